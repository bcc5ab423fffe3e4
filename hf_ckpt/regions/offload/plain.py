"""Copies that are complete when the call returns: on the CPU, and on devices without streams of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_ckpt.regions.offload.link import Buffer, DeviceMemory, Mark
from hf_ckpt.regions.offload.tensors import Layout


class PlainWire:
    """A `Wire` whose copies are complete when the call returns."""

    survives_fork = True

    def check(self, device: torch.device) -> None:
        """Copies can be made at any time."""

    def send(self, source: Tensor, buffer: Buffer) -> PlainTrip:
        """Copy bytes into a buffer."""
        buffer.first(source.numel()).copy_(source)
        buffer.trip = trip = PlainTrip()
        return trip

    def fetch(self, buffer: Buffer, layout: Layout) -> PlainArrival:
        """Make a tensor and fill it from a buffer."""
        tensor, content = layout.empty()
        content.copy_(buffer.first(content.numel()))
        return PlainArrival(layout.finish(tensor))

    def allocate(self, num_bytes: int) -> PlainMemory:
        """Make ordinary memory."""
        return PlainMemory(num_bytes)

    def mark(self, device: torch.device) -> Mark | None:
        """Nothing runs beside anything: there is nothing to time."""
        return None

    def memory(self, device: torch.device) -> DeviceMemory | None:
        """Nobody asks where nothing is timed."""
        return None

    def forget_peak(self, device: torch.device) -> None:
        """Nobody asks."""


class PlainTrip:
    """A copy that is done."""

    def wait(self) -> None:
        """Do nothing."""

    def order(self) -> None:
        """Do nothing."""

    def order_before(self, stream: Any) -> None:
        """Do nothing."""

    def marks(self) -> None:
        """Nothing was timed."""
        return


class PlainArrival:
    """A tensor that is there.

    Args:
        tensor: it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def take(self) -> Tensor:
        """Return the tensor."""
        tensor, self._tensor = self._tensor, None
        assert tensor is not None, "an arrival is taken once"
        return tensor

    def drop(self) -> None:
        """Let go of the tensor."""
        self._tensor = None


class PlainMemory:
    """Memory as torch gives it.

    Args:
        num_bytes: how much.
    """

    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def free(self) -> None:
        """Give it back to torch."""
        self.bytes = self.bytes.new_empty(0)
