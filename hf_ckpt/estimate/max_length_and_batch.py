"""The longest row and the largest micro-batch of a recipe that fit under a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hf_ckpt.errors import HFCkptError
from hf_ckpt.estimate.estimate import RECIPE, Say, budget_of, fit_of
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, is_auto
from hf_ckpt.planner.integer_search import Limit, largest
from hf_ckpt.planner.layer_costs import may_tile
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import AUTO, REVOLVE
from hf_ckpt.policy.revolve import fewest_snapshots
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import StepMemory

LENGTH_UNIT = 64
"""Tokens that lengths are counted in: kernels work on tiles of so many."""

_MOST_TOKENS = 2**22
_MOST_ROWS = 4096


def longest_row(predictor: Predictor, plan: Plan | None, budget_bytes: int, *, host_bytes: int | None = None) -> Limit:
    """Return the longest row that fits, in tokens, in steps of `LENGTH_UNIT`.

    `host_bytes`: that may wait on the host; None for any amount.
    """
    step = predictor.subject.step

    def peak(length: int) -> int:
        memory = predictor.memory(plan, with_length(step, length))
        return _peak_within_host(memory, budget_bytes, host_bytes)

    most = predictor.subject.longest or _MOST_TOKENS
    return largest(peak, budget_bytes, start=step.seq_length, most=most, multiple=min(LENGTH_UNIT, most))


def largest_batch(
    predictor: Predictor, plan: Plan | None, budget_bytes: int, *, host_bytes: int | None = None
) -> Limit:
    """Return the largest micro-batch that fits, in rows. See `longest_row`."""
    step = predictor.subject.step

    def peak(rows: int) -> int:
        memory = predictor.memory(plan, with_rows(step, rows))
        return _peak_within_host(memory, budget_bytes, host_bytes)

    return largest(peak, budget_bytes, start=step.batch_size, most=_MOST_ROWS)


def _peak_within_host(memory: StepMemory, budget_bytes: int, host_bytes: int | None) -> int:
    """Return a step's peak; more than the budget where the host has not enough."""
    fits_host = host_bytes is None or memory.host_bytes <= host_bytes
    return memory.peak_bytes if fits_host else max(memory.peak_bytes, 2 * budget_bytes)


def with_length(step: Step, length: int) -> Step:
    """Return the step with rows of another length."""
    return replace(step, seq_length=length)


def with_rows(step: Step, rows: int) -> Step:
    """Return the step with another number of rows, which are padded where there are several."""
    if step.is_packed:
        return replace(step, seq_length=step.seq_length * rows)
    return replace(step, batch_size=rows, is_padded=step.is_padded or rows > 1)


