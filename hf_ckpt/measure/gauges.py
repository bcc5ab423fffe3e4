"""Time and memory of a device while something really runs on it: an accelerator, or the CPU.

On an accelerator time is told by events on its stream, and memory is what the allocator has given out. On the CPU
memory is what of the process is resident, since nothing counts what is allocated.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch


class Clock:
    """Tells the time on a device, by events that the device passes, so that nothing has to wait for it."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def stamp(self) -> Any:
        """Return this moment of what was issued to the device so far."""
        if self._place.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._place, enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two stamps; after `synchronize`."""
        if self._place.type == "cpu":
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._place.type != "cpu":
            torch.accelerator.synchronize(self._place)


class Memory:
    """Tells the bytes in use on a device."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    def now(self) -> int:
        """Return the bytes in use."""
        if self._place.type == "cpu":
            return _resident("VmRSS")
        return int(torch.accelerator.memory_allocated(self._place))

    def peak(self) -> int:
        """Return the most that was in use since the peak was forgotten."""
        if self._place.type == "cpu":
            return _resident("VmHWM")
        return int(torch.accelerator.max_memory_allocated(self._place))

    def forget_peak(self) -> None:
        """Begin anew: the peak is what is in use now."""
        if self._place.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._place)
        elif sys.platform == "linux":
            # Makes the kernel forget the highest resident size so far (man 5 proc).
            Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int:
    if sys.platform != "linux":
        return 0
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
