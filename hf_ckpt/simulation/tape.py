"""What happened in a step, event by event: storages that come and go, operators that run, and where.

A tape is written by `tracker` and filled up by `layer_reuse`. `read_tape` sums it up: what each storage is for, when
the peak is, what is held for backward, how long it takes. Pure data.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, groupby

import numpy as np

from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.step_memory import Category, HeldTensor, Phase, Place, StepMemory, StepTime, Timeline


@dataclass(slots=True, eq=False)
class Storage:
    """One block of memory. `shape` and `dtype` are those of the tensor that it was made for."""

    num_bytes: int
    """On the device, rounded as its allocator does."""
    made: Place | None = None
    """Where in the step; None for what existed before it."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    category: Category | None = None
    """Known at once for gradients and what existed before the step; else set by `assign_categories`."""
    why: str = ""
    """The operators that hold it for backward, as far as that was recorded."""
    parameter: str = ""
    """Path of the parameter that it is, or whose gradient or state it is, if any."""


class MemoryChange(StrEnum):
    """What an event does to the memory."""

    ALLOCATE = "allocate"
    FREE = "free"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Mark:
    """The forward or the backward of a layer begins or ends here."""

    phase: Phase
    """`FORWARD`, or `BACKWARD` with the recomputation that runs in it."""
    stack: int
    """Its number."""
    layer_idx: int
    micro_batch: int
    is_end: bool = False
    is_copy: bool = False
    """Whether the layer was skipped, so that another one represents it."""


class TransferKind(StrEnum):
    """What a transfer does."""

    SEND = "send"
    """A copy to the host begins, and takes host memory."""
    WAIT_FOR_SEND = "wait for send"
    """The device waits for the oldest copy to the host that it has not waited for."""
    FETCH = "fetch"
    """A copy from the host begins."""
    RECEIVE = "receive"
    """The device waits for the oldest copy from the host that it has not waited for."""
    RELEASE = "release"
    """Host memory is freed."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A step of a copy to the host or back."""

    kind: TransferKind
    num_bytes: int


@dataclass(slots=True)
class Event:
    """One entry of the tape. Not frozen: there are tens of thousands, and frozen ones take twice as long to make."""

    place: Place
    change: MemoryChange = MemoryChange.NOTHING
    """What it does to `storage`."""
    storage: Storage | None = None
    seconds: float = 0.0
    """Predicted: of an operator, or of waiting for a copy (`is_copy`)."""
    num_flops: int = 0
    mark: Mark | None = None
    """The forward or backward of a layer that begins or ends."""
    is_copy: bool = False
    """Whether `seconds` are of a copy between host and device, or between ranks."""
    transfer: Transfer | None = None


@dataclass(slots=True)
class Tape:
    """A step: the storages that exist when it begins, and the events in their order."""

    before: list[Storage] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    copied_gradients: dict[str, Storage] = field(default_factory=dict)
    """By parameter of a skipped layer: the gradients whose allocation `layer_reuse` writes."""
    has_categories: bool = False
    """Whether `assign_categories` has run."""


def sort_frees(tape: Tape) -> None:
    """Put storages that are freed at once in the order in which they were made.

    Autocast clears its cache in the order of addresses, which differs from run to run.
    """
    made = {
        id(event.storage): index for index, event in enumerate(tape.events) if event.change is MemoryChange.ALLOCATE
    }
    ordered: list[Event] = []
    for (change, _), run in groupby(tape.events, key=lambda event: (event.change, event.place)):
        events = list(run)
        if change is MemoryChange.FREE:
            events.sort(key=lambda event: made.get(id(event.storage), -1))
        ordered.extend(events)
    tape.events = ordered


# --- Reading. ---


