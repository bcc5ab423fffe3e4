"""What one rank holds: a step of the whole model, turned into that of one rank under DDP, FSDP or ZeRO.

The arithmetic of engines, applied to the tape of one process; nothing is sent. A unit is what an engine gathers at a
time: a decoder layer, or the rest of the model, which stays gathered from its forward to its backward.

Note [What engines hold].
- DDP: everything, and buckets as large as all gradients, which are copied into them (torch's `Reducer`).
- FSDP: of weights, gradients and optimizer state one share. Of units, whole weights in the dtype of the computation:
  the one that runs, and the next one, which is gathered meanwhile; while the loss runs backward, that is the last
  layer. A unit's gradients are copied into one buffer, which
  is freed when the next unit's are. Ranks exchange gradients in the last micro-batch only (the Trainer's `no_sync`):
  until then each holds all of them whole. accelerate keeps what is trained in float32 under mixed precision.
- ZeRO-1: a share of the optimizer's state, with weights in float32 for what is trained; ZeRO-2: of gradients as well,
  sent as soon as a unit's are there; ZeRO-3: of weights as well, gathered as under FSDP. DeepSpeed trains in the dtype
  of mixed precision throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.op_costs import copy_seconds
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import Event, Mark, MemoryChange, Storage, Tape
from hf_ckpt.simulation.tracker import BLOCK_BYTES
from hf_ckpt.structure.layers import Stack

_UnitKey = tuple[int, int] | None
"""Number of the stack and `layer_idx`; None for the rest of the model."""

_Running = tuple[Phase, _UnitKey, int]
"""What runs: forward or backward, unit, micro-batch."""

_MASTER_BYTES = 4
"""Of one weight in float32."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter."""

    unit: _UnitKey
    """The layer that it belongs to."""
    numel: int
    """Of its storage: a 4-bit weight is packed."""
    num_bytes: int
    """Whole, in the dtype that it is stored in."""
    compute_bytes: int
    """Whole, in the dtype that it is gathered in."""
    shard_bytes: int
    """Of one rank."""
    is_trained: bool
    """Whether it gets a gradient."""


def compute_dtype(step: Step, tensor: Tensor) -> torch.dtype:
    """Return the dtype in which an engine passes a parameter to the computation."""
    engine, dtype = step.sharding.engine, step.autocast
    gathers_in_half = engine.startswith(("fsdp", "zero")) and dtype is not None and tensor.is_floating_point()
    return getattr(torch, dtype) if gathers_in_half and dtype is not None else tensor.dtype


