"""What a probe says of its card, and what the table of devices has: proposed, and taken where it repeats itself.

A rate is compared as it is reached: the nominal rate times its efficiency in the table, what was measured in the probe.
Launch cost, link and pinning are facts of the machine that was lent and not of the card: they are shown, never taken.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.journal import NO_FIGURES, Entry, replace_text
from benchmarks.on_gpu.identity import ROOT
from benchmarks.on_gpu.probe import CALIBRATION_S, MIB, NUM_REPETITIONS
from benchmarks.predict import device_of
from hf_ckpt.errors import PolicyError
from hf_ckpt.estimate.step_of_recipe import subject_of
from hf_ckpt.recipe.recipe import load_recipe
from hf_ckpt.simulation.devices import DEVICES, MEASURED, RATES, Device, find_device, with_measured
from hf_ckpt.simulation.op_costs import attention_efficiency

MOST_SPREAD = 0.03
"""Largest less smallest repetition, as a share of the median, up to which a figure is taken."""
_LINK_SIZE = str(256 * MIB)
_OF_THE_MACHINE = {
    "host_link": "link, the slower way",
    "launch_seconds": "launch, forward",
    "backward_launch_seconds": "launch, backward",
}
_LONGEST_NAME = 40
_SHOWN = 0.001
# Share of a time by which it must change to show in figures of three digits.
_CARD = "name title memory_bytes matmul_flops memory_bandwidth host_link rank_link source capability".split()
"""Fields of a card that is not in the table, as data sheets would have them."""
_RECIPES = ("llama7b_lora.yaml", "mistral7b_full_bf16.yaml")
"""Whose steps are predicted anew: adapters, and a full fine-tune."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One figure of a card or of the machine around it.

    Args:
        device: as it is in force now; of a card that is not in the table, as it describes itself.
        field: one of `devices.RATES`, or a name of what is of the machine.
        title: what it is, for people.
        old: in force, as it is reached; None where nothing is.
        repetitions: as measured.
        is_of_card: whether it can be taken.
    """

    device: Device
    field: str
    title: str
    old: float | None
    repetitions: tuple[float, ...]
    is_of_card: bool

    @property
    def new(self) -> float:
        """The median."""
        return statistics.median(self.repetitions)

    @property
    def spread(self) -> float:
        """Largest less smallest, as a share of the median."""
        difference = max(self.repetitions) - min(self.repetitions)
        return difference / self.new if self.new > 0 else float("inf") if difference else 0.0

    @property
    def why_not(self) -> str:
        """Why it is not taken; empty where it is."""
        if not self.is_of_card:
            return "of this machine, never taken"
        if len(self.repetitions) < NUM_REPETITIONS:
            return f"not taken: {len(self.repetitions)} of {NUM_REPETITIONS} repetitions"
        if self.spread > MOST_SPREAD:
            return f"not taken: more than {MOST_SPREAD:.0%} apart"
        return ""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """The predicted step of a recipe, before and after.

    Args:
        recipe: its file.
        policy: in force; None for none.
        old_s: seconds before.
        new_s: seconds after.
    """

    recipe: str
    policy: str | None
    old_s: float
    new_s: float


# --- What is proposed. ---


def propose(entries: Mapping[str, Entry]) -> list[Proposal]:
    """Return what a probe says of its card and its machine; nothing of a CPU, and of tries with tiny sizes.

    Args:
        entries: of the stage `probe`, by key.

    Raises:
        ValueError: they are of more than one card.
    """
    found = [entry for key, entry in entries.items() if key.startswith("calibrate/") and _has_figures(entry)]
    measured = [device_of(entry["device"]) for entry in found if entry["seconds"] >= CALIBRATION_S]
    measured = [device for device in measured if device.is_cuda]
    cards = {device.title for device in measured}
    if len(cards) > 1:
        raise ValueError(
            f"These entries are of {len(cards)} cards: {', '.join(sorted(cards))}. Propose from the results of one."
        )
    if not measured:
        return []
    device = DEVICES.get(measured[0].name) or _described(entries, measured[0])
    in_force = _reached(device)
    titles = RATES | _OF_THE_MACHINE | {"attention_flops": f"attention ({_kernel(entries)})"}
    rows = [_reached(one) for one in measured]
    proposals = [
        Proposal(
            device=device,
            field=field,
            title=title,
            old=in_force[field],
            repetitions=tuple(row[field] for row in rows),
            is_of_card=field in RATES,
        )
        for field, title in titles.items()
    ]
    return proposals + list(_of_the_machine(entries, device))


def _has_figures(entry: Entry) -> bool:
    return not any(reason in entry for reason in (*NO_FIGURES, "skipped"))


def _kernel(entries: Mapping[str, Entry]) -> str:
    """Return the operator that attention ran as where it was calibrated: its rate is that kernel's."""
    names = entries.get("sdpa/causal_128", {}).get("forward", ())
    return next((name for name in names if "scaled_dot_product" in name), "kernel not known")


def _described(entries: Mapping[str, Entry], measured: Device) -> Device:
    """Return a card that is not in the table as it describes itself by its clocks."""
    entry = entries.get("device", {})
    if "table_device" not in entry:
        raise ValueError(
            f"{measured.title} is not in the table of devices, and the probe has no entry `device` that describes it: "
            "run the probe again, whole."
        )
    return device_of(entry["table_device"])


