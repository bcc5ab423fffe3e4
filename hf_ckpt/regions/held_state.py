"""What modules hold besides weights and modules: numbers, containers, tensors, buffers, generators.

A forward may read it, and write it for later: a counter, a running statistic, a list of losses. So a recomputation
starts from what its forward found, on copies, and leaves everything as the later forwards left it.

Note [copies]: small tensors are copied before each forward, as kernels, `.data` and numpy write past the versions. A
large one is copied only where the region has written to it before, which its version tells.
"""

from __future__ import annotations

import copy
import random
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from enum import Enum
from functools import partial
from itertools import chain
from numbers import Number
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig

from hf_ckpt.errors import ChangedSinceForwardError
from hf_ckpt.regions.fingerprints import unobserved
from hf_ckpt.regions.put_back import Slots, put_container_back, slot_names
from hf_ckpt.upstream.deepspeed import ON_MODULES
from hf_ckpt.upstream.peft import CONSTANT
from hf_ckpt.upstream.torch import (
    FSDP_MANAGED,
    FakeTensor,
    NormBase,
    base_of,
    dispatch_modes,
    hidden_from_modes,
    is_traceable_wrapper_subclass,
    is_view,
    make_wrapper_subclass,
    num_dispatch_modes,
    storage_id,
)
from hf_ckpt.upstream.transformers import IS_INITIALIZED, OF_MODELS

# Raises an error: what has happened, and the names of what it has happened to.
Refuse = Callable[[str, Sequence[str]], None]

# Attribute of a dispatch mode that is to be given the copies that are made here.
COUNTS_COPIES = "_hf_ckpt_counts_copies"
# See the note on copies. As many as a statistic of 4096 channels has.
SMALL_BYTES = 16 * 1024
_MOST_DEEP = 4
# A longer container is a record, of which nothing is looked at but which items it has.
_MOST_ITEMS = 1000
_IMMUTABLE = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
_PLAIN: tuple[Any, ...] = (*_IMMUTABLE, torch.layout, torch.memory_format, Number, Enum, range)
# Who takes off a hook, to place another, is to take off the one that the forward found.
_PLAIN += (FunctionType, BuiltinFunctionType, type, RemovableHandle)
_COPIED: tuple[Any, ...] = (np.ndarray, array, bytearray, torch.Generator, random.Random, np.random.Generator)
_COPIED += (np.random.RandomState, np.random.BitGenerator)
# What is behind objects of theirs is not the layer's to write.
_LIBRARIES = frozenset(
    "torch transformers accelerate peft bitsandbytes numpy deepspeed hf_ckpt threading _thread weakref".split()
)
# Exactly these modules read no attribute when they run.
_HOLDERS = frozenset({nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Identity})
_OTHERS_NAMES = frozenset(vars(nn.Module())) - {"training"} | {
    # Of whoever checkpoints; the plan looks after that.
    "gradient_checkpointing",
    # Of FSDP1's state (2.13), and of transformers' loading (5.23).
    "training_state",
    IS_INITIALIZED,
    # Sizes of weights.
    "in_features",
    "out_features",
}
# Of transformers' models (5.23): sizes, and what is for loading and sharding.
_OF_TRANSFORMERS = OF_MODELS.union(
    "training name_or_path kernel_config loss_type vocab_size padding_idx all_tied_weights_keys".split()
)
_OTHERS_PREFIXES = ("_hf_ckpt", *ON_MODULES)


class _Sign(Enum):
    """Stands for an attribute that is not there."""

    MISSING = 0


_MISSING = _Sign.MISSING


