"""A fake copy of a model: its own modules and code, its weights without data.

The copy's tensors are fake ones on the CPU. `meta` itself would pick other attention kernels, and a fake GPU cannot
exist where torch was built without one. The model itself is not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ckpt.simulation import quantized
from hf_ckpt.simulation.instance_forwards import follow_forwards


def fake_twin(
    model: nn.Module, dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype"), *, is_cuda: bool = True
) -> tuple[nn.Module, FakeTensorMode]:
    """Return a copy of a model whose tensors are fake, and the mode that it has to run in.

    Args:
        model: on `meta`, on the CPU or on a device.
        dtype_of: what a parameter is computed with, where that is not what it is stored in.
        is_cuda: whether the copy stands for a model on CUDA, where quantised layers compute in another way.
    """
    # A constant that a module has cached is real, and harmless.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with mode:
        for tensor in _tensors_of(model):
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor, dtype_of)
        twin = copy.deepcopy(model, memo)
        follow_forwards(model, memo)
        quantized.restore(model, twin, is_cuda=is_cuda)
    return twin, mode


def _tensors_of(model: nn.Module) -> Iterator[Tensor | None]:
    for module in model.modules():
        yield from module._parameters.values()
        yield from module._buffers.values()
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))
    yield from quantized.constants(model)


def _fake(tensor: Tensor | None, dtype_of: Callable[[Tensor], torch.dtype]) -> Tensor | None:
    if tensor is None:
        return None
    is_parameter = isinstance(tensor, nn.Parameter)
    dtype = dtype_of(tensor) if is_parameter else tensor.dtype
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
