"""Frozen weights that wait on the host, in a simulated step: when they are copied, and what lies on the device.

A step is traced without them: they change nothing of what is computed. Here the engine that trains
(`regions.waiting_weights`) goes through the layers of that step, and what it would copy and free is written into the
tape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_ckpt.patch.frozen_weights import layers_that_wait, tables_outside
from hf_ckpt.policy.options import EmbeddingPlace
from hf_ckpt.policy.plan import Plan, with_entries
from hf_ckpt.regions.offload.transfer import Wire
from hf_ckpt.regions.waiting_weights import LayerWeights, Table, WaitingWeights, owners_of, waiting_tensors
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import ALLOCATED, Columns, Event, Mark, MemoryChange, Storage, Tape, Transfer, TransferKind
from hf_ckpt.structure.layers import Stack


def without_waiting_weights(plan: Plan) -> Plan:
    """Return the plan that leaves all weights on the device."""
    if plan.embedding is EmbeddingPlace.CPU:
        plan = replace(plan, embedding=EmbeddingPlace.DEVICE)
    if all(entry.weights is None for stack in plan.stacks for entry in stack.layers):
        return plan
    return with_entries(plan, lambda entry: replace(entry, weights=None))


def let_weights_wait(
    tape: Tape, plan: Plan, model: nn.Module, stacks: Sequence[Stack], *, rounding: int
) -> tuple[Tape, int]:
    """Return the tape of a step in which the plan's weights wait on the host, and the bytes that lie there.

    Args:
        tape: the step with all weights on the device.
        plan: says whose wait.
        model: the model of the step, with its values or without.
        stacks: its layers.
        rounding: bytes of which the device's allocator gives whole multiples.
    """
    owners = owners_of(model)
    places = {layer.module: (number, layer.layer_idx) for number, stack in enumerate(stacks) for layer in stack.layers}
    indices: dict[tuple[int, int], int] = {}
    layers: list[_CountedWeights] = []
    gone: list[tuple[str, Tensor]] = []
    waiting = layers_that_wait(plan, stacks)
    for path, layer, _ in waiting:
        tensors, _ = waiting_tensors(layer.module, owners)
        indices[places[layer.module]] = len(layers)
        layers.append(_CountedWeights(path, tensors, torch.device("cpu")))
        gone += [(f"{path}.{name}", each[0]) for name, each in tensors]
    written = _Written(tape, rounding)
    for each in layers:
        each.written = written
    if waiting:
        _run(WaitingWeights(waiting[0][2], layers), tape, indices, written)
    tables = tables_that_wait(plan, model, stacks)
    _look_up({table.path for table in tables}, tape, written)
    # By the first of its names.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    gone += [(names[id(table.parameter)], table.parameter) for table in tables]
    before = _without(tape.before, gone)
    changed = Tape(before, places=tape.places)
    changed.columns = _inserted(tape, written)
    return changed, sum(each.num_bytes for each in layers) + sum(table.parameter.nbytes for table in tables)


def tables_that_wait(plan: Plan, model: nn.Module, stacks: Sequence[Stack]) -> list[Table]:
    """Return the embeddings that wait on the host under a plan."""
    found = tables_outside(model, stacks) if plan.embedding is EmbeddingPlace.CPU else []
    return [table for table in found if table.reason_to_stay is None]


def _look_up(paths: Collection[str], tape: Tape, written: _Written) -> None:
    """Let the link bring the rows that are looked up: the device waits for them, as its own operator reads them."""
    columns = tape.columns
    for row in np.flatnonzero(columns.change == ALLOCATED).tolist():
        place, storage = columns.places.all[columns.place[row]], columns.storages[columns.storage[row]]
        if place.module in paths and place.operator.startswith("aten.embedding"):
            written.row, written.place = row, place
            for kind in (TransferKind.FETCH_WEIGHTS, TransferKind.RECEIVE_WEIGHTS):
                written.add(transfer=Transfer(kind, storage.num_bytes))


class _Written:
    """Events to be written into a tape, each before one of its rows."""

    def __init__(self, tape: Tape, rounding: int) -> None:
        self.rows: list[int] = []
        self.events: list[Event] = []
        self.row, self.place = 0, Place(Phase.FORWARD)
        self._rounding = rounding

    def add(self, **what: Any) -> None:
        self.rows.append(self.row)
        self.events.append(Event(self.place, **what))

    def storage(self, num_bytes: int) -> Storage:
        return Storage(-(-num_bytes // self._rounding) * self._rounding, category=Category.GATHERED)


class _CountedWeights(LayerWeights):
    """What would be copied of a layer: nothing is moved."""

    written: _Written

    def _reset(self) -> None:
        super()._reset()
        self._is_coming = False
        self._storage: Storage | None = None

    @property
    def is_packed(self) -> bool:
        return True

    def fetch(self, wire: Wire) -> None:
        self.is_on_device = self._is_coming = True
        self._storage = self.written.storage(self.num_bytes)
        self.written.add(change=MemoryChange.ALLOCATE, storage=self._storage)
        self.written.add(transfer=Transfer(TransferKind.FETCH_WEIGHTS, self.num_bytes))

    def use(self, wire: Wire) -> None:
        self.is_in_use = True
        self._wait()

    def rest(self) -> None:
        self.is_in_use = False

    def free(self) -> None:
        if self.is_on_device:
            self.is_on_device = False
            self._wait()
            self.written.add(change=MemoryChange.FREE, storage=self._storage)

    def _wait(self) -> None:
        if self._is_coming:
            self._is_coming = False
            self.written.add(transfer=Transfer(TransferKind.RECEIVE_WEIGHTS, self.num_bytes))


def _run(engine: WaitingWeights, tape: Tape, indices: dict[tuple[int, int], int], written: _Written) -> None:
    """Let the engine go through the layers of a step, as they run."""
    columns = tape.columns
    is_backward = columns.places.is_in(columns.place, Phase.BACKWARD, Phase.RECOMPUTATION)
    micro_batches = columns.places.micro_batches(columns.place)
    ends = {
        int(np.flatnonzero(is_backward & (micro_batches == number))[-1]) + 1
        for number in np.unique(micro_batches[is_backward]).tolist()
    }
    marks = {row: note for row, note in columns.noted() if isinstance(note, Mark)}
    for row in sorted(ends | marks.keys()):
        written.row = row
        written.place = columns.places.all[columns.place[min(row, len(columns) - 1)]]
        if row in ends:
            engine.end_backward()
        mark = marks.get(row)
        index = None if mark is None else indices.get((mark.stack, mark.layer_idx))
        if mark is None or index is None:
            continue
        if mark.phase is Phase.BACKWARD:
            engine.begin_backward(index)
        elif mark.phase is Phase.FORWARD and mark.is_end:
            engine.end_forward(index, needs_backward=bool(ends))
        elif mark.phase is Phase.FORWARD:
            engine.begin_forward(index)


def _without(before: Sequence[Storage], gone: Sequence[tuple[str, Tensor]]) -> list[Storage]:
    """Return what exists before the step but for the tensors that wait."""
    names = {name for name, _ in gone}
    # Statistics of quantised weights have no names.
    looks = Counter((tuple(each.shape), str(each.dtype).removeprefix("torch.")) for _, each in gone)
    left = []
    for storage in before:
        if storage.category is Category.PARAMETERS and storage.parameter in names:
            looks[storage.shape, storage.dtype] -= 1
            continue
        left.append(storage)
    for storage in list(left):
        look = storage.shape, storage.dtype
        if storage.category is Category.PARAMETERS and not storage.parameter and looks[look] > 0:
            looks[look] -= 1
            left.remove(storage)
    return left


def _inserted(tape: Tape, written: _Written) -> Columns:
    """Return the columns of a tape with the events that were written into it."""
    old, new = tape.columns, Columns.of(written.events, tape.places)
    shifted = {
        "storage": np.where(new.storage < 0, -1, new.storage + len(old.storages)),
        "note": np.where(new.note < 0, -1, new.note + len(old.notes)),
    }
    rows = np.array(written.rows, dtype=np.int64)
    names = ("place", "change", "storage", "seconds", "num_flops", "is_copy", "note")
    both = {name: np.insert(getattr(old, name), rows, shifted.get(name, getattr(new, name))) for name in names}
    return Columns(old.places, [*old.storages, *new.storages], [*old.notes, *new.notes], **both)