_MOST_RUNS = 4
"""Of a layer under a binomial schedule."""
_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the layers that offload, where there is a cap on host memory."""


def longest_row_of_all(predictor: Predictor, budget_bytes: int) -> Limit:
    """Return the longest row that fits under one of the plans that need least, in tokens."""
    subject, found = predictor.subject, None
    host_bytes = None if subject.allowed.offload is None else subject.allowed.offload.host_memory
    for plan in leanest_plans(subject):
        if found is not None and found.is_bound:
            break
        if found is not None and found.number:
            longer = predictor.memory(plan, with_length(subject.step, found.number + LENGTH_UNIT))
            is_more = longer.peak_bytes <= budget_bytes and (host_bytes is None or longer.host_bytes <= host_bytes)
            if not is_more:
                continue
        limit = longest_row(predictor, plan, budget_bytes, host_bytes=host_bytes)
        if found is None or limit.number > found.number:
            found = limit
    assert found is not None, "there is always the plan that keeps everything"
    return found


def largest_batch_of_all(predictor: Predictor, budget_bytes: int) -> Limit:
    """Return the largest micro-batch that fits under one of the plans that need least, in rows."""
    offload = predictor.subject.allowed.offload
    host_bytes = None if offload is None else offload.host_memory
    found = (
        largest_batch(predictor, plan, budget_bytes, host_bytes=host_bytes) for plan in leanest_plans(predictor.subject)
    )
    return max(found, key=lambda limit: limit.number)


def leanest_plans(subject: Subject) -> Iterator[Plan]:
    """Yield the plans that may need least: each layer recomputed, with all that is allowed, and run several times."""
    subject = replace(subject, allowed=subject.allowed.in_turn[-1])
    longest = max((len(stack.layers) for stack in subject.stacks), default=1)
    plans = [plan for way in _ways(subject.allowed, longest) if (plan := _with_least_head(subject, way)) is not None]
    yield from (_tiled_where_possible(plan, subject) for plan in plans or [subject.resolve("none")])


def _ways(allowed: Allowed, num_layers: int) -> Iterator[dict[str, Any]]:
    offload = allowed.offload_option
    if offload is not None:
        shares = _SHARES if offload.host_memory is not None else (1.0,)
        yield from ({"policy": "full", "offload": replace(offload, fraction=share)} for share in shares)
    yield {"policy": "full"}
    yield {"policy": "full", "segment_size": "sqrt", "nested": True}
    yield {"policy": "full", "nested": REVOLVE, "snapshots": fewest_snapshots(num_layers, _MOST_RUNS)}


def _with_least_head(subject: Subject, way: dict[str, Any]) -> Plan | None:
    """Return the plan with a chunked head where that is allowed and the model has one; None where there is no plan."""
    for head in ("chunked", "plain") if subject.allowed.head else ("plain",):
        with suppress(HFCkptError):
            return subject.resolve(**way, head=head)
    return None


def _tiled_where_possible(plan: Plan, subject: Subject) -> Plan:
    stacks = tuple(
        replace(
            planned,
            layers=tuple(
                replace(entry, tiles="auto") if entry.segment is None and may_tile(layer, subject.allowed) else entry
                for entry, layer in zip(planned.layers, stack.layers, strict=True)
            ),
        )
        for planned, stack in zip(plan.stacks, subject.stacks, strict=True)
    )
    return replace(plan, stacks=stacks)


@dataclass(frozen=True)
class FittingSize:
    """What fits on one device under one plan."""

    plan: str
    device: Device
    budget_bytes: int
    limit: Limit


@dataclass(frozen=True)
class FittingSizes:
    """What fits."""

    subject: Subject
    is_length: bool  # Whether rows are counted in tokens, or micro-batches in rows.
    rows: tuple[FittingSize, ...]  # By device and plan.

    @property
    def unit(self) -> str:
        """What is counted."""
        return "tokens" if self.is_length else "rows"


def fitting_sizes(subject: Subject, devices: Sequence[Device], *, is_length: bool, say: Say) -> FittingSizes:
    """Find the longest row or the largest micro-batch that fits.

    `is_length`: rows in tokens, or micro-batches in rows.
    """
    search = longest_row if is_length else largest_batch
    predictor = Predictor(subject, devices[0])
    rows = []
    for device in devices:
        budget = budget_of(subject, device)
        if is_auto(subject.recipe):
            say(f"Searching what fits on {device.name}: {AUTO} ...")
            of_all = longest_row_of_all if is_length else largest_batch_of_all
            rows.append(FittingSize(AUTO, device, budget, of_all(predictor, budget)))
        for name, plan in _plans(subject):
            say(f"Searching what fits on {device.name}: {name} ...")
            rows.append(FittingSize(name, device, budget, search(predictor, plan, budget)))
    return FittingSizes(subject, is_length, tuple(rows))


def _plans(subject: Subject) -> Iterator[tuple[str, Plan | None]]:
    if subject.plan is not None:
        yield RECIPE, subject.plan
    yield "none", None
    try:
        yield "full", subject.resolve("full")
    except HFCkptError:
        # A model of which not every layer can be recomputed; its own plan is there.
        return


def sizes_as_json(found: FittingSizes) -> dict[str, Any]:
    """Return what fits as JSON types."""
    return {
        "recipe": found.subject.title,
        "unit": found.unit,
        "facts": [{"name": name, "text": text} for name, text in found.subject.facts],
        "rows": [
            {
                "device": row.device.name,
                "plan": row.plan,
                "budget_bytes": row.budget_bytes,
                "number": row.limit.number,
                "peak_bytes": row.limit.peak_bytes,
                "is_bound": row.limit.is_bound,
            }
            for row in found.rows
        ],
    }


_SHORTER, _LONGER, _GRID_ROWS = 2, 2, 4


Grid = dict[tuple[int, int], int]
"""Peaks of one plan in bytes, by (tokens of a row, rows)."""


def grids(predictor: Predictor, say: Say) -> dict[str, Grid]:
    """Simulate the recipe at lengths and micro-batches around its own, under plans by name."""
    subject = predictor.subject
    lengths = _lengths(subject.step.seq_length, subject.longest)
    rows = _powers(subject.step.batch_size)
    plans: list[tuple[str, Plan | None]] = [("none", None)]
    plans += [(RECIPE, subject.plan)] if subject.plan is not None else []
    return {name: _grid(predictor, name, plan, lengths, rows, say) for name, plan in plans}


def grids_as_json(found: Mapping[str, Grid], predictor: Predictor) -> dict[str, Any]:
    """Return grids as JSON types."""
    return {
        "recipe": predictor.subject.title,
        "device": predictor.device.name,
        "grids": [
            {
                "plan": name,
                "peaks": [
                    {
                        "seq_length": length,
                        "batch_size": rows,
                        "peak_bytes": peak,
                        "fits": str(fit_of(peak, predictor.device)),
                    }
                    for (length, rows), peak in grid.items()
                ],
            }
            for name, grid in found.items()
        ],
    }


def _grid(
    predictor: Predictor, name: str, plan: Plan | None, lengths: Sequence[int], rows: Sequence[int], say: Say
) -> Grid:
    peaks = {}
    for length in lengths:
        for number in rows:
            say(f"Simulating {name}: {number} x {length:,} tokens ...")
            step = with_rows(with_length(predictor.subject.step, length), number)
            peaks[length, number] = predictor.memory(plan, step).peak_bytes
    return peaks


def _lengths(own: int, longest: int | None) -> list[int]:
    """Return the recipe's length, halves and doubles of it, up to what the model has positions for."""
    around = {max(1, own >> power) for power in range(_SHORTER + 1)} | {own << power for power in range(_LONGER + 1)}
    return sorted(length for length in around if longest is None or length <= max(longest, own))


def _powers(own: int) -> list[int]:
    return sorted({1 << power for power in range(_GRID_ROWS) if 1 << power <= max(_GRID_ROWS, own)} | {own})
