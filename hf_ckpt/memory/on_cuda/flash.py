"""Flash attention as transformers runs it from a package of its own, on a machine where that is not installed.

It keeps what torch's flash kernel keeps. It takes no mask: sliding windows and packed documents are arguments of the
kernel, and padding is taken out of its inputs. A step is simulated for rows of full length, without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ckpt.memory.on_cuda import autocast
from hf_ckpt.memory.on_cuda.attention import flash

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

    It then runs inside of `as_on_cuda` only, and is to be given no attention mask.

    Args:
        model: the fake copy of the model, with configs of its own.
        name: what the user asked for.
    """
    if not _is_flash(name):
        return
    configs = {id(config): config for module in model.modules() for config in _configs(module)}
    for config in configs.values():
        config._attn_implementation_internal = NAME


@contextmanager
def stand_in() -> Iterator[None]:
    """Let transformers find the attention under its name, as long as this is entered.

    It makes no mask for an attention that it knows no masks of.
    """
    ALL_ATTENTION_FUNCTIONS[NAME] = _attend
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
    output = flash(query, key, value, dropout, causal and query.shape[2] == key.shape[2], scaling)
    return output.transpose(1, 2)[..., :value_dim], None


def _dtype_of(module: nn.Module) -> torch.dtype:
    linear = next(each for each in module.modules() if isinstance(each, nn.Linear))
    dtype = linear.weight.dtype
    return dtype if dtype.is_floating_point and dtype is not torch.float32 else torch.bfloat16
