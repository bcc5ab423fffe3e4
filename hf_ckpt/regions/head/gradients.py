"""Gradients that come chunk by chunk, added up where torch's engine would need more memory or round more often.

The engine adds the gradients of a tensor that is used several times two by two, in the tensor's dtype, and `split`
keeps all parts until the last one is there. Here the parts go into one buffer: the tensor is taken through `_Whole`
once and through `_Part` for each chunk; the backward of `_Whole`, which comes last, hands the buffer on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Parts(Protocol):
    """Takes in the gradients of parts."""

    def part_of(self, tensor: Tensor, number: int) -> Tensor:
        """Return the part of a tensor that a chunk uses."""

    def add(self, gradient: Tensor, number: int) -> None:
        """Take in the gradient of that part."""

    def total(self) -> Tensor | None:
        """Return the gradient of the tensor, and start again; None if no part had one."""

    def spread(self, gradient: Tensor, number: int) -> Tensor:
        """Return the gradient of the tensor that comes from that part alone."""


Watched = Callable[[Parts], Parts]


class _Rows:
    """Some rows for each chunk: their gradients stand side by side.

    Args:
        lengths: rows of each chunk, T in all.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        ends = list(accumulate(lengths))
        self._slices = [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]
        self._num_rows = ends[-1]
        self._missing = set(range(len(lengths)))
        self._gradient: Tensor | None = None

    def part_of(self, tensor: Tensor, number: int) -> Tensor:
        return tensor[self._slices[number]]

    def add(self, gradient: Tensor, number: int) -> None:
        if self._gradient is None:
            self._gradient = gradient.new_empty(self._num_rows, *gradient.shape[1:])
        self._gradient[self._slices[number]] = gradient
        self._missing.discard(number)

    def total(self) -> Tensor | None:
        gradient, self._gradient = self._gradient, None
        if gradient is not None:
            for number in self._missing:
                gradient[self._slices[number]] = 0
        self._missing = set(range(len(self._slices)))
        return gradient

    def spread(self, gradient: Tensor, number: int) -> Tensor:
        rows = self._slices[number]
        around = [0, 0] * (gradient.dim() - 1)
        return functional.pad(gradient, [*around, rows.start, self._num_rows - rows.stop])


class _Sum:
    """The whole tensor for each chunk: their gradients are added up, in float32 at least.

    In bf16 a sum over a hundred chunks is several times further off than the one product of the whole batch, which the
    kernel adds up in float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._gradient: Tensor | None = None

    def part_of(self, tensor: Tensor, number: int) -> Tensor:
        return tensor

    def add(self, gradient: Tensor, number: int) -> None:
        if self._gradient is None:
            self._gradient = gradient.to(torch.promote_types(self._dtype, torch.float32), copy=True)
        else:
            self._gradient += gradient

    def total(self) -> Tensor | None:
        gradient, self._gradient = self._gradient, None
        return None if gradient is None else gradient.to(self._dtype)

    def spread(self, gradient: Tensor, number: int) -> Tensor:
        return gradient


class _Whole(torch.autograd.Function):
    """A tensor of which nothing but parts are used: its backward comes when theirs are through."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, parts: Parts) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parts = parts
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return (gradient if torch.is_grad_enabled() else ctx.parts.total()), None


class _Part(torch.autograd.Function):
    """What one chunk uses of a tensor; hands nothing on, and so nothing is added up by the engine.

    But under `create_graph=True`: what is put into a buffer is in no graph that could be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, parts: Parts, number: int) -> Tensor:
        ctx.parts, ctx.number = parts, number
        return parts.part_of(tensor, number).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        if torch.is_grad_enabled():
            return ctx.parts.spread(gradient, ctx.number), None, None
        ctx.parts.add(gradient, ctx.number)
        return None, None, None


class InParts:
    """A tensor that is used in parts.

    Args:
        tensor: with a gradient.
        parts: which.
    """

    def __init__(self, tensor: Tensor, parts: Parts) -> None:
        self._parts = parts
        self._whole: Tensor = _Whole.apply(tensor, parts)  # type: ignore[no-untyped-call]  # upstream

    @classmethod
    def by_rows(cls, tensor: Tensor, lengths: Sequence[int], watched: Watched | None = None) -> InParts:
        """Use some rows of a tensor in each chunk.

        Args:
            tensor: with T rows.
            lengths: of the chunks, T in all.
            watched: returns what looks at the gradients as well.
        """
        parts = _Rows(lengths)
        return cls(tensor, parts if watched is None else watched(parts))

    @classmethod
    def repeated(cls, tensor: Tensor, watched: Watched | None = None) -> InParts:
        """Use all of a tensor in each chunk. See `by_rows`."""
        parts = _Sum(tensor.dtype)
        return cls(tensor, parts if watched is None else watched(parts))

    def __call__(self, number: int) -> Tensor:
        """Return what a chunk uses.

        Args:
            number: of the chunk, from 0.
        """
        part: Tensor = _Part.apply(self._whole, self._parts, number)  # type: ignore[no-untyped-call]  # upstream
        return part
