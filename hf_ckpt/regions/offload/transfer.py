"""What goes between device and host: how tensors become bytes and tensors again, and who carries them.

A `Link` takes whole tensors and decides where their bytes wait (`host_buffers`, `disk`). A `Wire` copies bytes between
a device and a buffer in host memory; `CudaWire` of `cuda` does so on streams of its own. Knows no layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_ckpt.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Everything about a tensor but its values: enough to build another one like it.

    Strides are part of it: recomputing from another layout could take another kernel, and differ in the last bit.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Read the layout of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements, gaps excluded."""
        return self.shape.numel() * self.dtype.itemsize

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the elements of such a tensor as bytes [num_bytes]: a view if it has no gaps, else a copy."""
        plain = tensor.resolve_conj().resolve_neg()
        dense = plain if _is_dense(plain.shape, plain.stride()) else plain.contiguous()
        return _bytes_in_memory(dense)

    def empty(self) -> tuple[Tensor, Tensor]:
        """Return a new tensor on the device, to be filled, and its bytes [num_bytes] in the order of `flat`."""
        # If the layout has gaps, the new tensor is dense; `finish` makes the gaps.
        if self._has_gaps():
            tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        else:
            tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return tensor, _bytes_in_memory(tensor)

    def finish(self, tensor: Tensor) -> Tensor:
        """Return what `empty` made and somebody filled, in this layout."""
        if not self._has_gaps():
            return tensor
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).copy_(tensor)

    def _has_gaps(self) -> bool:
        return not _is_dense(self.shape, self.strides)


# What two tensors share that hold the same values in the same memory.
StorageKey = tuple[Any, ...]


def storage_key(tensor: Tensor) -> tuple[StorageWeakRef, StorageKey]:
    """Return a key that no tensor of other values has, for as long as the weak reference is held."""
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    where = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
    return storage, (*where, tensor.dtype, tensor._version)


def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for stride, length in sorted(
        (stride, length) for length, stride in zip(shape, strides, strict=True) if length != 1
    ):
        if stride != expected:
            return False
        expected *= length
    return True


def _bytes_in_memory(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# --- Who carries them. ---


class Link:
    """Takes tensors off the device and brings them back.

    The offloader calls it from one thread at a time. The order for each tensor is `send`, `wait_for_send`, any number
    of `prefetch` (with `cancel` if it was for nothing) and `receive`, and at last `release`, which may come at any
    point after `send`. A handle is whatever the link likes. Links inherit from this class, and may leave as it is what
    they have no use for.
    """

    ahead: int = 1
    """How many regions ahead of the one in its backward `prefetch` is called."""
    seconds_waited: float = 0.0
    """Seconds for which `receive` and `send` made their thread wait, in all."""
    survives_fork: bool = True
    """Whether a forked process can go on with the link and what had been sent by then."""
    timed_wire: Wire | None = None
    """The wire, if a copy over it is all that sending takes, so that layers are paced by what it measures."""

    def send(self, tensor: Tensor) -> Any:
        """Start copying a tensor away and return a handle. The caller keeps the tensor until `wait_for_send`."""

    def wait_for_send(self, handle: Any) -> None:
        """Make the device's later work wait for the copy: from then on the tensor may be freed."""

    def prefetch(self, handle: Any) -> None:
        """Start bringing a tensor back. Allocates its memory on the device."""

    def cancel(self, handle: Any) -> None:
        """Let go of what `prefetch` made."""

    def receive(self, handle: Any) -> Tensor:
        """Return a tensor equal to the one sent, layout included, for use on the current stream.

        The link keeps no reference to it. Works without `prefetch`, and again after a `receive`.
        """
        raise NotImplementedError

    def release(self, handle: Any) -> None:
        """Free everything that the handle holds. It is not used afterwards."""

    def close(self) -> None:
        """Give back what is kept for later use. Handles that are out stay good."""

    def check_room(self, num_bytes: int) -> None:
        """Check, before the first of them comes, that so many more bytes can be taken.

        Raises:
            HostMemoryError: they cannot.
        """

    def expect_batch(self, num_tokens: int, max_tokens: int) -> None:
        """Announce the tokens (rows times length) of the next batch and of the longest; the same if unknown."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are held now, in use or kept for later."""
        return 0

    @property
    def peak_host_bytes(self) -> int:
        """The largest value that `host_bytes` has had."""
        return 0

    def copy_events(self, handle: Any) -> tuple[torch.Event, torch.Event] | None:
        """Return the events at which the copy of `send` began and ended; None if the device cannot time its work."""
        return None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How full a device is, in bytes."""

    capacity: int
    """What this process can have in all."""
    allocated: int
    peak: int
    """The most that was allocated, since the process started or the peak was reset."""


class AsyncCopy:
    """One copy between a device and a buffer in host memory: this one is done, so that nobody waits for it."""

    def synchronize(self) -> None:
        """Make the calling thread wait until the copy is complete."""

    def wait_home_stream(self) -> None:
        """Make the stream that asked for the copy wait for it, with all that the stream is given from now on."""

    def wait_stream(self, stream: Any) -> None:
        """Make a stream (one of the wire's own kind) wait for the copy, with all that it is given from now on."""

    def events(self) -> tuple[torch.Event, torch.Event] | None:
        """Return the events at which the copy began and ended; None if they cannot be timed."""
        return None


class HostAllocation:
    """Memory on the host: `bytes`."""

    def __init__(self, content: Tensor) -> None:
        self.bytes = content

    def free(self) -> None:
        """Give it back, to torch if it came from there. No copy may be under way."""
        self.bytes = torch.empty(0, dtype=torch.uint8)


class PageableMemory(HostAllocation):
    """Ordinary host memory, as torch gives it."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory on the host, with the last copy that used it."""

    memory: HostAllocation
    last_copy: AsyncCopy | None = None
    """From or into it. Whoever uses the memory next comes after that."""

    @property
    def num_bytes(self) -> int:
        """Size of the memory."""
        return self.memory.bytes.numel()

    def first(self, num_bytes: int) -> Tensor:
        """Return the first bytes, as a tensor [num_bytes]."""
        return self.memory.bytes[:num_bytes]

    def synchronize(self) -> None:
        """Make the calling thread wait until no copy is under way."""
        if self.last_copy is not None:
            self.last_copy.synchronize()
        self.last_copy = None


class IncomingTensor:
    """A tensor on its way to a device; there already, unless a class of its own says how to wait for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def take(self) -> Tensor:
        """Return the tensor, for use on the current stream, which waits for the copy."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "an arrival is taken once"
        return tensor

    def drop(self) -> None:
        """Let go of the tensor: its memory is used again only after the copy."""
        self._tensor = None


class Wire:
    """Copies between one kind of device and buffers in host memory, while the device computes.

    Each copy is left on its buffer as the last one that used it. Here copies are complete when the call returns: on the
    CPU, and on devices without streams of their own. Nothing runs at the same time as a copy, so there is nothing to
    time.
    """

    survives_fork: bool = True
    """See `Link`."""

    def check(self, device: torch.device) -> None:
        """Check that the device can be given copies now. Called before anything is allocated or started for a copy.

        Raises:
            UnsupportedError: it cannot.
        """

    def send(self, source: Tensor, buffer: Buffer) -> AsyncCopy:
        """Start copying bytes [n] on a device into a buffer of at least n bytes.

        The copy comes after everything that the current stream was given, and after the last copy from or into the
        buffer. The caller keeps `source` until the copy has been waited for, or ordered before whatever could use its
        memory next.
        """
        buffer.first(source.numel()).copy_(source)
        buffer.last_copy = copy = AsyncCopy()
        return copy

    def fetch(self, buffer: Buffer, layout: TensorLayout) -> IncomingTensor:
        """Make a tensor on its device and start filling it from a buffer, after the last copy into that."""
        tensor, content = layout.empty()
        content.copy_(buffer.first(content.numel()))
        return IncomingTensor(layout.finish(tensor))

    def fill(self, target: Tensor, buffer: Buffer) -> AsyncCopy:
        """Start copying the first bytes of a buffer into memory [n] that the current stream has just allocated.

        `wait` comes before the first use, `AsyncCopy.wait_home_stream` where there is none.
        """
        target.copy_(buffer.first(target.numel()))
        return AsyncCopy()

    def wait(self, copy: AsyncCopy, device: torch.device) -> None:
        """Make the current stream wait for a copy of `fill`, with all that it is given from now on."""

    def allocate(self, num_bytes: int, *, in_forks: bool = False) -> HostAllocation:
        """Allocate host memory that copies can use.

        `in_forks`: forked processes may read it too. Only for what is written once.

        Raises:
            OSError, RuntimeError: the system does not give it.
        """
        return PageableMemory(num_bytes)

    def map(self, memory: HostAllocation, device: torch.device) -> Tensor:
        """Return host memory as a tensor [num_bytes] of a device, which reads it in place.

        The tensor, and what is made of it, keep the memory. It is for the device alone to write to.

        Raises:
            UnsupportedError: the device cannot read it.
        """
        if device.type == "cpu":
            return memory.bytes
        raise UnsupportedError(f"Device {device} cannot read host memory in place. Write embedding: device.")

    def record_event(self, device: torch.device) -> torch.Event | None:
        """Return an event at the current place in the device's work; None if the device cannot time its work."""
        return None

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """Return how full the device is; None if it does not say."""
        return None

    def allocated(self, device: torch.device) -> int:
        """Return what this process has allocated of the device, in bytes. Called only if `memory` says it too."""
        raise NotImplementedError
