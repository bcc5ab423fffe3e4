"""What links over buffers in host memory have in common: the pool, its limits, the way of a tensor into a buffer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_ckpt.regions.offload.limits import HostLimits
from hf_ckpt.regions.offload.link import Buffer, Link, Trip, Wire
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
        self.pool = Pool(wire.allocate, self._check)

    def _fill(self, tensor: Tensor) -> tuple[Filling, Buffer]:
        """Start copying a tensor into a buffer of its size, and return that too."""
        layout = Layout.of(tensor)
        source = layout.flat(tensor)
        buffer = self.pool.take(layout.num_bytes)
        try:
            trip = self._wire.send(source, buffer)
        except BaseException:
            self.pool.give_back(buffer)
            raise
        return Filling(layout, trip, source), buffer

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
