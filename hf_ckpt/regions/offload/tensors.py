"""Which tensors are sent away, and how one is taken down to its bytes and built again.

Knows nothing of streams, buffers or layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_ALIGNMENT = 256
"""Bytes. Kernels are chosen by how a tensor is aligned, up to this; a new tensor always is."""


def why_left_alone(tensor: Tensor, min_bytes: int) -> str | None:
    """Return why a tensor that is saved stays where it is, or None if it can be sent away.

    Args:
        tensor: what a region saves; not empty.
        min_bytes: smaller tensors stay.
    """
    if _is_kept_anyway(tensor):
        return "kept by the model or by autograd anyway"
    if not _is_plain(tensor):
        return "no plain tensor"
    num_bytes = bytes_of(tensor)
    if num_bytes < min_bytes:
        return f"smaller than min_bytes={min_bytes}"
    if num_bytes > _span(tensor) * tensor.element_size():
        return "larger than the memory behind it (expanded)"
    if tensor.storage_offset() * tensor.element_size() % _ALIGNMENT:
        # The same values elsewhere could be multiplied by another kernel, which need not agree in the last bit.
        return "begins at an odd place in its memory"
    return None


def _is_plain(tensor: Tensor) -> bool:
    # A DTensor, for one, holds other tensors.
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    return not is_wrapper and tensor.layout is torch.strided and not tensor.is_quantized


def _is_kept_anyway(tensor: Tensor) -> bool:
    # A leaf that requires a gradient is held by the node that accumulates it, as a weight is by the model.
    base = tensor._base if tensor._is_view() else None
    return (
        (tensor.is_leaf and tensor.requires_grad) or isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter)
    )


def _span(tensor: Tensor) -> int:
    """Return the elements from the first to the last in memory, both and the gaps included."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything about a tensor but its values; builds its like.

    Strides are part of it: recomputing from another layout could take another kernel, and differ in the last bit.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """Read the layout of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.shape.numel() * self.dtype.itemsize

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the elements of such a tensor as bytes [num_bytes]: a view if it has no gaps, else a copy."""
        plain = tensor.resolve_conj().resolve_neg()
        dense = plain if _has_no_gaps(plain) else plain.contiguous()
        return _bytes_in_memory(dense)

    def empty(self) -> tuple[Tensor, Tensor]:
        """Return a new tensor on the device to be filled, and its bytes [num_bytes] in the order that `flat` gives.

        Of a tensor with gaps, the first is dense; `finish` makes the gaps.
        """
        strides = self.strides if not self._has_gaps() else _contiguous(self.shape)
        tensor = torch.empty_strided(self.shape, strides, dtype=self.dtype, device=self.device)
        return tensor, _bytes_in_memory(tensor)

    def finish(self, tensor: Tensor) -> Tensor:
        """Return what `empty` made, now filled, in this layout."""
        if not self._has_gaps():
            return tensor
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device).copy_(tensor)

    def _has_gaps(self) -> bool:
        return not _is_dense(self.shape, self.strides)


Key = tuple[Any, ...]
"""What two tensors share that hold the same values in the same memory."""


def identity(tensor: Tensor) -> tuple[StorageWeakRef, Key]:
    """Return a key that no tensor of other values has for as long as the weak reference is held."""
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    where = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
    return storage, (*where, tensor.dtype, tensor._version)


def _has_no_gaps(tensor: Tensor) -> bool:
    return _is_dense(tensor.shape, tensor.stride())


def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    expected = 1
    for stride, length in sorted(
        (stride, length) for length, stride in zip(shape, strides, strict=True) if length != 1
    ):
        if stride != expected:
            return False
        expected *= length
    return True


def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    strides, stride = [], 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= length
    return tuple(reversed(strides))


def _bytes_in_memory(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
