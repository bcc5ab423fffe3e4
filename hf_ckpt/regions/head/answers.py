"""Which of the ways to answer a function of torch is taken, when it is asked of put-off logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from hf_ckpt.regions.head import computing, following, operations, rows
from hf_ckpt.regions.head.logits import DeferredLogits
from hf_ckpt.regions.head.source import unsupported

_WATCHING = ("torch.distributed.", "torch.utils.module_tracker.", "deepspeed.", "accelerate.", "hf_ckpt.")
"""Their hooks on gradients let these be: they gather weights, or take note that a gradient came by."""


def answer(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function of torch returns for logits that are not there.

    Args:
        function: any that torch lets a tensor answer itself.
        args: its arguments, put-off logits among them.
        kwargs: likewise.

    Raises:
        UnsupportedError: it cannot be had, not even from the whole logits.
    """
    name = function.__name__
    if name in ("__get__", "__set__", "__delete__"):
        return _property(function, name, args)
    if name in operations.METADATA:
        return _natively(function, args, kwargs)
    if name in operations.WANT_GRADIENT:
        return _hook(name, args)
    # Of a tensor to be like, nothing but its shape is asked.
    given = args[:1] if name in ("view_as", "reshape_as") else (*args, *kwargs.values())
    asked = [value for value in given if isinstance(value, DeferredLogits)]
    if len(asked) == 1 and asked[0].whole is None:
        position = next((place for place, value in enumerate(args) if value is asked[0]), None)
        if position is not None and "out" not in kwargs:
            found = _without_logits(function, name, asked[0], position, args, kwargs)
            if found is not NotImplemented:
                return found
    return _with_logits(function, name, args, kwargs)


def _natively(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _property(function: Callable[..., Any], kind: str, args: tuple[Any, ...]) -> Any:
    name = getattr(getattr(function, "__self__", None), "__name__", "")
    logits = args[0]
    if kind != "__get__":
        raise unsupported(f"Setting {name}")
    if name == "data":
        return logits.detach()
    if name in operations.VIEWED_PROPERTIES:
        return function(computing.whole(logits, name))
    return _natively(function, args, {})


def _hook(name: str, args: tuple[Any, ...]) -> RemovableHandle:
    """Let an engine's hook run before the backward of what is computed from the logits; refuse everybody else's.

    FSDP registers one on what a module returns, to gather weights before they are needed, and lets the gradient be.
    """
    if name == "register_hook" and _lets_gradient_be(args[1]):
        hooks = args[0].state.source.hooks
        handle = RemovableHandle(hooks)
        hooks[handle.id] = args[1]
        return handle
    raise unsupported(f"The gradient ({name})")


def _lets_gradient_be(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    # One that torch makes for several tensors has the one that it was given in its closure.
    inside = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    origins = [getattr(each, "__module__", None) for each in (hook, *inside) if callable(each)]
    return any(f"{origin}.".startswith(_WATCHING) for origin in origins)


def _without_logits(
    function: Callable[..., Any],
    name: str,
    logits: DeferredLogits,
    position: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Answer without the whole logits, or with NotImplemented."""
    if logits.state.has_classes_first and name not in operations.CASTS | computing.LOSSES:
        return NotImplemented
    if name in operations.ELEMENTWISE:
        return following.each_row(function, name, logits, position, args, kwargs)
    if position != 0:
        return NotImplemented
    if operations.is_in_place(name):
        return following.in_place(name, logits, args, kwargs)
    if name in operations.REDUCTIONS:
        return computing.reduced(function, name, logits, args[1:], kwargs)
    if name in computing.LOSSES:
        return computing.loss(name, logits, args, kwargs)
    if name in operations.ALONG_ROWS:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        is_along = operations.is_of_vocabulary(dim, logits.dim())
        return following.each_row(function, name, logits, 0, args, kwargs) if is_along else NotImplemented
    return _moved(name, logits, args, kwargs)


def _moved(name: str, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer by moving rows, or with NotImplemented."""
    if name == "__getitem__":
        return following.indexed(logits, args[1])
    if rows.puts_classes_first(name, logits.shape, *args[1:], **kwargs):
        return following.with_classes_first(logits)
    if name in rows.MOVES:
        hidden = rows.MOVES[name](logits.state.hidden, logits.shape, *args[1:], **kwargs)
        return following.moved(logits, name, hidden)
    return NotImplemented


def _with_logits(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let a function have the real logits."""
    writes = operations.is_in_place(name) and isinstance(args[0], DeferredLogits)
    if writes and args[0].has_relatives:
        raise unsupported(f"A write ({name}) into memory that they share with others")
    if isinstance(kwargs.get("out"), Tensor):
        raise unsupported(f"Taking in the result of {name}")
    real_args, real_kwargs = tree_map_only(DeferredLogits, partial(computing.whole, name=name), (args, kwargs))
    found = function(*real_args, **real_kwargs)
    return args[0] if writes and found is real_args[0] else found
