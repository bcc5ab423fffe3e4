"""A fake copy of a model: its own modules and code, its weights without data.

The copy's tensors are fake ones on the CPU. `meta` itself would pick other attention kernels, and a fake GPU cannot
exist where torch was built without one. The model itself is not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_twin(model: nn.Module) -> tuple[nn.Module, FakeTensorMode]:
    """Return a copy of a model whose tensors are fake, and the mode that it has to run in.

    Args:
        model: on `meta`, on the CPU or on a device.
    """
    # A constant that a module has cached is real, and harmless.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with mode:
        for tensor in _tensors_of(model):
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor)
        return copy.deepcopy(model, memo), mode


def _tensors_of(model: nn.Module) -> Iterator[Tensor | None]:
    for module in model.modules():
        yield from module._parameters.values()
        yield from module._buffers.values()
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _fake(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
