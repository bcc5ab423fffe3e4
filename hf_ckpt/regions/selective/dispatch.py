"""How operators and modules get to a region: through a dispatch mode, or kernels of our own in torch's dispatcher.

A dispatch mode runs Python for each of the 60 to 200 operators of a layer; a selective region keeps a handful. So those
have a kernel at a dispatch key that torch leaves unused, and every other operator falls through it, in C++. The key is
below autograd, as a mode is: what autograd saves does not depend on it. It is in no tensor and in no thread's state but
inside of a region, so that no other code runs these kernels. They stand for the process, and other models' regions run
them: they hand on every call as torch made it.

If torch comes to use that key, `kernels_are_possible` says no, and regions run under a dispatch mode; so do those that
keep cheap operators, which take numbers in the place of tensors: torch hands Python the number of `x + 1`, and does not
take that back (2.13).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.library import Library, fallthrough_kernel

from hf_ckpt.regions.selective.save_rules import OperatorKind, OperatorRole, operator_kind, role_of
from hf_ckpt.upstream.torch import (
    KEYS,
    TorchDispatchMode,
    TracingContext,
    all_schemas,
    dispatch_key,
    dispatch_table,
    has_kernel,
    has_kernel_for_key,
    keys_after,
    num_dispatch_modes,
    redispatch_of,
    schema_of,
    set_key_included,
)

_KEY_NAME = "Fake"


class RegionRun(Protocol):
    """One run of a region, which is given operators: the forward, or a recomputation of it."""

    modules: list[str]
    """Globs that the modules which run now match, one entry for each module."""
    outer: RegionRun | None
    """The run that this one is inside of; None also where that is paused."""

    def run(self, kind: OperatorKind, args: Any, kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """Return what an operator returns; `call(*args, **kwargs)` runs it."""

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Note that the forward of an adapted layer begins (`adapted_layers`)."""

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Note that it ends. Return what takes the place of its output; None to leave that."""

    def end(self, raised: type[BaseException] | None) -> None:
        """End the run."""


class InterceptionState(NamedTuple):
    """Whether the key is set in this thread, for which region, and how many dispatch modes there were at that time."""

    is_on: bool = False
    receiver: RegionRun | None = None
    num_modes: int = 0


class _ThreadState(threading.local):
    """What holds in this thread: backward runs in others than forward, and replicas of a model in one each."""

    run: RegionRun | None = None
    interception = InterceptionState()


ACTIVE = _ThreadState()


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # upstream
    """Gives every operator that runs inside to a run of a region.

    `begin` makes the run; it is called each time that this is entered, as for each backward over the same graph.
    `ignores` says which operators matter to no run.
    """

    supports_higher_order_operators = True

    def __init__(self, begin: Callable[[], RegionRun], ignores: Callable[[Any], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # upstream
        self._begin = begin
        self._ignores = ignores
        self._run: RegionRun | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled inside of a region stay compiled (flex attention is)."""
        return True

    def __enter__(self) -> DispatchMode:
        self._run = self._begin()
        self._previous = ACTIVE.run, pause_interception()
        ACTIVE.run = self._run
        super().__enter__()  # type: ignore[no-untyped-call]  # upstream
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # upstream
        run, self._run = self._run, None
        ACTIVE.run, previous = self._previous
        restore_interception(previous)
        assert run is not None, "it is entered"
        run.end(raised[0])

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._ignores(function) or not self._is_active():
            return function(*args, **(kwargs or {}))
        assert self._run is not None, "it is entered"
        return self._run.run(operator_kind(function), args, kwargs or {}, function)

    def _is_active(self) -> bool:
        """Whether this run, or one inside of it, is the one that runs now: none is where all are paused."""
        run = ACTIVE.run
        while run is not None and run is not self._run:
            run = run.outer
        return run is not None


class KernelInterception:
    """Gives those operators that matter to a run of a region, through kernels of our own. See `DispatchMode`."""

    def __init__(self, begin: Callable[[], RegionRun]) -> None:
        self._begin = begin

    def __enter__(self) -> KernelInterception:
        run = self._run = self._begin()
        self._previous = ACTIVE.run, begin_interception(run)
        ACTIVE.run = run
        return self

    def __exit__(self, *raised: Any) -> None:
        ACTIVE.run, previous = self._previous
        restore_interception(previous)
        self._run.end(raised[0])


