"""What the engine asks of the way to the host and back, and what that asks of a device.

A `Link` takes whole tensors and decides where their bytes wait. A `Wire` moves bytes between a device and a buffer in
host memory. Protocols, and the few values that pass between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_ckpt.regions.offload.tensors import Layout


class Link(Protocol):
    """Takes tensors off the device and brings them back.

    The engine calls it from one thread at a time, in this order for each tensor: `send`, `settle`, then any number of
    times `prefetch` (with `cancel` if it was for nothing) and `receive`, and at last `release`. `release` may come at
    any point after `send`. A parcel is whatever the link likes. Inherit from this class: what has a body below may be
    left as it is.

    Attributes:
        ahead: how many regions ahead of the one in its backward the engine calls `prefetch`.
        seconds_waited: seconds for which `receive` and `send` made their thread wait, in all.
        survives_fork: whether a forked process can go on with it, with what had been sent by then.
    """

    ahead: int = 1
    seconds_waited: float = 0.0
    survives_fork: bool = True

    def send(self, tensor: Tensor) -> Any:
        """Start copying a tensor away and return a parcel.

        The engine keeps the tensor, and so its memory, until it has called `settle`.
        """

    def settle(self, parcel: Any) -> None:
        """See to it that whatever the device does from now on comes after the copy: the tensor may be freed."""

    def prefetch(self, parcel: Any) -> None:
        """Start bringing a tensor back. Makes its memory on the device."""

    def cancel(self, parcel: Any) -> None:
        """Let go of what `prefetch` made."""

    def receive(self, parcel: Any) -> Tensor:
        """Return a tensor that equals what was sent, layout included, to be used on the current stream.

        The link keeps no reference to it. Works without `prefetch`, and again after a `receive`.
        """

    def release(self, parcel: Any) -> None:
        """Free everything that the parcel holds. Nothing is asked of it afterwards."""

    def close(self) -> None:
        """Give back what is kept for later. Parcels that are out stay good."""

    def expect(self, num_bytes: int) -> None:
        """Say whether so many more bytes can be taken, before the first of them comes.

        Raises:
            HostMemoryError: they cannot.
        """

    def foresee(self, num_tokens: int, most_tokens: int) -> None:
        """Say how long the batch is that comes, and how long the longest one will be.

        Args:
            num_tokens: rows times length of the batch that comes.
            most_tokens: the most that will come; as many where that is not known.
        """
        return

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are held now, in use or kept for later."""
        return 0

    @property
    def peak_host_bytes(self) -> int:
        """The most that `host_bytes` has been."""
        return 0

    def mark(self, device: torch.device) -> Mark | None:
        """Return a mark of where the device is now; None where its time cannot be told."""
        return None

    def marks(self, parcel: Any) -> tuple[Mark, Mark] | None:
        """Return marks of where the copy of `send` began and ended; None where its time cannot be told."""
        return None

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """Return how full the device is; None where that cannot be told."""
        return None

    def forget_peak(self, device: torch.device) -> None:
        """Let `peak` of `memory` begin anew. Asked only where `memory` tells one."""
        return


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How full a device is, in bytes.

    Attributes:
        capacity: what this process can have in all.
        allocated: what its tensors take now.
        peak: the most that they took, since the process started or it was begun anew.
    """

    capacity: int
    allocated: int
    peak: int


class Mark(Protocol):
    """A point in what a device does."""

    def seconds_to(self, later: Any) -> float:
        """Return the seconds from here to a later mark. Waits until both have been reached."""


class Trip(Protocol):
    """One copy between a device and a buffer in host memory, under way or done."""

    def wait(self) -> None:
        """Let the calling thread wait until the copy is complete."""

    def order(self) -> None:
        """Let the stream that asked for the copy do whatever it is given from now on after the copy."""

    def order_before(self, stream: Any) -> None:
        """Let a stream, as the wire knows them, do whatever it is given from now on after the copy."""

    def marks(self) -> tuple[Mark, Mark] | None:
        """Return where the copy began and ended; None where it cannot be told."""


class Memory(Protocol):
    """Memory on the host.

    Attributes:
        bytes: it, as a tensor [num_bytes] of bytes.
    """

    bytes: Tensor

    def free(self) -> None:
        """Give it back. No copy may be under way."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory on the host with the last copy that used it.

    Attributes:
        memory: where.
        trip: the last copy from or into it. Whoever uses the memory next comes after that.
    """

    memory: Memory
    trip: Trip | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self.memory.bytes.numel()

    def first(self, num_bytes: int) -> Tensor:
        """Return the first bytes [num_bytes]."""
        return self.memory.bytes[:num_bytes]

    def wait(self) -> None:
        """Let the calling thread wait until no copy is under way."""
        if self.trip is not None:
            self.trip.wait()
        self.trip = None


class Arrival(Protocol):
    """A tensor on its way to a device."""

    def take(self) -> Tensor:
        """Return the tensor, to be used on the current stream, which waits for the copy."""

    def drop(self) -> None:
        """Let go of the tensor: its memory is used again after the copy."""


class Wire(Protocol):
    """Copies between one kind of device and buffers in host memory, beside what the device computes.

    Each copy is left on its buffer as the last one that used it.

    Attributes:
        survives_fork: whether a forked process can go on with it.
    """

    survives_fork: bool

    def check(self, device: torch.device) -> None:
        """Refuse what cannot be: asked before anything is allocated or started for a copy.

        Raises:
            UnsupportedError: the device cannot be given copies now.
        """

    def send(self, source: Tensor, buffer: Buffer) -> Trip:
        """Start copying bytes [n] on a device into a buffer of at least n bytes.

        The copy comes after all that the current stream was given, and after the last one from or into the buffer. The
        caller keeps `source` until the trip has been waited for, or ordered before what could use its memory next.
        """

    def fetch(self, buffer: Buffer, layout: Layout) -> Arrival:
        """Make a tensor on its device and start filling it from a buffer, after the last copy into that."""

    def allocate(self, num_bytes: int) -> Memory:
        """Make memory on the host that copies can use.

        Raises:
            OSError, RuntimeError: the system does not give it.
        """

    def forget_peak(self, device: torch.device) -> None:
        """Let the peak that `memory` returns begin anew."""

    def mark(self, device: torch.device) -> Mark | None:
        """Return a mark of where the current stream of the device is now; None where its time cannot be told."""

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """Return how full the device is; None where that cannot be told."""
