"""Buffers in host memory, of exactly the size asked for, used again from layer to layer and from step to step.

Making one is slow on a GPU (its pages are pinned, about 0.1 s for each GiB), so they are kept, and made for what is to
come: for the longest row where that is known, else with some room to grow. Knows no streams: a buffer carries the last
copy that used it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from hf_ckpt.errors import HostMemoryError
from hf_ckpt.regions.offload.link import Buffer, Memory

_size = attrgetter("num_bytes")

_GROWTH = 4
"""A buffer that takes the place of one that was too small is larger than that by one part in so many."""


class Pool:
    """Makes, lends and keeps buffers. Used by one thread at a time.

    Args:
        allocate: makes memory of so many bytes, or raises.
        check: raises when so many more bytes may not be allocated.

    Attributes:
        held_bytes: bytes of all buffers there are, lent or not.
        peak_bytes: the most that this has been.
        num_lent: buffers that are out.
        num_made: buffers made so far.
    """

    def __init__(self, allocate: Callable[[int], Memory], check: Callable[[int], None]) -> None:
        self._allocate = allocate
        self._check = check
        self._free: list[Buffer] = []
        self._is_closed = False
        self.held_bytes = 0
        self.peak_bytes = 0
        self.num_lent = 0
        self.num_made = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the buffers that are kept for later."""
        return sum(map(_size, self._free))

    @property
    def num_free(self) -> int:
        """Buffers that are kept for later."""
        return len(self._free)

    def take(self, num_bytes: int, most_bytes: int | None = None) -> Buffer:
        """Lend the smallest free buffer that is large enough; make one if there is none.

        Where lengths differ from batch to batch, one that is too small is given up for each that is made. So there are
        never more buffers than were once lent at the same time.

        Args:
            num_bytes: that are needed now.
            most_bytes: that will be needed of the same buffer at most, for which there is room; None where that is not
                known. Then a buffer has exactly the size, unless it takes the place of one that was too small: it is
                made somewhat larger than that one, where all could be, so that a slightly longer batch finds room.

        Raises:
            HostMemoryError: there is not enough memory for another one.
        """
        fitting = [buffer for buffer in self._free if buffer.num_bytes >= num_bytes]
        if fitting:
            buffer = min(fitting, key=_size)
            self._free.remove(buffer)
        else:
            size = max(num_bytes, most_bytes or 0)
            if self._free:
                too_small = max(self._free, key=_size)
                if most_bytes is None and self._can_grow():
                    size = max(size, too_small.num_bytes + too_small.num_bytes // _GROWTH)
                self._give_up(too_small)
            buffer = self._make(size)
        self.num_lent += 1
        return buffer

    def _can_grow(self) -> bool:
        try:
            self._check(self.held_bytes // _GROWTH)
        except HostMemoryError:
            return False
        return True

    def _make(self, num_bytes: int) -> Buffer:
        self._check(num_bytes)
        buffer = Buffer(self._allocate(num_bytes))
        self.num_made += 1
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back. A copy from or into it may still be under way."""
        self.num_lent -= 1
        self._free.append(buffer)
        if self._is_closed:
            self._give_up(buffer)

    def close(self) -> None:
        """Give up the buffers that are kept, and from now on each one that comes back."""
        self._is_closed = True
        for buffer in list(self._free):
            self._give_up(buffer)

    def _give_up(self, buffer: Buffer) -> None:
        self._free.remove(buffer)
        self.held_bytes -= buffer.num_bytes
        buffer.wait()
        buffer.memory.free()
