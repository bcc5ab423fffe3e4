"""Host memory that a CUDA device can copy to and from while it computes: pages that stay where they are.

Knows CUDA's runtime, and nothing of tensors on a device or of streams.
"""

from __future__ import annotations

import mmap
import os
import weakref

import torch


class PinningError(Exception):
    """The driver does not pin the pages that it was given."""


class PinnedPages:
    """Whole pages of this process, pinned by the driver.

    `pin_memory` of torch rounds up to a power of two (1.2 GiB take 2). Pages are not shared with forked
    processes (data loaders), whose copy-on-write would move them away from where the device writes.

    Args:
        num_bytes: how much.

    Raises:
        PinningError: the driver does not pin it.
    """

    def __init__(self, num_bytes: int) -> None:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _advise(pages)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)
        address = self.bytes.data_ptr()
        # 1: cudaHostRegisterPortable, pinned for all devices.
        told = int(torch.cuda.cudart().cudaHostRegister(address, size, 1))  # type: ignore[no-untyped-call]
        if told:
            _take_error_away()
            raise PinningError(f"cudaHostRegister returned error {told}")
        # Also when the model is dropped with nobody calling `free`; at the end of the process the system does it.
        self._lost = weakref.finalize(self, _unpin_lost, address, pages, os.getpid())
        self._lost.atexit = False

    def free(self) -> None:
        """Unpin the pages; they go back to the system with the last reference to `bytes`."""
        if self._lost.detach() is not None:
            _unpin(self.bytes.data_ptr())
        self.bytes = torch.empty(0, dtype=torch.uint8)


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _unpin_lost(address: int, pages: mmap.mmap, process: int) -> None:
    """Unpin pages that are kept until then, whatever may still be copying. A forked process has none of them."""
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


def _advise(pages: mmap.mmap) -> None:
    # Large pages are pinned faster; where the kernel has none of either, nothing is lost.
    for name in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        advice = getattr(mmap, name, None)
        if advice is not None:
            try:
                pages.madvise(advice)
            except OSError:
                continue


def _take_error_away() -> None:
    """Let a kernel of no consequence report the error that the refused call has left for the next one."""
    try:
        torch.zeros(1, device="cuda").add_(1)
    except RuntimeError:
        return


class PinnedByTorch:
    """Pinned memory of torch, which rounds up to a power of two.

    Args:
        num_bytes: how much.
    """

    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def free(self) -> None:
        """Give it back to torch."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
