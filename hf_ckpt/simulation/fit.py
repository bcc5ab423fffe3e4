"""Whether a step fits: what torch reserves for it, next to CUDA's context, against a device or a budget less a margin.

The one place that decides it: advice, plans, tables, pages, runs and recoveries ask here, mostly through
`StepSimulator.verdict`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from hf_ckpt.simulation.devices import GIB, Device, workspace_bytes


class Fit(StrEnum):
    """Whether a step fits."""

    YES = "yes"
    """All that torch reserves for it has room next to the most that the context takes: nothing is ever given back."""
    PERHAPS = "perhaps"
    """It has room only if torch gives back cached blocks, and these do not lie in too many pieces."""
    NO = "no"
    """What it allocates has no room next to the least that the context takes."""


# One part in so many is kept free: what torch reserves is predicted that well (docs/accuracy.md), and among several
# processes it depends on how far the host runs ahead.
_MARGIN = 100

_DATA_CENTRE = ((7, 0), (8, 0), (9, 0), (10, 0), (10, 3))
_LARGE = 40 * GIB

_PROCESS = GIB  # Of a machine that trains on its CPU: the interpreter, torch and transformers themselves.


@dataclass(frozen=True, slots=True)
class Capacity:
    """What there is for a step: a device, or a budget of it."""

    num_bytes: int
    outside: tuple[int, int] = (0, 0)
    """The least and the most of it that is not torch's: CUDA's context, or, of a whole machine, the process."""
    has_margin: bool = False
    """Whether a share is kept free. See `_MARGIN`."""

    @property
    def reserved_bytes(self) -> int:
        """The most that torch may reserve for a step that fits."""
        return self.num_bytes - self.margin_bytes - self.outside[1]

    @property
    def allocated_bytes(self) -> int:
        """The most that may be allocated: with more, no giving back helps."""
        return self.num_bytes - self.outside[0]

    def needed_bytes(self, reserved_bytes: int) -> int:
        """Return the smallest capacity of this kind that a step fits for which torch reserves so much."""
        wanted = reserved_bytes + self.outside[1]
        # The margin is a share of what is to be found.
        return -(-wanted * _MARGIN // (_MARGIN - 1)) if self.has_margin else wanted

    def fit(self, peak_bytes: int, reserved_bytes: int) -> Fit:
        """Return whether a step fits that allocates and reserves so much."""
        if reserved_bytes <= self.reserved_bytes:
            return Fit.YES
        return Fit.PERHAPS if peak_bytes <= self.allocated_bytes else Fit.NO

    def with_bytes(self, num_bytes: int) -> Capacity:
        """Return one of another size."""
        return replace(self, num_bytes=num_bytes)

    @property
    def margin_bytes(self) -> int:
        """What is kept free."""
        return -(-self.num_bytes // _MARGIN) if self.has_margin else 0


def capacity_of(device: Device, num_processes: int = 1, budget_bytes: int | None = None) -> Capacity:
    """Return what there is for a step of each of so many processes: a device of its own, or a budget of one.

    A budget for a CUDA device holds its context too: it is what nvidia-smi shows. One for a CPU is the step's alone.
    """
    if device.is_cuda:
        total = device.memory_bytes if budget_bytes is None else budget_bytes
        return Capacity(total, _context(device, num_processes), has_margin=True)
    if budget_bytes is None:
        return Capacity(device.memory_bytes, (_PROCESS, _PROCESS))
    # More than the machine has besides the process is no budget of it.
    return Capacity(min(budget_bytes, device.memory_bytes - _PROCESS) if device.memory_bytes else budget_bytes)


def _context(device: Device, num_processes: int) -> tuple[int, int]:
    """Return the least and the most that lies on a device outside of torch's allocator. nvidia-smi shows it too."""
    # Cards with compute capability 7.0, 8.0, 9.0 and 10.x are for data centres; of AMD's, which have none, large ones.
    capability = device.capability
    is_large = device.memory_bytes >= _LARGE if capability is None else capability in _DATA_CENTRE
    # CUDA keeps its context and the code of the kernels on the device, more on larger cards and after more kernels: 0.5
    # to 0.6 GiB in messages from an RTX 4090, L40 and 5090; on an A100 up to 1.8 GiB, and up to 2.5 with NCCL's buffers
    # (docs/accuracy.md).
    most = (2.5 if num_processes > 1 else 1.8) if is_large else 0.7
    return int(0.3 * GIB), int(most * GIB)


def unplayed_bytes(device: Device) -> int:
    """Return what torch may reserve beyond a peak where more than a step runs, such as a generation before it.

    That is not played: blocks that no tensor fits take up to 5 % where sizes change from step to step.
    """
    return device.memory_bytes // 20 + 2 * workspace_bytes(device)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a step fits, and what it needs."""

    fit: Fit
    peak_bytes: int
    """The most that is allocated."""
    reserved_bytes: int
    """The most that torch reserves where there is room; the peak on a CPU, and where that alone is too much."""
    needed_bytes: int
    """The smallest capacity that the step fits; at least so much where the peak alone is too much."""


def judge(peak_bytes: int, reserved_bytes: int, capacity: Capacity) -> Verdict:
    """Return whether what allocates and reserves so much fits."""
    reserved_bytes = max(peak_bytes, reserved_bytes)
    fit = capacity.fit(peak_bytes, reserved_bytes)
    return Verdict(fit, peak_bytes, reserved_bytes, capacity.needed_bytes(reserved_bytes))
