"""Will it fit, and what is the fastest way that does: one row for each way to checkpoint a recipe's activations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from hf_ckpt.errors import BudgetError, HFCkptError
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, is_auto
from hf_ckpt.estimate.weights import as_json as weights_as_json
from hf_ckpt.planner.advice import Exactness
from hf_ckpt.policy.options import TO_CPU
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import AUTO, Mode
from hf_ckpt.regions.offload import host_memory
from hf_ckpt.second_process import work_ahead
from hf_ckpt.simulation.devices import Device, this_device
from hf_ckpt.simulation.fit import Capacity, Fit, Verdict, judge
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import Budget, format_bytes

RECIPE = "recipe"  # Names of the rows of the recipe's own plan and of the planner's.

SENT, WAITING, LEAST = "full, offload", "full, weights", "full, offload, tiles, head"
"""The rows of what keeps layers' inputs on the host, or frozen weights, and of all that saves activations."""

FIXED: Mapping[str, Mapping[str, Any]] = {
    **{mode.value: {"policy": mode.value} for mode in Mode},
    "every-2": {"policy": "full", "every_n_layers": 2},
    "segments": {"policy": "full", "segment_size": "sqrt"},
    "segments, nested": {"policy": "full", "segment_size": "sqrt", "nested": True},
    SENT: {"policy": "full", "offload": "cpu"},
    WAITING: {"policy": "full", "weights": "cpu"},
    LEAST: {"policy": "full", "offload": "cpu", "tiles": "auto", "head": "chunked"},
}
"""Policies that every model is estimated under, by the name of their row. Of the activations the last keeps least."""

QUICK = ("none", "full")  # Those of them that a quick estimate has.

Say = Callable[[str], None]


@dataclass(frozen=True)
class CachedBlocks:
    """What becomes of the blocks that torch caches where a step fits only perhaps."""

    retries_per_step: int | None = None  # How often each step gives them back; None if that is not enough, or unknown.
    expandable_bytes: int | None = None
    """What is reserved with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, where the step fits with that."""


@dataclass(frozen=True)
class Row:
    """One way to checkpoint, and what it needs."""

    name: str
    memory: StepMemory | None  # What the step needs; None where it cannot be done.
    refusal: str = ""  # Why it cannot be done.
    device: Device | None = None  # The only one that the row is for; None for all.
    exactness: Exactness | None = None  # Of the planner's choice: whether it is bitwise, and the time that takes.
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)  # By device.
    cached: Mapping[str, CachedBlocks] = field(default_factory=dict)  # On which it fits perhaps, if the row decides.


@dataclass(frozen=True)
class Estimate:
    """What a recipe needs."""

    predictor: Predictor  # Of the first device.
    devices: tuple[Device, ...]  # Those that were asked for; times are the first one's.
    rows: tuple[Row, ...]  # One for each way to checkpoint.
    decides: str  # The name of the row that decides whether the recipe fits.
    evaluation: StepMemory | None = None
    """What a batch of the recipe's evaluation needs, between two steps; None where it does not evaluate."""

    @property
    def subject(self) -> Subject:
        """What was estimated."""
        return self.predictor.subject

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


def capacity_of_subject(predictor: Predictor, device: Device) -> Capacity:
    """Return what a plan is chosen for: the recipe's own budget, or the whole device."""
    return predictor.capacity(device, own_budget(predictor.subject))


def own_budget(subject: Subject) -> Budget | None:
    """Return the budget that a recipe names."""
    checkpointing = None if subject.recipe is None else subject.recipe.checkpointing
    if checkpointing is None or checkpointing.budget is None:
        return None
    return replace(checkpointing.budget, key="checkpointing.memory_budget")


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
    names = names or tuple(FIXED)
    with predictor.ahead(_plans_of_rows(predictor, names)):
        planned = [_auto(predictor, device, say) for device in devices] if decides == AUTO else []
        if not planned:
            say(f"Simulating {subject.title} ...")
        rows = tuple(planned) or (judged(predictor, RECIPE, subject.plan, devices, decides=True),)
        say("Simulating an evaluation ...")
        plan = None if rows[0].memory is None else rows[0].memory.plan
        found = Estimate(predictor, tuple(devices), rows, decides, predictor.evaluation(plan))
        yield found
        for row in fixed_rows(predictor, devices, say, names):
            found = replace(found, rows=(*found.rows, row))
            yield found
    for row in () if planned else _planned_rows(predictor, devices, say):
        found = replace(found, rows=(*found.rows, row))
        yield found


