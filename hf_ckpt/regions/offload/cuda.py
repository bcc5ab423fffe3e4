"""Copies on streams of their own, into pinned memory of exact size, while the device computes.

Note on memory and streams. The caching allocator hands freed memory out again at once, to the stream that it was
allocated on: what that stream is given later comes after what it was given before, and the allocator knows of no other
stream. So

1. a copy away starts behind everything the compute stream has been given, and its source is let go only after the
   compute stream waits for the copy (`CudaCopy.wait_home_stream`);
2. what is copied back is allocated on the compute stream. The copy starts behind everything that stream has been given
   (which may still use the memory's former content), and nobody touches the tensor before the stream it is used on
   waits for the copy (`CudaIncomingTensor.take`); one that is never used is let go in the same way (`drop`);
3. a buffer on the host carries its last copy, and the next one, either way, starts behind it.

No thread waits in any of this, and no tensor is kept alive for a guessed time.

Note on CUDA graphs. A graph replays copies from and into the same addresses. Here Python chooses a free buffer for each
tensor, and a replay does not run Python: the buffers of one step would be handed to another while the graph still
writes them. So nothing is sent while a stream is captured.
"""

from __future__ import annotations

import mmap
import os
import sys
import warnings
import weakref
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.offload.transfer import (
    AsyncCopy,
    Buffer,
    DeviceMemory,
    HostAllocation,
    IncomingTensor,
    TensorLayout,
    Wire,
)


class CudaDevice:
    """What the wire needs of torch.cuda; tests put something else in its place."""

    def __init__(self) -> None:
        self._pins_pages = sys.platform == "linux"

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream is being captured into a graph."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream that work for the device is given to in this thread."""
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Make a stream."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Make a stream the current one for a while."""
        return torch.cuda.stream(stream)

    def record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event that is reached when a stream has done what it was given; its time can be read."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Give a copy to the current stream, and return at once; the host's side is pinned."""
        target.copy_(source, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Give a tensor's memory back, when it is freed, only behind what a stream has been given by then."""
        tensor.record_stream(stream)

    def allocate(self, num_bytes: int, *, in_forks: bool = False) -> HostAllocation:
        """Allocate pinned memory: pages of our own where the system lets us, else what torch gives (a power of two).

        Raises:
            RuntimeError: neither can be had.
        """
        if self._pins_pages:
            try:
                return PinnedPages(num_bytes, in_forks=in_forks)
            except PinningError as error:
                self._pins_pages = False
                warnings.warn(
                    f"Host memory for offload is pinned by torch, which rounds up to a power of two: {error}.",
                    stacklevel=2,
                )
        return PinnedByTorch(num_bytes)

    def map(self, memory: HostAllocation, device: torch.device) -> Tensor:
        """See `Wire.map`: pinned memory has the same address on a CUDA device, which reads it over the link.

        vLLM keeps weights in host memory in the same way (`get_cuda_view_from_cpu_tensor`).
        """
        try:
            mapped: Tensor = torch.as_tensor(_MappedMemory(memory), device=device)
        except (RuntimeError, ValueError) as error:
            raise UnsupportedError(f"{device} cannot read host memory in place: {error}. {_NOT_MAPPED}") from error
        if mapped.data_ptr() != memory.bytes.data_ptr():
            # torch has copied it: it was pinned for another device.
            raise UnsupportedError(
                f"{device} cannot read host memory in place: it was pinned by another device. Call "
                f"torch.cuda.set_device({device.index}) before, or: {_NOT_MAPPED}"
            )
        return mapped

    def memory(self, device: torch.device) -> DeviceMemory:
        """Return what torch may use of the device, given its own cap and other processes, and what it uses."""
        free, total = torch.cuda.mem_get_info(device)
        cap = int(total * torch.cuda.get_per_process_memory_fraction(device))
        capacity = min(cap, free + torch.cuda.memory_reserved(device))
        return DeviceMemory(capacity, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))

    def allocated(self, device: torch.device) -> int:
        """Return what torch has allocated; asks its count, and not the driver."""
        return torch.cuda.memory_allocated(device)

    def reset_peak(self, device: torch.device) -> None:
        """Restart torch's peaks. Offload never does."""
        torch.cuda.reset_peak_memory_stats(device)


_NOT_MAPPED = "Leave the embedding on the device (embedding: device)."