class HeldState:
    """What the modules below a region hold, or those above it (`is_above`), read again and again."""

    def __init__(self, modules: Mapping[nn.Module, str], *, is_above: bool = False) -> None:
        self._modules = modules
        self._is_above = is_above
        self._places = _Places(modules, is_above=is_above)
        self._shape: _Shape | None = None
        self._written: dict[int, weakref.ref[Tensor]] = {}
        self._num_forwards = 0
        self.num_changes = 0
        """How often `has_changed` has found one."""

    def has_changed(self) -> bool:
        """Whether there is something else than when this was looked at last."""
        last = self._shape
        is_other = last is not None and self.look() is not last
        self.num_changes += is_other
        return is_other

    def look(self) -> _Shape:
        """Return which objects there are now."""
        if not self._places.are_current():
            self._places = _Places(self._modules, is_above=self._is_above)
        values = self._places.read()
        if self._shape is None or self._shape.places is not self._places or not self._shape.fits(values):
            self._shape = _Shape(self._places, values)
        return self._shape

    def names(self) -> Sequence[str]:
        """Return the names of what there was when this was looked at last; the same list until some come or go."""
        return self._places.paths

    def note(self, *, is_looked_at: bool = False) -> Held:
        """Return what there is now, to start from it again; before a forward. `is_looked_at`: just now."""
        shape = self._shape if is_looked_at and self._shape is not None else self.look()
        return Held(shape, self._is_written, is_first=not self._num_forwards)

    def end_forward(self, held: Held) -> None:
        """Complete a note when its forward ends."""
        self._num_forwards += 1
        if held.large:
            for tensor in held.end_forward(self.look()):
                self._written[id(tensor)] = weakref.ref(tensor)

    def _is_written(self, tensor: Tensor) -> bool:
        reference = self._written.get(id(tensor))
        return reference is not None and reference() is tensor

    @contextmanager
    def as_in_forward(self, held: Held, now: _Shape, refuse: Refuse, *, is_shared: bool) -> Iterator[None]:
        """Let the block start from what a forward found, and put back what there is `now` when it ends.

        `is_shared`: another thread runs the region as well, so that nothing can be put in its place.
        """
        found = now.objects()
        versions = list(map(_version, found.values()))
        start = {} if is_shared and held.shape is now else held.start(refuse)
        if start or held.shape is not now:
            held.shape.put(start)
        try:
            yield
        finally:
            if start or self.look() is not now:
                now.put(found)
        again = map(_version, found.values())
        if names := [leaf.name for leaf, *pair in zip(found, versions, again, strict=True) if pair[0] != pair[1]]:
            refuse("its recomputation has written a second time to what is reached past its module", names)

    @contextmanager
    def unchanged(self, refuse: Callable[[Sequence[str]], None]) -> Iterator[None]:
        """Refuse what the block writes."""
        before = self.note()
        yield
        now = self.look()
        names = before.shape.differences(now) if now is not before.shape else set()
        if names := {*names, *before.written()}:
            refuse(sorted(names))


