"""The experts of a mixture, where those of a layer are one parameter, found by structure; no list of models."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hf_ckpt.structure.attention_and_ffn import is_at_or_below
from hf_ckpt.structure.layers import Stack
from hf_ckpt.upstream.deepspeed import WHOLE_SHAPE

_DIMS = 3  # Experts, and the rows and columns of each.


def are_experts(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a parameter that a module holds itself is a matrix for each expert: the module says how many it has.

    Kernels of convolutions and tables of positions may have three dimensions too.
    """
    shape = whole_shape(parameter)
    return len(shape) == _DIMS and any("expert" in name and value == shape[0] for name, value in vars(module).items())


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
                # JetMoe's attention has experts of its own.
                if is_at_or_below(path, *layer.attention):
                    continue
                for name, parameter in module.named_parameters(recurse=False):
                    if are_experts(module, parameter):
                        found[f"{path}.{name}"] = None
    return tuple(found)
