"""What a Trainer reaches besides the model that it trains: reference, teacher and reward models, copies of weights.

It is looked for where users put it: in attributes of the Trainer and of its callbacks, in containers and objects there,
in what functions close over, and in globals that the user's own methods name. What is larger than a few hundred
entries, such as data, is left alone, and so are data sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.regions.module_state import is_ours

# Steps from the Trainer or a callback.
_MAX_DEPTH = 6
# Of a container that is looked into.
_MAX_ENTRIES = 500
# Objects that are looked at.
_MAX_REACHED = 20000
# Whose own objects and functions are not looked into.
_LIBRARIES = frozenset(
    "accelerate builtins collections datasets deepspeed functools hf_ckpt huggingface_hub logging numpy peft "
    "tokenizers torch transformers trl".split()
)
_DATA = ("train_dataset", "eval_dataset", "optimizer", "lr_scheduler", "model_init")


@dataclass(frozen=True)
class OtherModel:
    """Tensors on the device that the trained model does not have: of a module, or on their own, of some numbers."""

    name: str
    """Where they were found, such as `DPOTrainer.ref_model`."""
    module: nn.Module | None
    """None of tensors that are in none."""
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)

    @property
    def attribute(self) -> str:
        """Under which its holder has it."""
        return self.name.rpartition(".")[2]

    @property
    def kind(self) -> str:
        return "tensors" if self.module is None else type(self.module).__name__


def other_models(trainer: Any, model: nn.Module, device: torch.device) -> Iterator[OtherModel]:
    """Yield what a Trainer (None reaches nothing) and its callbacks reach besides the trained model, each once."""
    trained = [getattr(trainer, name, None) for name in ("model", "model_wrapped")]
    own = {
        id(tensor) for each in (model, *trained) if isinstance(each, nn.Module) for tensor in weights_and_buffers(each)
    }
    loose: dict[str, list[Tensor]] = {}
    for name, found in _reached(trainer):
        candidates = [found] if isinstance(found, Tensor) else weights_and_buffers(found)
        tensors = {id(each): each for each in candidates if id(each) not in own}
        own |= tensors.keys()
        on_device = [each for each in tensors.values() if each.device.type == device.type]
        if isinstance(found, Tensor):
            loose.setdefault(name, []).extend(on_device)
        elif tensors:
            yield OtherModel(name, found, tuple(on_device))
    yield from (OtherModel(name, None, tuple(tensors)) for name, tensors in loose.items() if tensors)


def trained_beside(code: Any) -> list[tuple[str, nn.Module | Tensor]]:
    """Return the modules and parameters that a Trainer, or a function, reaches, itself or by its functions."""
    seen: dict[int, Any] = {}
    is_function = isinstance(code, FunctionType | MethodType | partial)
    found = _inside("closure", code, seen) if is_function else _held_by(code, code, {id(code): code})
    return [(name, each) for name, each in found if isinstance(each, nn.Module | nn.Parameter)]


def weights_and_buffers(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _reached(trainer: Any) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield the modules and tensors that a Trainer and its callbacks reach, by the attribute that leads there."""
    handler = getattr(trainer, "callback_handler", None)
    holders = (trainer, *getattr(handler, "callbacks", ()))
    # Each object is looked into once; not those that this begins with, which their own methods lead to. They are kept,
    # so that no other object gets the id of one that was seen.
    seen: dict[int, Any] = {id(holder): holder for holder in holders}
    for holder in holders:
        # This package holds batches and gradients that are counted elsewhere.
        if not is_ours(type(holder)):
            yield from _held_by(holder, trainer, seen)


def _held_by(holder: Any, trainer: Any, seen: dict[int, Any]) -> Iterator[tuple[str, nn.Module | Tensor]]:
    for name, value in getattr(holder, "__dict__", {}).items():
        if holder is not trainer or name not in _DATA:
            yield from _inside(f"{type(holder).__name__}.{name}", value, seen)
    for kind in type(holder).__mro__:
        if not is_of_library(kind.__module__):
            for name, value in list(vars(kind).items()):
                yield from _inside(f"{type(holder).__name__}.{name}", value, seen)


def _inside(name: str, value: Any, seen: dict[int, Any], depth: int = 0) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield modules and tensors that a value is or leads to."""
    if isinstance(value, str | bytes | int | float | bool | None) or depth > _MAX_DEPTH:
        return
    if id(value) in seen or len(seen) > _MAX_REACHED:
        return
    seen[id(value)] = value
    if isinstance(value, nn.Module | Tensor):
        # Single numbers are meters, but for those that train.
        if isinstance(value, nn.Module | nn.Parameter) or value.dim():
            yield name, value
        return
    for each in _leads_to(value):
        yield from _inside(name, each, seen, depth + 1)


def _leads_to(value: Any) -> Iterable[Any]:
    """Return what an object holds, or what a function reads."""
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if len(value) > _MAX_ENTRIES:
            return ()
        return list(value.values()) if isinstance(value, Mapping) else list(value)
    if isinstance(value, partial):
        if is_ours(value.func):
            return ()
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, property):
        return (value.fget,)
    if isinstance(value, FunctionType):
        return () if is_of_library(value.__module__) else _read_by(value)
    if isinstance(value, type) or is_of_library(type(value).__module__):
        return ()
    return list(getattr(value, "__dict__", {}).values())


def _read_by(function: FunctionType) -> list[Any]:
    """Return what a function closes over, and the modules and functions among the globals that it names."""
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            # It is filled later.
            continue
    globals_ = [function.__globals__.get(name) for name in names_in(function.__code__)]
    return found + [each for each in globals_ if isinstance(each, nn.Module | nn.Parameter | FunctionType | partial)]


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code reads, that of functions inside included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def is_of_library(module: str | None) -> bool:
    """Whether a Python module is of a library whose own objects and functions are not looked into."""
    return (module or "").partition(".")[0] in _LIBRARIES
