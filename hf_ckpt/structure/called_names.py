"""Whether code calls something of a certain name: read off the compiled code of functions, which are not run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def calls(value: Any, pattern: re.Pattern[str]) -> bool:
    """Whether a function, or one of its own package that it calls, calls a name that the pattern matches as a whole."""
    found: set[FunctionType] = set()
    left = [_function(value)]
    while left:
        function = left.pop()
        if function is None or function in found:
            continue
        found.add(function)
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        if any(map(pattern.fullmatch, names)):
            return True
        package = _package(function)
        if package != "torch":
            called = [_function(function.__globals__.get(name)) for name in names]
            left += [other for other in called if other is not None and _package(other) == package]
    return False


def class_calls(kind: type, pattern: re.Pattern[str]) -> bool:
    """Whether a function that a class defines itself does; see `calls`."""
    return kind not in (nn.Module, object) and any(calls(value, pattern) for value in vars(kind).values())


def _function(value: Any) -> FunctionType | None:
    """Return the function behind `partial`s, methods and decorators; None for what has no Python code."""
    while isinstance(value, partial):
        value = value.func
    value = inspect.unwrap(value) if callable(value) else value
    value = getattr(value, "__func__", value)
    return value if isinstance(value, FunctionType) else None


def _package(function: FunctionType) -> str:
    return (function.__module__ or "").partition(".")[0]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
