"""What happened in a step, event by event: storages that come and go, operators that run, and where.

A tape is written by `tracker` and filled up by `tape_expansion`. `read_tape` sums it up: what each storage is for, when
the peak is, what is held for backward, how long it takes. Pure data.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.step_memory import (
    Category,
    HeldTensor,
    Phase,
    Place,
    StepMemory,
    StepTime,
    Timeline,
    TuplesOnDemand,
)


class Stream(StrEnum):
    """Whose memory a storage is: CUDA's allocator keeps blocks of streams apart."""

    COMPUTE = "compute"
    GATHER = "gather"  # Of weights that an engine gathers.
    COPY_IN = "copy in"  # Of what FSDP2 gathers, until it is copied into the weights, which are of `COMPUTE`.
    CAST = "cast"  # Of shares of weights that an engine casts before it gathers them.
    REDUCE = "reduce"  # Of gradients that an engine shares out.


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """A unit of FSDP1, whose weights are one tensor, of which each rank keeps a share."""

    weights: tuple[int, ...]  # Bytes of each weight, whole, as it was loaded.
    is_broadcast: bool  # Whether rank 0 sends them to the others.
    loaded_bytes: int  # Of the share as its weights were loaded.
    share_bytes: int  # Of the share that is kept.
    emptied: tuple[int, ...]  # Bytes of each tensor that is made, and emptied, before the first forward.


@dataclass(slots=True, eq=False)
class Storage:
    """One block of memory. `shape` and `dtype` are those of the tensor that it was made for."""

    num_bytes: int  # On the device, rounded as its allocator does.
    shape: tuple[int, ...] = ()
    dtype: str = ""
    category: Category | None = None
    """Known at once for gradients and what existed before the step; else set by `assign_categories`."""
    why: str = ""  # The operators that hold it for backward, as far as that was recorded.
    parameter: str = ""  # Path of the parameter that it is, or whose gradient or state it is, if any.
    stream: Stream = Stream.COMPUTE
    is_sent: bool = False  # Whether another stream still reads it when it is freed.
    flat_parameter: FlatParameter | None = None  # What it is the share of, under FSDP1.
    is_extra: bool = False  # Whether a layer made it besides what layers like it make.


class MemoryChange(StrEnum):
    """What an event does to the memory."""

    ALLOCATE = "allocate"
    FREE = "free"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Mark:
    """The forward or the backward of a layer begins or ends here."""

    phase: Phase  # `FORWARD`, or `BACKWARD` with the recomputation that runs in it.
    stack: int  # Its number.
    layer_idx: int
    micro_batch: int
    is_end: bool = False


class TransferKind(StrEnum):
    """What a transfer does."""

    SEND = "send"  # A copy to the host begins, and takes host memory.
    WAIT_FOR_SEND = "wait for send"  # The device waits for the oldest copy to the host that it has not waited for.
    FETCH = "fetch"  # A copy from the host begins.
    RECEIVE = "receive"  # The device waits for the oldest copy from the host that it has not waited for.
    RELEASE = "release"  # Host memory is freed.
    FETCH_WEIGHTS = "fetch weights"  # A copy of a layer's weights from the host begins, on the link of `FETCH`.
    RECEIVE_WEIGHTS = "receive weights"  # The device waits for the oldest of them that it has not waited for.
    GATHER = "gather"  # The device waits for the weights of a unit that come from other ranks.
    LET_GO = "let go"  # What a unit gathered is freed.
    REDUCE = "reduce"  # Gradients are sent to other ranks.


@dataclass(frozen=True, slots=True)
class Transfer:
    """A step of a copy to the host or back, or between ranks: `num_bytes` are those that one rank sends."""

    kind: TransferKind
    num_bytes: int
    num_calls: int = 0  # What the host calls of torch to send gradients, besides the collective.


@dataclass(slots=True)
class Event:
    """One entry of the tape. Not frozen: there are tens of thousands, and frozen ones take twice as long to make."""

    place: Place
    change: MemoryChange = MemoryChange.NOTHING  # What it does to `storage`.
    storage: Storage | None = None
    seconds: float = 0.0  # Predicted: of an operator, or of waiting for a copy (`is_copy`).
    num_flops: int = 0
    mark: Mark | None = None  # The forward or backward of a layer that begins or ends.
    is_copy: bool = False  # Whether `seconds` are of a copy between host and device, or between ranks.
    transfer: Transfer | None = None