@cache
def kernels_are_possible() -> bool:
    """Whether torch leaves the key unused."""
    if KEYS.gone:
        KEYS.warn()
        return False
    try:
        dispatch_key(_KEY_NAME)
        tables = [dispatch_table(name) for name in ("aten::mm", "aten::add.Tensor", "aten::detach")]
    except RuntimeError:
        return False
    return not any(line.startswith(f"{_KEY_NAME}:") for table in tables for line in table.splitlines())


@cache
def _kernel_registry() -> _KernelRegistry:
    return _KernelRegistry()


_REGISTERING = threading.Lock()
"""Nobody else makes kernels meanwhile: torch takes one for each operator and key, whatever thread it comes from."""


def register_kernels(functions: Iterable[Any]) -> None:
    """Register kernels for overloads that have none yet (libraries that were loaded later, or that a plan names)."""
    with _REGISTERING:
        kernels = _kernel_registry()
        for function in functions:
            kernels.add(schema_of(function))


def begin_interception(receiver: RegionRun) -> InterceptionState:
    """Give the operators that matter to a receiver from now on, in this thread; return the state from before.

    `register_kernels` has been called.
    """
    previous = ACTIVE.interception
    ACTIVE.interception = InterceptionState(True, receiver, num_dispatch_modes())
    set_key_included(_kernel_registry().key, True)
    return previous


def pause_interception() -> InterceptionState:
    """Give no operators away from now on, in this thread, even inside of a region; return the state from before."""
    previous = ACTIVE.interception
    if previous.is_on:
        ACTIVE.interception = InterceptionState()
        set_key_included(_kernel_registry().key, False)
    return previous


def restore_interception(previous: InterceptionState) -> None:
    """Go back to a state from before."""
    if previous.is_on is not ACTIVE.interception.is_on:
        set_key_included(_kernel_registry().key, previous.is_on)
    ACTIVE.interception = previous


@contextmanager
def selection_paused() -> Iterator[None]:
    """Give no operators and modules away in the block: it is not the region that runs there."""
    found = ACTIVE.run, pause_interception()
    ACTIVE.run = None
    try:
        yield
    finally:
        ACTIVE.run, previous = found
        restore_interception(previous)


class _KernelRegistry:
    """The kernels that there are."""

    def __init__(self) -> None:
        self.key = dispatch_key(_KEY_NAME)
        self._below = keys_after(self.key)
        self._libraries: dict[str, Library] = {}
        self._names: set[str] = set()
        self._library("_").fallback(fallthrough_kernel, _KEY_NAME)  # type: ignore[no-untyped-call]  # upstream
        for schema in all_schemas():
            if role_of(schema) is not OperatorRole.CHEAP:
                self.add(schema)

    def add(self, schema: Any) -> None:
        """Register a kernel for the operator of a schema."""
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
    return bool(has_kernel(name)) and not has_kernel_for_key(name, "CompositeImplicitAutograd")


class _Kernel:
    """The kernel of one operator."""

    def __init__(self, name: str, overload: str, key: Any, below: Any) -> None:
        self._name = name
        self._overload = overload
        self._key = key
        self._below = below
        self._function: Any = None
        # The dispatcher names kernels after what is registered.
        self.__name__ = name

    def _find(self) -> None:
        """Look the operator up when it is first needed, as there are many."""
        namespace, _, packet = self._name.partition("::")
        function = getattr(getattr(getattr(torch.ops, namespace), packet), self._overload or "default")
        self._kind = operator_kind(function)
        self._redispatch = redispatch_of(function)
        self._function = function

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if self._function is None:
            self._find()
        call = partial(self._redispatch, keyset & self._below)
        _, receiver, num_modes = ACTIVE.interception
        # What an operator calls inside of itself is its own affair.
        set_key_included(self._key, False)
        try:
            # Who compiles or traces inside of the region does not compute what the region computes.
            is_traced = num_dispatch_modes() != num_modes or TracingContext.try_get() is not None
            if receiver is None or is_traced:
                return call(*args, **kwargs)
            return receiver.run(self._kind, args, kwargs, call)
        finally:
            # A run may pause what follows.
            set_key_included(self._key, ACTIVE.interception.is_on)
