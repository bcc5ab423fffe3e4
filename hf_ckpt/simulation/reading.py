"""Reads a tape: what each storage is for, what the peak is and when, what is held for backward, how long it takes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import accumulate

from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.step_memory import Category, HeldTensor, Phase, Place, StepMemory, StepTime, Timeline
from hf_ckpt.simulation.tape import Change, Event, Region, Storage, Tape


def read(
    tape: Tape, *, device: str, plan: Plan | None, tokens: int, repeats: int = 1, host_bytes: int = 0
) -> StepMemory:
    """Return what a tape says.

    Args:
        tape: of one optimizer step.
        device: its name.
        plan: what was in force.
        tokens: of the whole optimizer step.
        repeats: how often the last micro-batch of the tape runs in the step.
        host_bytes: what lies on the host.
    """
    sort(tape)
    alive: Counter[Category] = Counter()
    for storage in tape.before:
        alive[_category(storage)] += storage.num_bytes
    places, columns, totals = _columns(tape, alive)
    peak = max(range(len(totals)), key=totals.__getitem__)
    by_category = {category: column[peak] for category, column in columns.items() if column[peak]}
    seconds = list(accumulate(event.seconds for event in tape.events))
    at_changes = [second for second, event in zip(seconds, tape.events, strict=True) if event.storage is not None]
    timeline = Timeline(
        tuple(places),
        {category: tuple(column) for category, column in columns.items()},
        tuple(at_changes) if seconds and seconds[-1] > 0 else (),
    )
    return StepMemory(
        device=device,
        plan=plan,
        tokens=tokens,
        peak_bytes=totals[peak],
        peak_at=places[peak],
        by_category=by_category,
        timeline=timeline,
        ledger=_ledger(tape),
        time=_time(tape, repeats),
        num_flops=_num_flops(tape, repeats),
        host_bytes=host_bytes,
    )


def _columns(tape: Tape, alive: Counter[Category]) -> tuple[list[Place], dict[Category, list[int]], list[int]]:
    """Return place, bytes by category and bytes in all after each change; the state before the step comes first."""
    changes = [event for event in tape.events if event.storage is not None]
    places = [tape.events[0].place if tape.events else Place(Phase.FORWARD), *(event.place for event in changes)][1:]
    used = {_category(storage) for storage in (*tape.before, *(event.storage for event in changes)) if storage}
    columns: dict[Category, list[int]] = {category: [] for category in Category if category in used}
    totals, total = [], sum(alive.values())
    for event in changes:
        assert event.storage is not None
        delta = event.storage.num_bytes if event.change is Change.ALLOCATE else -event.storage.num_bytes
        alive[_category(event.storage)] += delta
        total += delta
        totals.append(total)
        for category, column in columns.items():
            column.append(alive[category])
    return places, columns, totals


# --- Categories. ---


@dataclass(slots=True)
class _Bounds:
    """Where the layers of one micro-batch end: as indices of events."""

    last_layer: float = math.inf
    """Its forward ends here."""
    backward: float = math.inf
    """The backward of the step begins here."""
    first_layer_back: float = math.inf
    """The first backward of a layer begins here."""


def sort(tape: Tape) -> None:
    """Give every storage of a tape its category."""
    bounds = _bounds(tape.events)
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for index, event in enumerate(tape.events):
        if event.storage is not None:
            (made if event.change is Change.ALLOCATE else freed)[id(event.storage)] = index
    for event in tape.events:
        storage = event.storage
        if storage is not None and storage.category is None:
            key = id(storage)
            storage.category = _of(storage, made.get(key, 0), freed.get(key, math.inf), bounds)


def _bounds(events: list[Event]) -> dict[int, _Bounds]:
    bounds: dict[int, _Bounds] = defaultdict(_Bounds)
    for index, event in enumerate(events):
        here, mark = bounds[event.place.micro_batch], event.mark
        if mark is not None and mark.region is Region.FORWARD and mark.is_end:
            here.last_layer = index
        elif mark is not None and mark.region is Region.BACKWARD:
            here.first_layer_back = min(here.first_layer_back, index)
        if event.place.phase in (Phase.BACKWARD, Phase.RECOMPUTATION):
            here.backward = min(here.backward, index)
    return bounds


def _of(storage: Storage, made: int, freed: float, bounds: dict[int, _Bounds]) -> Category:
    assert storage.made is not None, "what was there before has a category"
    here = bounds[storage.made.micro_batch]
    match storage.made.phase:
        case Phase.FORWARD if made > here.last_layer:
            return Category.LOSS
        case Phase.FORWARD if freed > here.backward:
            return Category.SAVED
        case Phase.BACKWARD if made < here.first_layer_back < math.inf:
            return Category.LOSS
        case Phase.RECOMPUTATION:
            return Category.RECOMPUTED
        case _:
            return Category.TEMPORARY


def _category(storage: Storage | None) -> Category:
    assert storage is not None
    assert storage.category is not None, "`sort` has been there"
    return storage.category


# --- Ledger and time. ---


def _ledger(tape: Tape) -> tuple[HeldTensor, ...]:
    """Return what the first micro-batch holds for its backward."""
    held = []
    for event in tape.events:
        storage = event.storage
        is_first = event.change is Change.ALLOCATE and event.place.micro_batch == 0
        if is_first and storage is not None and storage.category is Category.SAVED:
            held.append(HeldTensor(event.place, storage.num_bytes, storage.shape, storage.dtype, storage.why))
    return tuple(held)


def _weight(place: Place, last: int, repeats: int) -> int:
    is_repeated = place.phase is not Phase.OPTIMIZER and place.micro_batch == last
    return repeats if is_repeated else 1


def _time(tape: Tape, repeats: int) -> StepTime:
    last = max((event.place.micro_batch for event in tape.events), default=0)
    seconds: dict[str, list[float]] = defaultdict(list)
    for event in tape.events:
        if event.seconds:
            spent_on = "copies" if event.is_copy else event.place.phase.value
            seconds[spent_on].append(event.seconds * _weight(event.place, last, repeats))
    # Exact sums, so that equal steps take equal times in whatever order their layers run.
    return StepTime(**{spent_on: math.fsum(each) for spent_on, each in seconds.items()})


def _num_flops(tape: Tape, repeats: int) -> dict[Phase, int]:
    last = max((event.place.micro_batch for event in tape.events), default=0)
    flops: Counter[Phase] = Counter()
    for event in tape.events:
        if event.num_flops:
            flops[event.place.phase] += event.num_flops * _weight(event.place, last, repeats)
    return dict(flops)