def copied_events(events: Iterable[Event], copy: Callable[[Storage], Storage] = replace) -> Iterator[Event]:
    """Yield the same events with storages of their own, for a tape that has them once more."""
    copy_of = cache(copy)
    for event in events:
        storage = None if event.storage is None else copy_of(event.storage)
        # `replace` takes three times as long, and of a step in tiles most events are copies.
        look = event.seconds, event.num_flops, event.mark, event.is_copy, event.transfer
        yield Event(event.place, event.change, storage, *look)


IntColumn = NDArray[np.int64]
_CHANGES = tuple(MemoryChange)
ALLOCATED, FREED = _CHANGES.index(MemoryChange.ALLOCATE), _CHANGES.index(MemoryChange.FREE)
_PHASES = tuple(Phase)
_CATEGORIES = tuple(Category)


class Places:
    """Numbers for places, so that columns can hold them. Equal places have one number."""

    def __init__(self) -> None:
        self.all: list[Place] = []  # By number.
        self._numbers: dict[Place, int] = {}
        self._phases = np.empty(0, dtype=np.int8)
        self._micro_batches = np.empty(0, dtype=np.int64)  # Both by number, as far as they were asked for.
        self._moved: dict[tuple[str, int], IntColumn] = {}

    def numbers_of(self, places: list[Place]) -> IntColumn:
        """Return the number of each place."""
        # By identity first: to hash a place takes longer than all else here.
        known: dict[int, int] = {}
        for place in places:
            if id(place) not in known:
                known[id(place)] = self._number(place)
        return np.array([known[id(place)] for place in places], dtype=np.int64)

    def _number(self, place: Place) -> int:
        number = self._numbers.setdefault(place, len(self.all))
        if number == len(self.all):
            self.all.append(place)
        return number

    def is_in(self, numbers: IntColumn, *phases: Phase) -> NDArray[np.bool_]:
        """Return, for each place, whether it lies in one of the phases."""
        self._read_new()
        is_wanted = np.isin(self._phases, [_PHASES.index(phase) for phase in phases])
        return is_wanted[numbers]

    def micro_batches(self, numbers: IntColumn) -> IntColumn:
        """Return the micro-batch of each place."""
        self._read_new()
        return self._micro_batches[numbers]

    def _read_new(self) -> None:
        new = self.all[len(self._phases) :]
        if new:
            phases = np.array([_PHASES.index(place.phase) for place in new], dtype=np.int8)
            self._phases = np.concatenate([self._phases, phases])
            self._micro_batches = np.concatenate([self._micro_batches, [place.micro_batch for place in new]])

    def moved(self, numbers: IntColumn, path: str, shift: int) -> IntColumn:
        """Return the same places in the layer `shift` further on in the stack at `path`."""
        moved = self._moved.get((path, shift), np.empty(0, dtype=np.int64))
        if len(moved) < len(self.all):
            moved = np.concatenate([moved, np.full(len(self.all) - len(moved), -1)])
        modules: dict[str, str] = {}
        for number in np.unique(numbers[moved[numbers] < 0]).tolist():
            place, number_there = self.all[number], number
            if place.stack == path and place.layer_idx is not None:
                if place.module not in modules:
                    modules[place.module] = moved_path(place.module, path, shift)
                where = path, place.layer_idx + shift, place.part, modules[place.module]
                number_there = self._number(Place(place.phase, place.micro_batch, *where, place.operator))
            moved[number] = number_there
        self._moved[path, shift] = moved
        return moved[numbers]


def moved_path(path: str, stack: str, shift: int) -> str:
    """Return the path of the module or parameter in the layer `shift` further on in the stack at the path `stack`."""
    if not path.startswith(f"{stack}."):
        return path
    number, _, rest = path[len(stack) + 1 :].partition(".")
    return f"{stack}.{int(number) + shift}.{rest}".rstrip(".")


