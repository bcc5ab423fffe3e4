"""Buffers in host memory, of exactly the size asked for, used again from layer to layer and from step to step.

Making one is slow on a GPU (its pages are pinned, about 0.1 s for each GiB), so they are kept. Knows no streams: a
buffer carries the last copy that used it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from hf_ckpt.amounts import format_bytes
from hf_ckpt.errors import HostMemoryError
from hf_ckpt.regions.offload.link import Buffer, Memory

_size = attrgetter("num_bytes")


class Pool:
    """Makes, lends and keeps buffers. Used by one thread at a time.

    Args:
        allocate: makes memory of so many bytes.
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

    def take(self, num_bytes: int) -> Buffer:
        """Lend the smallest free buffer that is large enough; make one of exactly this size if there is none.

        Where lengths differ from batch to batch, one that is too small is given up for each that is made. So there are
        never more buffers than were once lent at the same time.

        Raises:
            HostMemoryError: there is not enough memory for another one.
        """
        fitting = [buffer for buffer in self._free if buffer.num_bytes >= num_bytes]
        if fitting:
            buffer = min(fitting, key=_size)
            self._free.remove(buffer)
        else:
            if self._free:
                self._give_up(max(self._free, key=_size))
            buffer = self._make(num_bytes)
        self.num_lent += 1
        return buffer

    def _make(self, num_bytes: int) -> Buffer:
        self._check(num_bytes)
        try:
            buffer = Buffer(self._allocate(num_bytes))
        except (OSError, RuntimeError) as error:
            if isinstance(error, HostMemoryError):
                raise
            raise HostMemoryError(
                f"Offloading to the host needs {format_bytes(num_bytes)} more of host memory, which the system does "
                f"not give: {error}. Set host_memory, lower fraction, or shorten the sequence."
            ) from error
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
