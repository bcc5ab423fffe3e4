"""What links over buffers in host memory have in common: the pool, its limits, the way of a tensor into a buffer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from hf_ckpt.errors import HostMemoryError
from hf_ckpt.regions.offload.limits import HostLimits
from hf_ckpt.regions.offload.link import Buffer, Link, Memory, Trip, Wire
from hf_ckpt.regions.offload.pool import Pool
from hf_ckpt.regions.offload.tensors import Layout


@dataclass(slots=True, eq=False)
class Filling:
    """A tensor on its way into a buffer.

    Attributes:
        layout: what it looks like.
        trip: the copy.
        source: what the copy reads, as long as it may be under way.
    """

    layout: Layout
    trip: Trip
    source: Tensor | None

    def settle(self) -> None:
        """Order the copy before what the device does from now on."""
        if self.source is not None:
            self.trip.order()
            self.source = None


class BufferedLink(Link):
    """A link whose bytes pass through buffers in host memory, or stay there.

    Args:
        wire: copies between device and host.
        limits: how much host memory there may be.

    Attributes:
        pool: the buffers.
    """

    def __init__(self, wire: Wire, limits: HostLimits) -> None:
        self._wire = wire
        self._limits = limits
        self._num_tokens = self._most_tokens = 1
        self._has_room = False
        self.pool = Pool(self._allocate, self._check)

    def _fill(self, tensor: Tensor) -> tuple[Filling, Buffer]:
        """Start copying a tensor into a buffer of its size, and return that too."""
        self._wire.check(tensor.device)
        layout = Layout.of(tensor)
        source = layout.flat(tensor)
        buffer = self.pool.take(layout.num_bytes, self._most_bytes(layout))
        try:
            trip = self._wire.send(source, buffer)
        except BaseException:
            self.pool.give_back(buffer)
            raise
        return Filling(layout, trip, source), buffer

    def foresee(self, num_tokens: int, most_tokens: int) -> None:
        """Take note."""
        self._num_tokens, self._most_tokens = num_tokens, max(num_tokens, most_tokens)

    def _most_bytes(self, layout: Layout) -> int | None:
        """Return what such a tensor takes in the longest batch, if there is room for that; None if it is not known."""
        # A row of numbers for each token, or several.
        grows = layout.shape[:-1].numel() % self._num_tokens == 0
        return self._in_longest(layout.num_bytes) if grows and self._has_room else None

    def _in_longest(self, num_bytes: int) -> int:
        return num_bytes * self._most_tokens // self._num_tokens

    def _make_room(self, num_bytes: int) -> None:
        """Decide whether buffers are made for the longest batch: if there is room for those of all layers.

        Args:
            num_bytes: that are still to come of this batch.
        """
        if self._most_tokens == self._num_tokens or self._has_room:
            return
        held = self.pool.held_bytes
        with suppress(HostMemoryError):
            self._limits.check(self._in_longest(num_bytes + held - self.pool.free_bytes) - held, held)
            self._has_room = True

    def _allocate(self, num_bytes: int) -> Memory:
        try:
            return self._wire.allocate(num_bytes)
        except (OSError, RuntimeError) as error:
            raise self._limits.not_given(num_bytes, self.pool.held_bytes, error) from error

    def _check(self, num_bytes: int) -> None:
        self._limits.check(num_bytes, self.pool.held_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of all buffers."""
        return self.pool.held_bytes

    @property
    def peak_host_bytes(self) -> int:
        """The most that the buffers have taken."""
        return self.pool.peak_bytes