@dataclass(slots=True, eq=False)
class Columns:
    """Events as columns, all of the same length: see `Event`."""

    places: Places
    storages: list[Storage]
    notes: list[Mark | Transfer]
    place: IntColumn  # Numbers of `places`.
    change: NDArray[np.int8]  # `ALLOCATED`, `FREED`, or neither.
    storage: IntColumn  # Indices of `storages`; -1 for none.
    seconds: NDArray[np.float64]
    num_flops: IntColumn
    is_copy: NDArray[np.bool_]
    note: IntColumn  # Indices of `notes`; -1 for none.

    @classmethod
    def of(cls, events: list[Event], places: Places) -> Columns:
        """Return events as columns."""
        indices: dict[Storage | None, int] = {None: -1}
        of_events = [indices.setdefault(event.storage, len(indices) - 1) for event in events]
        notes = {row: each for row, event in enumerate(events) if (each := event.mark or event.transfer)}
        note = np.full(len(events), -1, dtype=np.int64)
        note[list(notes)] = np.arange(len(notes))
        return cls(
            places,
            [storage for storage in indices if storage is not None],
            list(notes.values()),
            places.numbers_of([event.place for event in events]),
            np.array([_CHANGES.index(event.change) for event in events], dtype=np.int8),
            np.array(of_events, dtype=np.int64),
            np.array([event.seconds for event in events], dtype=np.float64),
            np.array([event.num_flops for event in events], dtype=np.int64),
            np.array([event.is_copy for event in events], dtype=bool),
            note,
        )

    def __len__(self) -> int:
        return len(self.place)

    def take(self, rows: NDArray[Any]) -> Columns:
        """Return the rows with these indices, or those where a mask holds."""
        names = ("place", "change", "storage", "seconds", "num_flops", "is_copy", "note")
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def events(self) -> list[Event]:
        """Return the rows as events."""
        places, storages = self.places.all, [*self.storages, None]  # -1 is the last
        columns = (self.place, self.change, self.storage, self.seconds, self.num_flops, self.is_copy)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        events = [
            Event(places[place], _CHANGES[change], storages[storage], seconds, num_flops, None, is_copy)
            for place, change, storage, seconds, num_flops, is_copy in rows
        ]
        for row, note in self.noted():
            if isinstance(note, Mark):
                events[row].mark = note
            else:
                events[row].transfer = note
        return events

    def noted(self) -> Iterator[tuple[int, Mark | Transfer]]:
        """Yield the rows that have a mark or a transfer, with it."""
        for row in np.flatnonzero(self.note >= 0).tolist():
            yield row, self.notes[self.note[row]]

    def transfers(self) -> dict[int, Transfer]:
        """Return the transfers by their row."""
        return {row: note for row, note in self.noted() if isinstance(note, Transfer)}

    def rows_of_storages(self, change: int) -> IntColumn:
        """Return, for each storage, the row that allocates or frees it; -1 for none."""
        rows = np.full(len(self.storages), -1, dtype=np.int64)
        found = np.flatnonzero(self.change == change)
        rows[self.storage[found]] = found
        return rows


class Tape:
    """A step: the storages that exist when it begins, and the events in their order.

    Events are objects while they are written, and columns when they are read. Each is made of the other where it is
    asked for; what was changed last holds.
    """

    def __init__(
        self, before: Iterable[Storage] = (), events: Iterable[Event] = (), *, places: Places | None = None
    ) -> None:
        self.before = list(before)
        # By parameter of a skipped layer: the gradients whose allocation `tape_expansion` writes.
        self.copied_gradients: dict[str, Storage] = {}
        self.has_categories = False  # Whether `assign_categories` has run.
        self.places = Places() if places is None else places
        self._events: list[Event] | None = list(events)
        self._columns: Columns | None = None

    @property
    def events(self) -> list[Event]:
        """One object for each event, to append to."""
        if self._events is None:
            assert self._columns is not None, "one of the two is there"
            self._events = self._columns.events()
        return self._events

    @property
    def columns(self) -> Columns:
        """The events as columns. Assign changed ones."""
        if self._columns is None or (self._events is not None and len(self._events) != len(self._columns)):
            self._columns = Columns.of(self.events, self.places)
        return self._columns

    @columns.setter
    def columns(self, columns: Columns) -> None:
        self._columns, self._events = columns, None


