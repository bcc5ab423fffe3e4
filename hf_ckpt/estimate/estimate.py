"""Will it fit, and what is the fastest way that does: one row for each way to checkpoint a recipe's activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any

from hf_ckpt.errors import BudgetError, HFCkptError
from hf_ckpt.estimate.predict import Predictor, Reserved, room_on
from hf_ckpt.estimate.step_of_recipe import Subject, is_auto
from hf_ckpt.planner.advice import Exactness
from hf_ckpt.planner.search import Planned
from hf_ckpt.policy.policy import AUTO, Mode
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.reserve import beyond_reserved, reserve
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import Budget, format_bytes

RECIPE = "recipe"
"""Names of the rows of the recipe's own plan and of the planner's."""

FIXED: Mapping[str, Mapping[str, Any]] = {
    **{mode.value: {"policy": mode.value} for mode in Mode},
    "every-2": {"policy": "full", "every_n_layers": 2},
    "segments": {"policy": "full", "segment_size": "sqrt"},
    "segments, nested": {"policy": "full", "segment_size": "sqrt", "nested": True},
    "full, offload": {"policy": "full", "offload": "cpu"},
    "full, offload, tiles, head": {"policy": "full", "offload": "cpu", "tiles": "auto", "head": "chunked"},
}
"""Policies that every model is estimated under, by the name of their row; the last needs least of all."""

QUICK = ("none", "full")
"""Those of them that a quick estimate has."""

Say = Callable[[str], None]


class Fit(StrEnum):
    """Whether a step fits on a device."""

    YES = "yes"
    """What torch holds for it fits next to the most that CUDA's context takes, once it gives back what is unused."""
    PERHAPS = "perhaps"
    """What it allocates fits next to the least that the context takes; what torch holds may be in too many pieces."""
    NO = "no"


@dataclass(frozen=True)
class Row:
    """One way to checkpoint, and what it needs."""

    name: str
    memory: StepMemory | None  # What the step needs; None where it cannot be done.
    refusal: str = ""  # Why it cannot be done.
    device: Device | None = None  # The only one that the row is for; None for all.
    exactness: Exactness | None = None  # Of the planner's choice: whether it is bitwise, and the time that takes.
    reserved: Reserved | None = None  # What torch holds of a CUDA device, where that was asked.


@dataclass(frozen=True)
class Estimate:
    """What a recipe needs."""

    subject: Subject
    devices: tuple[Device, ...]  # Those that were asked for; times are the first one's.
    rows: tuple[Row, ...]  # One for each way to checkpoint.
    decides: str  # The name of the row that decides whether the recipe fits.
    evaluation: StepMemory | None = None
    """What a batch of the recipe's evaluation needs, between two steps; None where it does not evaluate."""

    def deciding(self) -> Iterator[tuple[Device, Row]]:
        """Yield, for each device, the row that decides whether the recipe fits there."""
        for device in self.devices:
            for row in self.rows:
                if row.name == self.decides and row.device in (None, device):
                    yield device, row

    def steps(self) -> dict[str, StepMemory]:
        """Return the steps that can be done, by name; of the planner's the first one."""
        found: dict[str, StepMemory] = {}
        for row in self.rows:
            if row.memory is not None:
                found.setdefault(row.name, row.memory)
        return found


def fit_of(peak_bytes: int, device: Device, reserved: Reserved | None = None) -> Fit:
    """Tell whether a peak fits on a device. Where it was not asked what torch reserves, a share is kept for that."""
    kept_free = reserve(device) if reserved is None else beyond_reserved(device, reserved.num_processes)
    held_bytes = peak_bytes if reserved is None else max(peak_bytes, reserved.bytes_on(device))
    if held_bytes + kept_free.high_bytes <= device.memory_bytes:
        return Fit.YES
    return Fit.PERHAPS if peak_bytes + kept_free.low_bytes <= device.memory_bytes else Fit.NO


def budget_of(subject: Subject, device: Device) -> int:
    """Return the bytes that a step may use: the recipe's own budget, or the device's memory less the reserve."""
    own = own_budget(subject)
    if own is not None:
        return own.bytes_on(device.memory_bytes, device=device.title)
    return device.memory_bytes - reserve(device).high_bytes


def own_budget(subject: Subject) -> Budget | None:
    """Return the budget that a recipe names."""
    checkpointing = None if subject.recipe is None else subject.recipe.checkpointing
    if checkpointing is None or checkpointing.budget is None:
        return None
    return replace(checkpointing.budget, key="checkpointing.memory_budget")


