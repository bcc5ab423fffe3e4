"""The experts of a mixture, which are one parameter of three dimensions: experts, and rows and columns of each."""

from __future__ import annotations

from torch import nn

_DIMS = 3


def is_experts(module: nn.Module, name: str) -> bool:
    """Tell whether a parameter of a module is a matrix for each expert: its module says how many it has.

    Kernels of convolutions and tables of positions may have three dimensions too.
    """
    parameter = module._parameters.get(name)
    if parameter is None or parameter.dim() != _DIMS:
        return False
    return any("expert" in key and value == parameter.shape[0] for key, value in vars(module).items())