class Held:
    """What there was before a forward.

    `large` are tensors of which there may be no copy: see the note on copies.
    """

    __slots__ = ("_copies", "_is_first", "_unknown", "large", "shape")

    def __init__(self, shape: _Shape, is_written: Callable[[Tensor], bool], *, is_first: bool) -> None:
        self.shape = shape
        self._is_first = is_first
        self._unknown: list[_Leaf] = []
        self.large: dict[_Leaf, tuple[Tensor, int]] = {}
        self._copies: dict[_Leaf, Any] = {}
        if not shape.leaves:
            return
        with unobserved(shape.hiding):
            objects = shape.objects()
            for leaf, value in objects.items():
                if leaf.is_large:
                    self.large[leaf] = value, value._version
            small = {leaf: value for leaf, value in objects.items() if leaf not in self.large or is_written(value)}
            self._copies = _copied(small)

    def written(self) -> list[str]:
        """Return the names of what has been written in place since."""
        names = [leaf.name for leaf, (tensor, version) in self.large.items() if tensor._version != version]
        for leaf, value in self._copies.items():
            now = leaf.ref()
            with unobserved(hidden_from_modes):
                same = torch.equal(now, value) if isinstance(now, Tensor) else np.array_equal(now, value)
            names += [] if same or now is None else [leaf.name]
        return names

    @property
    def has_copies(self) -> bool:
        """Whether a recomputation gets other objects than there are."""
        return bool(self._copies)

    def end_forward(self, now: _Shape) -> list[Tensor]:
        """Note what has become of large tensors, and return those that the forward has written to."""
        present = set(map(id, now.objects().values()))
        written = []
        for leaf, (tensor, version) in self.large.items():
            if tensor._version != version:
                written.append(tensor)
                if leaf not in self._copies:
                    self._unknown.append(leaf)
            if leaf in self._copies:
                continue
            if id(tensor) not in present:
                # Most layers do not read what they make anew, and to keep it would keep the last step's.
                self._copies[leaf] = _Gone(tensor, leaf.name)
            # Without its graph, which is of an earlier step.
            plain = tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()
            self.large[leaf] = plain, tensor._version
        self.large = {leaf: noted for leaf, noted in self.large.items() if leaf not in self._copies}
        return written

    def start(self, refuse: Refuse) -> dict[_Leaf, Any]:
        """Return what a recomputation gets in the place of what there was."""
        if not (self._copies or self.large):
            return {}
        if self._unknown and not self._is_first:
            refuse("it wrote to large tensors for the first time", [leaf.name for leaf in self._unknown])
        changed = [
            leaf.name
            for leaf, (tensor, version) in self.large.items()
            # Buffers are compared by their values.
            if tensor._version != version and leaf not in self._unknown and not leaf.is_buffer
        ]
        if changed:
            refuse("tensors that it holds were written to", changed)
        start = {leaf: tensor for leaf, (tensor, _) in self.large.items()}
        with unobserved(self.shape.hiding):
            return start | _copied({leaf: start[leaf] for leaf in self._unknown} | self._copies)


class _Places:
    """The dictionaries that attributes and buffers of modules are in."""

    def __init__(self, modules: Mapping[nn.Module, str], *, is_above: bool) -> None:
        self.is_above = is_above
        used = [(path, module) for module, path in modules.items() if type(module) not in _HOLDERS]
        found = [(path, vars(module), is_managed(module)) for path, module in used]
        of_peft = {id(vars(module)) for _, module in used if type(module).__module__.startswith("peft.")}
        # Layers read switches of the model's config when they run, as the implementation of attention.
        owners = [] if is_above else [owner for _, owner, _ in found]
        configs = {id(config): config for owner in owners if _is_config(config := owner.get("config"))}
        found += [("config", vars(config), False) for config in configs.values()]
        found += [(path, module._buffers, False) for module, path in modules.items()]
        self._all = [owner for _, owner, _ in found]
        self._are_managed = [is_managed for *_, is_managed in found]
        self._sizes = list(map(len, self._all))
        self._known = list(map(frozenset, self._all))
        self.owners: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.paths: list[str] = []
        self._readers: list[tuple[itemgetter[Any], dict[str, Any]]] = []
        for path, owner, is_of_engine in found:
            left_out = _OF_TRANSFORMERS if is_above else CONSTANT if id(owner) in of_peft else frozenset()
            tracked = [name for name in owner if _is_tracked(name, owner, is_of_engine)]
            names = [name for name in tracked if name not in left_out]
            if names:
                # A getter of one name would return no tuple.
                names = names if len(names) > 1 else names * 2
                self._readers.append((itemgetter(*names), owner))
                self.owners += [owner] * len(names)
                self.names += names
                self.paths += [f"{path}.{name}".lstrip(".") for name in names]
        self.buffers = {id(buffer) for module in modules for buffer in module._buffers.values()}
        # Their kernels write past the versions.
        norms = (module for module in modules if isinstance(module, NormBase) and module.training)
        self.always_copied = {id(buffer) for module in norms for buffer in module._buffers.values()}

    def are_current(self) -> bool:
        """Whether no attribute has come or gone."""
        return list(map(len, self._all)) == self._sizes

    def read(self) -> list[Any]:
        """Return the values; `_MISSING` for what is gone."""
        try:
            return list(chain.from_iterable([get(owner) for get, owner in self._readers]))
        except KeyError:
            return [owner.get(name, _MISSING) for owner, name in zip(self.owners, self.names, strict=True)]

    def remove_others(self) -> None:
        """Take attributes away that there were not."""
        for owner, known, is_of_engine in zip(self._all, self._known, self._are_managed, strict=True):
            for name in [] if owner.keys() == known else list(owner.keys() - known):
                if _is_tracked(name, owner, is_of_engine):
                    del owner[name]


