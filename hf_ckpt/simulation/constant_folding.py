"""Lies between a fake step and the fake mode: runs for real what a model computes of its inputs and of constants alone.

Positions, lengths and masks of padding depend on no weight. Models read their values to decide what to do: without
padding, transformers leaves the causal mask to the attention kernel, which it cannot decide of fake tensors.
Random numbers are drawn for real too: to be entered where the state of the generator is put back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hf_ckpt.simulation.fake_kernels import substitute

_MOST_ELEMENTS = 2**22
"""What is larger than that (a mask [S, S], say) stays fake."""
_MOST_FLOATS = 2**18
"""Likewise of floating-point numbers: a mask of padding may be one, a table of positions need not have values."""

_DEVICE = torch.ops.prim.device.default
"""Asked of fake tensors several times by each operator; there is a shorter way to the answer."""


class Concrete(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Entered inside a `FakeTensorMode`: inputs and constants have values, everything else has a shape only."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is _DEVICE:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else function(*args)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(map(_has_values, tensors)):
            return (substitute(function) or function)(*args, **kwargs)
        if tensors and function._schema.is_mutable:
            # It returns what is there already, or nothing: on fake copies it would leave no trace.
            return _for_real(function, args, kwargs)
        try:
            output = function(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            # It reads values, which are there.
            return _for_real(function, args, kwargs)
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        return _for_real(function, args, kwargs) if made and all(map(_is_small, made)) else output


def _has_values(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (_MOST_FLOATS if tensor.is_floating_point() else _MOST_ELEMENTS)


def _for_real(function: Any, args: Any, kwargs: Any) -> Any:
    with _disable_current_modes():
        return function(*args, **kwargs)
