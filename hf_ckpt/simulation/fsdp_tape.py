"""What one rank of FSDP holds: its tape, made of that of the whole model.

Of weights, gradients and optimizer state it holds one share, and of the unit that runs the whole weights, in the dtype
of the computation. In host order, as `torch.cuda.memory_allocated` counts: what is freed while another stream reads it
is counted no more, though its memory is not yet of use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from hf_ckpt.regions.selective.save_rules import OperatorRole
from hf_ckpt.simulation.op_costs import role_of_operator
from hf_ckpt.simulation.rank_tape import EMBEDDINGS, HAS_UNITS_AT_THE_ENDS, Running, UnitKey, UnitTape, Weight
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import (
    Event,
    FlatParameter,
    MemoryChange,
    Storage,
    Stream,
    Transfer,
    TransferKind,
)

ADD = "aten.add_.Tensor"  # Adds a gradient to that of earlier micro-batches.


class FsdpTape(UnitTape):
    """What both versions of FSDP do."""

    _cast_stream: Stream  # Makes the copy of a share in the dtype that is gathered, where the share is kept in another.
    _frees_sent: bool  # Whether what is sent is freed at once, while another stream still reads it.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._is_alone = self._world_size == 1
        self._prefetches_in_backward = self._sharding.prefetches_in_backward and not self._is_alone
        self._reshards = self._sharding.reshards_after_forward
        # Whether gradients of a later micro-batch wait for the others of their unit.
        self._syncs_each = self._holds_added = self._sharding.syncs_each_batch
        self._micro_batch = 0
        self._last_micro_batch = max(event.place.micro_batch for event in self.whole.events)
        self._gathered: dict[UnitKey, list[Storage]] = {}
        # Whole ones, and the shares that are made of them.
        self._gradients: dict[UnitKey, list[tuple[Storage, Storage]]] = {}
        self._gradient_shapes = set[tuple[int, ...]]()
        # Gradients of a later micro-batch that were added to those of earlier ones, and are not freed.
        self._added: dict[UnitKey, list[Storage]] = {}
        self._last_operator = ""
        self._sent: Storage | None = None  # The buffer of gradients.
        # Of each layer that may run again in the backward of a later one, its unit, and whether it has snapshots.
        self._segments = {
            (stack.path, idx): ((number, idx), entry.snapshots is not None)
            for number, stack in enumerate(() if self.plan is None else self.plan.stacks)
            for idx, entry in enumerate(stack.layers)
            if entry.segment is not None
        }
        self._rerun: tuple[UnitKey, bool] | None = None

    def _before_event(self, place: Place) -> Iterator[Event]:
        if self._syncs_each and place.micro_batch > self._micro_batch:
            yield from self._leave(self._running, self._backward_place)
            self._running, self._micro_batch = None, place.micro_batch
            yield from self._reduce_rest(self._backward_place)
        again = None
        if place.phase is Phase.RECOMPUTATION and place.layer_idx is not None:
            again = self._segments.get((place.stack, place.layer_idx))
        if again is not None and self._running is not None and again[0] == self._running[1]:
            again = None
        if again == self._rerun:
            return
        # A layer that runs again in the backward of a later one is gathered for that, and let go of behind it.
        if self._rerun is not None and self._reshards and self._frees_behind(*self._rerun):
            yield from self._free_gathered(self._rerun[0], place)
        self._rerun = again
        if again is not None:
            yield from self._use(again[0], place)

    def _frees_behind(self, key: UnitKey, has_snapshots: bool) -> bool:
        """Whether a layer is freed that ran again in the backward of a later one, as in a forward."""
        return True

    # --- Weights. ---

    def _enter_layer(self, running: Running, place: Place) -> Iterator[Event]:
        phase, key, _ = running
        if phase is Phase.BACKWARD and self._sharding.gathers_to_recompute:
            yield from self._pass(self._bytes_of(key), place)
        yield from self._use(key, place)
        if phase is Phase.BACKWARD:
            yield from self._prefetch_before(key, place)

    def _prefetch_before(self, key: UnitKey, place: Place) -> Iterator[Event]:
        """Gather the unit whose backward comes next."""
        # FSDP2 does, and FSDP1 with `BACKWARD_PRE`: before the gradients of the unit that runs are made.
        if self._prefetches_in_backward:
            yield from self._gather(self._unit_before(key), place)

    def _start_backward(self, place: Place) -> Iterator[Event]:
        """Gather the last layer while the loss runs backward: the hook of the root does, or that of the head."""
        if self._prefetches_in_backward:
            yield from self._gather(self._order[-1] if self._order else None, place)

    def _use(self, key: UnitKey, place: Place) -> Iterator[Event]:
        yield from self._gather(key, place)

    def _gather(self, key: UnitKey, place: Place) -> Iterator[Event]:
        """Gather a unit's weights, where they are not whole."""
        num_bytes = self._bytes_of(key)
        if key in self._gathered or not num_bytes:
            return
        # Of one process the copy in another dtype is what is gathered.
        cast = None if self._is_alone else self._cast_share(key)
        if cast is not None:
            yield Event(place, MemoryChange.ALLOCATE, cast)
        yield Event(place, MemoryChange.ALLOCATE, self._destination(key, num_bytes))
        yield self._collective(TransferKind.GATHER, num_bytes, place)
        yield from self._free(place, cast)

    def _destination(self, key: UnitKey, num_bytes: int) -> Storage:
        """Return what a unit is gathered into."""
        storage = Storage(num_bytes, category=Category.GATHERED, stream=Stream.GATHER)
        self._gathered[key] = [storage]
        return storage

    def _cast_share(self, key: UnitKey) -> Storage | None:
        """Return the copy of a share that FSDP sends where it keeps another dtype; FSDP1 until all ranks have it."""
        kept = self._by_unit.get(key, ())
        num_bytes = self._share(sum(each.compute_bytes for each in kept if each.num_bytes != each.compute_bytes))
        if not num_bytes:
            return None
        return Storage(num_bytes, category=Category.GATHERED, stream=self._cast_stream, is_sent=self._frees_sent)

    def _free_gathered(self, key: UnitKey, place: Place) -> Iterator[Event]:
        if key in self._gathered:
            yield from self._free(place, *self._gathered.pop(key))
            yield Event(place, transfer=Transfer(TransferKind.LET_GO, 0))

    def _bytes_of(self, key: UnitKey) -> int:
        return sum(weight.compute_bytes for weight in self._by_unit.get(key, ()))

    def _unit_before(self, key: UnitKey) -> UnitKey:
        units = [EMBEDDINGS, *self._order]
        return units[units.index(key) - 1]

    def _leave(self, running: Running | None, place: Place) -> Iterator[Event]:
        """Free the unit that ran, and reduce its gradients."""
        if running is None:
            return
        phase, key, micro_batch = running
        if phase is Phase.BACKWARD or self._reshards:
            yield from self._free_gathered(key, place)
        if phase is Phase.BACKWARD:
            # In the last micro-batch only (the Trainer's `no_sync`): until then each rank holds all of them whole.
            if self._syncs_each or micro_batch == self._last_micro_batch:
                yield from self._reduce(key, place)
            yield from self._leave_added(key, place)

    def _end_backward(self, place: Place) -> Iterator[Event]:
        for gathered in self._gathered.values():
            yield from self._free(place, *gathered)
        self._gathered.clear()
        yield from self._reduce_rest(place)
        yield from self._free_sent(place)

    # --- Gradients. ---

    def _takes_over(self, event: Event) -> bool:
        """Whether a gradient is freed that was just added to that of earlier micro-batches: here it waits."""
        storage = event.storage
        is_freed = event.change is MemoryChange.FREE and event.place.phase is Phase.BACKWARD
        if storage is None or not is_freed or not self._holds_added:
            return False
        is_added = self._last_operator == ADD and storage.shape in self._gradient_shapes
        if is_added:
            self._added.setdefault(self._running[1] if self._running else None, []).append(storage)
        return is_added

    def _one_rank_events(self, event: Event) -> Iterator[Event]:
        storage = event.storage
        self._last_operator = event.place.operator or self._last_operator
        is_made = event.change is MemoryChange.ALLOCATE
        if is_made and storage is not None and storage.category is Category.GRADIENTS:
            weight = self.weights.get(storage.parameter)
            # Gradients have the dtype of the shards that the optimizer steps.
            share = self._share(storage.num_bytes if weight is None else weight.num_bytes)
            shard = self._shards[storage] = replace(storage, num_bytes=share)
            self._gradient_shapes.add(storage.shape)
            self._gradients.setdefault(None if weight is None else weight.unit, []).append((storage, shard))
        yield self._event(event)

    def _reduce(self, key: UnitKey, place: Place) -> Iterator[Event]:
        """Reduce a unit's gradients over the ranks: from now on a rank has its share of them."""
        if gradients := self._gradients.pop(key, []):
            yield from self._share_out(gradients, place)

    def _leave_added(self, key: UnitKey, place: Place) -> Iterator[Event]:
        """Free a unit's gradients of a later micro-batch: what arrived of them was added to the rank's share."""
        added = self._added.pop(key, [])
        if not self._syncs_each or not added:
            yield from self._free(place, *added)
            return
        # With `sync_each_batch` ranks exchange them again, and add what arrives to their shares.
        shards = [replace(whole, num_bytes=self._share(self._stepped_bytes(whole))) for whole in added]
        yield from self._share_out(list(zip(added, shards, strict=True)), place)
        yield from self._free(place, *shards)

    def _reduce_rest(self, place: Place) -> Iterator[Event]:
        for key in list(self._gradients):
            yield from self._reduce(key, place)
        for key in list(self._added):
            yield from self._leave_added(key, place)

    def _share_out(self, gradients: Sequence[tuple[Storage, Storage]], place: Place) -> Iterator[Event]:
        """Send whole gradients, and make their shares in their place."""
        # The shares are parts of one block, that of the first.
        shards = [shard for _, shard in gradients]
        shards[0].num_bytes = sum(shard.num_bytes for shard in shards)
        for shard in shards:
            shard.stream = Stream.REDUCE
        for shard in shards[1:]:
            shard.num_bytes = 0
        num_bytes = sum(self._sent_bytes(whole) for whole, _ in gradients)
        # They are read and written where they are copied into one buffer.
        copying = 2 * num_bytes / (self.device.memory_bandwidth * self.device.bandwidth_efficiency)
        yield Event(place, seconds=copying)
        yield from self._free_sent(place)
        self._sent = Storage(num_bytes, category=Category.GATHERED, is_sent=self._frees_sent)
        yield Event(place, MemoryChange.ALLOCATE, self._sent)
        received = None
        if self._keeps_masters and num_bytes == sum(whole.num_bytes for whole, _ in gradients):
            # It arrives in the dtype that it was computed in, and is cast to that of the stored weights.
            received = Storage(self._share(num_bytes), category=Category.GATHERED, stream=Stream.REDUCE)
            yield Event(place, MemoryChange.ALLOCATE, received)
        for whole, shard in gradients:
            yield Event(place, MemoryChange.FREE, whole)
            yield Event(place, MemoryChange.ALLOCATE, shard)
        yield from self._free(place, received)
        yield self._collective(TransferKind.REDUCE, num_bytes, place)
        if self._frees_sent:
            yield from self._free_sent(place)

    def _sent_bytes(self, gradient: Storage) -> int:
        """Return what of a whole gradient is sent: accelerate sends it in the dtype that it is computed in."""
        return gradient.num_bytes

    def _free_sent(self, place: Place) -> Iterator[Event]:
        sent, self._sent = self._sent, None
        yield from self._free(place, sent)


