"""The state of the random number generators and of autocast at one point, to be brought back there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from hf_ckpt.regions.call import tensors_of


@dataclass(frozen=True)
class RandomState:
    """State of the CPU's generator and of those of the devices that tensors of a call lie on."""

    cpu: Tensor
    devices: tuple[int, ...]
    device_states: tuple[Tensor, ...]
    device_type: str

    @classmethod
    def of(cls, *values: Any) -> RandomState:
        """Read the state; `values` are arguments or outputs whose tensors tell the devices."""
        device_type = _accelerator_type()
        on_device = {tensor.device: tensor for value in values for tensor in tensors_of(value) if not tensor.is_cpu}
        # A device that has not been used yet has no state to read; MPS has none that could be read by device.
        if not on_device or not getattr(torch.get_device_module(device_type), "_initialized", False):
            return cls(torch.get_rng_state(), (), (), device_type)
        devices, states = get_device_states(*on_device.values())
        return cls(torch.get_rng_state(), tuple(devices), tuple(states), device_type)

    def restore(self) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(list(self.devices), list(self.device_states), device_type=self.device_type)

    def is_same(self, other: RandomState) -> bool:
        """Whether no random number was drawn between this state and another one of the same devices."""
        ours, theirs = (self.cpu, *self.device_states), (other.cpu, *other.device_states)
        return all(map(torch.equal, ours, theirs))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put the generators back, on leaving, to what they were on entering."""
        with torch.random.fork_rng(devices=list(self.devices), device_type=self.device_type, enabled=True):
            yield


@dataclass(frozen=True)
class AutocastState:
    """Whether and how autocast is on, for the CPU and for the accelerator."""

    settings: tuple[tuple[str, bool, torch.dtype, bool], ...]

    @classmethod
    def now(cls) -> AutocastState:
        """Read the state."""
        types = dict.fromkeys(("cpu", _accelerator_type()))
        return cls(
            tuple(
                (
                    kind,
                    torch.is_autocast_enabled(kind),
                    torch.get_autocast_dtype(kind),
                    torch.is_autocast_cache_enabled(),
                )
                for kind in types
            )
        )

    def without_cache(self) -> AutocastState:
        """Return the same state in which casts of weights are not kept for the next use."""
        return AutocastState(tuple((kind, enabled, dtype, False) for kind, enabled, dtype, _ in self.settings))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set autocast to this state while the block runs."""
        with ExitStack() as stack:
            for device_type, enabled, dtype, cache in self.settings:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield


def _accelerator_type() -> str:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if device is None else device.type
