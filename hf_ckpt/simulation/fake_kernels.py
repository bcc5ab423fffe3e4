"""Operators that real CPU tensors run and fake ones cannot: what stands in for them, and what nothing can stand in for.

Knows operators, and nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hf_ckpt.errors import UnsupportedError

_ROW_BYTES = 16
"""Rows of a grouped product begin at multiples of this."""


def substitute(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what to call instead of an operator on fake CPU tensors, or None where the operator itself runs.

    Args:
        function: an overload of an aten operator, such as `torch.ops.aten._grouped_mm.default`.

    Returns:
        A function with the operator's arguments whose output has the storages that the real CPU and CUDA kernels make.
        It is to be called with the fake mode on, and makes its output in one operator of its own, `aten.empty_strided`.
    """
    return _SUBSTITUTES.get(function)


def explain(error: Exception, module: str) -> UnsupportedError | None:
    """Return what to tell a user about an error of the fake mode, or None where it is about something else.

    Args:
        error: raised by a step on fake tensors.
        module: path of the innermost module that ran, empty outside all.
    """
    if not isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return None
    where = f'Module "{module}"' if module else "The model"
    return UnsupportedError(
        f"{where} cannot be simulated: it reads values of tensors to decide what to compute ({error.func}), and a "
        "simulated step has shapes only. Measure a step on the device instead, or choose an implementation with fixed "
        'shapes where the model has one (experts_implementation="grouped_mm").'
    )


def _grouped_mm(
    mat1: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Make the output of grouped products, such as those of a mixture's experts.

    torch's own fake kernel takes bfloat16 only, and pads rows only in builds for CUDA; the CPU kernel takes all
    floating types and pads always.
    """
    dtype = out_dtype or mat1.dtype
    rows, columns = mat1.shape[-2], mat2.shape[-1]
    is_batch = mat1.dim() == mat2.dim()
    num_groups = len(offs) if offs is not None and mat1.dim() == 2 else mat1.shape[0]
    per_row = _ROW_BYTES // dtype.itemsize
    stride = -(-columns // per_row) * per_row
    if is_batch:
        return torch.empty_strided((num_groups, rows, columns), (rows * stride, stride, 1), dtype=dtype)
    return torch.empty_strided((rows, columns), (stride, 1), dtype=dtype)


_SUBSTITUTES: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {torch.ops.aten._grouped_mm.default: _grouped_mm}
)
