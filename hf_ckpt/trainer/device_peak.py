"""The highest memory of the device of a run, also where torch's count of it begins anew in between."""

from __future__ import annotations

import torch

from hf_ckpt.regions.offload.cuda import CudaDevice
from hf_ckpt.regions.offload.transfer import DeviceMemory
from hf_ckpt.units import format_bytes


class DevicePeak:
    """The highest memory of a device since this was made."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._cuda = CudaDevice() if place.type == "cuda" else None
        self._before = _counted()
        self._highest_before_window = 0

    def highest(self) -> int | None:
        """Return the most bytes that torch has counted so far; None on a CPU, where nothing counts them."""
        now = _counted()
        return None if now is None else max(now, self._highest_before_window)

    def begin_window(self) -> None:
        if self._cuda is not None:
            self._highest_before_window = max(self._highest_before_window, self._cuda.memory(self._place).peak)
            self._cuda.reset_peak(self._place)

    def in_window(self) -> DeviceMemory | None:
        """Return what this process can have of the device, and the most it had since `begin_window`; None on a CPU."""
        return None if self._cuda is None else self._cuda.memory(self._place)

    def compare(self, predicted_bytes: int) -> str:
        """Return predicted and measured peak, for the log."""
        predicted, now = f"Predicted peak {format_bytes(predicted_bytes)}", self.highest()
        if self._before is None or now is None:
            return f"{predicted}; a CPU does not count what is allocated."
        if now <= self._before:
            # What was there before this run is counted too: the count says something only once it has risen.
            return f"{predicted}; measured no more than the {format_bytes(self._before)} that were allocated before."
        return f"{predicted}, measured {format_bytes(now)} ({now / predicted_bytes - 1:+.1%})."


def _counted() -> int | None:
    return torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else None
