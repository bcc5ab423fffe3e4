"""Copies on streams of their own, into pinned memory of exact size, beside what the device computes.

Note on memory and streams. The caching allocator hands freed memory out again at once, to the stream that it was
allocated on: what that stream is given later comes after what it was given before, and the allocator knows of no other
stream. So
1. a copy away starts behind everything the compute stream has been given, and its source is let go only after the
   compute stream has been told to wait for the copy (`CudaTrip.order`);
2. what is copied back is allocated on the compute stream, the copy starts behind everything that stream has been
   given (which may still use the memory's former content), and nobody touches the tensor before the stream it is used
   on has been told to wait (`CudaArrival.take`); one that is never used is let go in the same way (`drop`);
3. a buffer on the host carries its last copy, and the next one, either way, starts behind it.
No thread waits in any of this, and no tensor is kept alive for a guessed time.

Note on CUDA graphs. A graph replays copies from and into the same addresses. What is sent here goes to whichever buffer
is free, by Python, which a replay does not run: the buffers of one step would be handed to another while the graph
still writes them. So nothing is sent while a stream is captured.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.offload.link import Buffer, DeviceMemory, Memory
from hf_ckpt.regions.offload.pinned import PinnedByTorch, PinnedPages, PinningError
from hf_ckpt.regions.offload.tensors import Layout


class Device(Protocol):
    """What is asked of a device: `Cuda`, or something that tests put in its place."""

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the stream in force is being captured into a graph."""

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream that work for the device is given to in this thread."""

    def new_stream(self, device: torch.device) -> Any:
        """Make a stream."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Give work to a stream for a while."""

    def mark(self, stream: Any) -> Any:
        """Return an event that is reached when a stream has done what it was given."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Give a copy to the stream in force, and return at once."""

    def lend(self, tensor: Tensor, stream: Any) -> None:
        """Give a tensor's memory back, when it is freed, only behind what a stream has been given by then."""

    def allocate(self, num_bytes: int) -> Memory:
        """Make pinned memory."""

    def memory(self, device: torch.device) -> DeviceMemory:
        """Return what the device has, what is allocated, and the most that was."""

    def forget_peak(self, device: torch.device) -> None:
        """Let the peak that `memory` returns begin anew."""


