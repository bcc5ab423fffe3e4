"""What a region is given besides the tensors of its graph: caches, which it does not get, and all else, unchanged.

A recomputation gets the arguments of the forward, so that they must be what they were then. What a layer appends to
would be appended to a second time.
"""

from __future__ import annotations

import weakref
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import is_
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_ckpt.regions.execution_state import is_in_backward
from hf_ckpt.regions.fingerprints import BitSum, bit_sums, sums_differ
from hf_ckpt.upstream.transformers import OTHER_CACHES

# Objects that are read of one argument: what is behind them is not looked at.
_MAX_READ = 500
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice)
_COUNTED = (dict, UserDict, list, tuple, set, frozenset, deque, UserList)
_OPAQUE = (nn.Module, type, ModuleType, *_VALUES)


def is_cache(value: object) -> bool:
    """Whether a value is a key/value cache of transformers, or the state of a mamba or linear-attention layer."""
    kind = type(value)
    # A subclass of somebody else's may hold what a layer reads besides. Compilers trace this: no method of a string.
    return (issubclass(kind, Cache) or kind.__name__ in OTHER_CACHES) and kind.__module__[:13] == "transformers."


def is_filled(cache: Any, layer: nn.Module | None) -> bool:
    """Whether a cache has something for a layer, before that has run: of another model, a prefix, an earlier round."""
    modules = () if layer is None else layer.modules()
    indices = {index for module in modules if type(index := vars(module).get("layer_idx")) is int}
    caches = [cache]
    if isinstance(cache, EncoderDecoderCache):
        caches = [cache.self_attention_cache, cache.cross_attention_cache]
    entries = [enumerate(getattr(each, "layers", ())) for each in caches]
    return any(_has_values(entry) for index, entry in chain(*entries) if not indices or index in indices)


def _has_values(entry: Any) -> bool:
    """Whether a layer has written to its place in a cache; those that hold a state alone count no positions."""
    length = getattr(entry, "get_seq_length", int)()
    states = getattr(entry, "has_previous_state", False)
    return bool(length) or (any(states.values()) if isinstance(states, dict) else bool(states))


class GivenState:
    """What arguments of a call are at one moment, to be compared later; `arguments` by their place."""

    __slots__ = ("_others", "_tensors")

    def __init__(self, arguments: Mapping[int | str, Any]) -> None:
        self._tensors: list[tuple[Tensor, int, int | str]] = []
        self._others: list[tuple[Any, tuple[list[Any], list[Any]], int | str]] = []
        for place, value in arguments.items():
            if isinstance(value, Tensor):
                self._add_tensor(value, place)
            elif type(value) is tuple and all(isinstance(item, Tensor) for item in value):
                # Rotary tables.
                for item in value:
                    self._add_tensor(item, place)
            elif not isinstance(value, _OPAQUE):
                self._others.append((value, _read(value), place))

    def _add_tensor(self, tensor: Tensor, place: int | str) -> None:
        if not tensor.is_inference():
            self._tensors.append((tensor, tensor._version, place))

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments, and in them, that count versions."""
        inside = [each for _, (objects, _), _ in self._others for each in objects if type(each) is Tensor]
        return [tensor for tensor, *_ in self._tensors] + [each for each in inside if not each.is_inference()]

    def find_change(self) -> tuple[int | str, str] | None:
        """Return the place of an argument that has changed and what a layer does that changes it so, or None."""
        for tensor, version, place in self._tensors:
            if tensor._version != version:
                return place, "writes into a tensor that it is given"
        for value, (objects, values), place in self._others:
            objects_now, values_now = _read(value)
            if values != values_now or len(objects) != len(objects_now) or not all(map(is_, objects, objects_now)):
                # Of a container its length comes first.
                before, now = (values[0], values_now[0]) if isinstance(value, _COUNTED) else (0, 0)
                does = "takes something out of" if now < before else "adds something to" if now > before else "changes"
                return place, f"{does} a {type(value).__name__} that it is given"
        return None


class GivenBits:
    """Sums of the bits of tensors that a call is given: `.data`, numpy and dlpack write past the versions of tensors.

    What a recomputation gets in the place of them is a copy of what was there (offload), or was computed again.
    """

    __slots__ = ("_noted",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        noted = ((tensor, _sums_of([tensor])) for tensor in tensors)
        self._noted = [(weakref.ref(tensor), _Place.of(tensor) if sums else None, sums) for tensor, sums in noted]

    def differ(
        self, tensors: Sequence[Tensor], before: Sequence[BitSum] = (), now: Sequence[BitSum] = ()
    ) -> bool | Tensor:
        """Whether the bits of these tensors, or other sums, differ; a tensor on their device if that is not known."""
        before, now = list(before), list(now)
        for tensor, (found, place, sums) in zip(tensors, self._noted, strict=True):
            if sums and (found() is tensor or (place is not None and place.is_of(tensor))):
                before += sums
                now += _sums_of([tensor])
        return sums_differ(before, now)


class SharedSums:
    """Sums of tensors that several regions are given (masks, rotary tables): made once a forward, and once a backward.

    A region that asks a second time has begun another one.
    """

    def __init__(self) -> None:
        # By the `id` of a tensor, and whether in a backward.
        self._known: dict[tuple[int, bool], tuple[weakref.ref[Tensor], int, set[object], list[BitSum]]] = {}

    def of(self, tensors: Sequence[Tensor], user: object) -> list[BitSum]:
        """Return the sums of tensors for a region."""
        found: list[BitSum] = []
        is_backward = is_in_backward()
        for tensor in tensors:
            key, version = (id(tensor), is_backward), tensor._version
            known = self._known.get(key)
            if known is None or known[1] != version or user in known[2]:
                reference = weakref.ref(tensor, partial(self._forget, key))
                known = self._known[key] = reference, version, set(), _sums_of([tensor])
            known[2].add(user)
            found += known[3]
        return found

    def _forget(self, key: tuple[int, bool], _: object) -> None:
        self._known.pop(key, None)


class _Place(NamedTuple):
    """Where a tensor is, for as long as its memory lives: then another one may come to lie there."""

    storage: StorageWeakRef
    address: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        """Return that of a tensor."""
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # upstream
        return cls(storage, tensor.data_ptr())

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the place of a tensor."""
        is_there = type(tensor) is Tensor and tensor.data_ptr() == self.address
        return is_there and not self.storage.expired()  # type: ignore[no-untyped-call]  # upstream


