"""Operations on put-off logits that only move or drop positions: done to the hidden states in their place.

Hidden states [..., H] and logits [..., V] differ in their last dimension alone. Whatever keeps that one as it is does
the same to both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

ALL = slice(None)


def same(hidden: Tensor, shape: torch.Size, *args: Any, **kwargs: Any) -> Tensor:
    """`contiguous`, `clone`, `detach`."""
    return hidden


def viewed(hidden: Tensor, shape: torch.Size, *sizes: Any, **kwargs: Any) -> Tensor | None:
    """`view`, `reshape`: None where the vocabulary does not stay the last dimension."""
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


def viewed_as(hidden: Tensor, shape: torch.Size, other: Tensor) -> Tensor | None:
    """`view_as`, `reshape_as`."""
    return viewed(hidden, shape, other.shape)


def flattened(hidden: Tensor, shape: torch.Size, start_dim: int = 0, end_dim: int = -1) -> Tensor | None:
    """`flatten`."""
    end = end_dim % len(shape)
    return None if end == len(shape) - 1 else hidden.flatten(start_dim, end)


def transposed(hidden: Tensor, shape: torch.Size, dim0: int, dim1: int) -> Tensor | None:
    """`transpose`."""
    return hidden.transpose(dim0, dim1) if _are_leading((dim0, dim1), shape) else None


def puts_classes_first(name: str, shape: torch.Size, *args: Any, **kwargs: Any) -> bool:
    """Whether a call turns logits [B, S, V] into [B, V, S]."""
    if len(shape) != 3 or kwargs:
        return False
    dims = [dim % 3 for dim in (args[0] if len(args) == 1 and isinstance(args[0], Sequence) else args)]
    return (name == "transpose" and set(dims) == {1, 2}) or (name == "permute" and dims == [0, 2, 1])


def squeezed(hidden: Tensor, shape: torch.Size, dim: int | None = None) -> Tensor | None:
    """`squeeze`."""
    return hidden.squeeze(dim) if dim is not None and _are_leading((dim,), shape) else None


def unsqueezed(hidden: Tensor, shape: torch.Size, dim: int) -> Tensor | None:
    """`unsqueeze`."""
    return hidden.unsqueeze(dim) if -len(shape) - 1 <= dim < len(shape) and dim != -1 else None


def parted(method: Callable[..., Any], hidden: Tensor, shape: torch.Size, size: Any, dim: int = 0) -> Any:
    """`split`, `chunk`."""
    return method(hidden, size, dim) if _are_leading((dim,), shape) else None


def unbound(hidden: Tensor, shape: torch.Size, dim: int = 0) -> Any:
    """`unbind`."""
    return hidden.unbind(dim) if _are_leading((dim,), shape) else None


def take_index_apart(index: Any, num_dims: int) -> tuple[tuple[Any, ...], Any] | None:
    """Split an index of logits into that of the positions and that of the vocabulary.

    Args:
        index: what stands between the brackets.
        num_dims: of the logits.

    Returns:
        None where it cannot be said which is which.
    """
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


def _are_leading(dims: Sequence[int], shape: torch.Size) -> bool:
    return all(-len(shape) <= dim < len(shape) and dim % len(shape) != len(shape) - 1 for dim in dims)


MOVES: dict[str, Callable[..., Any]] = {
    "contiguous": same,
    "clone": same,
    "detach": same,
    "view": viewed,
    "reshape": viewed,
    "view_as": viewed_as,
    "reshape_as": viewed_as,
    "flatten": flattened,
    "transpose": transposed,
    "squeeze": squeezed,
    "unsqueeze": unsqueezed,
    "unbind": unbound,
    "split": partial(parted, torch.split),
    "chunk": partial(parted, torch.chunk),
}
"""By the name of the function of torch; each is given the hidden states, the shape of the logits, and its arguments."""