def _reached(device: Device) -> dict[str, float]:
    """Return what a device reaches, by name of the figure: nominal rates times their efficiencies."""
    rates = {f"matmul_flops.{dtype}": rate * device.matmul_efficiency for dtype, rate in device.matmul_flops.items()}
    return rates | {
        "attention_flops": device.matmul_flops["bfloat16"]
        * attention_efficiency(device, is_cudnn=device.tries_cudnn_first),
        "memory_bandwidth": device.memory_bandwidth * device.bandwidth_efficiency,
        "kernel_seconds": device.kernel_seconds,
        "host_link": device.host_link * device.link_efficiency,
        "launch_seconds": device.launch_seconds,
        "backward_launch_seconds": device.backward_launch_seconds,
    }


def _of_the_machine(entries: Mapping[str, Entry], device: Device) -> Iterator[Proposal]:
    for way in ("out", "in", "both"):
        rates = entries.get(f"link/{way}", {}).get("rates", {}).get(_LINK_SIZE)
        if rates:
            yield _shown(device, f"link/{way}", f"link, {way}, 256 MiB a copy", rates)
    rows = [row for row in entries.get("pinning", {}).get("rows", ()) if "pin_s" in row]
    for way in ("pages", "torch"):
        rates = [row["bytes"] / row["pin_s"] for row in rows if row["way"] == way and row["bytes"] == 1024 * MIB]
        if rates:
            yield _shown(device, f"pinning/{way}", f"pinning 1 GiB, {way}", rates)
    for key, entry in entries.items():
        if key.startswith("host_time/") and _has_figures(entry):
            seconds = 1e-6 * entry["policies"]["selective"]["us_per_kept_output"]
            title = f"selective, each output kept ({key.partition('/')[2]})"
            yield replace(_shown(device, "selective_seconds", title, [seconds]), old=device.selective_seconds)


def _shown(device: Device, field: str, title: str, repetitions: Iterable[float]) -> Proposal:
    return Proposal(device=device, field=field, title=title, old=None, repetitions=tuple(repetitions), is_of_card=False)


def lines(proposals: Iterable[Proposal]) -> list[str]:
    """Return a line for each proposal: what it is, old, new, spread, and whether it can be taken."""
    return [_line(proposal) for proposal in proposals]


def _line(proposal: Proposal) -> str:
    old = "nothing" if proposal.old is None else _formatted(proposal.field, proposal.old)
    return (
        f"{proposal.device.name}: {proposal.title}: {old} -> {_formatted(proposal.field, proposal.new)}, spread "
        f"{proposal.spread:.1%} of {len(proposal.repetitions)}; {proposal.why_not or 'can be taken'}"
    )


def _formatted(field: str, value: float) -> str:
    if field.endswith("_seconds"):
        return f"{1e6 * value:.1f} us"
    return f"{value / 1e12:.1f} TFLOP/s" if "flops" in field else f"{value / 1e9:.1f} GB/s"


# --- What is taken. ---


def accept(proposals: Sequence[Proposal], source: str, path: Path = MEASURED) -> list[Proposal]:
    """Write what repeats itself to the file that the table of devices reads, for this card only; return it.

    Other figures of the card stay as they are, and so do other cards. Processes that have read the table go on with
    what they read.

    Args:
        proposals: of `propose`.
        source: name of the result file; each figure has it.
        path: of the file; replaced in tests.
    """
    taken = [proposal for proposal in proposals if not proposal.why_not]
    if not taken:
        return []
    device = taken[0].device
    known = json.loads(path.read_text(encoding="utf-8"))
    card = known.setdefault(device.name, {"measured": {}})
    if device.name not in DEVICES:
        card["card"] = {field: value for field, value in asdict(device).items() if field in _CARD}
    card["measured"] = dict(sorted((card["measured"] | _figures(taken, source)).items()))
    replace_text(path, json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return taken


def _figures(proposals: Iterable[Proposal], source: str) -> dict[str, dict[str, Any]]:
    return {proposal.field: {"value": proposal.new, "source": source} for proposal in proposals}


def before_and_after(proposals: Sequence[Proposal], source: str) -> tuple[Device, Device]:
    """Return the card as it is in force, and as it will be with what can be taken.

    Args:
        proposals: of `propose`; at least one.
        source: name of the result file.
    """
    before = proposals[0].device
    return before, with_measured(before, _figures((one for one in proposals if not one.why_not), source))


def changed_predictions(
    before: Device, after: Device, recipes: Sequence[str] = _RECIPES, folder: Path = ROOT / "recipes"
) -> list[Changed]:
    """Return the predicted steps of recipes that change: with one micro-batch, without checkpointing and with `full`.

    Each step is simulated on both, a few seconds each.

    Args:
        before: the card as it was.
        after: with what was taken.
        recipes: names of files.
        folder: of the recipes.
    """
    found = []
    for name in recipes:
        subject = subject_of(load_recipe(folder / name))
        step = replace(subject.step, gradient_accumulation_steps=1)
        for policy in (None, "full"):
            old, new = (
                subject.simulator(device).with_step(step).simulate(policy).time.total for device in (before, after)
            )
            if abs(new - old) > _SHOWN * old:
                found.append(Changed(recipe=name, policy=policy, old_s=old, new_s=new))
    return found


def results_that_predict(card: str, folder: Path = ROOT / "benchmarks" / "results") -> list[str]:
    """Return the names of committed results that name a card: they hold predictions for it, to be made anew.

    Args:
        card: its name in the table.
        folder: of the results.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        texts = set(_texts(json.loads(path.read_text(encoding="utf-8"))))
        if any(_names(text, card) for text in texts):
            found.append(path.name)
    return found


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings of a document, names of fields among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _names(text: str, card: str) -> bool:
    # Every card has a number in its name; most other strings are left out without a search.
    if len(text) > _LONGEST_NAME or not any(character.isdigit() for character in text):
        return False
    try:
        return find_device(text).name == card
    except PolicyError:
        return False
