"""`torch.rms_norm` as the one kernel that it is on CUDA: it keeps its input, and a number per row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms_norm(input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
    """Return a tensor of the shape and dtype of the norm's output.

    Args:
        input: fake, [..., *normalized_shape].
        normalized_shape: the dimensions that are normed.
        weight: of that shape and the input's dtype, or None.
    """
    output: Tensor = _RMSNorm.apply(input, normalized_shape, weight)  # type: ignore[no-untyped-call]
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        rows = input.shape[: input.dim() - len(normalized_shape)]
        ctx.save_for_backward(input, weight, torch.empty(rows, dtype=torch.float32))
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        of_input = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        return of_input, None, of_weight