def _plans_of_rows(predictor: Predictor, names: Sequence[str]) -> Iterator[Plan | None]:
    """Yield the plans that will be simulated, as far as that is known: last those that only rows are made of."""
    subject = predictor.subject
    yield from predictor.plans_to_read()
    if not is_auto(subject.recipe):
        yield subject.plan
    for name in names:
        with suppress(HFCkptError):
            yield subject.resolve(**FIXED[name])


def _planned_rows(predictor: Predictor, devices: Sequence[Device], say: Say) -> Iterator[Row]:
    """Yield the planner's choice for each device."""

    def planned(device: Device) -> tuple[Row, list[str]]:
        said: list[str] = []
        return _auto(predictor, device, said.append), said

    searched = [device for device in devices if _weights_without_room(predictor, device) is None]
    if len(searched) > 1:
        # Both processes search with it.
        _ = predictor.chain
    with work_ahead({device.name: partial(planned, device) for device in searched[1:]}) as take:
        for device in devices:
            row, said = take(device.name) or (_auto(predictor, device, say), [])
            for text in said:
                say(text)
            yield row


def num_estimate_rows(subject: Subject, devices: Sequence[Device], names: Sequence[str] = ()) -> int:
    """Return how many rows an estimate will have."""
    fixed = _rows_there(Predictor(subject, devices[0]), names or tuple(FIXED))
    return len(fixed) + len(devices) + (not is_auto(subject.recipe))


def _rows_there(predictor: Predictor, names: Sequence[str]) -> list[str]:
    """Return the names of the fixed rows that differ from others: where nothing is frozen, no weights wait."""
    return [name for name in names if name != WAITING or predictor.has_waiting_weights]


def judged(
    predictor: Predictor, name: str, plan: Plan | None, devices: Sequence[Device], *, decides: bool = False
) -> Row:
    """Return the row of a plan, with whether it fits each device."""
    verdicts = {device.name: predictor.verdict(plan, predictor.capacity(device)) for device in devices}
    perhaps = [device for device in devices if decides and verdicts[device.name].fit is Fit.PERHAPS]
    cached = {device.name: _cached_blocks(predictor, plan, device) for device in perhaps}
    return Row(name, predictor.memory(plan), verdicts=verdicts, cached=cached)


def _cached_blocks(predictor: Predictor, plan: Plan | None, device: Device) -> CachedBlocks:
    """Return what becomes of cached blocks where a step fits a device only perhaps."""
    capacity = predictor.capacity(device)
    held = predictor.held_within(plan, capacity)
    if held is None:
        return CachedBlocks()
    expandable = predictor.with_expandable_segments(plan)
    is_enough = capacity.fit(expandable, expandable) is Fit.YES
    retries = held.retries_per_step if held.num_bytes <= capacity.reserved_bytes else None
    return CachedBlocks(retries, expandable if is_enough else None)


def fixed_rows(
    predictor: Predictor, devices: Sequence[Device], say: Say, names: Sequence[str] = tuple(FIXED)
) -> Iterator[Row]:
    """Yield a row for each policy that a user would write."""
    for name in _rows_there(predictor, names):
        try:
            plan = predictor.subject.resolve(**FIXED[name])
        except HFCkptError as error:
            yield Row(name, None, str(error))
            continue
        say(f"Simulating {name} ...")
        yield judged(predictor, name, plan, devices)