def sort_frees(tape: Tape) -> None:
    """Put storages that are freed at once in the order in which they were made."""
    # Autocast clears its cache in the order of addresses, which differs from run to run.
    columns = tape.columns
    rows = np.arange(len(columns))
    is_same = (columns.change[1:] == columns.change[:-1]) & (columns.place[1:] == columns.place[:-1])
    runs = np.cumsum(np.concatenate([[0], ~is_same])) if len(columns) else rows
    is_freed = columns.change == FREED
    order = rows.copy()
    order[is_freed] = columns.rows_of_storages(ALLOCATED)[columns.storage[is_freed]]
    tape.columns = columns.take(np.lexsort((order, runs)))


# --- Reading. ---


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """What storages take of the device, in bytes."""

    before: IntColumn  # Those of `Tape.before`.
    storages: IntColumn  # Those of `Columns.storages`.

    @classmethod
    def of_tensors(cls, tape: Tape) -> Sizes:
        """Return what they take by themselves; see `caching_allocator.play` for the blocks that they lie in."""
        storages = tape.before, tape.columns.storages
        return cls(*(np.array([each.num_bytes for each in some], dtype=np.int64) for some in storages))


def bytes_after(tape: Tape, blocks: Sizes | None = None) -> IntColumn:
    """Return the bytes that are allocated after each event; without `blocks`, what tensors take."""
    columns, sizes = tape.columns, blocks or Sizes.of_tensors(tape)
    signs = np.where(columns.change == ALLOCATED, 1, -1)
    of_events = np.append(sizes.storages, 0)[columns.storage]  # -1 is the last
    levels: IntColumn = sizes.before.sum() + np.cumsum(signs * of_events)
    return levels


def read_tape(
    tape: Tape,
    *,
    device: str,
    plan: Plan | None,
    tokens: int,
    repeats: int = 1,
    host_bytes: int = 0,
    blocks: Sizes | None = None,
) -> StepMemory:
    """Sum up the tape of one optimizer step.

    `tokens` are those of the whole step; the last micro-batch of the tape runs `repeats` times in it. `blocks` are
    those that storages lie in, if they are larger than the storages.
    """
    assign_categories(tape)
    columns, sizes = tape.columns, blocks or Sizes.of_tensors(tape)
    alive: Counter[Category] = Counter()
    for storage, num_bytes in zip(tape.before, sizes.before.tolist(), strict=True):
        alive[_category(storage)] += num_bytes
    changes = np.flatnonzero(columns.storage >= 0)
    places = tuple([columns.places.all[number] for number in columns.place[changes].tolist()])
    by_category, totals = _bytes_by_category(columns, changes, alive, sizes), bytes_after(tape, sizes)[changes]
    peak = int(np.argmax(totals))
    seconds = np.cumsum(columns.seconds)
    timeline = Timeline(
        places,
        TuplesOnDemand(by_category),
        tuple(seconds[changes].tolist()) if len(seconds) and seconds[-1] > 0 else (),
    )
    in_phase = {phase: columns.places.is_in(columns.place, phase) for phase in Phase}
    micro_batches = columns.places.micro_batches(columns.place)
    is_last = (micro_batches == micro_batches.max(initial=0)) & ~in_phase[Phase.OPTIMIZER]
    num_times = np.where(is_last, repeats, 1)
    taken, flops = columns.seconds * num_times, columns.num_flops * num_times
    # Exact sums, so that equal steps take equal times in whatever order their layers run.
    times = {phase.value: math.fsum(taken[is_in & ~columns.is_copy].tolist()) for phase, is_in in in_phase.items()}
    num_flops = {phase: total for phase, is_in in in_phase.items() if (total := int(flops[is_in].sum()))}
    return StepMemory(
        device=device,
        plan=plan,
        tokens=tokens,
        peak_bytes=int(totals[peak]),
        tensor_peak_bytes=int(bytes_after(tape)[changes].max()),
        peak_at=places[peak],
        by_category={category: int(column[peak]) for category, column in by_category.items() if column[peak]},
        timeline=timeline,
        ledger=_ledger(columns),
        time=StepTime(**times, copies=math.fsum(taken[columns.is_copy].tolist())),
        num_flops=num_flops,
        host_bytes=host_bytes,
    )


