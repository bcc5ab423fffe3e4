"""Shapes of a model's parameters as they were before an engine sharded them.

FSDP1 flattens the parameters of a unit into one, ZeRO-3 leaves tensors of shape (0,) behind; FSDP2 keeps the shapes.
What is a matrix, and how large a layer is, cannot be read off the parameters there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

Shapes = dict[nn.Module, dict[str, torch.Size]]


def parameter_shapes(model: nn.Module) -> Shapes:
    """Return, for each module that holds parameters itself, their unsharded shapes by name."""
    shapes: Shapes = {module: dict(_own_shapes(module)) for module in model.modules()}
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        for module, name, shape in _flattened(unit):
            shapes.setdefault(module, {})[name] = shape
    return shapes


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside FSDP1's wrapper; any other module as it is."""
    while isinstance(module, FullyShardedDataParallel):
        module = module.module
    return module


def _own_shapes(module: nn.Module) -> Iterator[tuple[str, torch.Size]]:
    if isinstance(module, FullyShardedDataParallel):
        # What it holds itself is the flat parameter.
        return
    for name, parameter in module.named_parameters(recurse=False):
        # ZeRO-3 notes the shape on the parameter that it has emptied.
        yield name, getattr(parameter, "ds_shape", parameter.shape)


def _flattened(unit: FullyShardedDataParallel) -> Iterator[tuple[nn.Module, str, torch.Size]]:
    if unit._handle is None:
        # A unit whose parameters are all in units below it, or that has none.
        return
    flat = unit._handle.flat_param
    for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
        yield info.module, info.param_name, shape
    for shared in flat._shared_param_infos:
        prim = (
            info.module is shared.prim_module and info.param_name == shared.prim_param_name
            for info in flat._param_infos
        )
        yield shared.module, shared.param_name, flat._shapes[list(prim).index(True)]
