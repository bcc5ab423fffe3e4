"""Which operations on logits [..., V] treat each row alone, by the names of torch's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

ELEMENTWISE = frozenset(
    [
        *("float", "half", "bfloat16", "double", "to", "type", "type_as"),
        *("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "neg", "negative"),
        *("__rdiv__", "__rsub__", "__rpow__", "pow", "square", "sqrt", "exp", "log", "log1p", "abs"),
        *("tanh", "sigmoid", "relu", "clamp", "clip", "clamp_min", "clamp_max", "nan_to_num", "masked_fill", "where"),
    ]
)
"""Of the logits and of numbers, or of tensors that are the same for every row."""

CASTS = frozenset(["float", "half", "bfloat16", "double", "to", "type", "type_as"])
"""They return the tensor itself where it has the dtype already."""

ALONG_ROWS = frozenset(["log_softmax", "softmax"])
"""Of a row, into a row, where their dimension is the vocabulary."""

REDUCTIONS = {
    "argmax": 0,
    "amax": 0,
    "max": 0,
    "logsumexp": 0,
    "sum": 0,
    "mean": 0,
    "gather": 0,
    "topk": 1,
}
"""Of a row, into a few numbers. With the place of the dimension among the arguments behind the logits."""

METADATA = frozenset(
    [
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference", "has_names"),
        *("storage_offset", "is_same_size", "is_pinned", "is_shared", "__len__", "__hash__", "requires_grad_"),
    ]
)
"""Answered from what is known of logits that are not there."""

VIEWED_PROPERTIES = frozenset(["T", "H", "mT", "mH", "real", "imag"])

WANT_GRADIENT = frozenset(["register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad"])
"""They want the gradient of the logits, which are in no graph."""


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
