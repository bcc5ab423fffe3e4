"""Flash attention as transformers runs it from a package of its own, on a machine where that is not installed.

It keeps what torch's flash kernel keeps. It takes no mask: sliding windows and packed documents are arguments of the
kernel, and padding is taken out of its inputs, which then are copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ckpt.simulation.cuda import autocast
from hf_ckpt.simulation.cuda.attention import flash

NAME = "hf_ckpt_flash"
"""Under which transformers finds it while a step is simulated."""


def attention_to_build(name: str | None) -> str | None:
    """Return the `attn_implementation` to build a model with: `sdpa` in the place of flash attention.

    Args:
        name: what the user asked for, such as `flash_attention_2`, `kernels-community/flash-attn3` or `sdpa`.
    """
    return "sdpa" if _is_flash(name) else name


def restore_attention(model: nn.Module, name: str | None) -> None:
    """Let a model that was built with `attention_to_build(name)` run flash attention where that was asked for.

    It then runs inside of `as_on_cuda` only.

    Args:
        model: on `meta`, or a fake copy; its configs are changed.
        name: what the user asked for.
    """
    if not _is_flash(name):
        return
    configs = {id(config): config for module in model.modules() for config in _configs(module)}
    for config in configs.values():
        config._attn_implementation_internal = NAME


@contextmanager
def stand_in(*, is_padded: bool) -> Iterator[None]:
    """Let transformers find the attention under its name, as long as this is entered.

    It makes no mask for an attention that it knows no masks of.

    Args:
        is_padded: whether rows of a batch differ in length.
    """
    ALL_ATTENTION_FUNCTIONS[NAME] = partial(_attend, is_padded)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.pop(NAME)


def _is_flash(name: str | None) -> bool:
    return name is not None and ("flash" in name or name == "flex_attention")


def _configs(module: nn.Module) -> Iterator[PretrainedConfig]:
    config = getattr(module, "config", None)
    if isinstance(config, PretrainedConfig):
        yield config
        yield from (part for part in vars(config).values() if isinstance(part, PretrainedConfig))


def _attend(
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
        output = flash(query, key, value, dropout, causal, scaling).transpose(1, 2)
    else:
        # The most that they can be is all positions.
        positions = torch.arange(batch * length)
        query, key, value = (_taken(each, positions) for each in (query, key, value))
        taken = flash(query, key, value, dropout, causal, scaling).transpose(1, 2).flatten(0, 1)
        output = torch.zeros_like(taken)
        output[positions] = taken
        output = output.view(batch, length, *taken.shape[1:])
    return output[..., :value_dim], None


def _taken(tensor: Tensor, positions: Tensor) -> Tensor:
    """Take positions out of [B, H, S, D], and see the result in the same shape."""
    batch, heads, length, head_dim = tensor.shape
    taken = tensor.transpose(1, 2).flatten(0, 1)[positions]
    return taken.view(batch, length, heads, head_dim).transpose(1, 2)


def _dtype_of(module: nn.Module) -> torch.dtype:
    linear = next(each for each in module.modules() if isinstance(each, nn.Linear))
    dtype = linear.weight.dtype
    return dtype if dtype.is_floating_point and dtype is not torch.float32 else torch.bfloat16