class _MappedMemory:
    """Pinned memory as torch takes memory of a device: it holds this object for as long as it uses the memory."""

    def __init__(self, memory: HostAllocation) -> None:
        self._memory = memory
        address, num_bytes = memory.bytes.data_ptr(), memory.bytes.numel()
        # (address, is it read-only); see Numba's CUDA Array Interface.
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
        # What was given to the device may still read it. At the end of the process the system frees it.
        weakref.finalize(self, _wait_for_readers, os.getpid()).atexit = False


def _wait_for_readers(process: int) -> None:
    # A forked process has given nothing to a device, and cannot use it.
    if os.getpid() == process:
        _wait_for_devices()


class CudaWire(Wire):
    """A `Wire` between CUDA devices and pinned memory."""

    # CUDA cannot be used there, and pinned pages are not shared with it.
    survives_fork = False

    def __init__(self, device: CudaDevice | None = None) -> None:
        self._device = device or CudaDevice()
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    def _streams_of(self, device: torch.device) -> tuple[Any, Any]:
        """Return the streams of a device for copies out of it and into it."""
        if device not in self._streams:
            self._streams[device] = (self._device.new_stream(device), self._device.new_stream(device))
        return self._streams[device]

    def check(self, device: torch.device) -> None:
        """Refuse to copy while a graph is captured. See the note on CUDA graphs."""
        if self._device.is_capturing(device):
            raise UnsupportedError(
                f"A layer with offload runs while a CUDA graph is captured on {device}, but a graph replays its copies "
                "without asking which buffers are free. Leave offload out of the policy, or capture no graph around "
                'the step (torch.cuda.graph, make_graphed_callables, torch.compile with mode="reduce-overhead").'
            )

    def send(self, source: Tensor, buffer: Buffer) -> CudaCopy:
        """Start copying bytes into a buffer."""
        home_stream = self._device.current_stream(source.device)
        out, _ = self._streams_of(source.device)
        return self._copy(buffer.first(source.numel()), source, buffer, home_stream, out)

    def fetch(self, buffer: Buffer, layout: TensorLayout) -> CudaIncomingTensor:
        """Make a tensor and start filling it from a buffer."""
        self.check(layout.device)
        home_stream = self._device.current_stream(layout.device)
        _, into = self._streams_of(layout.device)
        tensor, content = layout.empty()
        copy = self._copy(content, buffer.first(content.numel()), buffer, home_stream, into)
        return CudaIncomingTensor(self._device, tensor, layout, copy)

    def _copy(self, target: Tensor, source: Tensor, buffer: Buffer, home_stream: Any, copy_stream: Any) -> CudaCopy:
        copy_stream.wait_stream(home_stream)
        if buffer.last_copy is not None:
            buffer.last_copy.wait_stream(copy_stream)
        began = self._device.record_event(copy_stream)
        with self._device.on(copy_stream):
            self._device.copy(target, source)
        buffer.last_copy = copy = CudaCopy(home_stream, began, self._device.record_event(copy_stream))
        return copy

    def fill(self, target: Tensor, buffer: Buffer) -> CudaCopy:
        """Start filling memory of the current stream from a buffer."""
        home_stream = self._device.current_stream(target.device)
        _, into = self._streams_of(target.device)
        return self._copy(target, buffer.first(target.numel()), buffer, home_stream, into)

    def wait(self, copy: AsyncCopy, device: torch.device) -> None:
        """Make the current stream wait for a copy."""
        copy.wait_stream(self._device.current_stream(device))

    def allocate(self, num_bytes: int, *, in_forks: bool = False) -> HostAllocation:
        """See `CudaDevice.allocate`."""
        return self._device.allocate(num_bytes, in_forks=in_forks)

    def map(self, memory: HostAllocation, device: torch.device) -> Tensor:
        """See `CudaDevice.map`."""
        return self._device.map(memory, device)

    def record_event(self, device: torch.device) -> torch.cuda.Event:
        """Record an event on the current stream."""
        return self._device.record_event(self._device.current_stream(device))

    def memory(self, device: torch.device) -> DeviceMemory:
        """See `CudaDevice.memory`."""
        return self._device.memory(device)

    def allocated(self, device: torch.device) -> int:
        """See `CudaDevice.allocated`."""
        return self._device.allocated(device)


