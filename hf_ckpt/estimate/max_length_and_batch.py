"""The longest row and the largest micro-batch of a recipe that fit under a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from hf_ckpt.errors import HFCkptError
from hf_ckpt.estimate.estimate import RECIPE, Say, capacity_of_subject, facts_as_json
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, is_auto
from hf_ckpt.patch.frozen_weights import with_embedding
from hf_ckpt.planner.advice import LENGTH_MULTIPLE
from hf_ckpt.planner.largest_that_fits import Limit, largest
from hf_ckpt.planner.layer_costs import may_tile
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.options import EmbeddingPlace
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.policy.policy import AUTO, REVOLVE, Policy
from hf_ckpt.policy.revolve import fewest_snapshots
from hf_ckpt.second_process import work_ahead
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.step import Step
from hf_ckpt.structure.layers import Layer

_MOST_TOKENS = 2**22
_MOST_ROWS = 4096


def largest_fitting(
    predictor: Predictor, plan: Plan | None, capacity: Capacity, *, is_length: bool, host_bytes: int | None = None
) -> Limit:
    """Return the longest row that fits, in tokens, or the largest micro-batch, in rows.

    `host_bytes`: that may wait on the host; None for any amount.
    """
    step, resized = predictor.subject.step, with_length if is_length else with_rows

    def needed(number: int) -> int:
        return _needed_within_host(predictor, plan, resized(step, number), capacity, host_bytes)

    def ahead(number: int) -> AbstractContextManager[None]:
        return predictor.ahead([plan], resized(step, number), in_numbers=True)

    if not is_length:
        return largest(needed, capacity.num_bytes, start=step.batch_size, most=_MOST_ROWS, ahead=ahead)
    most = predictor.subject.longest or _MOST_TOKENS
    multiple = min(LENGTH_MULTIPLE, most)
    return largest(needed, capacity.num_bytes, start=step.seq_length, most=most, multiple=multiple, ahead=ahead)


def _needed_within_host(
    predictor: Predictor, plan: Plan | None, step: Step, capacity: Capacity, host_bytes: int | None
) -> int:
    """Return what a step needs; more than there is where the host has not enough."""
    verdict = predictor.verdict(plan, capacity, step)
    fits_host = host_bytes is None or predictor.host_bytes(plan, step) <= host_bytes
    return verdict.needed_bytes if fits_host else max(verdict.needed_bytes, 2 * capacity.num_bytes)


def with_length(step: Step, length: int) -> Step:
    """Return the step with rows of another length."""
    return replace(step, seq_length=length)


def with_rows(step: Step, rows: int) -> Step:
    """Return the step with another number of rows, which are padded where there are several."""
    if step.is_packed:
        return replace(step, seq_length=step.seq_length * rows)
    return replace(step, batch_size=rows, is_padded=step.is_padded or rows > 1)


_MOST_RUNS = 4  # Of a layer under a binomial schedule.
_SHARES = (1.0, 0.75, 0.5, 0.25)  # Of the layers that offload, where there is a cap on host memory.


def largest_of_all(predictor: Predictor, capacity: Capacity, *, is_length: bool) -> Limit:
    """Return the longest row or the largest micro-batch that fits under one of the plans that need least."""
    return _largest_with_plan(predictor, capacity, is_length=is_length)[0]


def _largest_with_plan(predictor: Predictor, capacity: Capacity, *, is_length: bool) -> tuple[Limit, Plan]:
    resized, unit = (with_length, LENGTH_MULTIPLE) if is_length else (with_rows, 1)
    subject = predictor.subject
    host_bytes = None if subject.allowed.offload is None else subject.allowed.offload.host_memory
    best, *others = leanest_plans(subject)
    found = largest_fitting(predictor, best, capacity, is_length=is_length, host_bytes=host_bytes)
    # One simulation tells whether a search would find more.
    larger = resized(subject.step, found.number + unit)
    with predictor.ahead(others if found.number and not found.is_bound else (), larger, in_numbers=True):
        for plan in others:
            if found.is_bound:
                break
            if found.number:
                larger = resized(subject.step, found.number + unit)
                if _needed_within_host(predictor, plan, larger, capacity, host_bytes) > capacity.num_bytes:
                    continue
            limit = largest_fitting(predictor, plan, capacity, is_length=is_length, host_bytes=host_bytes)
            if limit.number > found.number:
                found, best = limit, plan
    return found, best


def leanest_plans(subject: Subject) -> Iterator[Plan]:
    """Yield the plans that may need least: each layer recomputed, with all that is allowed, and run several times."""
    subject = replace(subject, allowed=subject.allowed.in_turn[-1])
    longest = max((len(stack.layers) for stack in subject.stacks), default=1)
    plans = []
    for way in _ways(subject.allowed, longest):
        # With a chunked head where that is allowed and the model has one.
        for head in ("chunked", "plain") if subject.allowed.head else ("plain",):
            with suppress(HFCkptError):
                plans.append(subject.resolve(**way, head=head))
                break
    yield from (_leaner_where_possible(plan, subject) for plan in plans or [subject.resolve("none")])


def _ways(allowed: Allowed, num_layers: int) -> Iterator[dict[str, Any]]:
    offload = allowed.offload_option
    if offload is not None:
        shares = _SHARES if offload.host_memory is not None else (1.0,)
        yield from ({"policy": "full", "offload": replace(offload, fraction=share)} for share in shares)
    yield {"policy": "full"}
    yield {"policy": "full", "segment_size": "sqrt", "nested": True}
    yield {"policy": "full", "nested": REVOLVE, "snapshots": fewest_snapshots(num_layers, _MOST_RUNS)}


def _with_all_allowed(entry: LayerPlan, layer: Layer, allowed: Allowed) -> LayerPlan:
    """Return an entry with tiles and waiting weights, as far as they are allowed."""
    return replace(entry, tiles="auto" if may_tile(layer, allowed) else entry.tiles, weights=allowed.weights)


def _leaner_where_possible(plan: Plan, subject: Subject) -> Plan:
    stacks = tuple(
        replace(
            planned,
            layers=tuple(
                _with_all_allowed(entry, layer, subject.allowed) if entry.segment is None else entry
                for entry, layer in zip(planned.layers, stack.layers, strict=True)
            ),
        )
        for planned, stack in zip(plan.stacks, subject.stacks, strict=True)
    )
    place = EmbeddingPlace.CPU if subject.allowed.moves_embedding else plan.embedding
    # Nobody asks for it by name: it waits if it can.
    return with_embedding(replace(plan, stacks=stacks, embedding=place), Policy(()), subject.model, subject.stacks)


def fitting_sizes(subject: Subject, devices: Sequence[Device], *, is_length: bool, say: Say) -> dict[str, Any]:
    """Find the longest row in tokens (`is_length`) or the largest micro-batch in rows that fits; return JSON types."""
    predictor = Predictor(subject, devices[0])
    # The longest searches first: both processes search for what the planner's choice would reach.
    chosen: dict[str, dict[str, Any]] = {}
    for device in devices if is_auto(subject.recipe) else ():
        say(f"Searching what fits on {device.name}: {AUTO} ...")
        chosen[device.name] = _chosen_on(predictor, device, is_length=is_length)
    asked = [(device, name, plan) for device in devices for name, plan in _plans(subject)]
    searches = {
        (device.name, name): partial(_fitting_on, predictor, device, name, plan, is_length=is_length)
        for device, name, plan in asked
    }
    rows: list[dict[str, Any]] = []
    with work_ahead(searches, first=predictor.warm_up) as take:
        for device, name, _ in asked:
            rows += filter(None, [chosen.pop(device.name, None)])
            say(f"Searching what fits on {device.name}: {name} ...")
            key = device.name, name
            rows.append(take(key) or searches[key]())
    return {
        "recipe": subject.title,
        "unit": "tokens" if is_length else "rows",
        **facts_as_json(subject),
        "rows": rows,
    }


def _chosen_on(predictor: Predictor, device: Device, *, is_length: bool) -> dict[str, Any]:
    """Return what fits on a device under the plan that needs least."""
    capacity = capacity_of_subject(predictor, device)
    limit, best = _largest_with_plan(predictor, capacity, is_length=is_length)
    resized = with_length if is_length else with_rows
    step = resized(predictor.subject.step, limit.number)
    return {
        **_row(device, AUTO, capacity, limit),
        "host_bytes": predictor.host_bytes(best, step) if limit.number else 0,
    }


def _fitting_on(
    predictor: Predictor, device: Device, name: str, plan: Plan | None, *, is_length: bool
) -> dict[str, Any]:
    """Return what fits on a device under a plan."""
    capacity = capacity_of_subject(predictor, device)
    return _row(device, name, capacity, largest_fitting(predictor, plan, capacity, is_length=is_length))


def _row(device: Device, plan: str, capacity: Capacity, limit: Limit) -> dict[str, Any]:
    return {
        "device": device.name,
        "plan": plan,
        "budget_bytes": capacity.num_bytes,
        "number": limit.number,
        "needed_bytes": limit.needed_bytes,
        "is_bound": limit.is_bound,
    }


def _plans(subject: Subject) -> Iterator[tuple[str, Plan | None]]:
    if subject.plan is not None:
        yield RECIPE, subject.plan
    yield "none", None
    try:
        yield "full", subject.resolve("full")
    except HFCkptError:
        # A model of which not every layer can be recomputed; its own plan is there.
        return


_SHORTER, _LONGER, _GRID_ROWS = 2, 2, 4


def grids(predictor: Predictor, say: Say) -> dict[str, Any]:
    """Simulate the recipe at lengths and micro-batches around its own, plan by plan; return peaks as JSON types."""
    own = predictor.subject.plan
    plans = [("none", None), *([(RECIPE, own)] if own is not None else [])]
    return {
        "recipe": predictor.subject.title,
        "device": predictor.device.name,
        "grids": [{"plan": name, "peaks": list(_peaks(predictor, name, plan, say))} for name, plan in plans],
    }


def _peaks(predictor: Predictor, name: str, plan: Plan | None, say: Say) -> Iterator[dict[str, Any]]:
    step, capacity = predictor.subject.step, predictor.capacity(predictor.device)
    own, longest = step.seq_length, predictor.subject.longest
    # The recipe's length, halves and doubles of it, up to what the model has positions for.
    around = {max(1, own >> power) for power in range(_SHORTER + 1)} | {own << power for power in range(_LONGER + 1)}
    batches = {1 << power for power in range(_GRID_ROWS) if 1 << power <= max(_GRID_ROWS, step.batch_size)}
    for length in sorted(length for length in around if longest is None or length <= max(longest, own)):
        for rows in sorted(batches | {step.batch_size}):
            say(f"Simulating {name}: {rows} x {length:,} tokens ...")
            verdict = predictor.verdict(plan, capacity, with_rows(with_length(step, length), rows))
            fits = str(verdict.fit)
            yield {"seq_length": length, "batch_size": rows, "peak_bytes": verdict.peak_bytes, "fits": fits}
