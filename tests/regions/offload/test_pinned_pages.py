"""Pages that the driver pins, without a device."""

from __future__ import annotations

import mmap
import os
import sys
import warnings

import pytest
import torch

from hf_ckpt.errors import HostMemoryError
from hf_ckpt.regions.offload import cuda
from hf_ckpt.regions.offload.cuda import CudaWire, PinnedPages
from hf_ckpt.regions.offload.host_buffers import HostLink
from hf_ckpt.regions.offload.host_memory import HostLimits, HostMemory
from hf_ckpt.regions.offload.transfer import (
    PageableMemory,
)

pytestmark = pytest.mark.core

LOW = HostMemory(machine_bytes=2**30, group_bytes=None, total_bytes=2**31)


class _Driver:
    """Stands in for CUDA's runtime: notes what is pinned."""

    def __init__(self, told: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self._told = told

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802  # the runtime's name
        if not self._told:
            self.pinned[address] = size
        return self._told

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # the runtime's name
        del self.pinned[address]
        return 0


@pytest.mark.skipif(sys.platform != "linux", reason="pages are pinned on Linux")
def test_pages_are_pinned_whole_and_unpinned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kept, dropped = PinnedPages(mmap.PAGESIZE + 1), PinnedPages(5)
    address = kept.bytes.data_ptr()
    assert driver.pinned == {address: 2 * mmap.PAGESIZE, dropped.bytes.data_ptr(): mmap.PAGESIZE}
    assert address % mmap.PAGESIZE == 0
    assert (kept.bytes.numel(), dropped.bytes.numel()) == (mmap.PAGESIZE + 1, 5)
    del dropped
    assert list(driver.pinned) == [address]
    kept.free()
    kept.free()
    assert driver.pinned == {}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="pages are pinned on Linux")
def test_forked_processes_have_the_same_pages_and_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    pages = PinnedPages(2**16, in_forks=True)
    pages.bytes.fill_(7)
    child = os.fork()
    if not child:
        is_seen = bool((pages.bytes == 7).all())
        # Nobody writes there but to see whose pages they are.
        pages.bytes[0] = 8
        os._exit(0 if is_seen else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pages.bytes[0] == 8
    pages.free()


@pytest.mark.skipif(sys.platform != "linux", reason="pages are pinned on Linux")
def test_pages_that_nobody_freed_wait_for_every_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, waited = _Driver(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 2**20 if index in (0, 2) else 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index=3: waited.append((index, len(driver.pinned))))
    dropped = PinnedPages(5)
    assert len(driver.pinned) == 1
    del dropped
    # Device 1 has no memory, and so no context: to wait for it would make one.
    assert waited == [(0, 1), (2, 1), (3, 1)]
    assert driver.pinned == {}


@pytest.mark.skipif(sys.platform != "linux", reason="pages are pinned on Linux")
def test_pages_that_are_not_pinned_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Driver(told=2))
    monkeypatch.setattr(cuda, "_clear_pending_error", lambda: None)
    monkeypatch.setattr(cuda, "PinnedByTorch", PageableMemory)
    wire = CudaWire()
    with pytest.warns(UserWarning, match="rounds up to a power of two: cudaHostRegister returned error 2"):
        assert wire.allocate(100).bytes.numel() == 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wire.allocate(100).bytes.numel() == 100


def test_memory_that_nobody_pins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> PageableMemory:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Driver(told=2))
    monkeypatch.setattr(cuda, "_clear_pending_error", lambda: None)
    monkeypatch.setattr(cuda, "PinnedByTorch", refuse)
    link = HostLink(CudaWire(), HostLimits(None, lambda: LOW))
    with (
        pytest.warns(UserWarning, match="pinned"),
        pytest.raises(
            HostMemoryError, match=r"1\.0 MiB more .* does not give: CUDA error: out of memory; 1\.0 GiB are free"
        ),
    ):
        link.pool.take(2**20)
    assert (link.pool.held_bytes, link.pool.peak_bytes) == (0, 0)
