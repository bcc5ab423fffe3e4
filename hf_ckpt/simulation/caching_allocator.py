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

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import ALLOCATED, FREED, Columns, Stream, Tape
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
    columns = tape.columns
    # Those that exist before the step have numbers of their own below those of the tape.
    numbers = {id(storage): number for number, storage in enumerate(columns.storages)}
    state = [storage for storage in tape.before if storage.category is Category.OPTIMIZER]
    blocks: dict[int, Block] = {
        numbers.get(id(storage), -1 - number): allocator.allocate(storage.num_bytes, storage.stream)
        for number, storage in enumerate(tape.before)
        if storage.category is not Category.OPTIMIZER and storage.num_bytes
    }
    asked = [allocator.asked(storage.num_bytes, storage.stream) for storage in columns.storages]
    gathered = {number for number, storage in enumerate(columns.storages) if storage.stream is Stream.GATHER}
    changes, optimizer_begins = _changes(columns)
    still_read: deque[Block] = deque()
    for step in range(_STEPS):
        for index, (is_allocated, number) in enumerate(changes):
            if index == optimizer_begins and not step:
                for each in state:
                    allocator.allocate(each.num_bytes)
            if is_allocated:
                if number in gathered and len(still_read) >= _GATHERED_AT_ONCE:
                    allocator.free(still_read.popleft())
                blocks[number] = allocator.serve(*asked[number])
            elif number in blocks:
                block = blocks.pop(number)
                if number in gathered:
                    still_read.append(block)
                else:
                    allocator.free(block)
    return allocator.reserved_bytes


def _changes(columns: Columns) -> tuple[list[tuple[bool, int]], int]:
    """Return what comes and goes, each with the number of its storage, and from where on the optimizer runs."""
    rows = np.flatnonzero((columns.change == ALLOCATED) | (columns.change == FREED))
    has_memory = np.array([storage.num_bytes > 0 for storage in columns.storages], dtype=bool)
    rows = rows[has_memory[columns.storage[rows]]]
    in_optimizer = np.flatnonzero(columns.places.is_in(columns.place[rows], Phase.OPTIMIZER))
    is_allocated = (columns.change[rows] == ALLOCATED).tolist()
    changes = list(zip(is_allocated, columns.storage[rows].tolist(), strict=True))
    return changes, int(in_optimizer[0]) if len(in_optimizer) else -1


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, in use or free. Made by `CachingAllocator`."""

    address: int
    num_bytes: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    key: int = 0
    """Among its pool's free blocks; 0 while it is in use."""


_ADDRESSES = 2**48
"""Addresses are below."""


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one kind, the smallest first, of equal ones the lowest."""

    is_small: bool
    keys: list[int] = field(default_factory=list)
    """Bytes and address of each in one number, which is compared faster than a tuple."""
    by_key: dict[int, Block] = field(default_factory=dict)
    last: Block | None = None
    """Of the one segment that grows."""

    @property
    def segment_bytes(self) -> int:
        """The least that is asked of the device at a time."""
        return _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT

    def add(self, block: Block) -> None:
        block.key = key = block.num_bytes * _ADDRESSES + block.address
        insort(self.keys, key)
        self.by_key[key] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, block.key)], self.by_key[block.key]
        block.key = 0


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
        return self.serve(*self.asked(num_bytes, stream))

    def asked(self, num_bytes: int, stream: Stream = Stream.COMPUTE) -> tuple[_Pool, int]:
        """Return what `serve` takes: where blocks of so many bytes are from, and how large they are."""
        num_bytes = max(1, -(-num_bytes // BLOCK_BYTES)) * BLOCK_BYTES
        kind = stream, num_bytes <= _LARGEST_SMALL
        if kind not in self._pools:
            self._pools[kind] = _Pool(kind[1])
        return self._pools[kind], num_bytes

    def serve(self, pool: _Pool, num_bytes: int) -> Block:
        """Return a block of what `asked` returned."""
        keys = pool.keys
        index = bisect_left(keys, num_bytes * _ADDRESSES)
        if index < len(keys):
            block = pool.by_key.pop(keys.pop(index))
            block.key = 0
        else:
            block = (self._at_end if self._expands else self._segment)(pool, num_bytes)
        rest = block.num_bytes - num_bytes
        if rest > _LARGEST_SMALL or (rest and (pool.is_small or self._expands)):
            self._cut(block, num_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and join it with free neighbours."""
        pool, before, after = block.pool, block.before, block.after
        if after is not None and after.key:
            pool.remove(after)
            self._join(block, after)
        if before is not None and before.key:
            pool.remove(before)
            self._join(before, block)
            block = before
        pool.add(block)

    def _cut(self, block: Block, num_bytes: int) -> None:
        after = block.after
        rest = Block(block.address + num_bytes, block.num_bytes - num_bytes, block.pool, block, after)
        if after is not None:
            after.before = rest
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
        free_bytes = last.num_bytes if last is not None and last.key else 0
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
