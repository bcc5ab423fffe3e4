"""What one rank of DDP or FSDP holds: its tape, made of that of the whole model.

The arithmetic of engines; nothing is sent. A unit is what an engine gathers at a time: a decoder layer, or the rest of
the model, which stays gathered from its forward to its backward.

Note [What engines hold].
- DDP: everything, and buckets as large as all gradients, which are copied into them (torch's `Reducer`).
- FSDP: of weights, gradients and optimizer state one share, and of the unit that runs the whole weights, in the dtype
  of the computation. A unit's gradients are copied into one buffer to be sent. Ranks exchange gradients in the last
  micro-batch only (the Trainer's `no_sync`): until then each holds all of them whole. With `sync_each_batch` they do in
  each, and add what arrives to their shares. accelerate keeps what is trained in float32 under mixed precision. One
  process has all shares: FSDP1 (then `NO_SHARD`) only casts a unit's weights, FSDP2 copies them when the unit runs.
- FSDP1: in backward the next layer is gathered before one's gradients (`BACKWARD_PRE`); while the loss runs backward,
  that is the last layer. PEFT makes each adapter a unit of its own: adapters are next until a layer's backward is
  almost done, and then, with its first adapter, the layer before. The buffer of gradients is freed when they are sent;
  from the second micro-batch on, those of a unit are added when all of them are there. In host order, as
  `torch.cuda.memory_allocated` counts: what is freed while another stream reads it is counted no more, though its
  memory is not yet of use.
- FSDP2: accelerate makes units of the embeddings and of the head as well, which stays gathered from its forward on;
  tied, the two are one, and stay all the time. What is gathered arrives in one buffer, which the copy-in stream makes,
  and is copied out of it into weight after weight, which the compute stream makes when the unit runs; in forward the
  buffer is held until the next unit's is copied out. In backward the next unit is gathered before one's
  gradients, from the head's backward on, and the buffer of gradients is held until the next one is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod

from hf_ckpt.policy.plan import Plan
from hf_ckpt.regions.selective.save_rules import OperatorRole
from hf_ckpt.simulation.caching_allocator import BLOCK_BYTES
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.op_costs import role_of_operator
from hf_ckpt.simulation.sharded_weights import (
    EMBEDDINGS,
    HAS_UNITS_AT_THE_ENDS,
    HEAD,
    MASTER_DTYPE,
    UnitKey,
    Weight,
    flat_parameter,
    numel_on_last_rank,
)
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import Event, Mark, MemoryChange, Storage, Stream, Tape, Transfer, TransferKind

Running = tuple[Phase, UnitKey, int]
"""What runs: forward or backward, unit, micro-batch."""

ADD = "aten.add_.Tensor"
"""Adds a gradient to that of earlier micro-batches."""


@dataclass(frozen=True, slots=True)
class _InSegment:
    """A layer that may run again in the backward of a later one."""

    unit: UnitKey
    is_let_go: bool
    """Whether FSDP2 is made to free its weights behind that run, unless its own backward is next."""


class RankTape:
    """Makes one rank's tape of that of the whole model, under DDP and FSDP. See Note [What engines hold]."""

    def __init__(
        self,
        tape: Tape,
        weights: Mapping[str, Weight],
        step: Step,
        device: Device,
        plan: Plan | None = None,
    ) -> None:
        self._whole = tape
        self._step = step
        self._segments = {} if plan is None else _in_segments(plan)
        self._rerun: _InSegment | None = None
        self._weights = weights
        self._engine = step.sharding.engine
        self._world_size = step.sharding.world_size
        self._master_bytes = MASTER_DTYPE.itemsize
        self._shards_weights = self._engine in ("fsdp1", "fsdp2", "zero3")
        self._reshards = step.sharding.reshards_after_forward
        self._is_alone = self._world_size == 1
        self._prefetches_in_backward = step.sharding.prefetches_in_backward and not self._is_alone
        self._small_units = self._find_small_units()
        self._has_adapter_units = self._engine == "fsdp1" and bool(self._small_units)
        self._device = device
        self._order = self._units_in_order()
        self._last = max(event.place.micro_batch for event in tape.events)
        self._syncs_each = step.sharding.syncs_each_batch and self._engine.startswith("fsdp")
        self._running: Running | None = None
        self._backward_place = Place(Phase.BACKWARD)
        """Of the last event of a backward."""
        self._gathered: dict[UnitKey, list[Storage]] = {}
        self._arrived: dict[UnitKey, Storage] = {}
        """What was gathered and is not copied out, under FSDP2."""
        self._buffer: Storage | None = None
        self._gradients: dict[UnitKey, list[tuple[Storage, Storage]]] = {}
        self._gradient_shapes = set[tuple[int, ...]]()
        self._added: dict[UnitKey, list[Storage]] = {}
        self._last_operator = ""
        self._shards: dict[Storage, Storage] = {}
        self._reduced: Storage | None = None
        self._gathers_to_recompute = step.sharding.gathers_to_recompute
        self._module = ""
        self._adapter: Running | None = None
        self._first_adapters: dict[UnitKey, str] = {}
        """The first of each layer to run forward."""

    def tape(self) -> Tape:
        tape = Tape(list(self._before()), list(self._events()))
        rounding = BLOCK_BYTES if self._device.is_cuda else 1
        for storage in (*tape.before, *(event.storage for event in tape.events)):
            if storage is not None:
                storage.num_bytes = -(-storage.num_bytes // rounding) * rounding
        return tape

    # --- What exists before the step. ---

    def _before(self) -> Iterator[Storage]:
        flat: dict[UnitKey, list[Weight]] = {}
        for storage in self._whole.before:
            weight = self._weights.get(storage.parameter)
            if weight is None:
                yield storage
            elif storage.category is Category.PARAMETERS and self._engine == "fsdp1":
                # A rank's share of a unit's weights is one block.
                flat.setdefault(weight.unit, []).append(weight)
            elif storage.category is Category.PARAMETERS:
                yield replace(storage, num_bytes=weight.shard_bytes if self._shards_weights else weight.num_bytes)
            else:
                yield self._state(storage, weight)
        # Layers are wrapped first, and then what is around them.
        for unit in sorted(flat, key=lambda unit: unit is None):
            unit_of_fsdp1 = flat_parameter(flat[unit], self._step)
            yield Storage(unit_of_fsdp1.share_bytes, category=Category.PARAMETERS, flat_parameter=unit_of_fsdp1)
        yield from self._held_by_engine()

    def _held_by_engine(self) -> Iterator[Storage]:
        """What is of no module and of no optimizer."""
        if self._engine == "ddp":
            yield Storage(sum(weight.num_bytes for weight in self._trained), category=Category.GATHERED)

    @cached_property
    def _trained(self) -> list[Weight]:
        return [weight for weight in self._weights.values() if weight.is_trained]

    def _state(self, storage: Storage, weight: Weight) -> Storage:
        """Return a rank's part of the optimizer's tensor: a share of what is as large as the parameter."""
        if self._engine == "ddp" or prod(storage.shape) <= 1:
            return storage
        stepped = self._stepped_bytes(storage)
        unit = self._by_unit[weight.unit]
        if self._engine == "fsdp1" and prod(storage.shape) == weight.numel and all(each.is_trained for each in unit):
            held = stepped * numel_on_last_rank(weight, unit, self._world_size) // weight.numel
            return replace(storage, num_bytes=held)
        return replace(storage, num_bytes=self._share(stepped))

    def _stepped_bytes(self, storage: Storage) -> int:
        """Return what a tensor of the optimizer takes in the dtype of the stored weights: float32 where kept so."""
        is_wider = self._keeps_masters and "float" in storage.dtype
        return max(storage.num_bytes, prod(storage.shape) * self._master_bytes if is_wider else 0)

    @cached_property
    def _keeps_masters(self) -> bool:
        """Whether the optimizer steps weights in float32."""
        return any(weight.num_bytes != weight.compute_bytes for weight in self._trained)

    @cached_property
    def _times_wider(self) -> float:
        """How many bytes the optimizer steps for each that its step was simulated with."""
        computed = sum(weight.compute_bytes for weight in self._trained)
        stepped = sum(weight.numel for weight in self._trained) * self._master_bytes
        return stepped / computed if computed and self._keeps_masters else 1.0

    @cached_property
    def _by_unit(self) -> dict[UnitKey, list[Weight]]:
        """Return the weights of each unit, in their order."""
        found: dict[UnitKey, list[Weight]] = {}
        for weight in self._weights.values():
            found.setdefault(weight.unit, []).append(weight)
        return found

    def _share(self, num_bytes: int) -> int:
        return -(-num_bytes // self._world_size)

    # --- The step. ---

    def _events(self) -> Iterator[Event]:
        place = Place(Phase.FORWARD)
        yield from self._use(None, place)
        yield from self._use(EMBEDDINGS, place)
        micro_batch = 0
        for event in self._whole.events:
            mark, place = event.mark, event.place
            if self._syncs_each and place.micro_batch > micro_batch:
                yield from self._leave(self._running, self._backward_place)
                self._running, micro_batch = None, place.micro_batch
                yield from self._reduce_rest(self._backward_place)
            yield from self._before_event(place)
            yield from self._run_again(place)
            if mark is not None and not mark.is_end:
                yield from self._change_layer(event, mark)
                continue
            yield from self._change_outside_layers(event)
            if self._small_units:
                yield from self._visit(event)
            if self._is_added_gradient(event) and event.storage is not None:
                self._added.setdefault(self._running[1] if self._running else None, []).append(event.storage)
                continue
            yield from self._one_rank_events(event)
            if place.phase is Phase.BACKWARD:
                self._backward_place = place
        yield from self._leave_backward(place)

    def _leave_backward(self, place: Place) -> Iterator[Event]:
        """Leave what ran last. Before the optimizer runs, which makes its state out of what the backward has left."""
        yield from self._leave(self._running, place)
        self._running = None
        yield from self._end_backward(place)

    def _run_again(self, place: Place) -> Iterator[Event]:
        """Gather the unit of a layer that runs again in the backward of a later one, and let go of it behind that."""
        again = None
        if place.phase is Phase.RECOMPUTATION and place.layer_idx is not None and self._engine.startswith("fsdp"):
            again = self._segments.get((place.stack, place.layer_idx))
        if again is not None and self._running is not None and again.unit == self._running[1]:
            again = None
        if again == self._rerun:
            return
        if self._rerun is not None and self._frees_behind(self._rerun):
            yield from self._free_gathered(self._rerun.unit, place)
        self._rerun = again
        if again is not None:
            yield from self._use(again.unit, place)

    def _frees_behind(self, layer: _InSegment) -> bool:
        """Whether an engine frees a layer that ran again: FSDP1 as in a forward, FSDP2 in the layer's own backward."""
        is_next = self._running is not None and self._unit_before(self._running[1]) == layer.unit
        return self._reshards and (self._engine == "fsdp1" or (layer.is_let_go and not is_next))

    def _before_event(self, place: Place) -> Iterator[Event]:
        """What the engine does before an event at `place`."""
        yield from ()

    def _one_rank_events(self, event: Event) -> Iterator[Event]:
        """Return what one rank does where the whole step has an event."""
        yield self._event(event)

    def _change_layer(self, event: Event, mark: Mark) -> Iterator[Event]:
        """Go from what ran to a layer whose forward or backward begins."""
        yield from self._leave(self._running, event.place)
        self._running = running = mark.phase, (mark.stack, mark.layer_idx), mark.micro_batch
        yield from self._leave_end(running, event.place)
        yield event
        yield from self._enter_layer(running, event.place)

    def _change_outside_layers(self, event: Event) -> Iterator[Event]:
        """Leave the last layer that runs, for the head, for the embeddings, or for the optimizer."""
        place = event.place
        if self._running is None:
            if place.phase is Phase.BACKWARD:
                yield from self._start_backward(place)
        elif place.phase is Phase.OPTIMIZER:
            yield from self._leave_backward(self._backward_place)
        elif event.mark and event.mark.is_end and (event.mark.stack, event.mark.layer_idx) == self._order[-1]:
            yield from self._leave(self._running, place)
            self._running = None
            yield from self._use(HEAD, place)
        elif self._is_gradient_of_embeddings(event):
            yield from self._leave(self._running, place)
            yield from self._use(EMBEDDINGS, place)

    def _leave_end(self, running: Running, place: Place) -> Iterator[Event]:
        """Leave the embeddings where layers begin, and the head where their backward does."""
        phase, key, micro_batch = running
        if phase is Phase.BACKWARD:
            yield from self._leave((phase, HEAD, micro_batch), place)
        elif key == self._order[0]:
            yield from self._leave((phase, EMBEDDINGS, micro_batch), place)

    def _enter_layer(self, running: Running, place: Place) -> Iterator[Event]:
        phase, key, _ = running
        if phase is Phase.BACKWARD and self._gathers_to_recompute:
            yield from self._pass(self._bytes_of(key), place)
        yield from self._use(key, place)
        if phase is Phase.BACKWARD and self._prefetches_in_backward and key not in self._first_adapters:
            yield from self._gather(self._unit_before(key), place)

    def _is_added_gradient(self, event: Event) -> bool:
        """Whether a gradient is freed that was just added to that of earlier micro-batches."""
        waits = self._syncs_each or (self._engine == "fsdp1" and not self._has_adapter_units)
        if not waits or event.storage is None:
            return False
        is_freed = event.change is MemoryChange.FREE and event.place.phase is Phase.BACKWARD
        return is_freed and self._last_operator == ADD and event.storage.shape in self._gradient_shapes

    def _start_backward(self, place: Place) -> Iterator[Event]:
        """Gather the last layer: the hook of the root does, or that of the head, whose gradient is a product."""
        yield from self._free_buffer(place)
        is_head = role_of_operator(place.operator) is OperatorRole.PRODUCT
        waits_for_head = self._engine == "fsdp2" and HAS_UNITS_AT_THE_ENDS
        if self._prefetches_in_backward and self._engine.startswith("fsdp") and (is_head or not waits_for_head):
            yield from self._gather(self._order[-1] if self._order else None, place)

    def _leave(self, running: Running | None, place: Place) -> Iterator[Event]:
        """Free the unit that ran, and reduce its gradients."""
        if running is None:
            return
        adapter, self._adapter = self._adapter, None
        yield from self._leave(adapter, place)
        phase, key, micro_batch = running
        yield from self._free_buffer(place)
        if phase is Phase.BACKWARD or self._reshards:
            yield from self._free_gathered(key, place)
        if phase is Phase.BACKWARD and (self._syncs_each or micro_batch == self._last):
            yield from self._reduce_gradients(key, place)
        if phase is Phase.BACKWARD:
            yield from self._leave_added(key, place)

    def _free_gathered(self, key: UnitKey, place: Place) -> Iterator[Event]:
        yield from self._free(self._arrived.pop(key, None), place)
        if key in self._gathered:
            yield from self._free_all(self._gathered.pop(key), place)
            yield Event(place, transfer=Transfer(TransferKind.LET_GO, 0))

    def _end_backward(self, place: Place) -> Iterator[Event]:
        yield from self._free_buffer(place)
        yield from self._free_all(chain(self._arrived.values(), *self._gathered.values()), place)
        self._arrived.clear()
        self._gathered.clear()
        yield from self._reduce_rest(place)
        yield from self._free(self._reduced, place)
        self._reduced = None

    def _reduce_rest(self, place: Place) -> Iterator[Event]:
        for key in list(self._gradients):
            yield from self._reduce_gradients(key, place)
        for key in list(self._added):
            yield from self._leave_added(key, place)

    def _use(self, key: UnitKey, place: Place) -> Iterator[Event]:
        """Gather a unit that runs now. FSDP2 copies it out of a buffer, and holds that while a forward runs."""
        yield from self._gather(key, place)
        if key not in self._arrived:
            return
        yield from self._free_buffer(place)
        self._buffer = self._arrived.pop(key)
        self._gathered[key] = [Storage(each.compute_bytes, category=Category.GATHERED) for each in self._by_unit[key]]
        for storage in self._gathered[key]:
            yield Event(place, MemoryChange.ALLOCATE, storage)
        if place.phase is not Phase.FORWARD:
            yield from self._free_buffer(place)

    def _free_buffer(self, place: Place) -> Iterator[Event]:
        yield from self._free(self._buffer, place)
        self._buffer = None

    def _gather(self, key: UnitKey, place: Place) -> Iterator[Event]:
        """Gather a unit's weights, where they are not whole."""
        if not self._shards_weights or key in self._gathered or key in self._arrived:
            return
        num_bytes = self._bytes_of(key)
        cast = self._cast_share(key)
        if not num_bytes or (self._is_alone and self._engine == "fsdp1" and cast is None):
            return
        if self._is_alone:
            cast = None  # It is what is gathered.
        if cast is not None:
            yield Event(place, MemoryChange.ALLOCATE, cast)
        is_copied = self._engine == "fsdp2" and not self._is_alone
        stream = Stream.COPY_IN if is_copied else Stream.GATHER
        storage = Storage(num_bytes, category=Category.GATHERED, stream=stream)
        if is_copied:
            self._arrived[key] = storage
        else:
            self._gathered[key] = [storage]
        yield Event(place, MemoryChange.ALLOCATE, storage)
        yield self._collective(TransferKind.GATHER, num_bytes, place)
        yield from self._free(cast, place)

    def _cast_share(self, key: UnitKey) -> Storage | None:
        """Return the copy of a share that FSDP sends where it keeps another dtype; FSDP1 until all ranks have it."""
        kept = self._by_unit.get(key, ())
        num_bytes = self._share(sum(each.compute_bytes for each in kept if each.num_bytes != each.compute_bytes))
        if not num_bytes:
            return None
        is_sent = self._engine == "fsdp1"
        stream = Stream.CAST if is_sent else Stream.COPY_IN
        return Storage(num_bytes, category=Category.GATHERED, stream=stream, is_sent=is_sent)

    def _bytes_of(self, key: UnitKey) -> int:
        return sum(weight.compute_bytes for weight in self._by_unit.get(key, ()))

    def _reduce_gradients(self, key: UnitKey, place: Place) -> Iterator[Event]:
        """Reduce a unit's gradients over the ranks: from now on a rank has its share of them."""
        gradients = self._gradients.pop(key, [])
        if gradients:
            yield from self._share_out(gradients, place)

    def _leave_added(self, key: UnitKey, place: Place) -> Iterator[Event]:
        """Free a unit's gradients of a later micro-batch: what arrived of them was added to the rank's share."""
        added = self._added.pop(key, [])
        if not self._syncs_each or not added:
            yield from self._free_all(added, place)
            return
        shards = [replace(whole, num_bytes=self._share(self._stepped_bytes(whole))) for whole in added]
        yield from self._share_out(list(zip(added, shards, strict=True)), place)
        yield from self._free_all(shards, place)

    def _share_out(self, gradients: Sequence[tuple[Storage, Storage]], place: Place) -> Iterator[Event]:
        """Send whole gradients, and make their shares in their place."""
        _join([shard for _, shard in gradients])
        num_bytes = sum(self._sent_bytes(whole) for whole, _ in gradients)
        # They are read and written where they are copied into one buffer.
        copying = 2 * num_bytes / (self._device.memory_bandwidth * self._device.bandwidth_efficiency)
        yield Event(place, seconds=copying)
        yield from self._free(self._reduced, place)
        self._reduced = Storage(num_bytes, category=Category.GATHERED, is_sent=self._engine == "fsdp1")
        yield Event(place, MemoryChange.ALLOCATE, self._reduced)
        received = None
        if self._keeps_masters and num_bytes == sum(whole.num_bytes for whole, _ in gradients):
            # It arrives in the dtype that it was computed in, and is cast to that of the stored weights.
            received = Storage(self._share(num_bytes), category=Category.GATHERED, stream=Stream.REDUCE)
            yield Event(place, MemoryChange.ALLOCATE, received)
        for whole, shard in gradients:
            yield Event(place, MemoryChange.FREE, whole)
            yield Event(place, MemoryChange.ALLOCATE, shard)
        yield from self._free(received, place)
        yield self._collective(TransferKind.REDUCE, num_bytes, place)
        if self._engine == "fsdp1":
            yield from self._free(self._reduced, place)
            self._reduced = None

    def _sent_bytes(self, gradient: Storage) -> int:
        """Return what of a whole gradient is sent: accelerate sends it in the dtype that it is computed in."""
        return gradient.num_bytes

    def _free(self, storage: Storage | None, place: Place) -> Iterator[Event]:
        if storage is not None:
            yield Event(place, MemoryChange.FREE, storage)

    def _free_all(self, storages: Iterable[Storage], place: Place) -> Iterator[Event]:
        return (Event(place, MemoryChange.FREE, storage) for storage in storages)

    def _collective(self, kind: TransferKind, num_bytes: int, place: Place, num_calls: int = 0) -> Event:
        return Event(place, transfer=Transfer(kind, num_bytes * (self._world_size - 1) // self._world_size, num_calls))

    def _visit(self, event: Event) -> Iterator[Event]:
        """Gather and let go of a unit within a layer, where it runs, and in backward where its gradient is made.

        Under ZeRO-3 its bytes came with the layer's. See Note [The host under FSDP and ZeRO-3].
        """
        place = event.place
        module = place.module
        if place.phase not in (Phase.FORWARD, Phase.RECOMPUTATION):
            module = _parameter_of_gradient(event).rpartition(".")[0]
            if not module and self._adapter is None:
                return
        if module == self._module or event.change is MemoryChange.FREE:
            return
        self._module = module
        if not self._has_adapter_units:
            yield from self._pass(0, place) if module in self._small_units else ()
        elif self._running is not None:
            yield from self._change_adapter(module, self._running, place)

    def _change_adapter(self, module: str, running: Running, place: Place) -> Iterator[Event]:
        """Leave an adapter, a unit of FSDP1, or go to one. In backward the layer before is next to a layer's first."""
        adapter, self._adapter = self._adapter, None
        yield from self._leave(adapter, place)
        if module not in self._small_units:
            return
        phase, layer, micro_batch = running
        self._adapter = phase, module, micro_batch
        yield from self._use(module, place)
        if phase is Phase.FORWARD:
            self._first_adapters.setdefault(layer, module)
        elif self._prefetches_in_backward and place.phase is phase and module == self._first_adapters.get(layer):
            yield from self._gather(self._unit_before(layer), place)

    def _pass(self, num_bytes: int, place: Place) -> Iterator[Event]:
        """Gather bytes, and let go of them."""
        yield self._collective(TransferKind.GATHER, num_bytes, place)
        yield Event(place, transfer=Transfer(TransferKind.LET_GO, 0))

    def _is_gradient_of_embeddings(self, event: Event) -> bool:
        """Whether the gradient of the embeddings is made: their backward comes when the layers' is done."""
        weight = self._weights.get(_parameter_of_gradient(event))
        return weight is not None and weight.unit == EMBEDDINGS

    def _event(self, event: Event) -> Event:
        """Return one rank's event for an event of the whole step."""
        self._last_operator = event.place.operator or self._last_operator
        storage = event.storage
        in_optimizer = event.place.phase is Phase.OPTIMIZER and self._engine != "ddp"
        if in_optimizer and event.seconds:
            return replace(event, seconds=event.seconds * self._times_wider / self._world_size)
        if storage is None:
            return event
        if event.change is MemoryChange.FREE:
            return replace(event, storage=self._shards.get(storage, storage))
        if in_optimizer and storage.category is not Category.GRADIENTS:
            shard = self._shards[storage] = replace(storage, num_bytes=self._optimizer_bytes(storage))
            return replace(event, storage=shard)
        if storage.category is Category.GRADIENTS and self._shards_weights:
            weight = self._weights.get(storage.parameter)
            # Gradients have the dtype of the shards that the optimizer steps.
            share = self._share(storage.num_bytes if weight is None else weight.num_bytes)
            shard = self._shards[storage] = replace(storage, num_bytes=share)
            self._gradient_shapes.add(storage.shape)
            self._gradients.setdefault(weight.unit if weight is not None else None, []).append((storage, shard))
        return event

    def _optimizer_bytes(self, storage: Storage) -> int:
        """Return what a temporary tensor of the whole optimizer step takes on one rank."""
        return self._share(self._stepped_bytes(storage))

    # --- The units. ---

    def _find_small_units(self) -> frozenset[str]:
        """Return the modules within layers that the host gathers one by one: adapters (FSDP1), or all (ZeRO-3)."""
        if self._engine == "fsdp1":
            return frozenset(weight.unit for weight in self._weights.values() if isinstance(weight.unit, str))
        if self._engine != "zero3":
            return frozenset()
        return frozenset(
            name.rpartition(".")[0] for name, weight in self._weights.items() if isinstance(weight.unit, tuple)
        )

    def _units_in_order(self) -> list[UnitKey]:
        marks = (event.mark for event in self._whole.events)
        keys = [
            (mark.stack, mark.layer_idx) for mark in marks if mark and mark.phase is Phase.FORWARD and not mark.is_end
        ]
        return list(dict.fromkeys(keys))

    def _unit_before(self, key: UnitKey) -> UnitKey:
        units = [EMBEDDINGS, *self._order]
        return units[units.index(key) - 1]


def _in_segments(plan: Plan) -> dict[tuple[str, int], _InSegment]:
    """Return the layers in segments, by the path of their stack and their index in it."""
    return {
        (stack.path, idx): _InSegment((number, idx), entry.snapshots is not None)
        for number, stack in enumerate(plan.stacks)
        for idx, entry in enumerate(stack.layers)
        if entry.segment is not None
    }


def _parameter_of_gradient(event: Event) -> str:
    """Return the path of the parameter whose gradient is made, empty where none is."""
    storage = event.storage
    if event.change is not MemoryChange.ALLOCATE or storage is None or storage.category is not Category.GRADIENTS:
        return ""
    return storage.parameter


def _join(shards: Sequence[Storage]) -> None:
    """Let shards be parts of one block, that of the first."""
    shards[0].num_bytes = sum(shard.num_bytes for shard in shards)
    for shard in shards:
        shard.stream = Stream.REDUCE
    for shard in shards[1:]:
        shard.num_bytes = 0