def _bytes_by_category(
    columns: Columns, changes: IntColumn, alive: Counter[Category], sizes: Sizes
) -> dict[Category, IntColumn]:
    """Return the bytes after each change."""
    numbers = {category: number for number, category in enumerate(_CATEGORIES)}
    kinds = np.array([numbers[_category(storage)] for storage in columns.storages], dtype=np.int8)
    storages = columns.storage[changes]
    deltas = np.where(columns.change[changes] == ALLOCATED, 1, -1) * sizes.storages[storages]
    categories = kinds[storages]
    used = {_CATEGORIES[number] for number in np.unique(categories)} | set(alive)
    return {
        category: alive[category] + np.cumsum(np.where(categories == numbers[category], deltas, 0))
        for category in _CATEGORIES
        if category in used
    }


# --- Categories. ---


@dataclass(slots=True)
class _LayerBounds:
    """Where the layers of one micro-batch begin and end: as indices of events."""

    last_layer: float = math.inf  # Its forward ends here.
    backward: float = math.inf  # The backward of the step begins here.
    first_layer_back: float = math.inf  # The first backward of a layer begins here.


def assign_categories(tape: Tape) -> None:
    """Give every storage of a tape its category, once."""
    if tape.has_categories:
        return
    tape.has_categories = True
    columns, places = tape.columns, tape.columns.places
    unknown = [number for number, storage in enumerate(columns.storages) if storage.category is None]
    made, freed = (columns.rows_of_storages(change)[unknown] for change in (ALLOCATED, FREED))
    assert (made >= 0).all(), "what was there before has a category"
    made_in = columns.place[made]
    freed[freed < 0] = len(columns)
    found = np.full(len(unknown), _CATEGORIES.index(Category.TEMPORARY))
    found[places.is_in(made_in, Phase.RECOMPUTATION)] = _CATEGORIES.index(Category.RECOMPUTED)
    micro_batches = places.micro_batches(made_in)
    is_forward, is_backward = (places.is_in(made_in, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    for number, here in _layer_bounds(columns).items():
        is_here = micro_batches == number
        is_behind = is_forward & (made > here.last_layer)
        is_before = is_backward & (made < here.first_layer_back) & (here.first_layer_back < math.inf)
        found[is_here & is_forward & (freed > here.backward)] = _CATEGORIES.index(Category.SAVED)
        found[is_here & (is_behind | is_before)] = _CATEGORIES.index(Category.LOSS)
    for storage_number, category in zip(unknown, found.tolist(), strict=True):
        columns.storages[storage_number].category = _CATEGORIES[category]


def _layer_bounds(columns: Columns) -> dict[int, _LayerBounds]:
    bounds: dict[int, _LayerBounds] = defaultdict(_LayerBounds)
    for row, note in columns.noted():
        here = bounds[columns.places.all[columns.place[row]].micro_batch]
        if isinstance(note, Mark) and note.phase is Phase.FORWARD and note.is_end:
            here.last_layer = row
        elif isinstance(note, Mark) and note.phase is Phase.BACKWARD:
            here.first_layer_back = min(here.first_layer_back, row)
    back = np.flatnonzero(columns.places.is_in(columns.place, Phase.BACKWARD, Phase.RECOMPUTATION))
    numbers, first = np.unique(columns.places.micro_batches(columns.place[back]), return_index=True)
    for number, index in zip(numbers.tolist(), first.tolist(), strict=True):
        bounds[number].backward = int(back[index])
    return bounds


def _category(storage: Storage) -> Category:
    assert storage.category is not None, "`assign_categories` has run"
    return storage.category


def _ledger(columns: Columns) -> tuple[HeldTensor, ...]:
    """Return what the first micro-batch holds for its backward."""
    rows = np.flatnonzero((columns.change == ALLOCATED) & (columns.places.micro_batches(columns.place) == 0))
    held = []
    for place, number in zip(columns.place[rows].tolist(), columns.storage[rows].tolist(), strict=True):
        storage = columns.storages[number]
        if storage.category is Category.SAVED:
            made = columns.places.all[place]
            held.append(HeldTensor(made, storage.num_bytes, storage.shape, storage.dtype, storage.why))
    return tuple(held)
