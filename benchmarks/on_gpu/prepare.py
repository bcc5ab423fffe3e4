"""Plans and predictions, made without a GPU before there is one, so that no second on it is spent simulating.

They are made for a card, by this code and these versions, and the file says so. Where any of that is other on the
machine that measures, the plans run all the same, and results say what they were prepared for. Those of the lean
programme take some minutes on two processors; those of the long one, which `--all` adds, half an hour.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from benchmarks import longctx, predict
from benchmarks.journal import NO_FIGURES, Entry, FileJournal
from benchmarks.on_gpu.identity import identity_of
from benchmarks.on_gpu.measurements import (
    LEAN_COMPARED,
    LEAN_PREDICTED,
    SMALL_CONTENDERS,
    case_of,
    longest_keys,
    longest_options,
)
from benchmarks.on_gpu.prepared import facts_of
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
LEAN_LONGEST = ((24, "bracket"), (80, "bracket"))
"""Caps in GiB, and parts of `longctx`."""
_NUM_PROCESSES = 2
_ALL_BUDGETS = 99


def write(path: Path, card: str, *, is_small: bool, is_lean: bool = True, say: Callable[[str], None]) -> list[str]:
    """Make all plans and predictions; what the file holds for the same card, code and versions is not made again.

    Args:
        path: of the file.
        card: in the words of the device table; small twins are prepared for a CPU.
        is_small: small twins.
        is_lean: what the lean programme asks for; all if not.
        say: is called with what is made.

    Returns:
        What could not be made, with its reason, a line each.

    Raises:
        WrongInputError: there is no such card.
    """
    try:
        device = CPU if is_small else find_device(card)
    except HFCkptError as error:
        raise WrongInputError(str(error)) from None
    journal = FileJournal(path, facts=facts_of(identity_of(device.name, is_small=is_small)))
    pieces = {key: make for key, make in _pieces(device, is_small, is_lean) if key not in journal.entries}
    for key, found in _made(pieces):
        journal.give(key, found)
        say(key)
    missing = [
        f"{key}: {found[reason]}"
        for key, found in journal.entries.items()
        for reason in sorted(NO_FIGURES & found.keys())
    ]
    say(f"written to {path}")
    return missing


def _made(pieces: dict[str, Callable[[], Entry]]) -> Iterator[tuple[str, Entry]]:
    """Yield what is made, as it comes: in processes of their own, the longest first, where there are several."""
    if len(pieces) <= 1:
        yield from ((key, FileJournal().entry(key, make)) for key, make in pieces.items())
        return
    # Each process simulates on one processor. A fork would take over threads of torch that hold locks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(_NUM_PROCESSES, os.cpu_count() or 1), mp_context=context) as pool:
        waiting: dict[Future[Entry], str] = {
            pool.submit(_entry, key, make): key
            for key, make in sorted(pieces.items(), key=lambda piece: -_cost(piece[0]))
        }
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def _entry(key: str, make: Callable[[], Entry]) -> Entry:
    """Make one piece; an error is what came of it."""
    return FileJournal().entry(key, make)


def _cost(key: str) -> int:
    return ("predicted", "side_by_side", "longest").index(key.partition("/")[0])


def _pieces(device: Device, is_small: bool, is_lean: bool) -> Iterator[tuple[str, Callable[[], Entry]]]:
    """Yield what is made, in the order in which the programme will ask for it."""
    for name in list(LEAN_PREDICTED if is_lean else predict.CONFIGURATIONS)[: 1 if is_small else None]:
        yield f"predicted/{name}", partial(_predicted, name, device, is_small)
    for name in list(LEAN_COMPARED if is_lean else COMPARED)[: 1 if is_small else None]:
        yield f"side_by_side/{name}", partial(_compared, name, device, is_small, is_lean)
    for cap_gib, part in (LEAN_LONGEST if is_lean else (*LEAN_LONGEST, *LONGEST))[: 1 if is_small else None]:
        options = longest_options(
            cap_gib,
            part,
            device="cpu" if is_small else "cuda",
            is_small=is_small,
            predicts_for=device.name,
        )
        if part == "limit":
            yield f"longest/{longest_keys(options)[0]}", partial(longctx.prediction, options)
        elif part == "bracket":
            for key, name in zip(longest_keys(options), longctx.PREDICTED, strict=True):
                yield f"longest/{key}", partial(longctx.prediction, options, name)
        else:
            for key, length in zip(longest_keys(options), options.lengths, strict=True):
                yield f"longest/{key}", partial(longctx.planned, options, length)


def _predicted(name: str, device: Device, is_small: bool) -> Entry:
    configuration, shape = predict.Options(device="cpu", is_small=is_small).case(name)
    return predict.predict(configuration, shape, device)


def _compared(name: str, device: Device, is_small: bool, is_lean: bool) -> Entry:
    case, lean = case_of(name, is_small), LEAN_COMPARED.get(name) if is_lean and not is_small else None
    wanted = chosen(lean.contenders if lean else SMALL_CONTENDERS if is_small else ())
    # Of the lean ones all budgets, of which some are chosen by name.
    num_budgets = _ALL_BUDGETS if lean else 1 if is_small else NUM_BUDGETS
    result = predicted.predict(
        case, wanted, num_budgets=num_budgets, set_by=lean.budgets if lean else (), device=device
    )
    for record in result["contenders"].values():
        record.get("predicted", {}).pop("timeline", None)
    return {"contenders": result["contenders"], "verdict": result["verdict"]}