class _Shape:
    """Which objects modules hold, and what is in them. Keeps no tensor alive: in its place is a `_Leaf`."""

    def __init__(self, places: _Places, values: Sequence[Any]) -> None:
        self.places = places
        self.leaves: list[_Leaf] = []
        self._by_id: dict[int, _Leaf] = {}
        self._opened: dict[int, Any] = {}
        self._holders: list[tuple[Any, Any, str]] = []
        self.roots = [self._keep(value, path) for value, path in zip(values, places.paths, strict=True)]
        self._is_simulated = any(type(leaf.ref()) is FakeTensor for leaf in self.leaves)
        self._rich = [number for number, kept in enumerate(self.roots) if type(kept) in (_Leaf, _Frozen)]
        plain = [each for each in self._holders if not _has_rich(each[1])]
        self._rich_holders = [each for each in self._holders if _has_rich(each[1])]
        self._dicts = [each for each, *_ in plain if type(each) is dict]
        self._lists = [each for each, *_ in plain if type(each) is list]
        self._rich_holders += [each for each in plain if type(each[0]) not in (dict, list)]
        self._sizes, self._flat = self._flat_now()
        del self._by_id, self._opened

    def hiding(self) -> AbstractContextManager[Any]:
        """Hide copies from modes that others have entered. What follows a step, simulated or real, counts them."""
        modes = [] if self._is_simulated or not num_dispatch_modes() else dispatch_modes()
        is_counted = any(getattr(mode, COUNTS_COPIES, False) for mode in modes)
        return nullcontext() if is_counted or not modes else hidden_from_modes()

    def _flat_now(self) -> tuple[list[int], list[Any]]:
        """Return how many items are in dictionaries and lists, and all of them."""
        held = chain(self._dicts, map(dict.values, self._dicts), self._lists)
        return [*map(len, self._dicts), *map(len, self._lists)], [*chain.from_iterable(held)]

    def _keep(self, value: Any, name: str, depth: int = _MOST_DEEP) -> Any:
        """Return what stands for a value here, and look at what is in it."""
        if type(value) in _IMMUTABLE or not depth:
            return value
        if _is_leaf(value):
            if id(value) not in self._by_id:
                self._by_id[id(value)] = _Leaf(value, name, self.places)
                self.leaves.append(self._by_id[id(value)])
            return self._by_id[id(value)]
        if isinstance(value, tuple):
            items = tuple(self._keep(item, name, depth - 1) for item in value)
            return _Frozen(type(value), items) if _has_rich(items) else value
        for holder in _holders_of(value):
            if id(holder) not in self._opened and len(self._opened) < _MOST_ITEMS:
                self._opened[id(holder)] = holder
                content = _content(holder)
                if len(content) <= _MOST_ITEMS and not isinstance(content, set):
                    content = _mapped(content, lambda item: self._keep(item, name, depth - 1))
                self._holders.append((holder, content, name))
        return value

    def fits(self, values: list[Any]) -> bool:
        """Whether these values are, and hold, the same objects."""
        values = list(values) if self._rich else values
        for number in self._rich:
            if not _matches(self.roots[number], values[number]):
                return False
            values[number] = self.roots[number]
        if not all(map(is_, values, self.roots)):
            return False
        if not self._holders:
            return True
        sizes, flat = self._flat_now()
        return (
            sizes == self._sizes
            and all(map(is_, flat, self._flat))
            and all(_matches_content(content, holder) for holder, content, _ in self._rich_holders)
        )

    def objects(self) -> dict[_Leaf, Any]:
        """Return what the leaves stand for."""
        return {leaf: leaf.ref() for leaf in self.leaves}

    def put(self, objects: Mapping[_Leaf, Any]) -> None:
        """Let modules hold these objects again, with `objects` in the places of leaves."""
        places = self.places
        for owner, name, kept in zip(places.owners, places.names, self.roots, strict=True):
            value = _filled(kept, objects)
            if value is _MISSING:
                owner.pop(name, None)
            elif owner.get(name, _MISSING) is not value:
                owner[name] = value
        places.remove_others()
        for holder, content, _ in self._holders:
            found = content if isinstance(content, set) else _mapped(content, partial(_filled, objects=objects))
            put: Callable[[Any], Any] = (
                holder.write if isinstance(holder, Slots) else partial(put_container_back, holder)
            )
            put(found)

    def differences(self, other: _Shape) -> set[str]:
        """Return the names of attributes that have other values, or hold others."""
        mine, others = dict(self._named()), dict(other._named())
        changed = [each for each in mine if not _are_same(mine[each], others.get(each))]
        return {name.rpartition(".")[2] for name, _ in changed}

    def _named(self) -> Iterator[tuple[tuple[str, int], Any]]:
        yield from (((name, 0), kept) for name, kept in zip(self.places.paths, self.roots, strict=True))
        yield from (((name, id(holder)), content) for holder, content, name in self._holders)


