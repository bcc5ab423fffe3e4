"""The loss of deferred logits, and other functions of their rows, in chunks that are recomputed in backward.

The gradients of the chunks are summed here, where torch's engine would need more memory or round more often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_ckpt.regions.head.head_call import HeadCall, RowOperation, compute_logits
from hf_ckpt.regions.recompute import recompute

# Computes a function of some logits in chunks, from the function and its operands.
Compute = Callable[..., list[Any]]

# Stands for the hidden states among the names of weights.
HIDDEN_STATES = ""


@dataclass(frozen=True, eq=False)
class LossCall:
    """A call of `cross_entropy` or `nll_loss` of torch; `options` are its other keyword arguments."""

    function: Callable[..., Tensor]
    target: Tensor
    """Class indices, [T]."""
    weight: Tensor | None
    """[V], in the dtype that the loss is computed in."""
    ignore_index: int
    reduction: str
    options: Mapping[str, Any]


def loss_in_chunks(compute: Compute, loss: LossCall) -> Tensor:
    """Return what the loss of torch returns: a scalar, or [T] without reduction.

    The sums over the chunks are added up in another order than the one sum over all tokens: equal within a few
    roundings of their dtype (1e-6 in float32), not bit by bit.
    """
    given = {"weight": loss.weight, "ignore_index": loss.ignore_index, **loss.options}
    of_rows = partial(loss.function, reduction="none" if loss.reduction == "none" else "sum", **given)
    losses = compute(of_rows, loss.target)
    if loss.reduction == "none":
        return torch.cat(losses)
    total: Tensor = losses[0]
    for other in losses[1:]:
        total = total + other
    return total if loss.reduction == "sum" else total / _divisor(loss, total.dtype)


def _divisor(loss: LossCall, dtype: torch.dtype) -> Tensor:
    """Return the divisor of the mean. If every token is ignored it is 0, and the mean nan, as in torch."""
    counts = loss.target != loss.ignore_index
    if loss.weight is None:
        return counts.sum().to(dtype)
    return loss.weight[loss.target.where(counts, 0)].where(counts, 0).sum()


def in_chunks(
    head_call: HeadCall,
    operations: Sequence[RowOperation],
    hidden: Tensor,
    lengths: Sequence[int],
    function: Callable[..., Any],
    *operands: Tensor,
    watch: Watch | None = None,
) -> list[Any]:
    """Return what `function` returns for each chunk: it takes the logits [n, V], and the chunk's rows of the operands.

    `hidden` is [T, H], the operands have T rows, and `lengths` are the rows of each chunk. Only `hidden` is held for
    backward, which costs one more forward of the head for each chunk.
    """
    rows = [torch.split(each, list(lengths)) for each in operands]
    if not torch.is_grad_enabled():
        chunks = zip(torch.split(hidden, list(lengths)), *rows, strict=True)
        return [function(compute_logits(head_call, operations, chunk), *others) for chunk, *others in chunks]
    weights = {
        name: InParts(weight, _SummedGradient(weight.dtype), name, watch)
        for name, weight in head_call.trainable_weights().items()
    }
    chunks = zip(_slices(hidden, lengths, watch), *rows, strict=True)
    return [
        recompute(partial(_run, head_call.head, head_call, tuple(operations), function, weights, number), *chunk)
        for number, chunk in enumerate(chunks)
    ]


def _run(
    head: nn.Module,
    head_call: HeadCall,
    operations: tuple[RowOperation, ...],
    function: Callable[..., Any],
    weights: Mapping[str, InParts],
    number: int,
    hidden: Tensor,
    *operands: Tensor,
) -> Any:
    """Return what `function` returns for a chunk. `head` comes first, so that `CallState` finds the module."""
    parts = {name: weight(number) for name, weight in weights.items()}
    return function(compute_logits(head_call, operations, hidden, parts), *operands)


def _slices(hidden: Tensor, lengths: Sequence[int], watch: Watch | None) -> Sequence[Tensor]:
    if not hidden.requires_grad:
        return torch.split(hidden, list(lengths))
    rows = InParts(hidden, _RowGradients(lengths), HIDDEN_STATES, watch)
    return [rows(number) for number in range(len(lengths))]


# --- Gradients of chunks. ---


class Parts(Protocol):
    """Gives chunks their parts of a tensor, here the whole of it, and collects the gradients of the parts.

    Inherit from this class: what has a value or a body below may be left as it is.
    """

    on_part: Callable[[Tensor, int], None] | None = None
    """Gets the gradient of each part, and its number."""
    on_total: Callable[[Tensor | None], None] | None = None
    """Gets the gradient of the tensor."""

    def part_of(self, tensor: Tensor, number: int) -> Tensor:
        """Return the part of a tensor that a chunk uses."""
        return tensor

    def add(self, gradient: Tensor, number: int) -> None:
        """Collect the gradient of that part."""

    def total(self) -> Tensor | None:
        """Return the gradient of the tensor, and start again; None if no part had one."""

    def spread(self, gradient: Tensor, number: int) -> Tensor:
        """Return the gradient of the tensor that comes from that part alone."""
        return gradient


# Is shown what collects the gradients of a weight, by its name, or of `HIDDEN_STATES`.
Watch = Callable[[str, Parts], None]


class InParts:
    """A tensor whose parts are used by chunks, with the gradients of the parts collected in one buffer.

    The engine would sum the gradients of a tensor that is used several times two by two, in the tensor's dtype, and
    `split` would keep all parts until the last one is there. Here the tensor goes through `_Whole` once and through
    `_ChunkInput` for each chunk; the backward of `_Whole`, which comes last, returns the buffer.
    """

    def __init__(self, tensor: Tensor, parts: Parts, name: str = HIDDEN_STATES, watch: Watch | None = None) -> None:
        self._parts = parts
        if watch is not None:
            watch(name, parts)
        self._whole: Tensor = _Whole.apply(tensor, self._parts)  # type: ignore[no-untyped-call]  # upstream

    def __call__(self, number: int) -> Tensor:
        """Return what chunk `number`, counted from 0, uses."""
        part: Tensor = _ChunkInput.apply(self._whole, self._parts, number)  # type: ignore[no-untyped-call]  # upstream
        return part


class _RowGradients(Parts):
    """Some rows for each chunk, as many as `lengths` say: their gradients are put side by side."""

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


class _SummedGradient(Parts):
    """The whole tensor for each chunk: the gradients are summed, in float32 at least.

    In bf16 a sum over a hundred chunks is several times further off than the one product of the whole batch, which the
    kernel sums in float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._gradient: Tensor | None = None

    def add(self, gradient: Tensor, number: int) -> None:
        if self._gradient is None:
            self._gradient = gradient.to(torch.promote_types(self._dtype, torch.float32), copy=True)
        else:
            self._gradient += gradient

    def total(self) -> Tensor | None:
        gradient, self._gradient = self._gradient, None
        return None if gradient is None else gradient.to(self._dtype)


class _Whole(torch.autograd.Function):
    """A tensor of which only parts are used: its backward comes after theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, parts: Parts) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parts = parts
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        if torch.is_grad_enabled():
            return gradient, None
        total = ctx.parts.total()
        if ctx.parts.on_total is not None:
            ctx.parts.on_total(total)
        return total, None


class _ChunkInput(torch.autograd.Function):
    """What one chunk uses of a tensor. Its backward returns nothing, so that the engine sums nothing.

    Except under `create_graph=True`: a buffer is in no graph that could be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, parts: Parts, number: int) -> Tensor:
        ctx.parts, ctx.number = parts, number
        return parts.part_of(tensor, number).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        if torch.is_grad_enabled():
            return ctx.parts.spread(gradient, ctx.number), None, None
        if ctx.parts.on_part is not None:
            ctx.parts.on_part(gradient, ctx.number)
        ctx.parts.add(gradient, ctx.number)
        return None, None, None
