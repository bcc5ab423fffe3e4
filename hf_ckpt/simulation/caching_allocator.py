"""What torch's caching allocator takes from a CUDA device to serve a step: more than the step's tensors.

The allocator asks CUDA for segments, cuts blocks out of them, and keeps what is freed. What it holds is
`torch.cuda.memory_reserved`; nvidia-smi shows it together with CUDA's own context.

Note [The rules]. Those of `c10/cuda/CUDACachingAllocator.cpp`:
- Blocks are multiples of 512 bytes. Those of up to 1 MiB come from segments of 2 MiB, larger ones from segments of
  20 MiB, and from 10 MiB on each new one gets a segment of its own size, rounded up to 2 MiB.
- The smallest free block that suffices is taken, of equal ones the lowest. What is left over is cut off where it is
  at least 512 bytes, or more than 1 MiB in large segments. Free neighbours of one segment are joined.
- Streams share no blocks.
- With `expandable_segments:True` there is one segment for each stream and kind, which grows at its end, and what is
  left over is always cut off.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import ALLOCATED, FREED, Storage, Stream, Tape
from hf_ckpt.simulation.tracker import BLOCK_BYTES

_MIB = 2**20
_LARGEST_SMALL = _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB
_LEAST_OWN_SEGMENT = 10 * _MIB
_SEGMENT_UNIT = 2 * _MIB
_GATHERED_AT_ONCE = 2
"""So many freed weights of units may still be in use when the next one is gathered (FSDP1's `limit_all_gathers`)."""
_STEPS = 2
"""From the second one on, all steps are alike."""


def reserved_bytes(tape: Tape, *, expands: bool = False) -> int:
    """Return the most that the allocator holds when a training begins with such steps, in bytes of one rank.

    The optimizer makes its state at the end of the first step, out of what that step has left. `expands`: under
    `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
    """
    allocator = CachingAllocator(expands=expands)
    state = [storage for storage in tape.before if storage.category is Category.OPTIMIZER]
    blocks = {
        id(storage): allocator.allocate(storage.num_bytes, storage.stream)
        for storage in tape.before
        if storage.category is not Category.OPTIMIZER and storage.num_bytes
    }
    still_read: deque[Block] = deque()
    changes = list(_changes(tape))
    for _ in range(_STEPS):
        for is_allocated, storage, is_optimizer in changes:
            if is_optimizer and state:
                for each in state:
                    allocator.allocate(each.num_bytes)
                state = []
            is_gathered = storage.stream is Stream.GATHER
            if is_allocated:
                if is_gathered and len(still_read) >= _GATHERED_AT_ONCE:
                    allocator.free(still_read.popleft())
                blocks[id(storage)] = allocator.allocate(storage.num_bytes, storage.stream)
            elif id(storage) in blocks:
                block = blocks.pop(id(storage))
                still_read.append(block) if is_gathered else allocator.free(block)
    return allocator.reserved_bytes


def _changes(tape: Tape) -> Iterator[tuple[bool, Storage, bool]]:
    """Yield what comes and goes, and whether the optimizer runs."""
    columns = tape.columns
    rows = np.flatnonzero(np.isin(columns.change, (ALLOCATED, FREED)))
    is_optimizer = columns.places.is_in(columns.place[rows], Phase.OPTIMIZER)
    for is_allocated, number, in_optimizer in zip(
        (columns.change[rows] == ALLOCATED).tolist(), columns.storage[rows].tolist(), is_optimizer.tolist(), strict=True
    ):
        storage = columns.storages[number]
        if storage.num_bytes:
            yield is_allocated, storage, in_optimizer


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, in use or free. Made by `CachingAllocator`."""

    address: int
    num_bytes: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one kind, the smallest first, of equal ones the lowest."""

    is_small: bool
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """(bytes, address) of each."""
    by_address: dict[int, Block] = field(default_factory=dict)
    last: Block | None = None
    """Of the one segment that grows."""

    @property
    def segment_bytes(self) -> int:
        """The least that is asked of the device at a time."""
        return _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT

    def add(self, block: Block) -> None:
        block.is_free = True
        bisect.insort(self.sizes, (block.num_bytes, block.address))
        self.by_address[block.address] = block

    def remove(self, block: Block) -> None:
        block.is_free = False
        del self.sizes[bisect.bisect_left(self.sizes, (block.num_bytes, block.address))]
        del self.by_address[block.address]

    def taken(self, num_bytes: int) -> Block | None:
        """Take the smallest free block of at least so many bytes; None where there is none."""
        index = bisect.bisect_left(self.sizes, (num_bytes, 0))
        if index == len(self.sizes):
            return None
        block = self.by_address.pop(self.sizes.pop(index)[1])
        block.is_free = False
        return block


class CachingAllocator:
    """Serves blocks as torch's allocator does, and counts what it holds. See Note [The rules]."""

    def __init__(self, *, expands: bool = False) -> None:
        self.reserved_bytes = 0
        """Nothing is given back to the device."""
        self._expands = expands
        self._pools: dict[tuple[Stream, bool], _Pool] = {}
        self._end = 0

    def allocate(self, num_bytes: int, stream: Stream = Stream.COMPUTE) -> Block:
        """Return a block of at least so many bytes."""
        num_bytes = max(1, -(-num_bytes // BLOCK_BYTES)) * BLOCK_BYTES
        is_small = num_bytes <= _LARGEST_SMALL
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = _Pool(is_small)
        block = pool.taken(num_bytes)
        if block is None:
            block = (self._at_end if self._expands else self._segment)(pool, num_bytes)
        rest = block.num_bytes - num_bytes
        if rest > _LARGEST_SMALL or (rest and (is_small or self._expands)):
            self._cut(block, num_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with free neighbours."""
        pool, before, after = block.pool, block.before, block.after
        if after is not None and after.is_free:
            pool.remove(after)
            self._join(block, after)
        if before is not None and before.is_free:
            pool.remove(before)
            self._join(before, block)
            block = before
        pool.add(block)

    def _cut(self, block: Block, num_bytes: int) -> None:
        rest = Block(block.address + num_bytes, block.num_bytes - num_bytes, block.pool, block, block.after)
        if block.after is not None:
            block.after.before = rest
        elif self._expands:
            block.pool.last = rest
        block.after, block.num_bytes = rest, num_bytes
        block.pool.add(rest)

    def _join(self, block: Block, after: Block) -> None:
        block.num_bytes += after.num_bytes
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        elif self._expands:
            block.pool.last = block

    def _segment(self, pool: _Pool, num_bytes: int) -> Block:
        """Return a new segment."""
        size = pool.segment_bytes
        if num_bytes >= _LEAST_OWN_SEGMENT:
            size = -(-num_bytes // _SEGMENT_UNIT) * _SEGMENT_UNIT
        block = Block(self._end, size, pool)
        self._end += size
        self.reserved_bytes += size
        return block

    def _at_end(self, pool: _Pool, num_bytes: int) -> Block:
        """Return a block at the end of the pool's one segment, which grows as far as it must."""
        last = pool.last
        free_bytes = last.num_bytes if last is not None and last.is_free else 0
        grown = -(-(num_bytes - free_bytes) // pool.segment_bytes) * pool.segment_bytes
        self.reserved_bytes += grown
        if last is not None and free_bytes:
            pool.remove(last)
            last.num_bytes += grown
            return last
        block = Block(0 if last is None else last.address + last.num_bytes, grown, pool, last)
        if last is not None:
            last.after = block
        pool.last = block
        return block
