"""Tapes as events and as columns, and what is filled up for layers that were skipped."""

from __future__ import annotations

import pytest

from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import Event, Mark, MemoryChange, Storage, Tape, Transfer, TransferKind
from hf_ckpt.simulation.tape_expansion import CannotReuseError, PartlyTraced, expand

NUM_LAYERS = 6
# Layer 1 represents layers 2 to 4.
REPRESENTATIVES = dict.fromkeys((2, 3, 4), 1)


def place(layer: int | None, operator: str = "") -> Place:
    if layer is None:
        return Place(Phase.FORWARD, operator=operator)
    return Place(Phase.FORWARD, 0, "layers", layer, "", f"layers.{layer}.mlp", operator)


def begins(layer: int) -> Event:
    return Event(place(layer), mark=Mark(Phase.FORWARD, 0, layer, 0))


def makes(layer: int, num_bytes: int = 8) -> Event:
    storage = Storage(num_bytes, (num_bytes,), "int8", Category.TEMPORARY)
    return Event(place(layer, "aten.mm"), MemoryChange.ALLOCATE, storage)


def frees(event: Event, layer: int | None) -> Event:
    return Event(place(layer), MemoryChange.FREE, event.storage)


def ends_stack() -> Event:
    return Event(place(NUM_LAYERS - 1), mark=Mark(Phase.FORWARD, 0, NUM_LAYERS - 1, 0, is_end=True))


def filled_up(events: list[Event]) -> Tape:
    return expand(Tape(events=events), [PartlyTraced(0, "layers", [None] * NUM_LAYERS, REPRESENTATIVES)])


def told(tape: Tape) -> list[tuple[str, int | None]]:
    return [(event.change.value, event.place.layer_idx) for event in tape.events if event.storage is not None]


def test_events_are_the_same_after_they_were_columns() -> None:
    made = makes(0)
    events = [
        begins(0),
        made,
        Event(place(0, "aten.mm"), seconds=0.5, num_flops=2**40),
        Event(place(None), seconds=0.25, is_copy=True, transfer=Transfer(TransferKind.RECEIVE, 3)),
        frees(made, None),
    ]
    tape = Tape(events=events)
    tape.columns = tape.columns
    assert tape.events is not events
    assert tape.events == events
    assert tape.events[1].storage is tape.events[4].storage is made.storage


def test_events_that_were_added_are_in_the_columns() -> None:
    tape = Tape(events=[begins(0)])
    assert len(tape.columns) == 1
    tape.events.append(makes(0))
    assert len(tape.columns) == 2


def test_skipped_layers_do_what_their_representative_does() -> None:
    first, second, last = makes(0), makes(1), makes(5)
    # Each layer frees what the one before it has made.
    events = [begins(0), first, begins(1), second, frees(first, 1), *map(begins, (2, 3, 4)), begins(5), last]
    tape = filled_up([*events, frees(second, 5), ends_stack(), frees(last, None)])
    expected = [("allocate", 0)]
    for layer in range(1, NUM_LAYERS):
        expected += [("allocate", layer), ("free", layer)]
    assert told(tape) == [*expected, ("free", None)]
    freed = [event.storage for event in tape.events if event.change is MemoryChange.FREE]
    made = [event.storage for event in tape.events if event.change is MemoryChange.ALLOCATE]
    assert [id(storage) for storage in freed] == [id(storage) for storage in made]


def test_what_is_freed_after_the_layers_is_freed_of_each_or_of_the_last_but_one() -> None:
    first, second, last = makes(0), makes(1), makes(5)
    layers = [begins(0), first, begins(1), second, *map(begins, (2, 3, 4)), begins(5), last, ends_stack()]
    of_each = filled_up([*layers, *(frees(each, None) for each in (first, second, last))])
    assert told(of_each)[NUM_LAYERS:] == [("free", None)] * NUM_LAYERS


def test_layers_that_free_other_things_are_not_reused() -> None:
    first, second, last = makes(0), makes(1), makes(5)
    layers = [begins(0), first, begins(1), second, *map(begins, (2, 3, 4)), begins(5), last, ends_stack()]
    # As if only the last but one layer's were freed: but no layer frees that of the one before it.
    with pytest.raises(CannotReuseError, match="do not free the same"):
        filled_up([*layers, frees(second, None)])
    other = makes(5, num_bytes=16)
    with pytest.raises(CannotReuseError, match="neighbours of equal layers differ"):
        filled_up(
            [begins(0), first, begins(1), frees(first, 1), *map(begins, (2, 3, 4)), begins(5), other, ends_stack()]
        )


def test_what_comes_between_skipped_layers_is_not_reused() -> None:
    with pytest.raises(CannotReuseError, match="what no other does") as raised:
        filled_up([begins(0), begins(1), begins(2), makes(2), begins(3), begins(4), begins(5), ends_stack()])
    assert raised.value.unlike == {(0, 2), (0, 3)}
