"""Inputs of a model's forward as a simulated step gives them: whole numbers with their values, all others as shapes."""

from __future__ import annotations

import base64
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod
from operator import le
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.upstream.torch import disable_current_modes

_MAX_VALUES = 2**20
"""Of whole numbers with so many elements the values are kept: tokens, their types and positions, sizes of images."""
_MAX_SIZES = 4
"""Numbers in a row of a table of sizes, such as time, height and width of an image."""


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor that a forward is called with."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: bytes | None = None
    """None where they are not known, or are none that a model would compute shapes of."""
    sizes: tuple[int, ...] = ()
    """Of a table of sizes, such as `image_grid_thw` [images, 3]: the product of each row, largest first."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def holds(self, other: InputTensor) -> bool:
        """Whether the other one is of the same kind and in no way larger."""
        return (
            self.dtype == other.dtype
            and _is_within(other.shape, self.shape)
            and len(other.shape) == len(self.shape)
            and _is_within(other.sizes, self.sizes)
        )

    def describe(self) -> str:
        """Return name and shape, such as `pixel_values [2, 3, 336, 336]`."""
        return f"{self.name} {[*self.shape]}"

    def to_json(self) -> list[Any]:
        """Return it as JSON holds it; see `from_json`."""
        values = None if self.values is None else base64.b64encode(self.values).decode()
        return [self.name, [*self.shape], str(self.dtype).removeprefix("torch."), values, [*self.sizes]]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> InputTensor:
        """Return what `to_json` was called of."""
        name, shape, dtype, values, sizes = fields
        content = None if values is None else base64.b64decode(values)
        return cls(name, tuple(shape), getattr(torch, dtype), content, tuple(sizes))

    def make(self, like: Tensor) -> Tensor:
        """Return the tensor: real where its values are known, else as fake as `like`."""
        if self.values is None:
            return like.new_empty(self.shape, dtype=self.dtype)
        with disable_current_modes():
            return torch.frombuffer(bytearray(self.values), dtype=self.dtype).view(self.shape)


def outline(name: str, tensor: Tensor) -> InputTensor:
    """Return a tensor without its values. Those of a table of sizes are read, as the model itself will do."""
    return InputTensor(name, tuple(tensor.shape), tensor.dtype, sizes=_sizes(tensor))


def with_values(name: str, tensor: Tensor) -> InputTensor:
    """Return a tensor with its values, where it holds whole numbers, and not too many. Waits for the device."""
    values = None
    if _is_whole(tensor) and 0 < tensor.numel() <= _MAX_VALUES:
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return InputTensor(name, tuple(tensor.shape), tensor.dtype, values, _sizes(tensor))


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    is_table = tensor.dim() == 2 and 1 < tensor.shape[1] <= _MAX_SIZES and tensor.dtype is not torch.bool
    if not is_table or not _is_whole(tensor):
        return ()
    return tuple(sorted(map(prod, tensor.tolist()), reverse=True))


def _is_within(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return len(small) <= len(large) and all(map(le, small, large))


Settings = tuple[tuple[str, Hashable], ...]
"""Plain values that a forward is called with besides tensors, by name, such as `return_loss`."""