def read_tape(
    tape: Tape, *, device: str, plan: Plan | None, tokens: int, repeats: int = 1, host_bytes: int = 0
) -> StepMemory:
    """Sum up the tape of one optimizer step.

    `tokens` are those of the whole step; the last micro-batch of the tape runs `repeats` times in it.
    """
    assign_categories(tape)
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
    """Return place, bytes by category and bytes in all after each change."""
    order = list(Category)
    numbers = {category: number for number, category in enumerate(order)}
    changes = [(event, event.storage) for event in tape.events if event.storage is not None]
    places = [event.place for event, _ in changes]
    made = np.array([event.change is MemoryChange.ALLOCATE for event, _ in changes], dtype=bool)
    sizes = np.array([storage.num_bytes for _, storage in changes], dtype=np.int64)
    categories = np.array([numbers[_category(storage)] for _, storage in changes], dtype=np.int8)
    deltas = np.where(made, sizes, -sizes)
    used = {order[number] for number in np.unique(categories)} | {_category(storage) for storage in tape.before}
    columns: dict[Category, list[int]] = {}
    for category in order:
        if category in used:
            own = np.where(categories == numbers[category], deltas, 0)
            columns[category] = (alive[category] + np.cumsum(own)).tolist()
    return places, columns, (sum(alive.values()) + np.cumsum(deltas)).tolist()


# --- Categories. ---


@dataclass(slots=True)
class _LayerBounds:
    """Where the layers of one micro-batch begin and end: as indices of events."""

    last_layer: float = math.inf
    """Its forward ends here."""
    backward: float = math.inf
    """The backward of the step begins here."""
    first_layer_back: float = math.inf
    """The first backward of a layer begins here."""


def assign_categories(tape: Tape) -> None:
    """Give every storage of a tape its category, once."""
    if tape.has_categories:
        return
    tape.has_categories = True
    bounds = _layer_bounds(tape.events)
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for index, event in enumerate(tape.events):
        if event.storage is not None:
            (made if event.change is MemoryChange.ALLOCATE else freed)[id(event.storage)] = index
    for event in tape.events:
        storage = event.storage
        if storage is not None and storage.category is None:
            key = id(storage)
            storage.category = _category_for(storage, made.get(key, 0), freed.get(key, math.inf), bounds)


def _layer_bounds(events: list[Event]) -> dict[int, _LayerBounds]:
    bounds: dict[int, _LayerBounds] = defaultdict(_LayerBounds)
    in_backward: int | None = None
    for index, event in enumerate(events):
        place, mark = event.place, event.mark
        if mark is not None and mark.phase is Phase.FORWARD and mark.is_end:
            bounds[place.micro_batch].last_layer = index
        elif mark is not None and mark.phase is Phase.BACKWARD:
            here = bounds[place.micro_batch]
            here.first_layer_back = min(here.first_layer_back, index)
        is_back = place.phase is Phase.BACKWARD or place.phase is Phase.RECOMPUTATION
        if is_back and place.micro_batch != in_backward:
            in_backward = place.micro_batch
            bounds[in_backward].backward = min(bounds[in_backward].backward, index)
    return bounds


def _category_for(storage: Storage, made: int, freed: float, bounds: dict[int, _LayerBounds]) -> Category:
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
    assert storage.category is not None, "`assign_categories` has run"
    return storage.category


# --- Ledger and time. ---


def _ledger(tape: Tape) -> tuple[HeldTensor, ...]:
    """Return what the first micro-batch holds for its backward."""
    held = []
    for event in tape.events:
        storage = event.storage
        is_first = event.change is MemoryChange.ALLOCATE and event.place.micro_batch == 0
        if is_first and storage is not None and storage.category is Category.SAVED:
            held.append(HeldTensor(event.place, storage.num_bytes, storage.shape, storage.dtype, storage.why))
    return tuple(held)


def _num_repeats(place: Place, last: int, repeats: int) -> int:
    is_repeated = place.phase is not Phase.OPTIMIZER and place.micro_batch == last
    return repeats if is_repeated else 1


def _time(tape: Tape, repeats: int) -> StepTime:
    last = max((event.place.micro_batch for event in tape.events), default=0)
    seconds: dict[str, list[float]] = defaultdict(list)
    for event in tape.events:
        if event.seconds:
            spent_on = "copies" if event.is_copy else event.place.phase.value
            seconds[spent_on].append(event.seconds * _num_repeats(event.place, last, repeats))
    # Exact sums, so that equal steps take equal times in whatever order their layers run.
    return StepTime(**{spent_on: math.fsum(each) for spent_on, each in seconds.items()})


def _num_flops(tape: Tape, repeats: int) -> dict[Phase, int]:
    last = max((event.place.micro_batch for event in tape.events), default=0)
    flops: Counter[Phase] = Counter()
    for event in tape.events:
        if event.num_flops:
            flops[event.place.phase] += event.num_flops * _num_repeats(event.place, last, repeats)
    return dict(flops)
