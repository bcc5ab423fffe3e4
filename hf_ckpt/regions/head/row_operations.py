"""Which functions of torch treat each row of logits [..., V] alone, and which only move or drop positions.

The latter are done to the hidden states [..., H], which differ from the logits in their last dimension alone: whatever
keeps that dimension as it is does the same to both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

ALL = slice(None)

# Of the logits and of numbers, or of tensors that are the same for every row.
ELEMENTWISE = frozenset(
    [
        *("float", "half", "bfloat16", "double", "to", "type", "type_as"),
        *("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "neg", "negative"),
        *("__rdiv__", "__rsub__", "__rpow__", "pow", "square", "sqrt", "exp", "log", "log1p", "abs"),
        *("tanh", "sigmoid", "relu", "clamp", "clip", "clamp_min", "clamp_max", "nan_to_num", "masked_fill", "where"),
    ]
)

# They return the tensor itself if it has the dtype already.
CASTS = frozenset(["float", "half", "bfloat16", "double", "to", "type", "type_as"])

# From a row to a row, if their dimension is the vocabulary.
ALONG_ROWS = frozenset(["log_softmax", "softmax"])

# From a row to a few numbers.
REDUCTIONS = frozenset(["argmax", "amax", "max", "logsumexp", "sum", "mean", "gather", "topk"])

# Answered from the shape, dtype and device of the deferred logits.
METADATA = frozenset(
    [
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "has_names"),
        *("storage_offset", "is_same_size", "is_pinned", "is_shared", "__len__", "__hash__", "requires_grad_"),
    ]
)

VIEWED_PROPERTIES = frozenset(["T", "H", "mT", "mH", "real", "imag"])

# They need the gradient of the logits, which are in no graph.
WANT_GRADIENT = frozenset(["register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad"])


def is_of_vocabulary(dim: Any, num_dims: int) -> bool:
    """Whether a dimension, as it is given to a function of torch, is the last one alone."""
    if isinstance(dim, Sequence):
        return len(dim) == 1 and is_of_vocabulary(dim[0], num_dims)
    return isinstance(dim, int) and dim in (-1, num_dims - 1)


def is_same_for_rows(operand: Any, num_dims: int) -> bool:
    """Whether an argument of an elementwise operation means the same to every row."""
    if not isinstance(operand, Tensor):
        return True
    return operand.ndim <= num_dims and all(size == 1 for size in operand.shape[:-1])


def is_in_place(name: str) -> bool:
    """Whether a function of torch writes into its first argument, by its name."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def reduction_of_rows(
    function: Callable[..., Any], name: str, shape: torch.Size, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Tensor, ...]] | None:
    """Return a function of rows [n, V] that does what one of `REDUCTIONS` does, and its operands with as many rows.

    None if the call does not work along the vocabulary. `shape` is that of the logits; `args` and `kwargs` are those
    after the logits.
    """
    # Of the dimension among the arguments after the logits.
    place = 1 if name == "topk" else 0
    dim = args[place] if len(args) > place else kwargs.get("dim", -1 if name == "topk" else None)
    if not is_of_vocabulary(dim, len(shape)):
        return None
    if name == "gather":
        index = kwargs["index"] if "index" in kwargs else args[1]
        is_by_row = isinstance(index, Tensor) and index.shape[:-1] == shape[:-1]
        return (lambda logits, index: function(logits, -1, index), (index,)) if is_by_row else None
    if len(args) > place:
        args = (*args[:place], -1, *args[place + 1 :])
    else:
        kwargs = {**kwargs, "dim": -1}
    return lambda logits: function(logits, *args, **kwargs), ()


# --- Indices. ---


