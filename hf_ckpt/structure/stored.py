"""What modules store, read without running code of the model: no property, no parametrisation, no `__getattr__`.

And one way to set an attribute for a while: `own` notes what the object itself had, and `restore_own` brings it back.

Reading a parametrised weight computes it: buffers advance (spectral norm) and random numbers are drawn, which makes
another model of it without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from types import BuiltinFunctionType, FunctionType
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hf_ckpt.upstream.peft import MODEL_CONFIGS
from hf_ckpt.upstream.torch import COMPILED_INSIDE, FSDP_WRAPPED

Noted = TypeVar("Noted")

_AROUND = ("base_layer", "original_module", FSDP_WRAPPED)
_PLAIN = (FunctionType, BuiltinFunctionType, classmethod, staticmethod, partial, partialmethod, type)
"""What a class may hold as it is; whatever else has a `__get__` computes something."""


class ByModel(Generic[Noted]):
    """What was noted of models before engines came to them, for as long as they are there. Copies begin empty."""

    def __init__(self) -> None:
        self._noted: WeakKeyDictionary[nn.Module, Noted] = WeakKeyDictionary()

    def note(self, model: nn.Module, what: Noted) -> None:
        self._noted[model] = what

    def of(self, model: nn.Module) -> Noted | None:
        """Return what was noted of a model, or of one that an engine has wrapped in it; None without that."""
        return next((self._noted[each] for each in model.modules() if each in self._noted), None)

    def __reduce__(self) -> tuple[type[ByModel[Noted]], tuple[()]]:
        # A search with ray pickles the Trainer.
        return ByModel, ()


def stored(owner: object, name: str) -> Any:
    """Return what an object or its class stores under a name; None where nothing is, or it would be computed."""
    # A module that a compiler wraps is looked at itself, not its wrapper.
    places: tuple[Any, ...] = (getattr(owner, "__dict__", {}),)
    if isinstance(owner, nn.Module):
        while (inner := owner._modules.get(COMPILED_INSIDE)) is not None:
            owner = inner
        places = (vars(owner), owner._parameters, owner._buffers, owner._modules)
    for place in places:
        if name in place:
            return place[name]
    for kind in type(owner).__mro__:
        if name in vars(kind):
            found = vars(kind)[name]
            return found if isinstance(found, _PLAIN) or not hasattr(type(found), "__get__") else None
    return None


class Missing:
    """Stands for an attribute that an object does not have. A class: copies and pickles keep its identity."""


def own(owner: object, name: str) -> Any:
    """Return what an object itself, not its class, has under a name; `Missing` without that."""
    return vars(owner).get(name, Missing)


def restore_own(owner: object, name: str, found: object) -> None:
    """Let an object have again what `own` has returned."""
    if found is Missing:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, found)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Let an object have another value under a name while the block runs."""
    found = own(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        restore_own(owner, name, found)


def adapter_configs(model: object) -> dict[str, Any]:
    """Return the configs of a model's adapters of PEFT, by name: what `peft_config` shows."""
    # `PeftModel.peft_config` is a property over these two.
    found = stored(model, "peft_config") or stored(model, MODEL_CONFIGS)
    return dict(found or stored(stored(model, "base_model"), "peft_config") or {})


def inside_adapters(module: nn.Module) -> nn.Module:
    """Return the layer that adapters of PEFT are around, or that one trains a copy of; any other module as it is."""
    while inner := [name for name in _AROUND if name in module._modules]:
        module = module.get_submodule(inner[0])
    return module


class AdaptedParameter(NamedTuple):
    """A parameter that an adapter of PEFT is on by name, as on experts."""

    base: nn.Module
    name: str


def adapted_parameter(module: nn.Module) -> AdaptedParameter | None:
    """Return the parameter that an adapter of PEFT is on by name; None for any other module."""
    name = getattr(module, "parameter_name", None)
    base = inside_adapters(module) if isinstance(name, str) else module
    return None if base is module else AdaptedParameter(base, str(name))


def path_without_adapters(path: str) -> str:
    """Return the path that a module has in its model without adapters of PEFT inside it."""
    # Adapters of several parameters of a module stand around each other.
    return path.replace(".base_layer", "")


def set_in_forwards(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield parameters that an adapter of PEFT is on by name: each forward sets them to themselves.

    torch's parametrizations do so where they are registered. It adds to the version, and writes nothing.
    """
    for module in modules:
        adapted = adapted_parameter(module)
        if adapted is not None and (parameter := adapted.base._parameters.get(adapted.name)) is not None:
            yield parameter


def weight_shape(module: nn.Module) -> torch.Size | None:
    """Return the shape of a module's own weight; None without one."""
    # Of a parametrised weight it is that of the largest tensor that it is computed from.
    if (weight := module._parameters.get("weight")) is not None:
        return weight.shape
    parametrised = stored(module._modules.get("parametrizations"), "weight")
    if isinstance(parametrised, nn.Module):
        found: list[Any] = list(parametrised.parameters(recurse=False))
    else:
        found = [stored(module, name) for name in ("weight", "qweight")]
    shapes = [each.shape for each in found if isinstance(each, Tensor)]
    return max(shapes, key=lambda shape: (len(shape), shape.numel()), default=None)