class _Leaf:
    """Stands for an object that is copied; `is_large`: only where it is known to be written to."""

    __slots__ = ("is_buffer", "is_large", "name", "ref")

    def __init__(self, value: Any, name: str, places: _Places) -> None:
        self.name = name
        # What the whole model keeps may well be written to between forward and backward.
        self.is_buffer = places.is_above or id(value) in places.buffers
        is_large = isinstance(value, Tensor) and value.nbytes > SMALL_BYTES
        self.is_large = is_large and id(value) not in places.always_copied
        self.ref: Callable[[], Any] = weakref.ref(value) if isinstance(value, Tensor) else partial(_same, value)


class _Frozen:
    """Stands for a tuple with leaves in it."""

    __slots__ = ("items", "kind")

    def __init__(self, kind: Any, items: tuple[Any, ...]) -> None:
        self.kind = kind
        self.items = items


class _Gone(Tensor):
    """Stands in a recomputation for a large tensor that the forward made anew, and so need not have read."""

    _name: str

    @staticmethod
    def __new__(cls, tensor: Tensor, name: str) -> _Gone:
        gone: _Gone = make_wrapper_subclass(
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
        )
        gone._name = name
        return gone

    def __init__(self, tensor: Tensor, name: str) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch has it disabled
        name = next((each._name for each in args if isinstance(each, _Gone)), "a tensor")
        raise ChangedSinceForwardError(
            f"A region that is recomputed reads {name}, but its forward has put another tensor in its place. What "
            f"was there is not kept, as it has more than {SMALL_BYTES} bytes. Write into it in place, or leave the "
            "layer out of the policy."
        )


def _is_tracked(name: str, owner: dict[str, Any], is_of_engine: bool) -> bool:
    """Whether an attribute is looked at. FSDP1 exchanges weights for views of what it has gathered (2.13)."""
    value = owner[name]
    if name in _OTHERS_NAMES or name.startswith(_OTHERS_PREFIXES):
        return False
    if isinstance(value, Tensor):
        is_own = not is_of_engine or not is_view(value) or any(each is base_of(value) for each in owner.values())
        return is_own and not isinstance(value, nn.Parameter)
    return isinstance(value, (*_PLAIN, *_COPIED, tuple, frozenset)) or bool(_holders_of(value))


def _is_leaf(value: Any) -> bool:
    """Whether a value is copied as a whole."""
    if not isinstance(value, Tensor):
        return isinstance(value, _COPIED) and not isinstance(value, random.SystemRandom)
    is_weight = value.requires_grad and value.is_leaf
    is_wrapper: bool = is_traceable_wrapper_subclass(value)
    return not (is_weight or is_wrapper or value.is_meta or value.is_inference()) and value.layout is torch.strided


