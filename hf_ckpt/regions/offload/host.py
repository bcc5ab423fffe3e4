"""A link to buffers in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_ckpt.regions.offload.limits import HostLimits
from hf_ckpt.regions.offload.link import Arrival, Buffer, DeviceMemory, Link, Mark, Trip, Wire
from hf_ckpt.regions.offload.pool import Pool
from hf_ckpt.regions.offload.tensors import Layout


@dataclass(slots=True, eq=False)
class HostParcel:
    """A tensor whose bytes are in host memory, or on their way there.

    Attributes:
        layout: what it looks like.
        buffer: where its bytes wait.
        trip: the copy into that.
        source: what the copy reads, as long as it may be under way.
        arrival: the tensor that is on its way back, if one is.
    """

    layout: Layout
    buffer: Buffer
    trip: Trip
    source: Tensor | None
    arrival: Arrival | None = None


class HostLink(Link):
    """Keeps what is sent in host memory.

    Args:
        wire: copies between device and host.
        limits: how much memory there may be.

    Attributes:
        pool: its buffers.
    """

    def __init__(self, wire: Wire, limits: HostLimits) -> None:
        self._wire = wire
        self._limits = limits
        self.pool = Pool(wire.allocate, self._check)

    def send(self, tensor: Tensor) -> HostParcel:
        """Start copying into a buffer of the tensor's size."""
        layout = Layout.of(tensor)
        source = layout.flat(tensor)
        buffer = self.pool.take(layout.num_bytes)
        try:
            trip = self._wire.send(source, buffer)
        except BaseException:
            self.pool.give_back(buffer)
            raise
        return HostParcel(layout, buffer, trip, source)

    def settle(self, parcel: HostParcel) -> None:
        """Order the copy before what the device does from now on."""
        if parcel.source is not None:
            parcel.trip.order()
            parcel.source = None

    def prefetch(self, parcel: HostParcel) -> None:
        """Start the copy to the device."""
        if parcel.arrival is None:
            parcel.arrival = self._wire.fetch(parcel.buffer, parcel.layout)

    def cancel(self, parcel: HostParcel) -> None:
        """Let go of the tensor that was on its way."""
        arrival, parcel.arrival = parcel.arrival, None
        if arrival is not None:
            arrival.drop()

    def receive(self, parcel: HostParcel) -> Tensor:
        """Return the tensor that is on its way, or fetch it now."""
        self.prefetch(parcel)
        arrival, parcel.arrival = parcel.arrival, None
        assert arrival is not None, "prefetch has just made it"
        return arrival.take()

    def release(self, parcel: HostParcel) -> None:
        """Give the buffer back to the pool."""
        self.settle(parcel)
        self.cancel(parcel)
        self.pool.give_back(parcel.buffer)

    def close(self) -> None:
        """Give up the buffers."""
        self.pool.close()

    def expect(self, num_bytes: int) -> None:
        """Compare what is to come with the limits; free buffers count for it."""
        self._limits.check(num_bytes - self.pool.free_bytes, self.pool.held_bytes)

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

    def mark(self, device: torch.device) -> Mark | None:
        """Ask the wire."""
        return self._wire.mark(device)

    def marks(self, parcel: HostParcel) -> tuple[Mark, Mark] | None:
        """Ask the copy."""
        return parcel.trip.marks()

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """Ask the wire."""
        return self._wire.memory(device)
