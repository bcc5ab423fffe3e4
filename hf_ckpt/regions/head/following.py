"""What the model does to put-off logits on their way to the loss: remembered, or done to the hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.regions.head import computing, operations, rows
from hf_ckpt.regions.head.logits import DeferredLogits, put_off
from hf_ckpt.regions.head.source import State, Step
from hf_ckpt.regions.rng_state import AutocastState


def each_row(
    function: Callable[..., Any],
    name: str,
    logits: DeferredLogits,
    position: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return the logits after an operation on each row; NotImplemented where an operand differs from row to row.

    Args:
        function: of torch.
        name: its name.
        logits: [..., V].
        position: theirs among the arguments.
        args: what it was called with, logits included.
        kwargs: likewise.
    """
    others = (*args[:position], *args[position + 1 :], *kwargs.values())
    if name in operations.CASTS:
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    elif not all(operations.is_same_for_rows(other, logits.dim()) for other in others):
        return NotImplemented
    if not logits.requires_grad and any(isinstance(other, Tensor) and other.requires_grad for other in others):
        return NotImplemented
    state = logits.state
    step = Step(function, _without(args, position), kwargs, position, logits.dim(), AutocastState.now())
    sample = step.run(state.sample)
    if name in operations.CASTS:
        if (sample.dtype, sample.device) == (state.sample.dtype, state.sample.device) and not kwargs.get("copy"):
            return logits
        # Whatever it was called with: a tensor to be like, say, which would be held on to.
        step = replace(step, function=Tensor.to, args=(None, sample.device, sample.dtype), kwargs={}, position=0)
    return _derived(logits, replace(state, steps=(*state.steps, step), sample=sample))


def in_place(name: str, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation on each row to the logits themselves; NotImplemented where that cannot be.

    Args:
        name: of torch's function.
        logits: [..., V], the first argument.
        args: what it was called with, logits included.
        kwargs: likewise.
    """
    if logits.has_relatives or not torch.is_grad_enabled():
        return NotImplemented
    if name == "__setitem__":
        made = _with_columns_set(logits, *args[1:])
    elif (plain := name.removesuffix("_")) in operations.ELEMENTWISE:
        made = each_row(getattr(Tensor, plain), plain, logits, 0, args, kwargs)
    else:
        return NotImplemented
    if made is NotImplemented or made.dtype != logits.dtype:
        return NotImplemented
    logits.state = made.state
    return logits


def moved(logits: DeferredLogits, name: str, hidden: Any) -> Any:
    """Return the logits of hidden states that were moved as the logits are to be.

    Args:
        logits: [..., V].
        name: of torch's function.
        hidden: what became of the hidden states; None where it cannot be done to them.
    """
    if hidden is None:
        return NotImplemented
    if isinstance(hidden, tuple | list):
        return tuple(moved(logits, name, each) for each in hidden)
    if name == "contiguous":
        return logits
    state = replace(logits.state, hidden=hidden, version=hidden._version)
    is_same = hidden is logits.state.hidden
    made = DeferredLogits(state) if name == "detach" else _derived(logits, state, is_same=is_same)
    if name != "clone" and isinstance(made, DeferredLogits):
        logits.has_relatives = made.has_relatives = True
    return made


def with_classes_first(logits: DeferredLogits) -> Any:
    """Return the logits with the vocabulary behind the batch.

    Args:
        logits: [B, S, V].
    """
    made = _derived(logits, replace(logits.state, has_classes_first=True), is_same=True)
    logits.has_relatives = made.has_relatives = True
    return made


def indexed(logits: DeferredLogits, index: Any) -> Any:
    """Return a part of the logits; NotImplemented where positions and vocabulary are indexed together.

    Args:
        logits: [..., V].
        index: what stands between the brackets.
    """
    apart = rows.take_index_apart(index, logits.dim())
    if apart is None:
        return NotImplemented
    positions, columns = apart
    if isinstance(columns, slice) and columns == rows.ALL:
        return moved(logits, "__getitem__", logits.state.hidden[positions])
    if not rows.are_all(positions):
        return logits[(*positions, rows.ALL)][..., columns] if rows.is_basic(positions) else NotImplemented
    if isinstance(columns, int):
        return computing.of_rows(logits, partial(_column, columns))
    made = each_row(Tensor.__getitem__, "__getitem__", logits, 0, (logits, (..., columns)), {})
    logits.has_relatives = made.has_relatives = True
    return made


def _derived(logits: DeferredLogits, state: State, *, is_same: bool = False) -> Any:
    """Return logits made from others; a single row is computed at once."""
    is_cut = logits.state.is_cut or not (is_same or torch.is_grad_enabled())
    made = put_off(replace(state, is_cut=is_cut), logits)
    return made if len(state.shape) > 1 else computing.whole(made, "a row")


def _without(args: tuple[Any, ...], position: int) -> tuple[Any, ...]:
    return (*args[:position], None, *args[position + 1 :])


def _column(column: int, logits: Tensor) -> Tensor:
    return logits[:, column]


def _with_columns_set(logits: DeferredLogits, index: Any, value: Any) -> Any:
    apart = rows.take_index_apart(index, logits.dim())
    if apart is None or not rows.are_all(apart[0]):
        return NotImplemented
    return each_row(_set_columns, "__setitem__", logits, 0, (logits, apart[1], value), {})


def _set_columns(logits: Tensor, columns: Any, value: Any) -> Tensor:
    logits = logits.clone()
    logits[..., columns] = value
    return logits
