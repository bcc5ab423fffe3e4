"""The loss of put-off logits, without the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Compute = Callable[..., list[Any]]
"""Computes a function of some logits in chunks: it is given the function and its operands."""


def in_chunks_of(
    compute: Compute,
    function: Callable[..., Tensor],
    target: Tensor,
    *,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    **options: Any,
) -> Tensor:
    """Return what `cross_entropy` or `nll_loss` of torch does.

    The sums over the chunks are added up in another order than the one sum over all tokens: equal within a few
    roundings of their dtype (1e-6 in float32), not by the bit.

    Args:
        compute: of logits [T, V].
        function: `cross_entropy` or `nll_loss`.
        target: class indices, [T].
        weight: of the classes, [V].
        ignore_index: as the function takes it.
        reduction: likewise.
        options: what else the function takes.

    Returns:
        A scalar; [T] without reduction.
    """
    of_rows = "none" if reduction == "none" else "sum"
    loss = partial(_loss, function, weight=weight, ignore_index=ignore_index, reduction=of_rows, **options)
    losses = compute(loss, target)
    if reduction == "none":
        return torch.cat(losses)
    total: Tensor = losses[0]
    for other in losses[1:]:
        total = total + other
    return total if reduction == "sum" else total / _divisor(target, weight, ignore_index, total.dtype)


def _loss(function: Callable[..., Tensor], logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return function(logits, target, **options)


def _divisor(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Return what the mean divides by. Where every token is ignored that is 0, and the mean nan, as torch has it."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum().to(dtype)
    return weight[target.where(counts, 0)].where(counts, 0).sum()