def _sums_of(tensors: Sequence[Tensor]) -> list[BitSum]:
    # Weights are looked at with their modules.
    return bit_sums([each for each in tensors if type(each) is Tensor], is_whole=False, is_sparse=True)


def _read(value: Any) -> tuple[list[Any], list[Any]]:
    """Return the objects that a value consists of, and the plain values in it. No property of an object runs."""
    objects: list[Any] = []
    values: list[Any] = []
    seen: set[int] = set()
    todo = [value]
    while todo and len(objects) < _MAX_READ:
        value = todo.pop()
        if isinstance(value, _VALUES):
            values.append(value)
            continue
        objects.append(value)
        if isinstance(value, Tensor):
            values.append(0 if value.is_inference() else value._version)
        elif not (isinstance(value, _OPAQUE) or id(value) in seen or type(value).__module__.startswith("hf_ckpt.")):
            seen.add(id(value))
            _read_object(value, values, todo)
    return objects, values


def _read_object(value: Any, values: list[Any], todo: list[Any]) -> None:
    """Add the plain values of an object to `values`, and the objects in it to `todo`."""
    if isinstance(value, _COUNTED):
        values.append(len(value))
        todo += [*value.keys(), *value.values()] if isinstance(value, dict | UserDict) else value
    elif isinstance(value, torch.Generator):
        values.append(value.get_state().numpy().tobytes())
    elif isinstance(value, Iterator):
        # What was read of it cannot be asked for. Equal to nothing: it is refused.
        values.append(object())
    elif isinstance(value, partial):
        todo += [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType | BuiltinMethodType):
        todo.append(value.__self__)
    elif isinstance(value, FunctionType):
        todo += [cell.cell_contents for cell in value.__closure__ or ()]
        todo += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    else:
        with suppress(TypeError, ValueError):
            # An array's numbers.
            values.append(memoryview(value).tobytes())
        todo += _attributes(value)


def _attributes(value: Any) -> list[Any]:
    found: list[Any] = []
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            slot = vars(base).get(name)
            if hasattr(slot, "__get__"):
                found.append(_read_slot(slot, value))
    with suppress(AttributeError):
        found += object.__getattribute__(value, "__dict__").values()
    return found


def _read_slot(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        # Not set.
        return None
