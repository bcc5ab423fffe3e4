"""The highest memory of a device, where its count begins anew in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_ckpt.regions.offload.transfer import DeviceMemory
from hf_ckpt.trainer import device_peak
from hf_ckpt.trainer.device_peak import DevicePeak


class Device:
    """Counts as torch does for CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 0
        monkeypatch.setattr(device_peak, "CudaDevice", lambda: self)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: self.peak)

    def allocate(self, num_bytes: int) -> None:
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)

    def memory(self, place: torch.device) -> DeviceMemory:
        return DeviceMemory(2**30, self.allocated, self.peak)

    def reset_peak(self, place: torch.device) -> None:
        self.peak = self.allocated


def test_what_was_counted_before_a_window_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.allocate(2**20)
    peak = DevicePeak(torch.device("cuda", 0))
    assert "measured no more than the 1.0 MiB that were allocated before" in peak.compare(2**21)
    device.allocate(3 * 2**20)
    device.allocate(-(2**21))
    peak.begin_window()
    device.allocate(2**10)
    window: Any = peak.in_window()
    assert window.peak == 2**21 + 2**10
    assert peak.highest() == 2**22
    assert peak.compare(2**22) == "Predicted peak 4.0 MiB, measured 4.0 MiB (+0.0%)."


def test_on_a_cpu_nothing_counts() -> None:
    peak = DevicePeak(torch.device("cpu"))
    peak.begin_window()
    assert peak.in_window() is None