class CudaCopy(AsyncCopy):
    """A copy on a stream of its own, asked for by `home_stream`, between the events `began` and `ended`."""

    def __init__(self, home_stream: Any, began: Any, ended: Any) -> None:
        self.home_stream = home_stream
        self._began = began
        self._ended = ended

    def synchronize(self) -> None:
        """Make the calling thread wait."""
        self._ended.synchronize()

    def wait_home_stream(self) -> None:
        """Make the stream that asked for the copy wait, with all that it is given from now on."""
        self.wait_stream(self.home_stream)

    def wait_stream(self, stream: Any) -> None:
        """Make a stream wait, with all that it is given from now on."""
        stream.wait_event(self._ended)

    def events(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Return where the copy began and ended."""
        return self._began, self._ended


class CudaIncomingTensor(IncomingTensor):
    """A tensor that is being filled; its memory belongs to the stream that asked for it."""

    def __init__(self, device: CudaDevice, tensor: Tensor, layout: TensorLayout, copy: CudaCopy) -> None:
        super().__init__(tensor)
        self._device = device
        self._layout = layout
        self._async_copy = copy

    def take(self) -> Tensor:
        """Return the tensor; the current stream waits for it."""
        tensor = super().take()
        stream = self._device.current_stream(self._layout.device)
        self._async_copy.wait_stream(stream)
        if stream != self._async_copy.home_stream:
            # Its memory must not go back to the stream that asked for it while this one uses it.
            self._device.record_stream(tensor, stream)
        return self._layout.finish(tensor)

    def drop(self) -> None:
        """Let go of the tensor: what uses its memory next comes after the copy."""
        self._async_copy.wait_home_stream()
        super().drop()


class PinningError(Exception):
    """The driver does not pin the pages that it was given."""


class PinnedPages(HostAllocation):
    """Whole pages of this process, pinned by the driver, which raises a `PinningError` where it does not.

    `pin_memory` of torch rounds up to a power of two (1.2 GiB take 2). Forked processes (data loaders) do not have the
    pages: copy-on-write would move them away from where the device writes. With `in_forks` they have the same ones.
    """

    def __init__(self, num_bytes: int, *, in_forks: bool = False) -> None:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # Of private pages that are pinned Linux makes a copy for each process when it forks, from 5.9 on.
        flags = mmap.MAP_SHARED if in_forks else mmap.MAP_PRIVATE
        pages = mmap.mmap(-1, size, flags=flags | mmap.MAP_ANONYMOUS)
        _advise(pages, in_forks=in_forks)
        super().__init__(torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes))
        address = self.bytes.data_ptr()
        # 1: cudaHostRegisterPortable, pinned for all devices.
        status = int(torch.cuda.cudart().cudaHostRegister(address, size, 1))  # type: ignore[no-untyped-call]
        if status:
            _clear_pending_error()
            raise PinningError(f"cudaHostRegister returned error {status}")
        # Also when the model is dropped with nobody calling `free`; at the end of the process the system does it.
        self._lost = weakref.finalize(self, _unpin_lost, address, pages, os.getpid())
        self._lost.atexit = False

    def free(self) -> None:
        """Unpin the pages; they go back to the system with the last reference to `bytes`."""
        if self._lost.detach() is not None:
            _unpin(self.bytes.data_ptr())
        super().free()


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _unpin_lost(address: int, pages: mmap.mmap, process: int) -> None:
    """Unpin pages that nobody freed, after whatever may still be copying. A forked process has none of them."""
    if os.getpid() == process:
        _wait_for_devices()
        _unpin(address)
    del pages


def _wait_for_devices() -> None:
    """Wait for every device that this process uses: the pages are pinned for all, and any could be copying."""
    for index in range(torch.cuda.device_count()):
        # Asking a device that is not used would start a context there, which takes memory of it.
        if torch.cuda.memory_reserved(index) or index == torch.cuda.current_device():
            torch.cuda.synchronize(index)


def _advise(pages: mmap.mmap, *, in_forks: bool) -> None:
    # Large pages are pinned faster; where the kernel has none of either, nothing is lost.
    for name in ("MADV_HUGEPAGE",) if in_forks else ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        advice = getattr(mmap, name, None)
        if advice is not None:
            with suppress(OSError):
                pages.madvise(advice)


def _clear_pending_error() -> None:
    """Run a trivial kernel, to report the error that the refused call has left for the next one."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)


class PinnedByTorch(HostAllocation):
    """Pinned memory of torch, which rounds up to a power of two."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))
