"""Kernels of our own in torch's dispatcher: a region is given the operators that it keeps, and no others.

A dispatch mode runs Python for each of the 60 to 200 operators of a layer; a selective region keeps a handful. So those
have a kernel at a dispatch key that torch leaves unused, and every other operator falls through it, in C++. The key is
below autograd, as a mode is: what autograd saves does not depend on it. It is in no tensor and in no thread's state but
inside of a region, so that nobody else comes by these kernels.

Where torch has come to use that key, `are_possible` says no, and regions run under a dispatch mode.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.library import Library, fallthrough_kernel

from hf_ckpt.regions.selective.operators import Kind, Role, kind_of, role_of

_KEY_NAME = "Fake"


class Region(Protocol):
    """What is given operators."""

    def run(self, kind: Kind, args: Any, kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """Return what an operator returns.

        Args:
            kind: of the operator.
            args: what it is given.
            kwargs: likewise.
            call: runs it.
        """

    def note_view(self, tensor: Tensor, view: Tensor) -> None:
        """A tensor got another that lies in its storage and counts its own writes: products of 3-D input have such."""


Setting = tuple[bool, Region | None, int]


class _State(threading.local):
    # Whether the key is set in this thread; the region; how many dispatch modes there were when it was entered.
    setting: Setting = (False, None, 0)


_STATE = _State()


@cache
def are_possible() -> bool:
    """Whether torch leaves the key unused."""
    try:
        torch._C._dispatch_key_parse(_KEY_NAME)
        tables = [torch._C._dispatch_dump_table(name) for name in ("aten::mm", "aten::add.Tensor", "aten::detach")]
    except (AttributeError, RuntimeError):
        return False
    return not any(line.startswith(f"{_KEY_NAME}:") for table in tables for line in table.splitlines())


@cache
def _are_made() -> _Kernels:
    return _Kernels()


_SERVING = threading.Lock()
"""Nobody else makes kernels meanwhile: torch takes one for each operator and key, whatever thread it comes from."""


def serve(functions: Iterable[Any]) -> None:
    """Make kernels for operators that have none yet, beside those of torch that matter to any region.

    Args:
        functions: overloads, of libraries that were loaded later, or that a plan names.
    """
    with _SERVING:
        kernels = _are_made()
        for function in functions:
            kernels.add(function._schema)


def enter(region: Region) -> Setting:
    """Give the operators that matter to a region from now on, in this thread; `serve` has been called.

    Returns:
        What was set before, for `leave`.
    """
    found = _STATE.setting
    _STATE.setting = (True, region, torch._C._len_torch_dispatch_stack())
    torch._C._dispatch_tls_set_dispatch_key_included(_are_made().key, True)
    return found


def pause() -> Setting:
    """Give no operators away from now on, in this thread, inside of a region that is given them either.

    Returns:
        What was set before, for `leave`.
    """
    found = _STATE.setting
    if found[0]:
        _STATE.setting = (False, None, 0)
        torch._C._dispatch_tls_set_dispatch_key_included(_are_made().key, False)
    return found


def leave(found: Setting) -> None:
    """Go back to what was set before."""
    if found[0] is not _STATE.setting[0]:
        torch._C._dispatch_tls_set_dispatch_key_included(_are_made().key, found[0])
    _STATE.setting = found


class _Kernels:
    """The kernels that there are.

    Attributes:
        key: the dispatch key.
    """

    def __init__(self) -> None:
        self.key = torch._C._dispatch_key_parse(_KEY_NAME)
        self._below = torch._C._dispatch_keyset_full_after(self.key)
        self._libraries: dict[str, Library] = {}
        self._names: set[str] = set()
        self._library("_").fallback(fallthrough_kernel, _KEY_NAME)  # type: ignore[no-untyped-call]  # upstream
        self._make("aten", "_unsafe_view", partial(_view, self._below))
        for schema in torch._C._jit_get_all_schemas():
            if role_of(schema) is not Role.CHEAP:
                self.add(schema)

    def add(self, schema: Any) -> None:
        """Make one for the operator of a schema."""
        name = ".".join(filter(None, (schema.name, schema.overload_name)))
        if name in self._names or not _is_dispatched(name):
            return
        self._names.add(name)
        namespace, _, rest = name.partition("::")
        kernel = _Kernel(schema.name, schema.overload_name, self.key, self._below)
        self._make(namespace, rest, kernel)

    def _make(self, namespace: str, name: str, kernel: Callable[..., Any]) -> None:
        self._library(namespace).impl(name, kernel, _KEY_NAME, with_keyset=True)  # type: ignore[no-untyped-call]  # upstream

    def _library(self, namespace: str) -> Library:
        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL")  # type: ignore[no-untyped-call]  # upstream
        return self._libraries[namespace]


def _is_dispatched(name: str) -> bool:
    # Operators of TorchScript have a schema and do not go through the dispatcher. What is made up of others never
    # gets below autograd, where this would be in the way of its being taken apart.
    return bool(torch._C._dispatch_has_kernel(name)) and not torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    )


class _Kernel:
    """The kernel of one operator.

    Args:
        name: such as `aten::mm`.
        overload: such as `out`, or empty.
        key: the dispatch key.
        below: what is below it.
    """

    def __init__(self, name: str, overload: str, key: Any, below: Any) -> None:
        self._name = name
        self._overload = overload
        self._key = key
        self._below = below
        self._function: Any = None
        # The dispatcher names kernels after what is registered.
        self.__name__ = name

    def _find(self) -> None:
        """Look at the operator: when it is first needed, as there are many."""
        namespace, _, packet = self._name.partition("::")
        function = getattr(getattr(getattr(torch.ops, namespace), packet), self._overload or "default")
        self._kind = kind_of(function)
        self._redispatch = function._handle.redispatch_boxed
        self._function = function

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            self._find()
        call = partial(self._redispatch, keyset & self._below)
        _, region, num_modes = _STATE.setting
        # What an operator calls inside of itself is its own affair.
        torch._C._dispatch_tls_set_dispatch_key_included(self._key, False)
        try:
            # Who compiles or traces inside of the region does not compute what the region computes.
            is_traced = torch._C._len_torch_dispatch_stack() != num_modes or TracingContext.try_get() is not None
            if region is None or is_traced:
                return call(*args, **kwargs)
            return region.run(self._kind, args, kwargs, call)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(self._key, True)


def _view(below: Any, keyset: Any, tensor: Tensor, size: Any) -> Tensor:
    """The kernel of `_unsafe_view`."""
    view: Tensor = torch.ops.aten._unsafe_view.default.redispatch(keyset & below, tensor, size)
    region = _STATE.setting[1]
    if region is not None:
        region.note_view(tensor, view)
    return view