def planned_on(predictor: Predictor, device: Device, say: Say) -> tuple[Planned, int]:
    """Return the fastest plan that fits a device, and the budget that it was chosen within.

    Where none leaves the whole reserve free, one will do for which what torch reserves fits next to CUDA's context.

    Raises:
        BudgetError: none fits.
    """
    subject = predictor.subject
    budget = budget_of(subject, device)
    found = predictor.fitting(budget)
    if found is not None:
        return found, budget
    if device.is_cuda and own_budget(subject) is None:
        wider = room_on(device, subject.step.sharding.world_size)
        found = predictor.fitting(wider)
        if found is not None:
            reserved = predictor.reserved(found.plan, [device])
            if fit_of(found.memory.peak_bytes, device, reserved) is Fit.YES:
                return found, wider
    # Raises, and says what would fit.
    return predictor.planned(budget, say, compare=True), budget


def estimate(subject: Subject, devices: Sequence[Device], say: Say, names: Sequence[str] = ()) -> Estimate:
    """Predict a recipe's step under its own plan, under fixed modes, and under the planner's choice.

    `devices`: the planner chooses for the memory of each; times are the first one's. `names`: of the fixed modes to
    predict; all of them if empty.
    """
    *_, found = growing(subject, devices, say, names)
    return found


def growing(subject: Subject, devices: Sequence[Device], say: Say, names: Sequence[str] = ()) -> Iterator[Estimate]:
    """Yield what `estimate` returns as it grows: first with what decides whether the recipe fits, then row by row."""
    predictor = Predictor(subject, devices[0])
    decides = AUTO if is_auto(subject.recipe) else RECIPE
    planned = (_auto(predictor, device, say) for device in devices)
    rows = tuple(planned) if decides == AUTO else (_own(predictor, devices, say),)
    say("Simulating an evaluation ...")
    found = Estimate(subject, tuple(devices), rows, decides, predictor.evaluation())
    yield found
    # Nothing is left of the planner's rows where they were first.
    for row in chain(_fixed(predictor, devices, say, names or tuple(FIXED)), planned):
        found = replace(found, rows=(*found.rows, row))
        yield found


def num_estimate_rows(subject: Subject, devices: Sequence[Device], names: Sequence[str] = ()) -> int:
    """Return how many rows an estimate will have."""
    return len(names or FIXED) + len(devices) + (not is_auto(subject.recipe))


def _own(predictor: Predictor, devices: Sequence[Device], say: Say) -> Row:
    say(f"Simulating {predictor.subject.title} ...")
    plan = predictor.subject.plan
    return Row(RECIPE, predictor.memory(plan), reserved=predictor.reserved(plan, devices, with_expandable=True))


def _fixed(predictor: Predictor, devices: Sequence[Device], say: Say, names: Sequence[str]) -> Iterator[Row]:
    for name in names:
        try:
            plan = predictor.subject.resolve(**FIXED[name])
        except HFCkptError as error:
            yield Row(name, None, str(error))
            continue
        say(f"Simulating {name} ...")
        yield Row(name, predictor.memory(plan), reserved=predictor.reserved(plan, devices))


def _auto(predictor: Predictor, device: Device, say: Say) -> Row:
    """Return the planner's choice for a device; it chooses by the times of the predictor's device.

    Where the weights alone exceed a card, no plan is searched for: the other rows tell what would do.
    """
    if own_budget(predictor.subject) is None and (weights := predictor.weights_and_gradients) > device.memory_bytes:
        return Row(AUTO, None, _no_room_for(weights, budget_of(predictor.subject, device)), device)
    say(_first_verdict(predictor, device))
    try:
        planned, _ = planned_on(predictor, device, say)
    except BudgetError as error:
        return Row(AUTO, None, str(error), device)
    reserved = predictor.reserved(planned.plan, [device], with_expandable=True)
    return Row(AUTO, planned.memory, device=device, exactness=planned.exactness, reserved=reserved)


def _no_room_for(weights_bytes: int, budget_bytes: int) -> str:
    return (
        f"No plan fits memory_budget={format_bytes(budget_bytes)}: weights and gradients alone take "
        f"{format_bytes(weights_bytes)} under any plan. Use fewer or smaller weights, more devices that share them, or "
        "a larger device."
    )


def _first_verdict(predictor: Predictor, device: Device) -> str:
    """Return what is known before plans are compared: where `full`, which the planner may choose, fits, a plan does."""
    planning = f"Planning for {device.name} ..."
    try:
        full = predictor.memory(predictor.subject.resolve(Mode.FULL))
    except HFCkptError:
        return planning
    if full.peak_bytes > budget_of(predictor.subject, device):
        return planning
    of = format_bytes(device.memory_bytes)
    return (
        f"Fits on {device.name}: full needs {format_bytes(full.peak_bytes)} of {of}. Planning for what is fastest ..."
    )