def _copied(objects: Mapping[_Leaf, Any]) -> dict[_Leaf, Any]:
    """Return copies, of which those share memory that share it now."""
    tensors = [value for value in objects.values() if isinstance(value, Tensor) and not isinstance(value, _Gone)]
    numbers = Counter(storage_id(tensor.untyped_storage()) for tensor in tensors)
    shared: dict[int, Any] = {place: None for place, number in numbers.items() if number > 1}
    found: dict[_Leaf, Any] = {}
    for leaf, value in objects.items():
        if isinstance(value, _Gone):
            found[leaf] = value
        elif not isinstance(value, Tensor):
            found[leaf] = value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)
        elif (place := storage_id(value.untyped_storage())) in shared:
            shared[place] = shared[place] or value.untyped_storage().clone()  # type: ignore[no-untyped-call]  # upstream
            like = value.detach().new_empty(0)
            found[leaf] = like.set_(shared[place], value.storage_offset(), value.shape, value.stride())
            found[leaf].requires_grad_(value.requires_grad)
        else:
            found[leaf] = value.detach().clone().requires_grad_(value.requires_grad)
    return found


def _version(value: Any) -> int:
    return int(value._version) if isinstance(value, Tensor) and not value.is_inference() else 0


def _same(value: Any) -> Any:
    return value


def _holders_of(value: Any) -> list[Any]:
    """Return what of a value can be written to: a container, the attributes of an object, its slots."""
    kind = type(value)
    if kind in (dict, list, set):
        return [value]
    libraries = {base.__module__.partition(".")[0] for base in kind.__mro__}
    if libraries & _LIBRARIES or isinstance(value, (*_PLAIN, *_COPIED, MethodType, partial, tuple, frozenset)):
        return []
    found = [value] if isinstance(value, dict | list | set | deque) else []
    if kind.__module__ in ("builtins", "collections", "functools", "itertools"):
        return found
    found += [vars(value)] if hasattr(value, "__dict__") else []
    return [*found, Slots(value)] if slot_names(kind) else found


def _content(holder: Any) -> Any:
    return holder.read() if isinstance(holder, Slots) else copy.copy(holder)


def _mapped(content: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(content, dict):
        return {key: change(item) for key, item in content.items()}
    return list(map(change, content))


def _filled(kept: Any, objects: Mapping[_Leaf, Any]) -> Any:
    if type(kept) is _Leaf:
        return objects.get(kept)
    if type(kept) is not _Frozen:
        return kept
    items = [_filled(item, objects) for item in kept.items]
    return kept.kind._make(items) if hasattr(kept.kind, "_make") else kept.kind(items)


def _has_rich(content: Any) -> bool:
    items = content.values() if isinstance(content, dict) else content
    return any(type(item) in (_Leaf, _Frozen) for item in items)


def _matches(kept: Any, value: Any) -> bool:
    if type(kept) is _Leaf:
        return kept.ref() is value
    if type(kept) is not _Frozen:
        return kept is value
    return type(value) is kept.kind and len(value) == len(kept.items) and all(map(_matches, kept.items, value))


def _matches_content(content: Any, holder: Any) -> bool:
    if isinstance(content, set):
        return bool(content == holder)
    if isinstance(content, dict):
        now = holder.read() if isinstance(holder, Slots) else holder
        return list(content) == list(now) and all(map(_matches, content.values(), now.values()))
    return len(content) == len(holder) and all(map(_matches, content, holder))


def _are_same(one: Any, other: Any) -> bool:
    """Whether values are equal; those that cannot be compared are not. Hooks are looked at by others."""
    if type(one) is RemovableHandle is type(other):
        return True
    try:
        return bool(one is other or one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def _is_config(value: Any) -> bool:
    return isinstance(value, (PretrainedConfig, SimpleNamespace)) or (
        is_dataclass(value) and hasattr(value, "__dict__")
    )


def is_managed(module: nn.Module) -> bool:
    """Whether FSDP gathers the weights of a module; FSDP1 and FSDP2 both mark it so."""
    return FSDP_MANAGED in module.__dict__
