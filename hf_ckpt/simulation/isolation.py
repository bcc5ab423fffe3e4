"""Keeps a simulation off the real model, and takes out again what the user's code kept of it.

A copy runs in the model's place. What its code still reaches of the model itself is refused where it runs
(`RealTensors`), and looked for when it has run (`isolated`). What hooks and forwards write elsewhere, such as a list of
activations, a counter or a random generator, is put back.
"""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.module_state import is_ours, versions_of
from hf_ckpt.regions.put_back import CONTAINERS, put_container_back
from hf_ckpt.simulation.shared_tensors import local_part
from hf_ckpt.structure.layers import modules_of
from hf_ckpt.trainer.other_models import is_of_library, names_in
from hf_ckpt.upstream.torch import FakeTensor, disable_current_modes, storage_id

_COPY_OF = "_hf_ckpt_copy_of"


def note_original(copied: nn.Module, model: nn.Module) -> None:
    """Let a copy that is kept know which model it was made of."""
    vars(copied)[_COPY_OF] = weakref.ref(original_of(model))


def original_of(model: nn.Module) -> nn.Module:
    """Return the model that a copy was made of, while there is one; any other model itself."""
    noted = vars(model).get(_COPY_OF)
    return (noted() if noted is not None else None) or model


_HARMLESS = frozenset({FakeTensor, type(None), bool, int, float, str, torch.dtype, torch.device})


class Running(Protocol):
    """What knows which module runs."""

    @property
    def module(self) -> str:
        """Its path."""


class RealModelReachedError(UnsupportedError):
    """The code of a copy has reached the model itself."""


class RealTensors:
    """The parameters and buffers of real models, which no operator of a simulation may meet."""

    def __init__(self, tensors: Iterable[tuple[tuple[str, ...], Tensor]] = ()) -> None:
        self._names: dict[int | None, tuple[str, ...]] = {_address(tensor): name for name, tensor in tensors}
        self._names.pop(None, None)
        self.is_guarded = bool(self._names)
        self.error: RealModelReachedError | None = None  # The first refusal. The model's own code may have caught it.

    def check(self, values: Collection[Any], running: Running) -> None:
        """Refuse arguments of an operator that runs if a tensor of a real model is among them."""
        if _HARMLESS.issuperset(map(type, values)):
            return
        for value in values:
            if type(value) is FakeTensor or not isinstance(value, Tensor | tuple | list):
                continue
            if not isinstance(value, Tensor):
                self.check(value, running)
            elif (name := self._name_of(value)) is not None:
                self.error = self.error or RealModelReachedError(
                    f'The step cannot be simulated: the forward of "{running.module or "the model"}" reaches {name}, '
                    "in a way that a copy of the model does not follow (a global variable, an attribute of another "
                    "object or of a class, C code), and would leave gradients there. Let it reach that through the "
                    "module itself, a closure, a partial or a bound method, or use a fixed policy, such as "
                    '"full".'
                )
                raise self.error

    def _name_of(self, tensor: Tensor) -> str | None:
        if isinstance(tensor, FakeTensor):
            return None
        if (name := self._names.get(_address(tensor))) is not None:
            return f"{_path(name)} of the real model"
        # Without a graph it gets no gradient: a teacher may be trainable, and is asked under `no_grad`.
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and torch.is_grad_enabled():
            return f"a trainable parameter {list(tensor.shape)} that no module of the model has"
        return None


def _path(parts: Iterable[str]) -> str:
    return ".".join(filter(None, parts))


def _address(tensor: Tensor) -> int | None:
    tensor = local_part(tensor)
    if tensor.layout is not torch.strided or isinstance(tensor, FakeTensor):
        return None
    try:
        address: int = storage_id(tensor.untyped_storage())
    except NotImplementedError:
        # A wrapper of another tensor.
        return None
    return address


@contextmanager
def isolated(
    models: Iterable[nn.Module], copies: Iterable[nn.Module], code: Iterable[object] = ()
) -> Iterator[RealTensors]:
    """Run copies of models inside, and see to it that nothing else is different afterwards.

    Yields what no operator may meet. `code`: what runs besides the models' own code, such as a loss.

    Raises:
        RealModelReachedError: the code of a copy has reached a real model. What it changed there is put back.
    """
    real = list(dict.fromkeys(map(original_of, models)))
    guarded = Snapshot()
    guarded.add_modules({module: path for model in real for path, module in model.named_modules()})
    reached = Snapshot()
    hooks = (getattr(torch.nn.modules.module, name, None) for name in _HOOKS_OF_ALL)
    _Reached(reached, real).look_into([module for copied in copies for module in modules_of(copied)], (*code, *hooks))
    tensors = RealTensors(guarded.tensors())
    try:
        yield tensors
    finally:
        with disable_current_modes():
            reached.put_back()
            changed = guarded.put_back()
    if tensors.error is not None:
        raise tensors.error
    if changed:
        raise RealModelReachedError(
            "The step cannot be simulated: on a copy of the model, its code has changed the real model "
            f"({', '.join(changed[:_MAX_NAMED])}), which was put back. Let forwards and hooks reach it through the "
            'module that they are given, or use a fixed policy, such as "full".'
        )


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put back the states of torch's generators (CPU and current GPU), numpy's global one and Python's afterwards."""
    state, of_numpy = random.getstate(), np.random.get_state()  # the global one
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]  # upstream
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(of_numpy)


