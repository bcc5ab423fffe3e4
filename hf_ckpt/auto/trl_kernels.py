"""trl's head and loss as they run on CUDA, where a kernel of Triton works in place.

Elsewhere trl computes the same with operators of torch, and so it does on the tensors of a simulation: with several
float32 copies of each tile of logits, of up to 512 MiB, which CUDA never has. Source: `trl/kernels/chunked_logprob.py`.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_LOSS = "_ChunkedLogProbFunction"


def use_cuda_kernels(copied: nn.Module) -> None:
    """Let a copy of a model run trl's fused head as on CUDA. Functions are made anew: those of trl stay as they are."""
    for module in copied.modules():
        forward = vars(module).get("forward")
        function = getattr(forward, "__func__", None)
        if isinstance(function, FunctionType) and _LOSS in function.__globals__:
            loss = _in_place(function.__globals__[_LOSS])
            module.forward = MethodType(with_globals(function, {_LOSS: loss}), module)


def _in_place(loss: Any) -> Any:
    """Return an autograd function like trl's whose steps on a tile take no memory."""
    steps = {"_forward_tile": _fold, "_backward_tile": _turn_to_gradient, "_addmm_fp32": _add_product}
    methods = {name: staticmethod(with_globals(getattr(loss, name), steps)) for name in ("forward", "backward")}
    return type(loss.__name__, (torch.autograd.Function,), methods)


def with_globals(function: FunctionType, changes: dict[str, Any]) -> FunctionType:
    """Return a function made anew that finds other things by these names of its module."""
    names = {**function.__globals__, **changes}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _fold(tile: Tensor, *args: Any, **kwargs: Any) -> None:
    """Write into the statistics of each row what depends on its tile."""
    for each in args:
        if isinstance(each, Tensor) and each.is_floating_point():
            each.copy_(tile[:, 0])


def _turn_to_gradient(tile: Tensor, *args: Any, **kwargs: Any) -> None:
    """Put the gradient of the logits in their place."""


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
