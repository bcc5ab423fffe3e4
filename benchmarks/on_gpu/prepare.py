"""Plans and predictions, made without a GPU before there is one, so that no second on it is spent simulating.

They are made for a card, by this code and these versions, and the file says so. Where any of that is other on the
machine that measures, the plans run all the same, and results say what they were prepared for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks import longctx, predict
from benchmarks.journal import Entry, FileJournal
from benchmarks.on_gpu.identity import identity_of
from benchmarks.on_gpu.measurements import SMALL_CONTENDERS, case_of, longest_keys, longest_options
from benchmarks.runner import WrongInputError
from benchmarks.side_by_side import predicted
from benchmarks.side_by_side.contenders import chosen
from hf_ckpt.errors import HFCkptError
from hf_ckpt.simulation.devices import CPU, Device, find_device

NUM_BUDGETS = 4
"""For so many budgets plans are made at least, for each case of the comparison."""
COMPARED = ("llama2_7b_lora_2048", "llama31_8b_qlora_8192", "llama32_1b_full_2048", "qwen3_06b_full_2048")
"""Cases that plans are made for, in the order of their value."""
LONGEST = ((24, "limit"), (24, "speed"), (80, "limit"))
"""Caps in GiB, and parts of `longctx`."""
_LIMIT_S = 3600.0


def write(path: Path, card: str, *, is_small: bool, say: Callable[[str], None]) -> None:
    """Make all plans and predictions; what the file holds for the same card, code and versions is not made again.

    Args:
        path: of the file.
        card: in the words of the device table; small twins are prepared for a CPU.
        is_small: small twins.
        say: is called with what is made.

    Raises:
        WrongInputError: there is no such card.
    """
    try:
        device = CPU if is_small else find_device(card)
    except HFCkptError as error:
        raise WrongInputError(str(error)) from None
    journal = FileJournal(path, facts=identity_of(device.name, is_small=is_small))
    for key, make in _pieces(device, is_small=is_small):
        say(key)
        found = journal.entry(key, make, limit_s=_LIMIT_S)
        if "failed" in found:
            say(f"{key}: {found['failed']}")
    say(f"written to {path}")


def _pieces(device: Device, *, is_small: bool) -> Iterator[tuple[str, Callable[[], Entry]]]:
    """Yield what is made, in the order in which the programme will ask for it."""
    for name in list(predict.CONFIGURATIONS)[: 1 if is_small else None]:
        yield f"predicted/{name}", partial(_predicted, name, device, is_small)
    for name in COMPARED[: 1 if is_small else None]:
        yield f"side_by_side/{name}", partial(_compared, name, device, is_small)
    for cap_gib, part in LONGEST[: 2 if is_small else None]:
        options = longest_options(
            cap_gib,
            part,
            device="cpu" if is_small else "cuda",
            is_small=is_small,
            predicts_for=device.name,
        )
        if part == "limit":
            yield f"longest/{longest_keys(options)[0]}", partial(longctx.prediction, options)
        else:
            for key, length in zip(longest_keys(options), options.lengths, strict=True):
                yield f"longest/{key}", partial(longctx.planned, options, length)


def _predicted(name: str, device: Device, is_small: bool) -> Entry:
    configuration, shape = predict.Options(device="cpu", is_small=is_small).case(name)
    return predict.predict(configuration, shape, device)


def _compared(name: str, device: Device, is_small: bool) -> Entry:
    case, wanted = case_of(name, is_small), chosen(SMALL_CONTENDERS if is_small else ())
    result = predicted.predict(case, wanted, num_budgets=1 if is_small else NUM_BUDGETS, device=device)
    for record in result["contenders"].values():
        record.get("predicted", {}).pop("timeline", None)
    return {"contenders": result["contenders"], "verdict": result["verdict"]}
