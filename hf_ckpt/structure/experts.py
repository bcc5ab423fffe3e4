"""The experts of a mixture, where those of a layer are one parameter, found by its shape; no list of models."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hf_ckpt.structure.attention_and_ffn import is_at_or_below
from hf_ckpt.structure.layers import Stack
from hf_ckpt.upstream.deepspeed import WHOLE_SHAPE

_EXPERT_DIMS = 3  # Experts, and the rows and columns of each.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def are_experts(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a parameter that a module holds itself is all experts of a layer, or one of their matrices."""
    # Kernels of convolutions have as many dimensions.
    return len(whole_shape(parameter)) == _EXPERT_DIMS and not isinstance(module, _CONVOLUTIONS)


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter, as it was before ZeRO-3 emptied it."""
    shape: torch.Size = getattr(parameter, WHOLE_SHAPE, parameter.shape)
    return shape


def names_of_experts(stacks: Iterable[Stack]) -> tuple[str, ...]:
    """Return the names, below a layer, of the parameters that are experts, such as `mlp.experts.down_proj`."""
    found: dict[str, None] = {}
    for stack in stacks:
        for layer in stack.layers:
            for path, module in layer.module.named_modules():
                # Convolutions that a mixer of states writes out itself are no experts.
                if is_at_or_below(path, *layer.attention):
                    continue
                for name, parameter in module.named_parameters(recurse=False):
                    if are_experts(module, parameter):
                        found[f"{path}.{name}"] = None
    return tuple(found)
