"""Attention as torch's CUDA dispatcher would run it, with what its kernels keep for backward and need meanwhile.

Taken from torch 2.13: `sdp_utils.cpp` (which kernel), `attention.cpp` (what happens to masks and head sizes before it),
and the kernels' own allocations (`flash_api.cpp`, `attention_backward.cu`, `kernel_forward.h`, `kernel_backward.h`).
The CUDA operators themselves run on fake CPU tensors, with their own autograd formulas.

At the end: flash attention as transformers runs it from a package of its own, also where that is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ckpt.simulation.cuda import autocast
from hf_ckpt.simulation.quantized import Workspace
from hf_ckpt.upstream.torch import (
    CUDNN_ATTENTION,
    CUDNN_BACKWARD,
    EFFICIENT_ATTENTION,
    EFFICIENT_BACKWARD,
    FLASH_ATTENTION,
    FLASH_BACKWARD,
    MATH_ATTENTION,
)
from hf_ckpt.upstream.transformers import set_attention_unchecked

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
    """Return the kernel that a device of this compute capability runs. Query, key and value are [B, H, S, D].

    With `enable_gqa` heads of the query share keys and values. `prefers_cudnn` is whether torch tries cuDNN before
    flash attention; otherwise it never gets to it.
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
    """Do what `scaled_dot_product_attention` does on CUDA; its arguments follow the two properties of the device."""
    mask = attn_mask
    kernel = choose_kernel(
        *(capability, query, key, value, mask),
        prefers_cudnn=prefers_cudnn,
        dropout=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
    )
    if kernel is Kernel.FLASH:
        return flash_attention(query, key, value, dropout_p, is_causal, scale)
    if mask is not None and mask.dtype is torch.bool:
        # Each call makes an additive mask of its own, and its backward keeps it.
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))
    output: Tensor
    if kernel is Kernel.MATH:
        output = MATH_ATTENTION(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
        return output
    attention = CUDNN_ATTENTION
    if kernel is Kernel.EFFICIENT:
        attention = EFFICIENT_ATTENTION
        mask = None if mask is None else _aligned(mask).expand(*query.shape[:3], key.shape[2])
    keeps_logsumexp = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    output = attention(query, key, value, mask, keeps_logsumexp, dropout_p, is_causal, scale=scale)[0]
    return output


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Run flash attention: dropout and grouped heads cost it no memory.

    Takes [B, H, S, D], where keys and values may have fewer heads. Returns [B, H, S, D], laid out as [B, S, H, D].
    """
    head_dim = query.shape[-1]
    missing = -head_dim % 8
    if missing:
        query, key, value = (functional.pad(each, (0, missing)) for each in (query, key, value))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    output: Tensor = FLASH_ATTENTION(query, key, value, dropout, is_causal, False, scale=scale)[0]
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


def _flash_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Workspace]:
    batch, heads, rows, head_dim = query.shape
    rows = _up(rows, _FLASH_ROWS)
    needed: list[Workspace] = [
        # Delta is a number per row; the query's gradient is added up in float32 by all blocks of keys.
        ((batch, heads, rows), torch.float32),
        ((batch, rows, heads, _up(head_dim, 32 if head_dim <= 128 else 64)), torch.float32),
    ]
    if key.shape[1] != heads:
        # Gradients of keys and values are made per head of the query, and then added up by groups.
        needed += [((batch, key.shape[2], heads, head_dim), query.dtype)] * 2
    return needed


def _efficient_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Workspace]:
    if value.shape[-1] <= _EFFICIENT_VALUE_DIM or query.dtype is torch.float32:
        return []
    # Wide heads do not stay in registers: the output is added up in float32.
    return [((*query.shape[:3], value.shape[-1]), torch.float32)]


def _efficient_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Workspace]:
    batch, heads, rows, head_dim = query.shape
    return [
        ((batch, heads, _up(rows, 64), _up(head_dim, 64)), torch.float32),
        ((batch, heads, rows), torch.float32),
    ]


WORKSPACES: dict[Callable[..., Any], Callable[..., list[Workspace]]] = {
    FLASH_BACKWARD: _flash_backward,
    # cuDNN's plans do not say what they allocate. Measured on an H200 (cuDNN 9.19, 1 x 32 heads x 2,048 x 128): what
    # flash attention does, and 512 bytes. With fewer heads of keys and values it has not been measured.
    CUDNN_BACKWARD: _flash_backward,
    EFFICIENT_ATTENTION: _efficient_forward,
    EFFICIENT_BACKWARD: _efficient_backward,
}
"""For each kernel, a function that returns what it allocates for itself from its arguments, in that order."""


# --- Flash attention of other packages. ---

NAME = "hf_ckpt_flash"
"""The name under which transformers finds it while a step is simulated."""


def attention_to_build(name: str | None) -> str | None:
    """Return the `attn_implementation` to build a model with: `sdpa` where the user's `name` is a flash attention."""
    return "sdpa" if _is_flash(name) else name


def restore_attention(model: nn.Module, name: str | None) -> None:
    """Let a model that was built with `attention_to_build(name)` run flash attention where that was asked for.

    It changes the model's configs. The model then runs only inside of `emulate_cuda`.
    """
    if not _is_flash(name):
        return
    configs = {id(config): config for module in model.modules() for config in _configs(module)}
    for config in configs.values():
        set_attention_unchecked(config, NAME)


@contextmanager
def registered_flash_attention(*, is_padded: bool) -> Iterator[None]:
    """Register the attention with transformers while this is entered.

    It keeps what torch's flash kernel keeps. It takes no mask, and transformers makes none for an attention that it
    knows no masks of: sliding windows and packed documents are arguments of the kernel, and padding is taken out of its
    inputs, which then are copies. `is_padded` is whether rows of a batch differ in length.
    """
    # A step may be simulated while one is followed.
    found = ALL_ATTENTION_FUNCTIONS.get(NAME)
    ALL_ATTENTION_FUNCTIONS[NAME] = partial(_flash_attention_forward, is_padded)
    try:
        yield
    finally:
        if found is None:
            ALL_ATTENTION_FUNCTIONS.pop(NAME)
        else:
            ALL_ATTENTION_FUNCTIONS[NAME] = found


def _is_flash(name: str | None) -> bool:
    return name is not None and ("flash" in name or name == "flex_attention")


def _configs(module: nn.Module) -> Iterator[PretrainedConfig]:
    config = getattr(module, "config", None)
    if isinstance(config, PretrainedConfig):
        yield config
        yield from (part for part in vars(config).values() if isinstance(part, PretrainedConfig))


def _flash_attention_forward(
    is_padded: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim != head_dim:
        value = functional.pad(value, (0, head_dim - value_dim))
    if query.dtype is torch.float32:
        dtype = torch.get_autocast_dtype("cpu") if autocast.is_on() else _dtype_of(module)
        query, key, value = (each.to(dtype) for each in (query, key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and query.shape[2] == key.shape[2]
    batch, _, length, _ = query.shape
    if not is_padded or batch == 1 or key.shape[2] != length:
        output = flash_attention(query, key, value, dropout, causal, scaling).transpose(1, 2)
    else:
        # At most all positions are left.
        positions = torch.arange(batch * length)
        query, key, value = (_taken(each, positions) for each in (query, key, value))
        taken = flash_attention(query, key, value, dropout, causal, scaling).transpose(1, 2).flatten(0, 1)
        output = torch.zeros_like(taken)
        output[positions] = taken
        output = output.view(batch, length, *taken.shape[1:])
    return output[..., :value_dim], None


def _taken(tensor: Tensor, positions: Tensor) -> Tensor:
    """Take positions out of [B, H, S, D], and return the result in the same shape."""
    batch, heads, length, head_dim = tensor.shape
    taken = tensor.transpose(1, 2).flatten(0, 1)[positions]
    return taken.view(batch, length, heads, head_dim).transpose(1, 2)


def _dtype_of(module: nn.Module) -> torch.dtype:
    linear = next(each for each in module.modules() if isinstance(each, nn.Linear))
    dtype = linear.weight.dtype
    return dtype if dtype.is_floating_point and dtype is not torch.float32 else torch.bfloat16
