"""What one rank of DeepSpeed's ZeRO holds: its tape, made of that of the whole model.

It trains in the dtype of mixed precision throughout. The optimizer steps a share of the weights in float32.

Source: `deepspeed/runtime/zero/stage_1_and_2.py`, `stage3.py` and `partitioned_param_coordinator.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate

from hf_ckpt.simulation.fsdp_tape import ADD
from hf_ckpt.simulation.rank_tape import EMBEDDINGS, HEAD, Running, UnitKey, UnitTape, Weight
from hf_ckpt.simulation.step_memory import Category, Phase, Place
from hf_ckpt.simulation.tape import Event, MemoryChange, Storage, Stream, Transfer, TransferKind

_NORM_BYTES = 8  # Of an element of a gradient as its norm is taken.
# What the host calls of torch to send a bucket of ZeRO-3 (`__avg_scatter_grads`, `reduce_scatter_coalesced`).
_CALLS_OF_BUCKET = 5
# The same for each gradient in it, until the share of it is kept (`__add_grad_to_ipg_bucket`, `partition_grads`).
_CALLS_OF_GRADIENT = 12


class ZeroTape(UnitTape):
    """Makes one rank's tape under ZeRO-1, 2 and 3."""

    _rank: int | None = None  # Whose tape it is; None for that of a rank that keeps most.
    # Before DeepSpeed 0.17.2 the bucket of ZeRO-1 and 2 is there from the beginning of backward.
    _opens_bucket_with_backward = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._engine, self._zero = self._sharding.engine, self._sharding.zero
        self._keeps_masters = True
        if self._engine == "zero3":
            in_layers = (name for name, weight in self.weights.items() if isinstance(weight.unit, tuple))
            self._small_units = frozenset(name.rpartition(".")[0] for name in in_layers)
        self._master_bytes = self._zero.master_bytes
        self._element_bytes = max((weight.compute_bytes // weight.numel for weight in self._trained), default=0)
        self._stepped_at_once = self._elements_stepped_at_once()
        forward: list[UnitKey] = [EMBEDDINGS, *self._order, HEAD]
        self._row = [*forward, *reversed(forward)]  # The units in the order of use, forward and backward.
        self._whole: dict[Weight, Storage] = {}
        self._num_live = 0
        self._ahead = 0
        self._persistent: Storage | None = None
        self._ranks = self._ranks_of_gradients()
        self._bucket: Storage | None = None
        self._in_bucket: list[Weight] = []
        self._waiting: Storage | None = None
        self._room: Storage | None = None
        self._more_room: Storage | None = None
        self._unreduced: list[Storage] = []
        self._stepping: Storage | None = None
        self._step_place: Place | None = None

    # --- What exists before the step. ---

    def _kept(self, storage: Storage, weight: Weight) -> Iterator[Storage]:
        kept = weight.shard_bytes if self._engine == "zero3" else weight.num_bytes
        yield replace(storage, num_bytes=kept)

    def _held_by_engine(self) -> Iterator[Storage]:
        # The weights that the optimizer steps are a copy, also where they have the model's own dtype: ZeRO-1 and 2
        # clone them; ZeRO-3 means to spare it since 0.18.2, and from 0.18.3 on compares a `torch.device` with its name,
        # which are never equal (`_create_fp32_partitions`).
        yield Storage(self._share_elements * self._master_bytes, category=Category.OPTIMIZER)
        if self._engine != "zero3":
            return
        # All the time: room for its share of the gradients, the bucket, and small weights, which stay whole.
        self._room = self._new_room(self._share_elements)
        self._bucket = self._new_bucket()
        persistent = sum(weight.compute_bytes for weight in self.weights.values() if self._is_persistent(weight))
        self._persistent = Storage(persistent, category=Category.GATHERED)
        yield from (each for each in (self._room, self._bucket, self._persistent) if each.num_bytes)

    def _is_persistent(self, weight: Weight) -> bool:
        return weight.numel <= self._zero.param_persistence_threshold

    @property
    def _share_elements(self) -> int:
        """Weights that one rank's optimizer steps."""
        return sum(self._share(weight.numel) for weight in self._trained)

    def _elements_stepped_at_once(self) -> int:
        if self._engine != "zero3":
            return self._share_elements
        # Gradients of at most `sub_group_size` elements at a time.
        groups = [0]
        for weight in self._trained:
            if groups[-1] >= self._zero.sub_group_size:
                groups.append(0)
            groups[-1] += self._share(weight.numel)
        return max(groups)

    def _ranks_of_gradients(self) -> dict[Weight, range]:
        """Return in whose shares a weight lies: ZeRO-1 and 2 cut shares out of one row of all weights."""
        size = max(1, self._share(sum(weight.numel for weight in self._trained)))
        ends = accumulate(weight.numel for weight in self._trained)
        return {
            weight: range((end - weight.numel) // size, (end - 1) // size + 1)
            for weight, end in zip(self._trained, ends, strict=True)
        }

    def _elements_of_room(self) -> int:
        """Return how many gradients ZeRO-2 keeps."""
        elements = [0] * self._world_size
        for weight, ranks in self._ranks.items():
            for rank in ranks:
                # What lies in two shares counts whole in both.
                elements[rank] += weight.numel
        return max(elements) if self._rank is None else elements[self._rank]

    # --- Weights. ---

    def _use(self, key: UnitKey, place: Place) -> Iterator[Event]:
        """Gather a unit that runs now, and those that come next."""
        yield from self._make_whole(self._by_unit.get(key, ()), place)
        if key not in self._row or self._engine != "zero3":
            return
        is_backward = self._running is not None and self._running[0] is Phase.BACKWARD
        position = self._position(key, is_backward=is_backward)
        self._ahead = max(self._ahead, position) if is_backward else position
        # It gathers ahead, forward and backward, until so many elements are whole.
        while self._num_live < self._zero.max_live_parameters and self._ahead + 1 < len(self._row):
            self._ahead += 1
            left, weights = self._zero.max_live_parameters - self._num_live, []
            for weight in self._by_unit.get(self._row[self._ahead], ()):
                if left > 0:
                    weights.append(weight)
                    left -= 0 if weight in self._whole else weight.numel
            yield from self._make_whole(weights, place)

    def _position(self, key: UnitKey, *, is_backward: bool) -> int:
        position = self._row.index(key)
        return len(self._row) - 1 - position if is_backward else position

    def _make_whole(self, weights: Iterable[Weight], place: Place) -> Iterator[Event]:
        if self._engine != "zero3":
            return
        gathered = 0
        for weight in weights:
            if weight in self._whole or self._is_persistent(weight):
                continue
            storage = Storage(weight.compute_bytes, category=Category.GATHERED, stream=Stream.GATHER)
            self._whole[weight] = storage
            self._num_live += weight.numel
            gathered += weight.compute_bytes
            yield Event(place, MemoryChange.ALLOCATE, storage)
        if gathered:
            yield self._collective(TransferKind.GATHER, gathered, place)

    def _leave(self, running: Running | None, place: Place) -> Iterator[Event]:
        """Let go of the unit that ran, where it is not used again soon."""
        if running is None:
            return
        phase, key, _ = running
        if phase is Phase.BACKWARD or not self._is_used_soon(key):
            yield from self._let_go(self._by_unit.get(key, ()), place)

    def _is_used_soon(self, key: UnitKey) -> bool:
        again = self._position(key, is_backward=True)
        between = self._row[self._position(key, is_backward=False) + 1 : again]
        distance = sum(weight.numel for unit in between for weight in self._by_unit.get(unit, ()))
        # What was passed over by gathering ahead is not gathered again.
        return again <= self._ahead or distance < self._zero.max_reuse_distance

    def _let_go(self, weights: Iterable[Weight], place: Place) -> Iterator[Event]:
        held = [weight for weight in weights if weight in self._whole]
        for weight in held:
            self._num_live -= weight.numel
            yield Event(place, MemoryChange.FREE, self._whole.pop(weight))
        if held:
            yield Event(place, transfer=Transfer(TransferKind.LET_GO, 0))

    def _change_module(self, module: str, place: Place) -> Iterator[Event]:
        """Its bytes came with the layer's. See Note [The host under FSDP and ZeRO-3]."""
        if module in self._small_units:
            yield from self._pass(0, place)

    # --- Gradients. ---

    def _before_event(self, place: Place) -> Iterator[Event]:
        if place.phase is Phase.OPTIMIZER and self._stepping is None:
            yield from self._leave_backward(self._backward_place)
            yield from self._begin_step(place)
        elif place.phase is not Phase.OPTIMIZER and self._stepping is not None:
            yield from self._end_step(place)
        if self._engine != "zero3" and place.phase not in (Phase.BACKWARD, Phase.RECOMPUTATION):
            yield from self._close(place)
        elif place.micro_batch and place.operator == ADD:
            yield from self._open_bucket(place)
            yield from self._make_room(place)
        elif self._opens_bucket_with_backward:
            yield from self._open_bucket(place)

    def _open_bucket(self, place: Place) -> Iterator[Event]:
        # ZeRO-1 and 2 have it from a micro-batch's first gradient to the end of its backward.
        if self._bucket is None:
            self._bucket = self._new_bucket()
            yield Event(place, MemoryChange.ALLOCATE, self._bucket)

    def _make_room(self, place: Place) -> Iterator[Event]:
        """Make room for the gradients of a micro-batch that ZeRO-2 keeps."""
        if self._engine != "zero2" or (self._room is not None and not place.micro_batch) or self._more_room is not None:
            return
        # Micro-batches are added up: from the second on there are two such rooms.
        room = self._new_room(self._elements_of_room())
        if self._room is None:
            self._room = room
        else:
            self._more_room = room
        yield Event(place, MemoryChange.ALLOCATE, room)

    def _close(self, place: Place) -> Iterator[Event]:
        yield from self._send(place)
        yield from self._free(place, self._bucket, self._more_room)
        self._bucket = self._more_room = None

    def _new_bucket(self) -> Storage:
        num_elements = self._zero.num_buckets * self._zero.reduce_bucket_size
        return Storage(num_elements * self._element_bytes, category=Category.GATHERED)

    def _one_rank_events(self, event: Event) -> Iterator[Event]:
        storage, place = event.storage, event.place
        if storage is None or storage.category is not Category.GRADIENTS:
            yield self._event(event)
        elif event.change is MemoryChange.ALLOCATE:
            yield event
            yield from self._reduce(storage, place)
        # Freed at the beginning of the step.

    def _reduce(self, gradient: Storage, place: Place) -> Iterator[Event]:
        """Copy a gradient into the bucket, as soon as it is there."""
        weight, size = self.weights[gradient.parameter], self._zero.reduce_bucket_size
        yield from self._open_bucket(place)
        if self._rank is None or self._rank in self._ranks[weight]:
            yield from self._make_room(place)
        # The bucket is sent when the next gradient does not fit; one that is larger is kept until then.
        if self._num_in_bucket + weight.numel > size:
            yield from self._send(place)
        self._in_bucket.append(weight)
        if self._engine == "zero1":
            # It keeps all of them.
            self._unreduced.append(gradient)
        elif self._num_in_bucket > size:
            self._waiting = gradient
        else:
            yield Event(place, MemoryChange.FREE, gradient)

    @property
    def _num_in_bucket(self) -> int:
        return sum(weight.numel for weight in self._in_bucket)

    def _new_room(self, num_elements: int) -> Storage:
        return Storage(num_elements * self._element_bytes, category=Category.GRADIENTS)

    def _send(self, place: Place) -> Iterator[Event]:
        """Reduce what the bucket holds over the ranks."""
        if not self._in_bucket:
            return
        num_bytes = self._num_in_bucket * self._element_bytes
        # It is copied into one row first: by ZeRO-1 and 2 where it belongs to several shares, by ZeRO-3 where it is
        # more than one gradient.
        ranks = {rank for weight in self._in_bucket for rank in self._ranks[weight]}
        if len(self._in_bucket if self._engine == "zero3" else ranks) > 1:
            row = Storage(num_bytes, category=Category.TEMPORARY)
            yield Event(place, MemoryChange.ALLOCATE, row)
            yield Event(place, MemoryChange.FREE, row)
        # In ZeRO-3 the host handles gradients one by one, in Python.
        num_calls = _CALLS_OF_BUCKET + _CALLS_OF_GRADIENT * len(self._in_bucket) if self._engine == "zero3" else 0
        yield self._collective(TransferKind.REDUCE, num_bytes, place, num_calls)
        yield from self._free(place, self._waiting)
        self._waiting = None
        self._in_bucket.clear()

    def _end_backward(self, place: Place) -> Iterator[Event]:
        yield from self._send(place)
        yield from self._let_go(list(self._whole), place)
        if self._engine != "zero3":
            yield from self._close(place)
        if self._stepping is not None:
            yield from self._end_step(place)

    # --- The optimizer's step. ---

    def _optimizer_bytes(self, storage: Storage) -> int:
        stepped = sum(weight.compute_bytes for weight in self._trained)
        return -(-storage.num_bytes * self._stepped_at_once * self._master_bytes // max(1, stepped))

    def _begin_step(self, place: Place) -> Iterator[Event]:
        """Copy a share's gradients into one row in the dtype of the weights that the optimizer steps."""
        yield from self._free(place, *self._unreduced)
        if self._engine == "zero1":
            self._room = self._new_room(self._share_elements)
            yield Event(place, MemoryChange.ALLOCATE, self._room)
        yield from self._free(place, self._persistent)
        row = self._new_room(self._stepped_at_once)
        yield Event(place, MemoryChange.ALLOCATE, row)
        self._stepping = row
        if self._master_bytes != self._element_bytes:
            self._stepping = replace(row, num_bytes=self._stepped_at_once * self._master_bytes)
            yield Event(place, MemoryChange.ALLOCATE, self._stepping)
            yield Event(place, MemoryChange.FREE, row)
        if self._engine != "zero3":
            yield from self._free(place, self._room)
        self._step_place = place._replace(operator="")
        yield Event(self._step_place, seconds=self._seconds_around_step)

    @property
    def _seconds_around_step(self) -> float:
        """What the device does with gradients and weights besides the optimizer's step."""
        kept, stepped = self._element_bytes, self._master_bytes
        # It has the norm of the gradients in float64, clipping or not; copies them; divides them by the loss scale; and
        # copies stepped weights back.
        norm = kept + 2 * _NORM_BYTES
        row = 2 * kept + (kept + stepped if stepped != kept else 0)
        divided, copied_back = 2 * stepped, stepped + kept
        num_bytes = self._share_elements * (norm + row + divided + copied_back)
        return num_bytes / (self.device.memory_bandwidth * self.device.bandwidth_efficiency)

    def _end_step(self, place: Place) -> Iterator[Event]:
        yield from self._free(place, self._stepping)
        self._stepping = None
        if self._engine != "zero3" and self._step_place is not None:
            # ZeRO-1 and 2 gather all weights.
            stepped = sum(weight.compute_bytes for weight in self._trained)
            yield self._collective(TransferKind.GATHER, stepped, self._step_place)
        if self._persistent is not None:
            yield Event(place, MemoryChange.ALLOCATE, replace(self._persistent))