def split_index(index: Any, num_dims: int) -> tuple[tuple[Any, ...], Any] | None:
    """Split an index of logits into that of the positions and that of the vocabulary; None if that cannot be done."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, bool) for item in items):
        return None
    num_indexed = sum(map(_num_indexed, items))
    rest = [ALL] * (num_dims - num_indexed)
    places = [place for place, item in enumerate(items) if item is Ellipsis]
    place = places[0] if places else len(items)
    items[place : place + 1] = rest
    if not items or items[-1] is None or _num_indexed(items[-1]) > 1:
        return None
    return tuple(items[:-1]), items[-1]


def are_all(items: Sequence[Any]) -> bool:
    """Whether an index leaves every position where it is."""
    return all(isinstance(item, slice) and item == ALL for item in items)


def is_basic(items: Sequence[Any]) -> bool:
    """Whether an index is made of numbers, slices and new dimensions alone."""
    return all(item is None or isinstance(item, int | slice) for item in items)


def _num_indexed(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def with_columns_set(logits: Tensor, columns: Any, value: Any) -> Tensor:
    """Return a copy of some rows in which some columns have another value."""
    logits = logits.clone()
    logits[..., columns] = value
    return logits


# --- Operations that move positions. ---


def puts_classes_first(name: str, shape: torch.Size, *args: Any, **kwargs: Any) -> bool:
    """Whether a call turns logits [B, S, V] into [B, V, S]."""
    if len(shape) != 3 or kwargs:
        return False
    dims = [dim % 3 for dim in (args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args)]
    return (name == "transpose" and set(dims) == {1, 2}) or (name == "permute" and dims == [0, 2, 1])


def _same(hidden: Tensor, shape: torch.Size, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


def _view(hidden: Tensor, shape: torch.Size, *sizes: Any, **kwargs: Any) -> Tensor | None:
    if kwargs or not sizes or isinstance(sizes[0], torch.dtype):
        return None
    wanted = list(sizes[0] if isinstance(sizes[0], Sequence) else sizes)
    num_elements = math.prod(shape)
    if wanted.count(-1) == 1:
        known = -math.prod(wanted)
        if known == 0 or num_elements % known:
            return None
        wanted[wanted.index(-1)] = num_elements // known
    if math.prod(wanted) != num_elements or wanted[-1] != shape[-1]:
        return None
    return hidden.reshape(*wanted[:-1], hidden.shape[-1])


def _view_as(hidden: Tensor, shape: torch.Size, other: Tensor) -> Tensor | None:
    return _view(hidden, shape, other.shape)


def _flatten(hidden: Tensor, shape: torch.Size, start_dim: int = 0, end_dim: int = -1) -> Tensor | None:
    end = end_dim % len(shape)
    return None if end == len(shape) - 1 else hidden.flatten(start_dim, end)


def _transpose(hidden: Tensor, shape: torch.Size, dim0: int, dim1: int) -> Tensor | None:
    return hidden.transpose(dim0, dim1) if _are_leading((dim0, dim1), shape) else None


def _squeeze(hidden: Tensor, shape: torch.Size, dim: int | None = None) -> Tensor | None:
    return hidden.squeeze(dim) if dim is not None and _are_leading((dim,), shape) else None


def _unsqueeze(hidden: Tensor, shape: torch.Size, dim: int) -> Tensor | None:
    return hidden.unsqueeze(dim) if -len(shape) - 1 <= dim < len(shape) and dim != -1 else None


def _split(method: Callable[..., Any], hidden: Tensor, shape: torch.Size, size: Any, dim: int = 0) -> Any:
    return method(hidden, size, dim) if _are_leading((dim,), shape) else None


def _unbind(hidden: Tensor, shape: torch.Size, dim: int = 0) -> Any:
    return hidden.unbind(dim) if _are_leading((dim,), shape) else None


def _are_leading(dims: Sequence[int], shape: torch.Size) -> bool:
    return all(-len(shape) <= dim < len(shape) and dim % len(shape) != len(shape) - 1 for dim in dims)


# By the name of torch's function. Each takes the hidden states, the shape of the logits and the function's arguments,
# and returns the hidden states moved likewise, or None if the vocabulary does not stay the last dimension.
MOVES: dict[str, Callable[..., Any]] = {
    "contiguous": _same,
    "clone": _same,
    "detach": _same,
    "view": _view,
    "reshape": _view,
    "view_as": _view_as,
    "reshape_as": _view_as,
    "flatten": _flatten,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "unbind": _unbind,
    "split": partial(_split, torch.split),
    "chunk": partial(_split, torch.chunk),
}