def weights_of(model: nn.Module, stacks: Sequence[Stack], step: Step) -> dict[str, Weight]:
    """Return the parameters of a model by name. The model is whole, in the dtypes that it was loaded in."""
    units: dict[nn.Parameter, _UnitKey] = {
        parameter: (number, layer.layer_idx)
        for number, stack in enumerate(stacks)
        for layer in stack.layers
        for parameter in layer.outer.parameters()
    }
    weights = {}
    for name, parameter in model.named_parameters():
        stored = parameter.element_size()
        computed = compute_dtype(step, parameter).itemsize
        if step.sharding.engine.startswith("fsdp") and step.autocast is not None and parameter.requires_grad:
            stored = _MASTER_BYTES
        elif step.sharding.engine.startswith("zero"):
            stored = computed
        shape, world_size = tuple(parameter.shape) or (1,), step.sharding.world_size
        rows = -(-shape[0] // world_size) if step.sharding.engine == "fsdp2" else shape[0] / world_size
        numel = parameter.numel()
        weights[name] = Weight(
            units.get(parameter),
            numel,
            numel * stored,
            numel * computed,
            -int(-(rows * (numel // max(1, shape[0])) * stored) // 1),
            parameter.requires_grad,
        )
    return weights


def one_rank_tape(tape: Tape, weights: Mapping[str, Weight], step: Step, device: Device) -> Tape:
    """Return one rank's tape, made of that of the whole model, whose storages name their parameters."""
    if step.sharding.world_size == 1 or step.sharding.engine == "none":
        return tape
    return _RankTape(tape, weights, step, device).tape()


class _RankTape:
    def __init__(self, tape: Tape, weights: Mapping[str, Weight], step: Step, device: Device) -> None:
        self._whole = tape
        self._weights = weights
        self._engine = step.sharding.engine
        self._world_size = step.sharding.world_size
        self._reshards = step.sharding.reshards_after_forward
        self._prefetches = step.sharding.prefetches_in_backward
        self._device = device
        self._rounding = BLOCK_BYTES if device.is_cuda else 1
        self._order = self._units_in_order()
        self._last = max(event.place.micro_batch for event in tape.events)
        self._gathered: dict[_UnitKey, Storage] = {}
        self._gradients: dict[_UnitKey, list[tuple[Storage, Storage]]] = {}
        self._shards: dict[int, Storage] = {}
        self._reduced: Storage | None = None
        self._computed = 0.0

    def tape(self) -> Tape:
        tape = Tape(list(self._before()), list(self._events()))
        made = [event.storage for event in tape.events if event.storage is not None]
        for storage in (*tape.before, *made):
            storage.num_bytes = -(-storage.num_bytes // self._rounding) * self._rounding
        return tape

    # --- What exists before the step. ---

    def _before(self) -> Iterator[Storage]:
        trained = [weight for weight in self._weights.values() if weight.is_trained]
        for storage in self._whole.before:
            weight = self._weights.get(storage.parameter)
            if weight is None:
                yield storage
            elif storage.category is Category.PARAMETERS:
                yield replace(storage, num_bytes=weight.shard_bytes if self._shards_weights else weight.num_bytes)
            else:
                yield self._state(storage, weight)
        if self._engine == "ddp":
            yield Storage(sum(weight.num_bytes for weight in trained), category=Category.GATHERED)
        elif self._engine.startswith("zero"):
            masters = sum(_MASTER_BYTES * weight.numel for weight in trained)
            yield Storage(self._share(masters), category=Category.OPTIMIZER)

    def _state(self, storage: Storage, weight: Weight) -> Storage:
        """Return a rank's part of the optimizer's tensor: a share of what is as large as the parameter."""
        numel = 1
        for size in storage.shape:
            numel *= size
        if self._engine == "ddp" or numel <= 1:
            return storage
        num_bytes = storage.num_bytes
        if "float" in storage.dtype:
            # State has the dtype of the stored weights: float32 where those are kept so.
            num_bytes = max(num_bytes, numel * _MASTER_BYTES if self._keeps_masters else 0)
        return replace(storage, num_bytes=self._share(num_bytes))

    @property
    def _keeps_masters(self) -> bool:
        """Whether the optimizer steps weights in float32."""
        trained = [weight for weight in self._weights.values() if weight.is_trained]
        return self._engine.startswith("zero") or any(weight.num_bytes != weight.compute_bytes for weight in trained)

    @property
    def _shards_weights(self) -> bool:
        return self._engine in ("fsdp1", "fsdp2", "zero3")

    @property
    def _shards_gradients(self) -> bool:
        return self._shards_weights or self._engine == "zero2"

    def _share(self, num_bytes: int) -> int:
        return -(-num_bytes // self._world_size)

    # --- The step. ---

    def _events(self) -> Iterator[Event]:
        running: _Running | None = None
        place = Place(Phase.FORWARD)
        if self._shards_weights:
            yield from self._gather(None, place)
        for event in self._whole.events:
            mark, place = event.mark, event.place
            if mark is not None and not mark.is_end:
                yield from self._leave_layer(running, place)
                running = mark.phase, (mark.stack, mark.layer_idx), mark.micro_batch
                yield event
                yield from self._enter_layer(mark, place)
                continue
            if running is not None and (place.phase is Phase.OPTIMIZER or _is_last_forward(mark, self._order)):
                yield from self._leave_layer(running, place)
                running = None
                if place.phase is Phase.OPTIMIZER:
                    yield from self._end_backward(place)
            if running is None and place.phase is Phase.BACKWARD:
                yield from self._prefetch_last_layer(place)
            yield self._event(event, running)
        yield from self._leave_layer(running, place)
        yield from self._end_backward(place)

    def _enter_layer(self, mark: Mark, place: Place) -> Iterator[Event]:
        if not self._shards_weights:
            return
        key = (mark.stack, mark.layer_idx)
        yield from self._gather(key, place)
        is_forward = mark.phase is Phase.FORWARD
        following = self._neighbour(key, 1 if is_forward else -1)
        if following is not None and (is_forward or self._prefetches):
            yield from self._gather(following, place)

    def _prefetch_last_layer(self, place: Place) -> Iterator[Event]:
        """Gather the last layer: the hook of the root module does, as soon as the loss has a gradient."""
        if self._prefetches and self._engine.startswith("fsdp") and self._shards_weights and self._order:
            yield from self._gather(self._order[-1], place)

    def _leave_layer(self, running: _Running | None, place: Place) -> Iterator[Event]:
        if running is None:
            return
        phase, key, micro_batch = running
        if self._shards_weights and (phase is Phase.BACKWARD or self._reshards):
            yield from self._free(self._gathered.pop(key, None), place)
        if phase is Phase.BACKWARD and (micro_batch == self._last or not self._engine.startswith("fsdp")):
            yield from self._reduce_gradients(key, place)
        self._computed = 0.0

    def _end_backward(self, place: Place) -> Iterator[Event]:
        yield from self._reduce_gradients(None, place)
        yield from self._free(self._reduced, place)
        self._reduced = None
        for key in list(self._gathered):
            yield from self._free(self._gathered.pop(key), place)

    def _gather(self, key: _UnitKey, place: Place) -> Iterator[Event]:
        """Gather a unit's weights, where they are not whole."""
        if key in self._gathered:
            return
        num_bytes = sum(weight.compute_bytes for weight in self._weights.values() if weight.unit == key)
        storage = self._gathered[key] = Storage(num_bytes, place, category=Category.GATHERED)
        yield Event(place, MemoryChange.ALLOCATE, storage)
        yield self._collective(num_bytes, place)

    def _reduce_gradients(self, key: _UnitKey, place: Place) -> Iterator[Event]:
        """Reduce a unit's gradients over the ranks: from now on a rank has its share of them."""
        gradients = self._gradients.pop(key, [])
        if not gradients:
            return
        num_bytes = sum(whole.num_bytes for whole, _ in gradients)
        yield from self._free(self._reduced, place)
        self._reduced = Storage(num_bytes, place, category=Category.GATHERED)
        yield Event(place, MemoryChange.ALLOCATE, self._reduced)
        for whole, shard in gradients:
            yield Event(place, MemoryChange.FREE, whole)
            yield Event(place, MemoryChange.ALLOCATE, shard)
        yield self._collective(num_bytes, place)

    def _free(self, storage: Storage | None, place: Place) -> Iterator[Event]:
        if storage is not None:
            yield Event(place, MemoryChange.FREE, storage)

    def _collective(self, num_bytes: int, place: Place) -> Event:
        """Return an event of the time that a collective takes beyond what was computed since the last one."""
        sent = num_bytes * (self._world_size - 1) // self._world_size
        seconds = copy_seconds(sent, self._device, between_ranks=True)
        waited = max(0.0, seconds - self._computed)
        self._computed = max(0.0, self._computed - seconds)
        return Event(place, seconds=waited, is_copy=True)

    def _event(self, event: Event, running: _Running | None) -> Event:
        """Return one rank's event for an event of the whole step."""
        self._computed += event.seconds
        storage = event.storage
        in_optimizer = event.place.phase is Phase.OPTIMIZER and self._engine != "ddp"
        if in_optimizer and event.seconds:
            return replace(event, seconds=event.seconds / self._world_size)
        if storage is None:
            return event
        if event.change is MemoryChange.FREE:
            return replace(event, storage=self._shards.get(id(storage), storage))
        if in_optimizer and storage.category is not Category.GRADIENTS:
            self._shards[id(storage)] = replace(storage, num_bytes=self._share(storage.num_bytes))
            return replace(event, storage=self._shards[id(storage)])
        if storage.category is Category.GRADIENTS and self._shards_gradients:
            shard = replace(storage, num_bytes=self._gradient_share(storage))
            self._shards[id(storage)] = shard
            key = running[1] if running is not None else None
            self._gradients.setdefault(key, []).append((storage, shard))
        return event

    def _gradient_share(self, storage: Storage) -> int:
        weight = self._weights.get(storage.parameter)
        # Gradients have the dtype of the shards that the optimizer steps.
        return self._share(storage.num_bytes if weight is None else weight.num_bytes)

    # --- The order of the units. ---

    def _units_in_order(self) -> list[_UnitKey]:
        marks = (event.mark for event in self._whole.events)
        keys = [
            (mark.stack, mark.layer_idx) for mark in marks if mark and mark.phase is Phase.FORWARD and not mark.is_end
        ]
        return list(dict.fromkeys(keys))

    def _neighbour(self, key: _UnitKey, step: int) -> _UnitKey:
        place = self._order.index(key) + step
        return self._order[place] if 0 <= place < len(self._order) else None


def _is_last_forward(mark: Mark | None, order: Sequence[_UnitKey]) -> bool:
    is_end = mark is not None and mark.is_end and mark.phase is Phase.FORWARD
    return is_end and mark is not None and bool(order) and (mark.stack, mark.layer_idx) == order[-1]
