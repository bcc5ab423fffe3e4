"""Forwards that other libraries put on instances, in copies of a model.

trl replaces a model's forward by a function that closes over what was there before. Python copies no functions: the
copy's forward would call that of the model itself, and leave gradients there. So functions on instances are made anew,
over the modules of the copy.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn


def follow_forwards(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let the forwards of a copy's instances run on the copy.

    Args:
        model: that was copied.
        memo: of the deep copy.
    """
    modules = {id(module) for module in model.modules()}
    for module in model.modules():
        if "forward" in vars(module) and id(module) in memo:
            memo[id(module)].forward = _over_copies(vars(module)["forward"], modules, memo)


def _over_copies(found: Any, modules: set[int], memo: dict[int, Any]) -> Any:
    """Return a callable with the copies in the place of the model's modules, wherever it holds one.

    Args:
        found: the callable, or what one holds.
        modules: ids of the model's modules.
        memo: of the deep copy.
    """
    if id(found) in modules:
        return memo.get(id(found), found)
    within = functools.partial(_over_copies, modules=modules, memo=memo)
    if isinstance(found, types.MethodType):
        return types.MethodType(within(found.__func__), within(found.__self__))
    if isinstance(found, functools.partial):
        keywords = {name: within(value) for name, value in found.keywords.items()}
        return functools.partial(within(found.func), *map(within, found.args), **keywords)
    if isinstance(found, types.FunctionType) and found.__closure__:
        return _with_closure(found, within, memo)
    return found


def _with_closure(function: types.FunctionType, within: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Return a function whose closure holds copies; the function itself where it holds no module of the model."""
    if id(function) in memo:
        return memo[id(function)]
    olds = function.__closure__ or ()
    cells = tuple(types.CellType() for _ in olds)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    functools.update_wrapper(made, function)
    made.__kwdefaults__ = function.__kwdefaults__
    # Accelerate follows `__wrapped__` to take its own wrappers off again.
    made.__dict__ = dict(vars(function))
    # Before its cells are filled: it may close over itself.
    memo[id(function)] = made
    is_new = False
    for cell, old in zip(cells, olds, strict=True):
        try:
            content = old.cell_contents
        except ValueError:
            # Not assigned yet.
            continue
        cell.cell_contents = within(content)
        is_new = is_new or cell.cell_contents is not content
    if not is_new:
        memo[id(function)] = function
    return memo[id(function)]
