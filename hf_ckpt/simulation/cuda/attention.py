"""Attention as torch's CUDA dispatcher would run it, with what its kernels keep for backward and need meanwhile.

Read off torch 2.13: `sdp_utils.cpp` (which kernel), `attention.cpp` (what happens to masks and head sizes before it),
and the kernels' own allocations (`flash_api.cpp`, `attention_backward.cu`, `kernel_forward.h`, `kernel_backward.h`).
The CUDA operators themselves run on fake CPU tensors, with their own autograd formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Shape = tuple[int, ...]
Block = tuple[Shape, torch.dtype]
"""Shape and dtype of memory that a kernel allocates for itself."""

_HALF = (torch.float16, torch.bfloat16)
_MASK_ALIGNMENT = 8
_FLASH_ROWS = 128
_FLASH_HEAD_DIM = 256
_CUDNN_HEAD_DIM = 128
_EFFICIENT_VALUE_DIM = 128


class Kernel(StrEnum):
    """Ways in which `scaled_dot_product_attention` computes."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


def choose_kernel(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    prefers_cudnn: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Kernel:
    """Return the kernel that a device of this compute capability runs.

    Args:
        capability: major and minor.
        query: [B, H, S, D].
        key: likewise; with `enable_gqa` it may have fewer heads.
        value: as `key`; its heads may have another size.
        mask: boolean or additive.
        prefers_cudnn: whether torch tries cuDNN before flash attention; otherwise it never comes to it.
        dropout: probability.
        is_causal: whether positions see only those before them.
        enable_gqa: whether heads of the query share keys and values.
    """
    inputs = (query, key, value)
    if any(each.dim() != 4 or each.stride(-1) != 1 or each.shape[0] != query.shape[0] for each in inputs):
        return Kernel.MATH
    if len({each.dtype for each in inputs}) > 1 or (mask is not None and mask.stride(-1) != 1):
        return Kernel.MATH
    has_equal_heads = query.shape[1] == key.shape[1] == value.shape[1]
    may_group = enable_gqa and key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0
    if has_equal_heads or may_group:
        if prefers_cudnn and _suits_cudnn(query, key, value, mask, dropout):
            return Kernel.CUDNN
        if capability >= (8, 0) and _suits_flash(capability, query, key, value, mask, dropout, is_causal):
            return Kernel.FLASH
    if has_equal_heads and _suits_efficient(capability, query, key, value):
        return Kernel.EFFICIENT
    return Kernel.MATH


def _suits_cudnn(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> bool:
    head_dims = query.shape[-1], value.shape[-1]
    return (
        query.dtype in _HALF
        and (max(head_dims) <= _CUDNN_HEAD_DIM or head_dims == (192, 128))
        and all(each % 8 == 0 for each in head_dims)
        and key.shape[2] > 1
        and float(dropout * 16).is_integer()
        and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
    )


def _suits_flash(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
) -> bool:
    head_dim = query.shape[-1]
    # Its backward has no room for such heads in the shared memory of consumer cards.
    is_consumer = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    is_too_wide = is_consumer and head_dim > 192 and (dropout > 0 or head_dim <= 224) and torch.is_grad_enabled()
    return (
        mask is None
        and query.dtype in _HALF
        and head_dim == key.shape[-1] == value.shape[-1]
        and head_dim <= _FLASH_HEAD_DIM
        and not is_too_wide
        and not (is_causal and query.shape[2] != key.shape[2])
    )


def _suits_efficient(capability: tuple[int, int], query: Tensor, key: Tensor, value: Tensor) -> bool:
    if query.dtype is torch.bfloat16 and capability < (8, 0):
        return False
    alignment = 8 if query.dtype in _HALF else 4 if capability >= (8, 0) else 1
    return (
        query.dtype in (*_HALF, torch.float32)
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
    )


def attend(
    capability: tuple[int, int],
    prefers_cudnn: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do what `scaled_dot_product_attention` does on CUDA; its arguments, after what is asked of the device."""
    mask = attn_mask
    kernel = choose_kernel(
        *(capability, query, key, value, mask),
        prefers_cudnn=prefers_cudnn,
        dropout=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
    )
    aten = torch.ops.aten
    if kernel is Kernel.FLASH:
        return flash(query, key, value, dropout_p, is_causal, scale)
    if mask is not None and mask.dtype is torch.bool:
        # Each call makes an additive mask of its own, and its backward keeps it.
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))
    keeps_logsumexp = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    output: Tensor
    if kernel is Kernel.CUDNN:
        output = aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, keeps_logsumexp, dropout_p, is_causal, scale=scale
        )[0]
    elif kernel is Kernel.EFFICIENT:
        bias = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
        output = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps_logsumexp, dropout_p, is_causal, scale=scale
        )[0]
    else:
        output = aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return output


def flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Run flash attention: dropout and grouped heads cost it no memory.

    Args:
        query: [B, H, S, D].
        key: likewise; it may have fewer heads.
        value: as `key`.
        dropout: probability.
        is_causal: whether positions see only those before them.
        scale: of the scores; by default one over the root of D.

    Returns:
        [B, H, S, D], laid out as [B, S, H, D].
    """
    head_dim = query.shape[-1]
    missing = -head_dim % 8
    if missing:
        query, key, value = (functional.pad(each, (0, missing)) for each in (query, key, value))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, is_causal, False, scale=scale
    )[0]
    return output[..., :head_dim] if missing else output


def _aligned(mask: Tensor) -> Tensor:
    """Copy an additive mask where its rows do not begin at multiples of 8 elements."""
    if all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return functional.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]


# --- What kernels need while they run. ---


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flash_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Block]:
    batch, heads, rows, head_dim = query.shape
    rows = _up(rows, _FLASH_ROWS)
    needed: list[Block] = [
        # The query's gradient is added up in float32 by all blocks of keys, delta is a number per row.
        ((batch, rows, heads, _up(head_dim, 32 if head_dim <= 128 else 64)), torch.float32),
        ((batch, heads, rows), torch.float32),
    ]
    if key.shape[1] != heads:
        # Gradients of keys and values are made per head of the query, and then added up by groups.
        needed += [((batch, key.shape[2], heads, head_dim), query.dtype)] * 2
    return needed


def _efficient_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Block]:
    if value.shape[-1] <= _EFFICIENT_VALUE_DIM or query.dtype is torch.float32:
        return []
    # Wide heads do not stay in registers: the output is added up in float32.
    return [((*query.shape[:3], value.shape[-1]), torch.float32)]


def _efficient_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Block]:
    batch, heads, rows, head_dim = query.shape
    return [
        ((batch, heads, _up(rows, 64), _up(head_dim, 64)), torch.float32),
        ((batch, heads, rows), torch.float32),
    ]


WORKSPACES: dict[Callable[..., Any], Callable[..., list[Block]]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    # cuDNN does not tell what its plans allocate; they add up the query's gradient in float32 too.
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
"""For each kernel, a function that returns what it allocates for itself from its arguments."""
