"""Tensors that a region starts from, handed to autograd before the region runs.

Autograd frees them with the graph, lets saved-tensor hooks see them, and refuses them when they were changed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class _SaveForBackward(torch.autograd.Function):
    """Its node is never run; it only holds what it was given."""

    @staticmethod
    def forward(ctx: Any, node_maker: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return (tensors[0] if tensors else node_maker).new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise AssertionError("the output of _SaveForBackward is in no graph")


class SavedInputs:
    """Tensors that a region starts from.

    Args:
        tensors: they; saved-tensor hooks see them now.

    Attributes:
        token: a tensor of no elements whose node holds the others: whoever keeps it keeps them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # The first argument brings about a node that holds the others, even if none of them needs a gradient.
        self.token: Tensor = _SaveForBackward.apply(torch.empty((), requires_grad=True), *tensors)  # type: ignore[no-untyped-call]

    def get(self) -> list[Tensor]:
        """Return the tensors."""
        return saved_behind(self.token)


def saved_behind(token: Tensor) -> list[Tensor]:
    """Return the tensors that the token of a `SavedInputs` keeps."""
    node: Any = token.grad_fn
    return list(node.saved_tensors)