class Cuda:
    """A `Device` that is one."""

    def __init__(self) -> None:
        self._pins_pages = sys.platform == "linux"

    def is_capturing(self, device: torch.device) -> bool:
        """Ask the runtime."""
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream in force."""
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Make a stream."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Put a stream in force."""
        return torch.cuda.stream(stream)

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record an event whose time can be read."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy without waiting; the host's side is pinned."""
        target.copy_(source, non_blocking=True)

    def lend(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Tell the allocator."""
        tensor.record_stream(stream)

    def allocate(self, num_bytes: int) -> Memory:
        """Make pinned memory: pages of our own where the system lets us, else what torch gives (a power of two).

        Raises:
            RuntimeError: neither can be had.
        """
        if self._pins_pages:
            try:
                return PinnedPages(num_bytes)
            except PinningError as error:
                self._pins_pages = False
                warnings.warn(
                    f"Host memory for offload is pinned by torch, which rounds up to a power of two: {error}.",
                    stacklevel=2,
                )
        return PinnedByTorch(num_bytes)

    def memory(self, device: torch.device) -> DeviceMemory:
        """Return what torch may use of the device (its own cap and other processes considered), and what it uses."""
        free, total = torch.cuda.mem_get_info(device)
        cap = int(total * torch.cuda.get_per_process_memory_fraction(device))
        capacity = min(cap, free + torch.cuda.memory_reserved(device))
        return DeviceMemory(capacity, torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))

    def forget_peak(self, device: torch.device) -> None:
        """Let torch count its peaks anew."""
        torch.cuda.reset_peak_memory_stats(device)


class CudaWire:
    """A `Wire` between CUDA devices and pinned memory.

    Args:
        device: replaced in tests.
    """

    # CUDA cannot be used there, and pinned pages are not shared with it.
    survives_fork = False

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or Cuda()
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    def _both(self, device: torch.device) -> tuple[Any, Any]:
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

    def send(self, source: Tensor, buffer: Buffer) -> CudaTrip:
        """Start copying bytes into a buffer."""
        home = self._device.current_stream(source.device)
        out, _ = self._both(source.device)
        return self._copy(buffer.first(source.numel()), source, buffer, home, out)

    def fetch(self, buffer: Buffer, layout: Layout) -> CudaArrival:
        """Make a tensor and start filling it from a buffer."""
        self.check(layout.device)
        home = self._device.current_stream(layout.device)
        _, into = self._both(layout.device)
        tensor, content = layout.empty()
        trip = self._copy(content, buffer.first(content.numel()), buffer, home, into)
        return CudaArrival(self._device, tensor, layout, trip)

    def _copy(self, target: Tensor, source: Tensor, buffer: Buffer, home: Any, lane: Any) -> CudaTrip:
        lane.wait_stream(home)
        if buffer.trip is not None:
            buffer.trip.order_before(lane)
        began = self._device.mark(lane)
        with self._device.on(lane):
            self._device.copy(target, source)
        buffer.trip = trip = CudaTrip(home, began, self._device.mark(lane))
        return trip

    def allocate(self, num_bytes: int) -> Memory:
        """Make pinned memory: pages of our own where the system lets us, else what torch gives (a power of two).

        Raises:
            RuntimeError: neither can be had.
        """
        return self._device.allocate(num_bytes)

    def mark(self, device: torch.device) -> CudaMark:
        """Return a mark of where the stream in force is now."""
        return CudaMark(self._device.mark(self._device.current_stream(device)))

    def memory(self, device: torch.device) -> DeviceMemory:
        """Return what the device has, what is allocated, and the most that was."""
        return self._device.memory(device)

    def forget_peak(self, device: torch.device) -> None:
        """Let the peak begin anew."""
        self._device.forget_peak(device)


class CudaMark:
    """A point in what a stream does.

    Args:
        event: recorded there.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def seconds_to(self, later: Any) -> float:
        """Return the seconds from here to there, and wait until both have been reached."""
        later._event.synchronize()
        milliseconds: float = self._event.elapsed_time(later._event)
        return milliseconds / 1000


class CudaTrip:
    """A copy on a stream of its own.

    Args:
        home: the stream that asked for it.
        began: event before the copy.
        ended: event behind it.
    """

    def __init__(self, home: Any, began: Any, ended: Any) -> None:
        self.home = home
        self._began = began
        self._ended = ended

    def wait(self) -> None:
        """Let the calling thread wait."""
        self._ended.synchronize()

    def order(self) -> None:
        """Let the stream that asked for it wait, with all that it is given from now on."""
        self.order_before(self.home)

    def order_before(self, stream: Any) -> None:
        """Let a stream wait, with all that it is given from now on."""
        stream.wait_event(self._ended)

    def marks(self) -> tuple[CudaMark, CudaMark]:
        """Return where it began and ended."""
        return CudaMark(self._began), CudaMark(self._ended)


class CudaArrival:
    """A tensor that is being filled.

    Args:
        device: gives streams.
        tensor: it; its memory belongs to the stream that asked for it.
        layout: what it has to look like in the end.
        trip: the copy.
    """

    def __init__(self, device: Device, tensor: Tensor, layout: Layout, trip: CudaTrip) -> None:
        self._device = device
        self._tensor: Tensor | None = tensor
        self._layout = layout
        self._trip = trip

    def take(self) -> Tensor:
        """Return the tensor; the stream in force waits for it."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "an arrival is taken once"
        stream = self._device.current_stream(self._layout.device)
        self._trip.order_before(stream)
        if stream != self._trip.home:
            # Its memory must not go back to the stream that asked for it while this one uses it.
            self._device.lend(tensor, stream)
        return self._layout.finish(tensor)

    def drop(self) -> None:
        """Let go of the tensor: what uses its memory next comes after the copy."""
        self._trip.order()
        self._tensor = None