_MAX_NAMED = 5
# Of `torch.nn.modules.module` (torch 2.13): those that `register_module_forward_hook` and the like have placed.
_HOOKS_OF_ALL = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


class Snapshot:
    """What mutable things held, one level deep."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[str, ...], Callable[[], bool]]] = []
        # Most containers of modules are without hooks, and are compared at once.
        self._empty: list[tuple[tuple[str, ...], Any]] = []
        self._names: list[tuple[str, str]] = []
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._gradients: list[tuple[Tensor | None, int]] = []

    def add(self, thing: Any, *name: str) -> None:
        """Note what a container, a cell, a class, a generator or a small tensor holds."""
        if isinstance(thing, CONTAINERS) and not thing:
            self._empty.append((name, thing))
        elif (put_back := _putting_back(thing)) is not None:
            self._kept.append((name, put_back))

    def add_names(self, names: dict[str, Any], of: Iterable[str]) -> None:
        """Note what some names of a dictionary stand for, such as those of a module's globals that code writes."""
        before = {name: names.get(name, names) for name in of}
        self._kept.append(((), functools.partial(_put_names_back, names, before)))

    def add_modules(self, modules: Mapping[nn.Module, str]) -> None:
        """Note the attributes of modules, what these hold, and the identity and version of tensors and gradients."""
        for module, path in modules.items():
            own = vars(module)
            self.add(own, path, "attributes")
            for name, value in own.items():
                if type(value) in _HARMLESS:
                    continue
                if type(value) in _DICTS and not value:
                    self._empty.append(((path, name), value))
                elif isinstance(value, CONTAINERS + _GENERATORS):
                    self.add(value, path, name)
                elif not isinstance(value, _PLAIN) and not _is_known(type(value).__module__):
                    self.add(getattr(value, "__dict__", None), path, name)
            for held in (module._parameters, module._buffers):
                found = {name: each for name, each in held.items() if each is not None}
                self._names += ((path, name) for name in found)
                self._tensors += found.values()
        self._versions = versions_of(self._tensors)
        self._gradients = self._gradients_now()

    def _gradients_now(self) -> list[tuple[Tensor | None, int]]:
        found = map(_gradient_of, self._tensors)
        return [(each, -1 if each is None else versions_of([each])[0]) for each in found]

    def put_back(self) -> list[str]:
        """Put back what has changed, as far as it can be, and name it."""
        filled = [each for each in self._empty if each[1]]
        for _, thing in filled:
            thing.clear()
        changed = [name for name, _ in filled] + [name for name, put_back in self._kept if put_back()]
        found = zip(self._names, versions_of(self._tensors), self._versions, strict=True)
        changed += [name for name, now, before in found if now != before]
        gradients = zip(self._names, self._tensors, self._gradients_now(), self._gradients, strict=True)
        for (path, name), tensor, (now, version), (gradient, before) in gradients:
            if now is not gradient:
                tensor.grad = gradient
            if now is not gradient or version != before:
                changed.append((path, f"{name}.grad"))
        return list(map(_path, changed))

    def tensors(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield the tensors of modules, with their names in parts."""
        yield from zip(self._names, self._tensors, strict=True)


_DICTS = frozenset({dict, OrderedDict})
_HELD = frozenset({"_parameters", "_buffers", "_modules"})
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_SMALL_NUMEL = 2**16  # Of a tensor that is copied in case it is written to.


def _putting_back(thing: Any) -> Callable[[], bool] | None:
    """Return what brings a thing back to what it holds now, and tells whether it was different."""
    match thing:
        case dict():
            return functools.partial(put_container_back, thing, dict(thing))
        case list() | deque() | set():
            return functools.partial(put_container_back, thing, list(thing))
        case CellType() | type():
            return functools.partial(_put_attributes_back, thing, _attributes(thing))
        case Tensor() if not isinstance(thing, FakeTensor) and not thing.is_meta:
            values = thing.detach().clone() if thing.numel() <= _SMALL_NUMEL else None
            return functools.partial(_put_values_back, thing, thing._version, values, _gradient_of(thing))
        case torch.Generator() | np.random.RandomState():
            return functools.partial(_put_state_back, thing.set_state, thing.get_state())
        case random.Random():
            return functools.partial(_put_state_back, thing.setstate, thing.getstate())
        case np.random.Generator():
            bits = thing.bit_generator
            return functools.partial(_put_state_back, functools.partial(setattr, bits, "state"), bits.state)
    return None


def _attributes(thing: Any) -> dict[str, Any]:
    if isinstance(thing, type):
        return dict(vars(thing))
    try:
        return {"cell_contents": thing.cell_contents}
    except ValueError:
        # Not assigned yet.
        return {}


def _put_attributes_back(thing: Any, before: Mapping[str, Any]) -> bool:
    now = _attributes(thing)
    for name in {**now, **before}:
        if name not in before:
            delattr(thing, name)
        elif now.get(name, now) is not before[name]:
            setattr(thing, name, before[name])
    return now.keys() != before.keys() or any(now[name] is not before[name] for name in before)


def _put_names_back(names: dict[str, Any], before: Mapping[str, Any]) -> bool:
    changed = [name for name, value in before.items() if names.get(name, names) is not value]
    for name in changed:
        if before[name] is names:
            del names[name]
        else:
            names[name] = before[name]
    return bool(changed)


def _put_state_back(put: Callable[[Any], Any], before: Any) -> bool:
    put(before)
    return False


def _gradient_of(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _put_values_back(tensor: Tensor, version: int, before: Tensor | None, gradient: Tensor | None) -> bool:
    is_other = _gradient_of(tensor) is not gradient
    if is_other:
        tensor.grad = gradient
    is_written = tensor._version != version
    if is_written and before is not None:
        tensor.data.copy_(before)
    return is_other or is_written


class _Reached:
    """Finds what code of the user's can write to: what its functions close over, and the globals that they name."""

    def __init__(self, snapshot: Snapshot, real: Iterable[nn.Module]) -> None:
        # Real models are looked at by themselves.
        self._snapshot = snapshot
        # What is kept here cannot give its address to another object.
        self._seen: dict[int, Any] = {id(module): module for model in real for module in model.modules()}
        self._code: list[Any] = []
        self._holds_copies = False

    def look_into(self, modules: Sequence[nn.Module], code: Iterable[object]) -> None:
        """Note the mutable things that code reaches which copied modules hold, or that is given."""
        # All that these hold besides functions are copies, and nothing is to keep what they let go of.
        self._holds_copies = True
        self._seen |= {id(module): module for module in modules}
        for module in modules:
            self._code.append(type(module))
            held = (value for name, value in vars(module).items() if type(value) not in _HARMLESS and name not in _HELD)
            self._walk([value for value in held if type(value) not in _DICTS or value])
        self._holds_copies = False
        self._walk([*self._code, *code])

    def _walk(self, values: Iterable[Any], depth: int = 0) -> None:
        for value in values:
            if value is None or isinstance(value, _PLAIN) or depth > _MAX_DEPTH or len(self._seen) > _MAX_REACHED:
                continue
            if self._holds_copies and isinstance(value, FunctionType | type):
                self._code.append(value)
            elif id(value) not in self._seen:
                self._seen[id(value)] = value
                self._walk(self._inside(value), depth + 1)

    def _inside(self, value: Any) -> Iterable[Any]:
        if isinstance(value, FunctionType):
            return () if is_ours(value) else self._of_function(value)
        if isinstance(value, functools.partial):
            return () if is_ours(value) else (value.func, *value.args, *value.keywords.values())
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, type):
            return self._of_class(value)
        if isinstance(value, property | staticmethod | classmethod):
            return getattr(value, "fget", None), getattr(value, "__func__", None)
        if not self._holds_copies:
            self._snapshot.add(value)
        if isinstance(value, (*CONTAINERS, tuple, frozenset)):
            held = value.values() if isinstance(value, dict) else value
            return list(held) if len(value) <= _MAX_ENTRIES else ()
        own = getattr(value, "__dict__", None)
        if isinstance(value, ModuleType):
            return ()
        if _is_known(type(value).__module__) and not isinstance(value, nn.Module | SimpleNamespace):
            # What is around a function in C, such as a cache, names it.
            return (own.get("__wrapped__"),) if isinstance(own, dict) else ()
        return own, type(value)

    def _of_function(self, function: FunctionType) -> Iterator[Any]:
        for cell in function.__closure__ or ():
            self._snapshot.add(cell)
            yield from _attributes(cell).values()
        yield function.__defaults__
        yield function.__kwdefaults__
        yield vars(function)
        if not _is_known(function.__module__):
            yield from self._of_names(function.__globals__, set(names_in(function.__code__)))

    def _of_names(self, space: dict[str, Any], names: set[str]) -> Iterator[Any]:
        self._snapshot.add_names(space, names)
        for value in [space[name] for name in names if name in space]:
            if isinstance(value, ModuleType) and not _is_known(value.__name__) and id(value) not in self._seen:
                self._seen[id(value)] = value
                yield from self._of_names(vars(value), names)
            yield value

    def _of_class(self, kind: type) -> Iterable[Any]:
        if _is_known(kind.__module__):
            return ()
        self._snapshot.add(kind)
        return *vars(kind).values(), *kind.__bases__


_PLAIN = (bool, int, float, complex, str, bytes, BuiltinFunctionType, torch.dtype, torch.device, FakeTensor)
_MAX_DEPTH = 8
_MAX_ENTRIES = 500  # Of a container that is looked into.
_MAX_REACHED = 20000


@functools.cache
def _is_known(module: str | None) -> bool:
    """Whether a Python module is of a library, or of Python itself: threads of theirs may write what they hold."""
    root = (module or "").partition(".")[0]
    path = getattr(sys.modules.get(root), "__file__", None) or ""
    return is_of_library(module) or root in sys.stdlib_module_names or "-packages" in path
