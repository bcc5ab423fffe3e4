"""Offload to host memory: buffers, their pool, and the link that keeps what is sent in them.

A buffer is slow to make on a GPU (its pages are pinned, about 0.1 s for each GiB). So the pool keeps buffers from layer
to layer and from step to step, and makes them for what is to come: for the longest row where that is known, else with
some room to grow. Knows no streams: a buffer carries the last copy that used it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.errors import HostMemoryError
from hf_ckpt.regions.offload.host_memory import HostLimits
from hf_ckpt.regions.offload.transfer import (
    AsyncCopy,
    Buffer,
    HostAllocation,
    IncomingTensor,
    Link,
    TensorLayout,
    Wire,
)

_size = attrgetter("num_bytes")

# A buffer that replaces one that was too small is larger than that by one part in so many.
_GROWTH = 4


class BufferPool:
    """Makes, lends and keeps buffers for a wire, within limits. Used by one thread at a time."""

    def __init__(self, wire: Wire, limits: HostLimits) -> None:
        self._wire = wire
        self._limits = limits
        self._free: list[Buffer] = []
        self._is_closed = False
        self.held_bytes = 0  # of all buffers, lent or not
        self.peak_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the buffers that are kept for later."""
        return sum(map(_size, self._free))

    def take(self, num_bytes: int, max_bytes: int | None = None) -> Buffer:
        """Lend the smallest free buffer that is large enough; make one if there is none.

        If lengths differ from batch to batch, one that is too small is discarded for each that is made. So there are
        never more buffers than were once lent at the same time.

        Where `max_bytes` is given, the same buffer will need so much at most, and there is room for that. Without it a
        buffer gets exactly the size, unless it replaces one that was too small: then it is made somewhat larger than
        that one, if all could be, so that a slightly longer batch finds room.

        Raises:
            HostMemoryError: there is not enough memory for another one.
        """
        fitting = [buffer for buffer in self._free if buffer.num_bytes >= num_bytes]
        if fitting:
            buffer = min(fitting, key=_size)
            self._free.remove(buffer)
            return buffer
        size = max(num_bytes, max_bytes or 0)
        if self._free:
            too_small = max(self._free, key=_size)
            if max_bytes is None and self._can_grow():
                size = max(size, too_small.num_bytes + too_small.num_bytes // _GROWTH)
            self._discard(too_small)
        return self._make(size)

    def _can_grow(self) -> bool:
        try:
            self._limits.check(self.held_bytes // _GROWTH, self.held_bytes)
        except HostMemoryError:
            return False
        return True

    def _make(self, num_bytes: int) -> Buffer:
        self._limits.check(num_bytes, self.held_bytes)
        buffer = Buffer(self._allocate(num_bytes))
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return buffer

    def _allocate(self, num_bytes: int) -> HostAllocation:
        try:
            return self._wire.allocate(num_bytes)
        except (OSError, RuntimeError) as error:
            raise self._limits.allocation_error(num_bytes, self.held_bytes, error) from error

    def give_back(self, buffer: Buffer) -> None:
        """Take a buffer back. A copy from or into it may still be under way."""
        self._free.append(buffer)
        if self._is_closed:
            self._discard(buffer)

    def close(self) -> None:
        """Free the buffers that are kept, and from now on each one that comes back."""
        self._is_closed = True
        for buffer in list(self._free):
            self._discard(buffer)

    def _discard(self, buffer: Buffer) -> None:
        self._free.remove(buffer)
        self.held_bytes -= buffer.num_bytes
        buffer.synchronize()
        buffer.memory.free()


@dataclass(slots=True, eq=False)
class OutgoingTensor:
    """A tensor on its way into a buffer."""

    layout: TensorLayout
    copy: AsyncCopy
    source: Tensor | None
    """What the copy reads, as long as it may be under way."""


class BufferedLink(Link):
    """A link whose bytes pass through buffers in host memory, or stay there."""

    def __init__(self, wire: Wire, limits: HostLimits) -> None:
        self._wire = wire
        self._limits = limits
        self._num_tokens = self._max_tokens = 1
        self._has_room = False
        self.pool = BufferPool(wire, limits)

    def _fill(self, tensor: Tensor) -> tuple[OutgoingTensor, Buffer]:
        """Start copying a tensor into a buffer of its size; return the buffer too."""
        self._wire.check(tensor.device)
        layout = TensorLayout.of(tensor)
        source = layout.flat(tensor)
        buffer = self.pool.take(layout.num_bytes, self._max_bytes(layout))
        try:
            copy = self._wire.send(source, buffer)
        except BaseException:
            self.pool.give_back(buffer)
            raise
        return OutgoingTensor(layout, copy, source), buffer

    def wait_for_send(self, handle: Any) -> None:
        """Make the device's later work wait for the copy to the host."""
        outgoing: OutgoingTensor = handle.outgoing
        if outgoing.source is not None:
            outgoing.copy.wait_home_stream()
            outgoing.source = None

    def close(self) -> None:
        """Free the buffers."""
        self.pool.close()

    def expect_batch(self, num_tokens: int, max_tokens: int) -> None:
        """Note the lengths, for the size of buffers."""
        self._num_tokens, self._max_tokens = num_tokens, max(num_tokens, max_tokens)

    def _max_bytes(self, layout: TensorLayout) -> int | None:
        """Return what such a tensor takes in the longest batch; None if unknown, or if there is no room."""
        # A row of numbers for each token, or several.
        grows = layout.shape[:-1].numel() % self._num_tokens == 0
        return self._in_longest(layout.num_bytes) if grows and self._has_room else None

    def _in_longest(self, num_bytes: int) -> int:
        return num_bytes * self._max_tokens // self._num_tokens

    def _make_room(self, num_bytes: int) -> None:
        """Decide whether buffers are made for the longest batch: yes, if there is room for those of all layers.

        `num_bytes` are still to come of this batch.
        """
        if self._max_tokens == self._num_tokens or self._has_room:
            return
        held = self.pool.held_bytes
        with suppress(HostMemoryError):
            self._limits.check(self._in_longest(num_bytes + held - self.pool.free_bytes) - held, held)
            self._has_room = True

    @property
    def host_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.pool.held_bytes

    @property
    def peak_host_bytes(self) -> int:
        """The most that the buffers have taken."""
        return self.pool.peak_bytes


@dataclass(slots=True, eq=False)
class HostHandle:
    """A tensor whose bytes are in host memory, or on their way there."""

    outgoing: OutgoingTensor
    buffer: Buffer
    incoming: IncomingTensor | None = None


class HostLink(BufferedLink):
    """Keeps what is sent in host memory."""

    def __init__(self, wire: Wire, limits: HostLimits) -> None:
        super().__init__(wire, limits)
        self.survives_fork = wire.survives_fork
        self.timed_wire = wire

    def send(self, tensor: Tensor) -> HostHandle:
        """Start copying into a buffer of the tensor's size."""
        return HostHandle(*self._fill(tensor))

    def prefetch(self, handle: HostHandle) -> None:
        """Start the copy to the device."""
        if handle.incoming is None:
            handle.incoming = self._wire.fetch(handle.buffer, handle.outgoing.layout)

    def cancel(self, handle: HostHandle) -> None:
        """Let go of the tensor that was on its way."""
        incoming, handle.incoming = handle.incoming, None
        if incoming is not None:
            incoming.drop()

    def receive(self, handle: HostHandle) -> Tensor:
        """Return the tensor that is on its way, or fetch it now."""
        self.prefetch(handle)
        incoming, handle.incoming = handle.incoming, None
        assert incoming is not None, "prefetch has just made it"
        return incoming.take()

    def release(self, handle: HostHandle) -> None:
        """Give the buffer back to the pool."""
        self.wait_for_send(handle)
        self.cancel(handle)
        self.pool.give_back(handle.buffer)

    def check_room(self, num_bytes: int) -> None:
        """Compare what is to come with the limits; free buffers count for it."""
        self._limits.check(num_bytes - self.pool.free_bytes, self.pool.held_bytes)
        self._make_room(num_bytes)

    def copy_events(self, handle: HostHandle) -> tuple[torch.Event, torch.Event] | None:
        """See `Link`."""
        return handle.outgoing.copy.events()