def _auto(predictor: Predictor, device: Device, say: Say) -> Row:
    """Return the planner's choice for a device; it chooses by the times of the predictor's device.

    Where the weights alone exceed a card, no plan is searched for: the other rows tell what would do.
    """
    capacity = capacity_of_subject(predictor, device)
    if (weights := _weights_without_room(predictor, device)) is not None:
        refusal = (
            f"No plan fits memory_budget={format_bytes(capacity.num_bytes)}: weights and gradients alone take "
            f"{format_bytes(weights)} under any plan{_what_to_do(predictor, capacity)}"
        )
        return Row(AUTO, None, refusal, device)
    say(_first_verdict(predictor, device))
    try:
        planned = predictor.planned(capacity, say, compare=True)
    except BudgetError as error:
        return Row(AUTO, None, str(error), device)
    row = judged(predictor, AUTO, planned.plan, [device], decides=True)
    return replace(row, memory=planned.memory, device=device, exactness=planned.exactness)


def _what_to_do(predictor: Predictor, capacity: Capacity) -> str:
    """Return advice for a card that the weights alone exceed: the host's memory, if that is enough."""
    advice = ". Use fewer or smaller weights, more devices that share them, or a larger device."
    if not predictor.has_waiting_weights:
        return advice
    plan = predictor.subject.resolve(Mode.FULL, weights=TO_CPU)
    verdict = predictor.verdict(plan, capacity)
    if verdict.fit is not Fit.YES:
        return advice
    needed, host = format_bytes(verdict.needed_bytes), format_bytes(predictor.memory(plan).host_bytes)
    line = f"checkpointing.weights={TO_CPU}  # {needed}, with {host} of host memory"
    return f" that leaves them there. With this line one fits, as simulated:\n  {line}"


def _weights_without_room(predictor: Predictor, device: Device) -> int | None:
    """Return the bytes of weights and gradients where these alone exceed a card; None where not, or with a budget."""
    can_wait = predictor.subject.allowed.weights is not None and predictor.has_waiting_weights
    weights = 0 if can_wait or own_budget(predictor.subject) is not None else predictor.weights_and_gradients
    return weights if weights > device.memory_bytes else None


def _first_verdict(predictor: Predictor, device: Device) -> str:
    """Return what is known before plans are compared: where `full`, which the planner may choose, fits, a plan does."""
    planning = f"Planning for {device.name} ..."
    try:
        full = predictor.verdict(predictor.subject.resolve(Mode.FULL), capacity_of_subject(predictor, device))
    except HFCkptError:
        return planning
    if full.fit is not Fit.YES:
        return planning
    of = format_bytes(device.memory_bytes)
    return (
        f"Fits on {device.name}: full needs {format_bytes(full.needed_bytes)} of {of}. Planning for what is fastest ..."
    )


# --- An estimate as a document: JSON types, for programs, and for `tables`, which prints it without torch. ---