class Fsdp1Tape(FsdpTape):
    """Makes a rank's tape under FSDP1: a unit's weights are one tensor. PEFT makes each adapter a unit of its own."""

    _cast_stream = Stream.CAST
    _frees_sent = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._small_units = frozenset(weight.unit for weight in self.weights.values() if isinstance(weight.unit, str))
        # From the second micro-batch on, gradients of a unit are added when all of them are there.
        self._holds_added = self._syncs_each or not self._small_units
        self._flat: dict[UnitKey, list[Weight]] = {}
        self._first_adapters: dict[UnitKey, str] = {}  # The first of each layer to run forward.

    # --- What exists before the step. ---

    def _kept(self, storage: Storage, weight: Weight) -> Iterator[Storage]:
        # A rank's share of a unit's weights is one block: see `_held_by_engine`.
        self._flat.setdefault(weight.unit, []).append(weight)
        yield from ()

    def _held_by_engine(self) -> Iterator[Storage]:
        # Layers are wrapped first, and then what is around them.
        for unit in sorted(self._flat, key=lambda unit: unit is None):
            flat = self._flat_parameter(self._flat[unit])
            yield Storage(flat.share_bytes, category=Category.PARAMETERS, flat_parameter=flat)

    def _flat_parameter(self, weights: Sequence[Weight]) -> FlatParameter:
        """Return the unit that has these weights."""
        of_each = ((weight.loaded_bytes, weight.num_bytes, weight.compute_bytes) for weight in weights)
        loaded, kept, gathered = (sum(each) for each in zip(*of_each, strict=True))
        is_trained, share = all(weight.is_trained for weight in weights), sum(weight.shard_bytes for weight in weights)
        return FlatParameter(
            weights=tuple(weight.loaded_bytes for weight in weights if weight.loaded_bytes),
            is_broadcast=self._sharding.broadcasts_weights,
            loaded_bytes=self._share(loaded) if is_trained and loaded != kept else share,
            share_bytes=share,
            emptied=(self._share(gathered), gathered, kept) if is_trained and kept != gathered else (gathered,),
        )

    def _state(self, storage: Storage, weight: Weight) -> Storage:
        unit, numel = self._by_unit[weight.unit], prod(storage.shape)
        if numel <= 1 or numel != weight.numel or not all(each.is_trained for each in unit):
            return super()._state(storage, weight)
        # A unit is cut into equal parts: what the last rank has of this weight.
        before = sum(each.numel for each in unit[: unit.index(weight)])
        begin = self._share(sum(each.numel for each in unit)) * (self._world_size - 1)
        held = max(0, before + numel - max(before, begin))
        return replace(storage, num_bytes=self._stepped_bytes(storage) * held // numel)

    # --- The step. ---

    def _gather(self, key: UnitKey, place: Place) -> Iterator[Event]:
        # One process has all shares (`NO_SHARD`), and only casts a unit's weights.
        if not self._is_alone or self._cast_share(key) is not None:
            yield from super()._gather(key, place)

    def _prefetch_before(self, key: UnitKey, place: Place) -> Iterator[Event]:
        # Adapters are next until a layer's backward is almost done: see `_change_module`.
        if key not in self._first_adapters:
            yield from super()._prefetch_before(key, place)

    def _change_module(self, module: str, place: Place) -> Iterator[Event]:
        """Leave an adapter, or go to one."""
        if self._running is None:
            return
        yield from self._leave_adapter(place)
        if module not in self._small_units:
            return
        phase, layer, micro_batch = self._running
        self._adapter = phase, module, micro_batch
        yield from self._use(module, place)
        if phase is Phase.FORWARD:
            self._first_adapters.setdefault(layer, module)
        elif place.phase is phase and module == self._first_adapters.get(layer):
            # Its backward is the last of the layer, so that the layer before is next.
            yield from super()._prefetch_before(layer, place)

    def _leave(self, running: Running | None, place: Place) -> Iterator[Event]:
        if running is not None:
            yield from self._leave_adapter(place)
            yield from super()._leave(running, place)

    def _leave_adapter(self, place: Place) -> Iterator[Event]:
        adapter, self._adapter = self._adapter, None
        yield from super()._leave(adapter, place)


class Fsdp2Tape(FsdpTape):
    """Makes a rank's tape under FSDP2: what is gathered arrives in a buffer, and is copied out of it.

    accelerate makes units of the embeddings and of the head as well; tied, the two are one, and stay all the time.
    """

    _cast_stream = Stream.COPY_IN
    _frees_sent = False  # The buffer of gradients is held until the next one is needed.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._arrived: dict[UnitKey, Storage] = {}  # What was gathered and is not copied out.
        self._buffer: Storage | None = None  # What was copied out last, while a forward runs.

    def _frees_behind(self, key: UnitKey, has_snapshots: bool) -> bool:
        # As a rule in the layer's own backward. One with snapshots is made to, unless that is next.
        return has_snapshots and not (self._running is not None and self._unit_before(self._running[1]) == key)

    def _gather(self, key: UnitKey, place: Place) -> Iterator[Event]:
        if key not in self._arrived:
            yield from super()._gather(key, place)

    def _destination(self, key: UnitKey, num_bytes: int) -> Storage:
        if self._is_alone:
            return super()._destination(key, num_bytes)
        # The copy-in stream makes it.
        storage = self._arrived[key] = Storage(num_bytes, category=Category.GATHERED, stream=Stream.COPY_IN)
        return storage

    def _use(self, key: UnitKey, place: Place) -> Iterator[Event]:
        yield from self._gather(key, place)
        if key not in self._arrived:
            return
        yield from self._free_buffer(place)
        self._buffer = self._arrived.pop(key)
        # The compute stream makes weight after weight.
        self._gathered[key] = [Storage(each.compute_bytes, category=Category.GATHERED) for each in self._by_unit[key]]
        for storage in self._gathered[key]:
            yield Event(place, MemoryChange.ALLOCATE, storage)
        # In forward the buffer is held until the next unit's is copied out.
        if place.phase is not Phase.FORWARD:
            yield from self._free_buffer(place)

    def _free_gathered(self, key: UnitKey, place: Place) -> Iterator[Event]:
        yield from self._free(place, self._arrived.pop(key, None))
        yield from super()._free_gathered(key, place)

    def _start_backward(self, place: Place) -> Iterator[Event]:
        yield from self._free_buffer(place)
        # From the head's backward on, whose gradient is a product.
        if role_of_operator(place.operator) is OperatorRole.PRODUCT or not HAS_UNITS_AT_THE_ENDS:
            yield from super()._start_backward(place)

    def _leave(self, running: Running | None, place: Place) -> Iterator[Event]:
        if running is not None:
            yield from self._free_buffer(place)
            yield from super()._leave(running, place)

    def _end_backward(self, place: Place) -> Iterator[Event]:
        yield from self._free_buffer(place)
        yield from self._free(place, *self._arrived.values())
        self._arrived.clear()
        yield from super()._end_backward(place)

    def _free_buffer(self, place: Place) -> Iterator[Event]:
        buffer, self._buffer = self._buffer, None
        yield from self._free(place, buffer)
