"""The experts of a mixture, where those of a layer are one parameter, found by structure; no list of models."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hf_ckpt.structure.attention_and_ffn import is_at_or_below
from hf_ckpt.structure.layers import Stack

_DIMS = 3  # Experts, and the rows and columns of each.


def are_experts(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a parameter that a module holds itself is a matrix for each expert: the module says how many it has.

    Kernels of convolutions and tables of positions may have three dimensions too.
    """
    if parameter.dim() != _DIMS:
        return False
    return any("expert" in name and value == parameter.shape[0] for name, value in vars(module).items())


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