def estimate_as_json(found: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON types."""
    verdicts = [verdict_as_json(found.predictor, device, row, found.evaluation) for device, row in found.deciding()]
    return {
        "recipe": found.subject.title,
        # On at least one of the devices.
        "fits": any(verdict["fits"] == Fit.YES for verdict in verdicts),
        "decides": found.decides,
        "verdicts": verdicts,
        **facts_as_json(found.subject),
        "devices": [
            {
                **device_as_json(
                    device.running(found.subject.attention),
                    found.predictor.capacity(device),
                    found.subject.computes_in,
                ),
                "budget_bytes": capacity_of_subject(found.predictor, device).num_bytes,
            }
            for device in found.devices
        ],
        "rows": [row_as_json(row) for row in found.rows],
        "evaluation": None if found.evaluation is None else memory_as_json(found.evaluation),
        "host": [
            {"device": device.name, "needed_bytes": needed, "free_bytes": _free_host_bytes(found, device)}
            for device, row in found.deciding()
            if row.memory is not None and (needed := row.memory.host_bytes)
        ],
    }


def facts_as_json(subject: Subject) -> dict[str, Any]:
    """Return what was taken for what: as text, and the weights as numbers."""
    weights = None if subject.weights is None else weights_as_json(subject.weights)
    return {"facts": [{"name": name, "text": text} for name, text in subject.facts], "weights": weights}


def row_as_json(row: Row) -> dict[str, Any]:
    """Return a row of an estimate as JSON types."""
    read: dict[str, Any] = {"name": row.name, "refusal": row.refusal}
    if row.device is not None:
        read["device"] = row.device.name
    if row.exactness is not None:
        read["exactness"] = exactness_as_json(row.exactness)
    if row.memory is not None:
        read |= memory_as_json(row.memory)
        # On a device where not even the peak has room the allocator is not played.
        read["reserved_bytes"] = max(verdict.reserved_bytes for verdict in row.verdicts.values())
        read["fits"] = {name: str(verdict.fit) for name, verdict in row.verdicts.items()}
        read["plan"] = None if row.memory.plan is None else json.loads(row.memory.plan.to_json())
    return read


def verdict_as_json(
    predictor: Predictor, device: Device, row: Row, evaluation: StepMemory | None = None
) -> dict[str, Any]:
    """Return whether a run fits on a device: its steps, and its evaluation between them."""
    read: dict[str, Any] = {
        "device": device.name,
        "fits": str(Fit.NO),
        "peak_bytes": None,
        "is_evaluation": False,
        "refusal": row.refusal,
    }
    if row.memory is None:
        return read
    capacity, step = predictor.capacity(device), row.verdicts[device.name]
    more = 0 if evaluation is None else evaluation.peak_bytes
    verdict = judge(max(step.peak_bytes, more), step.reserved_bytes, capacity)
    read |= {
        "fits": str(verdict.fit),
        "peak_bytes": verdict.peak_bytes,
        "needed_bytes": verdict.needed_bytes,
        "is_evaluation": more > step.peak_bytes,
    }
    if device.is_cuda:
        smi = [verdict.reserved_bytes + outside for outside in capacity.outside]
        read |= {"reserved_bytes": verdict.reserved_bytes, "nvidia_smi_bytes": smi}
    if (cached := row.cached.get(device.name)) is not None:
        read |= asdict(cached)
    return read


def memory_as_json(memory: StepMemory) -> dict[str, Any]:
    """Return what a step needs as JSON types, without the timeline and the ledger."""
    return {
        "peak_bytes": memory.peak_bytes,
        "peak_at": memory.peak_at.describe(),
        "by_category": {str(category): num_bytes for category, num_bytes in memory.by_category.items()},
        "host_bytes": memory.host_bytes,
        "tokens": memory.tokens,
        # None where the device's rates are not known.
        "seconds": {**asdict(memory.time), "total": memory.time.total} if memory.time.total else None,
        "num_flops": {str(phase): flops for phase, flops in memory.num_flops.items()},
    }


def exactness_as_json(exactness: Exactness) -> dict[str, Any]:
    """Return how exact a plan is as JSON types."""
    return {
        "is_bitwise": exactness.is_bitwise,
        "inexact": list(exactness.inexact),
        "of_none": exactness.of_none,
        "inexact_of_none": exactness.inexact_of_none,
        "text": exactness.describe(),
    }


def device_as_json(device: Device, capacity: Capacity, computes_in: str | None = None) -> dict[str, Any]:
    """Return a device as JSON types, with what it has besides a step, and what to know of it.

    `computes_in`: the dtype of the step's matrix products.
    """
    return {
        "name": device.name,
        "title": device.title,
        "memory_bytes": device.memory_bytes,
        "outside_bytes": list(capacity.outside),
        "outside": "CUDA's context" if device.is_cuda else "the process",
        "margin_bytes": capacity.margin_bytes,
        "attention": device.describe_attention(),
        "remarks": device.remarks(computes_in),
    }


def _free_host_bytes(found: Estimate, device: Device) -> int | None:
    """Return the free host memory where the device is this machine's; None elsewhere, and where it is not known."""
    offload = found.subject.allowed.offload
    trusts = offload is not None and offload.trust_host_memory
    return host_memory.available_bytes(trusts=trusts) if device.is_cuda and device == this_device() else None
