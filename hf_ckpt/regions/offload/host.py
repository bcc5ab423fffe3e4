"""A link to buffers in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_ckpt.regions.offload.buffered import BufferedLink, Filling
from hf_ckpt.regions.offload.limits import HostLimits
from hf_ckpt.regions.offload.link import Arrival, Buffer, DeviceMemory, Mark, Wire


@dataclass(slots=True, eq=False)
class HostParcel:
    """A tensor whose bytes are in host memory, or on their way there.

    Attributes:
        filling: its way there.
        buffer: where its bytes wait.
        arrival: the tensor that is on its way back, if one is.
    """

    filling: Filling
    buffer: Buffer
    arrival: Arrival | None = None


class HostLink(BufferedLink):
    """Keeps what is sent in host memory. See `BufferedLink`."""

    def __init__(self, wire: Wire, limits: HostLimits) -> None:
        super().__init__(wire, limits)
        self.survives_fork = wire.survives_fork

    def send(self, tensor: Tensor) -> HostParcel:
        """Start copying into a buffer of the tensor's size."""
        return HostParcel(*self._fill(tensor))

    def settle(self, parcel: HostParcel) -> None:
        """Order the copy before what the device does from now on."""
        parcel.filling.settle()

    def prefetch(self, parcel: HostParcel) -> None:
        """Start the copy to the device."""
        if parcel.arrival is None:
            parcel.arrival = self._wire.fetch(parcel.buffer, parcel.filling.layout)

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
        self._make_room(num_bytes)

    def mark(self, device: torch.device) -> Mark | None:
        """Ask the wire."""
        return self._wire.mark(device)

    def marks(self, parcel: HostParcel) -> tuple[Mark, Mark] | None:
        """Ask the copy."""
        return parcel.filling.trip.marks()

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """Ask the wire."""
        return self._wire.memory(device)

    def forget_peak(self, device: torch.device) -> None:
        """Ask the wire."""
        self._wire.forget_peak(device)
