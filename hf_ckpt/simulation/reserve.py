"""The part of a device's memory to leave free, which a simulated step does not show: a range."""

from __future__ import annotations

from dataclasses import dataclass

from hf_ckpt.simulation.devices import GIB, Device, workspace_bytes


@dataclass(frozen=True, slots=True)
class ReserveItem:
    """One use of memory that a simulated step does not show."""

    name: str
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """The part of a device's memory to leave free, as a range."""

    items: tuple[ReserveItem, ...]

    @property
    def low_bytes(self) -> int:
        """The least that is needed."""
        return sum(item.low_bytes for item in self.items)

    @property
    def high_bytes(self) -> int:
        """What is enough in practice."""
        return sum(item.high_bytes for item in self.items)


def reserve(device: Device) -> Reserve:
    """Return what to leave free besides a step's own tensors."""
    if not device.is_cuda:
        # The interpreter, torch and transformers themselves.
        return Reserve((ReserveItem("process", GIB // 4, GIB),))
    # cuBLAS gets a workspace from torch for each thread and stream: those of forward and backward are part of the step,
    # further ones come with side streams.
    workspaces = ReserveItem("workspaces", 0, 2 * workspace_bytes(device))
    # The allocator keeps blocks that no tensor fits: about 1 % with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,
    # up to 5 % where lengths change from step to step.
    num_bytes = device.memory_bytes
    fragmentation = ReserveItem("fragmentation", int(0.01 * num_bytes), int(0.05 * num_bytes))
    return Reserve((context(device), workspaces, fragmentation))


def beyond_reserved(device: Device, num_processes: int = 1) -> Reserve:
    """Return what to leave free of a CUDA device besides what torch is predicted to reserve."""
    # How far the host runs ahead of the streams on which processes exchange weights and gradients decides which blocks
    # are free.
    timing = ReserveItem("timing", 0, device.memory_bytes // 100)
    return Reserve((context(device, num_processes), *([timing] if num_processes > 1 else [])))


def context(device: Device, num_processes: int = 1) -> ReserveItem:
    """Return what CUDA, and NCCL between several processes, take of a device outside of torch's allocator.

    nvidia-smi shows it too.
    """
    if not device.is_cuda:
        return ReserveItem("context", 0, 0)
    # Cards with compute capability 7.0, 8.0, 9.0 and 10.0 are for data centres.
    is_large = device.capability is not None and device.capability[1] == 0 and device.capability[0] < 12
    # CUDA keeps its context and the code of the kernels on the device, more on larger cards and after more kernels: 0.5
    # to 0.6 GiB in messages from an RTX 4090, L40 and 5090; on an A100 up to 1.8 GiB, and up to 2.5 with NCCL's buffers
    # (docs/accuracy.md).
    most = (2.5 if num_processes > 1 else 1.8) if is_large else 0.7
    return ReserveItem("context", int(0.3 * GIB), int(most * GIB))
