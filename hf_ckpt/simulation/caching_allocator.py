"""What torch's caching allocator takes from a CUDA device to serve a step: more than the step's tensors.

The allocator asks CUDA for segments, cuts blocks out of them, and keeps what is freed. What it holds is
`torch.cuda.memory_reserved`; nvidia-smi shows it together with CUDA's own context.

Note [The rules]. Those of `c10/cuda/CUDACachingAllocator.cpp`:
- Blocks are multiples of 512 bytes. Those of up to 1 MiB come from segments of 2 MiB, larger ones from segments of
  20 MiB, and from 10 MiB on each new one gets a segment of its own size, rounded up to 2 MiB.
- The smallest free block that suffices is taken, of equal ones the lowest. What is left over is cut off where it is
  at least 512 bytes, or more than 1 MiB in large segments. Free neighbours of one segment are joined.
- Streams share no blocks. What another stream still reads is not served again when it is freed, but later.
- Where the device has no room for a new segment, the allocator waits for the other streams, and gives back each segment
  that is wholly free (`release_cached_blocks`), before it asks again.
- With `expandable_segments:True` there is one segment for each stream and kind, which grows at its end, and what is
  left over is always cut off.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

import numpy as np

from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import ALLOCATED, FREED, Columns, FlatParameter, Sizes, Storage, Stream, Tape

BLOCK_BYTES = 512  # Every block is a multiple of this.
_MIB = 2**20 // BLOCK_BYTES  # Sizes and addresses are counted in blocks of 512 bytes.
_LARGEST_SMALL = _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB
_LEAST_OWN_SEGMENT = 10 * _MIB
_SEGMENT_UNIT = 2 * _MIB
# So many freed weights of units may still be in use when the next one is gathered (FSDP1's `limit_all_gathers`).
_GATHERED_AT_ONCE = 2
_SENT_AT_ONCE = 1  # So many freed buffers of gradients may still be in use when the next one is made.
_BROADCAST_BYTES = 250 * 2**20  # torch's `PARAM_BROADCAST_BUCKET_SIZE`.
# That are played where the device is full. Some training steps never settle: each gives back the same again.
_MOST_STEPS = 8


@dataclass(frozen=True, slots=True)
class Held:
    """What the allocator holds of a device that has not as much as it would reserve."""

    num_bytes: int  # The most in any step; more than the device has where it runs out of memory.
    settled_bytes: int  # The most in each step of a training that has gone on for a while.
    retries_per_step: int  # How often it then has to give back what it holds unused.


@dataclass(frozen=True, slots=True)
class Played:
    """What the allocator gives a training that begins, in bytes of one rank."""

    reserved_bytes: int  # The most that it holds.
    blocks: Sizes  # What storages lie in: torch counts whole blocks as allocated.


def play(tape: Tape, *, expands: bool = False) -> Played:
    """Play the first two of such steps: from the second one on, all are alike.

    `expands`: under `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
    """
    allocator = CachingAllocator(expands=expands)
    steps = _Steps(tape, allocator)
    steps.play_first()
    steps.play_next()
    return Played(allocator.reserved_bytes, steps.blocks())


def held_within(tape: Tape, limit_bytes: int) -> Held:
    """Return what the allocator holds of a device that has so much for it."""
    allocator = CachingAllocator(limit_bytes=limit_bytes)
    steps = _Steps(tape, allocator)
    steps.play_first()
    num_segments = num_retries = retries = most = settled = 0
    # What it gives back may come to be missed steps later, so that steps are played until one changes nothing.
    for number in range(_MOST_STEPS):
        if number:
            allocator.begin_step()
        steps.play_next()
        settled = allocator.reserved_bytes
        most = max(most, settled)
        retries = allocator.num_retries - num_retries
        is_settled = not retries and allocator.num_segments == num_segments
        num_segments, num_retries = allocator.num_segments, allocator.num_retries
        if is_settled:
            break
    return Held(most, settled, retries)


class _Steps:
    """The steps of a training, whose storages lie in the allocator's blocks."""

    def __init__(self, tape: Tape, allocator: CachingAllocator) -> None:
        self._tape = tape
        self._allocator = allocator
        storages = tape.columns.storages
        self._before = _blocks_before(allocator, tape.before)
        self._blocks = [self._before.get(storage) for storage in storages]  # That are in use.
        self._last = list(self._blocks)  # In which each storage lies, or lay last.
        asked, lag_of = cache(allocator.asked), cache(_lag_of)
        self._asked = [asked(storage.num_bytes, storage.stream) for storage in storages]
        self._lags = [lag_of(storage.stream, storage.is_sent) for storage in storages]
        self._changes, self._optimizer_begins = _changes(tape.columns)
        self._still_read: dict[int, deque[Block]] = defaultdict(deque)
        allocator.wait_for_streams = self._free_still_read

    def play_first(self) -> None:
        """Play the first step: the optimizer makes its state at its end, out of what that step has left."""
        self._play(self._changes[: self._optimizer_begins])
        if self._optimizer_begins < len(self._changes):
            for storage in self._tape.before:
                if storage.category is Category.OPTIMIZER and storage.num_bytes:
                    self._before[storage] = self._allocator.allocate(storage.num_bytes)
        self._play(self._changes[self._optimizer_begins :])

    def play_next(self) -> None:
        """Play one more step."""
        # At the end of a step the Trainer looks at its loss, and so waits for the device.
        self._free_still_read()
        self._play(self._changes)

    def blocks(self) -> Sizes:
        """Return the blocks that storages lie in, or lay in last."""
        before = [_size_of(self._before.get(storage), storage) for storage in self._tape.before]
        storages = list(map(_size_of, self._last, self._tape.columns.storages))
        return Sizes(np.array(before, dtype=np.int64), np.array(storages, dtype=np.int64))

    def _play(self, changes: Iterable[tuple[bool, int]]) -> None:
        """Let storages come and go."""
        serve, free, blocks, asked = self._allocator.serve, self._allocator.free, self._blocks, self._asked
        lags, still_read, last = self._lags, self._still_read, self._last
        for is_allocated, number in changes:
            lag = lags[number]
            if is_allocated:
                if lag and len(still_read[lag]) >= lag:
                    free(still_read[lag].popleft())
                blocks[number] = last[number] = serve(*asked[number])
            elif (block := blocks[number]) is not None:
                blocks[number] = None
                if lag:
                    still_read[lag].append(block)
                else:
                    free(block)

    def _free_still_read(self) -> None:
        """Free what other streams had in use."""
        for block in chain.from_iterable(self._still_read.values()):
            self._allocator.free(block)
        self._still_read.clear()


def _size_of(block: Block | None, storage: Storage) -> int:
    return storage.num_bytes if block is None else (block[1] - block[0]) * BLOCK_BYTES


def _blocks_before(allocator: CachingAllocator, storages: Iterable[Storage]) -> dict[Storage, Block]:
    """Return what is there before the first step, and the block that it lies in."""
    there = [each for each in storages if each.num_bytes and each.category is not Category.OPTIMIZER]
    units = {each: each.flat_parameter for each in there if each.flat_parameter is not None}
    blocks = {each: allocator.allocate(each.num_bytes, each.stream) for each in there if each not in units}
    return blocks | dict(zip(units, _blocks_of_shares(allocator, list(units.values())), strict=True))


def _blocks_of_shares(allocator: CachingAllocator, units: Sequence[FlatParameter]) -> list[Block]:
    """Return the blocks of the shares of FSDP1's units, the root's last.

    It makes them before the first step. What is in use for a moment meanwhile is held by the allocator from then on.
    """
    loaded = [_loaded_share(allocator, unit) for unit in units]
    root_first = [len(units) - 1, *range(len(units) - 1)] if units else []
    # In mixed precision accelerate casts the shares of trained weights to float32 when all are made.
    kept = {
        number: allocator.allocate(units[number].share_bytes)
        for number in root_first
        if units[number].share_bytes != units[number].loaded_bytes
    }
    for number in root_first:
        # Before the first forward `init_flat_param_attributes` makes what each unit gathers into, the root's first, and
        # empties it: in mixed precision in both dtypes.
        for num_bytes in units[number].emptied:
            allocator.free(allocator.allocate(num_bytes))
    # The model's parameters are views of the shares as they were until the first forward.
    for number in kept:
        allocator.free(loaded[number])
    return [kept.get(number, share) for number, share in enumerate(loaded)]


def _loaded_share(allocator: CachingAllocator, unit: FlatParameter) -> Block:
    """Return the block of a share as its weights were loaded."""
    # Where rank 0 sends its weights (`sync_module_states`), it sends buckets of 250 MiB or more.
    buckets: list[list[int]] = []
    for num_bytes in unit.weights if unit.is_broadcast else ():
        if not buckets or sum(buckets[-1]) >= _BROADCAST_BYTES:
            buckets.append([])
        buckets[-1].append(num_bytes)
    weights = [allocator.allocate(num_bytes) for num_bytes in unit.weights]
    # They are copies where they hold more than one weight (`broadcast_coalesced`).
    sent = [allocator.allocate(sum(bucket)) for bucket in buckets if len(bucket) > 1]
    # The weights are on the device, copied into one tensor and freed, and a share of that is copied
    # (`flatten_tensors_into_flat_param` and `shard` in `torch/distributed/fsdp/_flat_param.py`).
    flat = allocator.allocate(sum(unit.weights))
    for each in weights:
        allocator.free(each)
    share = allocator.allocate(unit.loaded_bytes)
    # Up to torch 2.7 NCCL still reads the buckets when they are freed, so that they are of use again when the unit is
    # done. Later versions let go of them a little sooner: not told apart here.
    for each in (flat, *sent):
        allocator.free(each)
    return share


def _lag_of(stream: Stream, is_sent: bool) -> int:
    """Return how many of its kind may be freed and still be in use by another stream."""
    if stream is Stream.GATHER:
        return _GATHERED_AT_ONCE
    return _SENT_AT_ONCE if is_sent else 0


def _changes(columns: Columns) -> tuple[list[tuple[bool, int]], int]:
    """Return what comes and goes, each with the number of its storage, and from where on the optimizer runs."""
    rows = np.flatnonzero((columns.change == ALLOCATED) | (columns.change == FREED))
    has_memory = np.array([storage.num_bytes > 0 for storage in columns.storages], dtype=bool)
    rows = rows[has_memory[columns.storage[rows]]]
    in_optimizer = np.flatnonzero(columns.places.is_in(columns.place[rows], Phase.OPTIMIZER))
    is_allocated = (columns.change[rows] == ALLOCATED).tolist()
    changes = list(zip(is_allocated, columns.storage[rows].tolist(), strict=True))
    return changes, int(in_optimizer[0]) if len(in_optimizer) else len(changes)


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one kind."""

    is_small: bool
    cuts_all: bool  # Whether all that is left over of a block is cut off, and not only what is large.
    # The size and the begin of each in one number, the smallest first, of equal ones the lowest.
    keys: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)  # By where they begin.
    begins: dict[int, int] = field(default_factory=dict)  # By where they end.
    top: int = 0  # Where the one segment ends that grows.

    @property
    def segment_size(self) -> int:
        """The least that is asked of the device at a time."""
        return _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT


Block = tuple[int, int, _Pool]  # A part of a segment that is in use: where it begins and ends, and its pool.

_SIZE_BITS = 40  # Addresses have no more.
_ADDRESS = 2**_SIZE_BITS - 1


class CachingAllocator:
    """Serves blocks as torch's allocator does, and counts what it holds. See Note [The rules]."""

    def __init__(self, *, expands: bool = False, limit_bytes: int | None = None) -> None:
        self._reserved = 0
        self._most_reserved = 0
        self.num_segments = 0  # How many it has ever asked the device for.
        # How often the device had no room for one (`num_alloc_retries` of `torch.cuda.memory_stats`).
        self.num_retries = 0
        self._expands = expands
        self._limit = None if limit_bytes is None else limit_bytes // BLOCK_BYTES
        self._segments: dict[int, int] = {}
        self.wait_for_streams: Callable[[], None] = lambda: None  # Frees what other streams still read.
        self._pools: dict[tuple[Stream, bool], _Pool] = {}
        self._end = 0

    @property
    def reserved_bytes(self) -> int:
        """The most that it held in this step."""
        return self._most_reserved * BLOCK_BYTES

    def begin_step(self) -> None:
        """Forget what it held in the steps before."""
        self._most_reserved = self._reserved

    def allocate(self, num_bytes: int, stream: Stream = Stream.COMPUTE) -> Block:
        """Return a block of at least so many bytes."""
        return self.serve(*self.asked(num_bytes, stream))

    def asked(self, num_bytes: int, stream: Stream = Stream.COMPUTE) -> tuple[_Pool, int]:
        """Return what `serve` takes: where blocks of so many bytes are from, and how large they are."""
        size = max(1, -(-num_bytes // BLOCK_BYTES))
        is_small = size <= _LARGEST_SMALL
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = _Pool(is_small, is_small or self._expands)
        return pool, size

    def serve(self, pool: _Pool, size: int) -> Block:
        """Return a block of what `asked` returned."""
        keys, ends = pool.keys, pool.ends
        index = bisect_left(keys, size << _SIZE_BITS)
        if index < len(keys):
            # The smallest free block that suffices.
            begin = keys.pop(index) & _ADDRESS
            end = ends.pop(begin)
            del pool.begins[end]
        else:
            begin, end = (self._at_end if self._expands else self._segment)(pool, size)
        rest = begin + size
        if end - rest > _LARGEST_SMALL or (pool.cuts_all and rest < end):
            insort(keys, (end - rest) << _SIZE_BITS | rest)
            ends[rest], pool.begins[end] = end, rest
            end = rest
        return begin, end, pool

    def _first_that_suffices(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Take the smallest free block of at least this size; None where there is none."""
        index = bisect_left(pool.keys, size << _SIZE_BITS)
        if index == len(pool.keys):
            return None
        begin = pool.keys.pop(index) & _ADDRESS
        end = pool.ends.pop(begin)
        del pool.begins[end]
        return begin, end

    def free(self, block: Block) -> None:
        """Take a block back, and join it with free neighbours."""
        begin, end, pool = block
        keys, ends, begins = pool.keys, pool.ends, pool.begins
        after = ends.pop(end, None)
        if after is not None:
            del begins[after], keys[bisect_left(keys, (after - end) << _SIZE_BITS | end)]
            end = after
        before = begins.pop(begin, None)
        if before is not None:
            del ends[before], keys[bisect_left(keys, (begin - before) << _SIZE_BITS | before)]
            begin = before
        insort(keys, (end - begin) << _SIZE_BITS | begin)
        ends[begin], begins[end] = end, begin

    def _segment(self, pool: _Pool, size: int) -> tuple[int, int]:
        """Return where a new segment begins and ends."""
        length = pool.segment_size
        if size >= _LEAST_OWN_SEGMENT:
            length = -(-size // _SEGMENT_UNIT) * _SEGMENT_UNIT
        if self._limit is not None and self._reserved + length > self._limit:
            self.wait_for_streams()
            found = self._first_that_suffices(pool, size)
            if found is not None:
                return found
            self.num_retries += 1
            self._give_back()
        begin, end = self._end, self._end + length
        # Segments are no neighbours: their blocks are not joined.
        self._end = end + 1
        self._segments[begin] = end
        self._hold(length)
        return begin, end

    def _hold(self, length: int) -> None:
        self.num_segments += 1
        self._reserved += length
        self._most_reserved = max(self._most_reserved, self._reserved)

    def _give_back(self) -> None:
        """Give every segment that is wholly free back to the device."""
        for pool in self._pools.values():
            for begin, end in list(pool.ends.items()):
                if self._segments.get(begin) == end:
                    pool.keys.remove((end - begin) << _SIZE_BITS | begin)
                    del pool.ends[begin], pool.begins[end], self._segments[begin]
                    self._reserved -= end - begin

    def _at_end(self, pool: _Pool, size: int) -> tuple[int, int]:
        """Return the last block of the pool's one segment, which grows as far as it must."""
        begin = pool.begins.pop(pool.top, pool.top)
        if begin < pool.top:
            del pool.ends[begin], pool.keys[bisect_left(pool.keys, (pool.top - begin) << _SIZE_BITS | begin)]
        grown = -(-(begin + size - pool.top) // pool.segment_size) * pool.segment_size
        self._hold(grown)
        pool.top += grown
        return begin, pool.top
