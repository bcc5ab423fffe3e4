"""How many bytes of the device a step may use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.errors import PolicyError
from hf_ckpt.policy.options import Offload
from hf_ckpt.regions.offload import host_memory
from hf_ckpt.simulation import quantized
from hf_ckpt.simulation.devices import Device, workspace_bytes
from hf_ckpt.simulation.fit import Capacity, capacity_of
from hf_ckpt.units import Budget

_HOST_LEFT_FREE = 2**30  # Bytes of host memory that are no plan's, whatever is free.


@dataclass(frozen=True, slots=True)
class AllocatorState:
    """What a device's allocator says. Bytes."""

    free: int
    """What no process has."""
    reserved: int
    """What this process's allocator holds, used or not."""
    allocated: int
    """Of that, what is used."""


def capacity_of_run(
    budget: Budget | None,
    device: Device,
    model: nn.Module,
    optimizer: Any,
    counted_bytes: int = 0,
    *,
    num_processes: int = 1,
) -> Capacity:
    """Return what there is for a step.

    Args:
        budget: the user's; None takes what is free of the device.
        device: where the step runs.
        model: that is about to be trained on it; its tensors are part of the step.
        optimizer: the model's; None where there is none yet.
        counted_bytes: on the device besides the model that are part of the step too, such as those of a reference.
        num_processes: of the run, each on a device of its own.

    Raises:
        PolicyError: the budget is more than the device has, or there is none and the device is not a GPU.
    """
    check_budget(budget, device)
    device = _as_granted(device)
    if budget is not None:
        num_bytes = budget.bytes_on(device.memory_bytes, device=device.title)
        return capacity_of(device, num_processes, num_bytes)
    whole = capacity_of(device, num_processes)
    return whole.with_bytes(_usable(_free_on_cuda(), device, whole, _step_bytes(model, optimizer) + counted_bytes))


def unknown_bytes(device: Device, model: nn.Module, optimizer: Any, counted_bytes: int) -> int:
    """Return the bytes that this process has allocated on a GPU for nothing that is counted; 0 on a CPU.

    `counted_bytes`: see `capacity_of_run`, which takes them off where there is no budget.
    """
    if not device.is_cuda:
        return 0
    return _of_others(_free_on_cuda(), device, _step_bytes(model, optimizer) + counted_bytes)


def free_host_bytes(offload: Offload | None) -> int | None:
    """Return the bytes of host memory that this process may plan with; None where that is not known.

    `offload` is what the user grants; it may say to trust the machine.
    """
    available = host_memory.available_bytes(trusts=offload is not None and offload.trust_host_memory)
    if available is None:
        return None
    # Processes of one machine share what is free there.
    return max(0, available - _HOST_LEFT_FREE) // host_memory.num_local_processes()


def check_budget(budget: Budget | None, device: Device) -> None:
    """Refuse a budget that a device does not have, and none where the device is not a GPU: `PolicyError`."""
    device = _as_granted(device)
    if budget is not None:
        budget.bytes_on(device.memory_bytes, device=device.title)
    elif not device.is_cuda:
        raise PolicyError(
            f'Policy "auto" has no memory_budget, and {device.title} shares its memory with all that runs there. Write '
            'one, such as memory_budget="8GiB"; only on a GPU it may be left out.'
        )


def _usable(found: AllocatorState, device: Device, whole: Capacity, step_bytes: int) -> int:
    """Return what a step may use of what is free, if `step_bytes` of what is allocated are its own."""
    # The least that CUDA's context takes is gone already.
    return whole.outside[0] + found.free + found.reserved - _of_others(found, device, step_bytes)


def _of_others(found: AllocatorState, device: Device, step_bytes: int) -> int:
    # The workspaces of an earlier run in this process are part of the step too.
    return max(0, found.allocated - step_bytes - 2 * workspace_bytes(device))


def _as_granted(device: Device) -> Device:
    """Return a device with what this process may have of it, as `set_per_process_memory_fraction` says."""
    granted = _granted_bytes() if device.is_cuda else None
    if granted is None or granted >= device.memory_bytes:
        return device
    # What is granted bounds torch's allocator; CUDA's context lies beside it.
    return replace(
        device,
        memory_bytes=min(device.memory_bytes, granted + capacity_of(device).outside[0]),
        title=f"the share of {device.title} that set_per_process_memory_fraction leaves",
    )


def _granted_bytes() -> int | None:
    """Return the most that torch's allocator may hold of the current GPU; None where nobody bounded it."""
    if not torch.cuda.is_available():
        return None
    fraction = torch.cuda.get_per_process_memory_fraction()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return int(total * fraction) if fraction < 1 else None


def _free_on_cuda() -> AllocatorState:
    free, _ = torch.cuda.mem_get_info()
    reserved, granted = torch.cuda.memory_reserved(), _granted_bytes()
    if granted is not None:
        free = min(free, max(0, granted - reserved))
    return AllocatorState(free, reserved, torch.cuda.memory_allocated())


def _step_bytes(model: nn.Module, optimizer: Any) -> int:
    held: list[Any] = [*model.parameters(), *model.buffers(), *quantized.constants(model)]
    held += [parameter.grad for parameter in model.parameters()]
    # accelerate's wrapper hands on the state.
    held += [value for state in getattr(optimizer, "state", {}).values() for value in state.values()]
    seen = {id(tensor): tensor for tensor in held if isinstance(tensor, Tensor)}
    return sum(tensor.nbytes for tensor in seen.values() if tensor.device.type == "cuda")
