"""Which saved tensors can be offloaded, and why the others stay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_ckpt.upstream.torch import base_of, is_traceable_wrapper_subclass, is_view

_ALIGNMENT = 256
"""Bytes. Kernels are chosen by how a tensor is aligned, up to this; a new tensor always is."""


def reason_not_offloaded(tensor: Tensor, min_bytes: int) -> str | None:
    """Return why a saved tensor (not empty) stays where it is, or None if it can be offloaded."""
    if _is_kept_anyway(tensor):
        return "kept by the model or by autograd anyway"
    # A DTensor, for one, holds other tensors.
    is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if is_wrapper or tensor.layout is not torch.strided or tensor.is_quantized:
        return "no plain tensor"
    if tensor.nbytes < min_bytes:
        return f"smaller than min_bytes={min_bytes}"
    # From the first element to the last in memory, both and the gaps included.
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.nbytes > span * tensor.element_size():
        return "larger than the memory behind it (expanded)"
    if tensor.storage_offset() * tensor.element_size() % _ALIGNMENT:
        # The same values elsewhere could be multiplied by another kernel, which need not agree in the last bit.
        return "begins at an odd place in its memory"
    return None


def _is_kept_anyway(tensor: Tensor) -> bool:
    # A leaf that requires a gradient is held by the node that accumulates it, as a weight is by the model.
    base = base_of(tensor) if is_view(tensor) else None
    return (
        (tensor.is_leaf and tensor.requires_grad) or isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter)
    )
