"""Traces equal slices of a tiled module once: they run until two in a row do the same, which then stands for the rest.

The rest are those of the same length that follow. What the last slice did is written into the tape for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_ckpt.regions.execution_state import RandomState
from hf_ckpt.simulation.tape import Event, MemoryChange, Storage, copied_events
from hf_ckpt.simulation.tracker import Tracker

_Actions = list[tuple[object, ...]]


def run_unlike(
    tracker: Tracker, bounds: Sequence[tuple[int, int]], inputs: Sequence[Tensor]
) -> Iterator[tuple[int, int]]:
    """Yield the slices that have to run, and write the events of the others. See `regions.tiling.SlicesToRun`."""
    # What a module does may depend on values.
    is_fake = all(isinstance(tensor, FakeTensor) for tensor in inputs)
    last: tuple[int, _Actions | None] = 0, None
    repeated: list[Event] | None = None
    for start, length in bounds:
        if repeated is not None and length == last[0]:
            tracker.tape.events.extend(copied_events(repeated, partial(_copy, tracker)))
            continue
        begin, random_state = len(tracker.tape.events), RandomState.of()
        yield start, length
        # Here the slice has run.
        with tracker.on_host():
            draws = not RandomState.of().is_same(random_state)
        events = tracker.tape.events[begin:]
        actions = _actions(tracker, events) if is_fake and not draws else None
        repeated = events if actions is not None and last == (length, actions) else None
        last = length, actions


def _actions(tracker: Tracker, events: Sequence[Event]) -> _Actions | None:
    """Return what is equal for slices that do the same; None if a slice cannot be repeated.

    What it allocates it has to free, or to leave to an object that is there for all slices.
    """
    actions: _Actions = []
    slots: dict[int, int] = {}
    alive: dict[int, Storage] = {}
    for event in events:
        storage, look = event.storage, tuple[object, ...]()
        if storage is not None and event.change is MemoryChange.ALLOCATE:
            slots[id(storage)] = len(slots)
            alive[id(storage)] = storage
        if event.mark is not None or event.transfer is not None or (storage is not None and id(storage) not in slots):
            return None
        if storage is not None:
            look = (storage.num_bytes, storage.shape, storage.dtype, storage.category, storage.why, storage.parameter)
            look = slots[id(storage)], *look
        if event.change is MemoryChange.FREE:
            del alive[id(storage)]
        actions.append((event.place, event.change, look, event.seconds, event.num_flops, event.is_copy))
    owners = [tracker.owner_of(storage) for storage in alive.values()]
    if any(owner is None for owner in owners):
        return None
    return [*actions, *((slots[number], id(owner)) for number, owner in zip(alive, owners, strict=True))]


def _copy(tracker: Tracker, storage: Storage) -> Storage:
    copy = replace(storage)
    owner = tracker.owner_of(storage)
    if owner is not None:
        tracker.free_with(owner, copy)
    return copy
