"""What objects hold, noted and brought back: counters, records and generators that a repeated step would move on.

Each object that may change is looked at by itself, however many names it has, and brought back with its own identity.
What it holds is copied one level deep; what is in there and may change too is an object of its own. Which objects there
are is found once, and again only where one of them holds other ones than before.

Not reached: what functions find in closures and globals, attributes of classes, and the insides of objects of torch,
transformers, accelerate, peft and datasets, but for numbers and words, and of what reports runs.
"""

from __future__ import annotations

import io
import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_ckpt.regions.fingerprints import bytes_of, is_plain
from hf_ckpt.regions.put_back import Slots, slot_names
from hf_ckpt.upstream.peft import CONSTANT_IN_RUN
from hf_ckpt.upstream.transformers import FUNCTION, IS_INITIALIZED

# A container of so many entries is data rather than a record of a run: only its length is noted.
_LONG = 10_000
# Where more entries than these of one container may change (rows of data), all are noted by reference.
_MOST_INSIDE = 1000
# A tensor or an array of up to so many bytes may count or record, and is copied.
_SMALL_BYTES = 4096
# Attributes of a Trainer that no step changes, and that may be long.
_DATA = frozenset({"train_dataset", "eval_dataset"})
# In a Trainer's state: grows with the run, by entries that stay as they are.
_LOG = "log_history"
# How attributes of modules begin that are not the forward's to change.
_OF_A_PLAN = ("_hf_ckpt", FUNCTION)
# What most modules have, and do not change: what torch keeps in each, sizes of weights, names in a ParameterDict, marks
# of transformers.
_SIZES = "in_features out_features num_embeddings embedding_dim normalized_shape _keys".split()
_STANDARD = frozenset((*vars(nn.Module()), "gradient_checkpointing", IS_INITIALIZED, *_SIZES))
# Packages of whose modules there may be thousands: what they get as new attributes is seen only now and then.
_OF_MANY = ("torch", "peft")
# So many steps are between two looks at which modules there are. How many there are is looked at in each.
_LOOKS = 16
_MOST_NAMES = 4
_ATOMS = (int, float, complex, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size, np.generic)
_IS_ATOM = frozenset((*_ATOMS, *np.sctypeDict.values()))
# Packages into whose objects nobody looks, nor into those of classes derived from theirs: what a step changes of the
# engine's is undone elsewhere, and what a thread works on cannot be.
_OPAQUE = frozenset(
    "torch transformers accelerate peft datasets tokenizers hf_ckpt logging threading concurrent multiprocessing "
    "wandb mlflow comet_ml tensorboardX neptune clearml aim swanlab trackio tqdm ray".split()
)
# Of these numbers and words are noted all the same: a loss may anneal one in a config or in the arguments.
_WITH_SETTINGS = frozenset({"torch", "transformers", "accelerate", "peft"})


@dataclass
class Attributes:
    """What some objects held at one moment. See `AttributeSnapshots`."""

    _noted: list[tuple[_Alike, list[Any]]]
    _modules: _Modules
    _unknown: list[str]

    def without_large_tensors(self) -> Attributes:
        """Return the same, but for large tensors that modules hold: they are left as they are."""
        noted = [
            (alike, [tuple(_LEFT if _is_large(each) else each for each in note) for note in notes])
            if alike.is_of_modules and any(map(_is_large, chain.from_iterable(notes)))
            else (alike, notes)
            for alike, notes in self._noted
        ]
        return Attributes(noted, self._modules, self._unknown)

    def restore(self) -> None:
        """Bring it back, each object with its own identity: others may hold it too."""
        self._modules.drop_new()
        for alike, notes in self._noted:
            for value, note in zip(alike.values, notes, strict=True):
                alike.kind.write(value, note)

    def describe_lost(self) -> str | None:
        """Say what has changed, or may have, and cannot be brought back; None if nothing."""
        lost = [
            (name, value)
            for alike, notes in self._noted
            if alike.kind.is_lost is not None
            for name, value, note in zip(alike.names, alike.values, notes, strict=True)
            if alike.kind.is_lost(value, note)
        ]
        if tensors := [name for name, value in lost if isinstance(value, Tensor)]:
            return f"it has written to large tensors: {', '.join(tensors[:_MOST_NAMES])}"
        if names := [*self._unknown, *(name for name, _ in lost), *self._modules.names_of_new()]:
            return f"nothing brings back {', '.join(names[:_MOST_NAMES])} (an iterator, too large to be copied, or new)"
        return None if self._modules.has_same_children() else "modules have come or gone in it"


class AttributeSnapshots:
    """Notes what objects hold, again and again.

    Args:
        owners: by the name that messages give them; each is looked into, of whatever class it is.

    Attributes:
        parameters: those that are held outside of modules.
    """

    def __init__(self, *owners: tuple[str, object]) -> None:
        self._owners = owners
        self._kinds: dict[type, tuple[_Kind, ...] | None] = {}
        self._alike: dict[_Kind, _Alike] = {}
        self._modules = _Modules([])
        self._find()

    @property
    def modules(self) -> list[nn.Module]:
        """Those among the owners and in what they hold, with all modules inside."""
        return self._modules.modules

    def now(self, *, is_later: bool = False) -> Attributes:
        """Return what they hold now; `is_later` in a step in which modules have been looked for already."""
        # All of them look, as each notes anew what it holds.
        look_other = [alike.looks_other() for alike in self._every()]
        if any(look_other) or not (self._modules.has_same_names() and (is_later or self._modules.looks_current())):
            self._find()
        return Attributes([(alike, alike.notes) for alike in self._every()], self._modules, self._unknown)

    def _every(self) -> list[_Alike]:
        return [*self._alike.values(), *self._modules.alike]

    def _find(self) -> None:
        before, self._alike = list(self._alike.values()), {}
        self._last = {id(held): note for each in before for held, note in zip(each.values, each.notes, strict=True)}
        self._seen: dict[int, object] = {}
        self._unknown: list[str] = []
        self.parameters: list[nn.Parameter] = []
        roots = self._look_into(self._owners)
        num_roots = -1
        # What modules hold may lead to others.
        while len(roots) != num_roots:
            num_roots = len(roots)
            if not self._modules.is_of([root for _, root in roots]):
                self._modules = _Modules(roots)
            more = self._look_into(self._modules.inside())
            inside = set(map(id, self._modules.modules))
            roots += [(name, module) for name, module in more if id(module) not in inside]
        self._seen.clear()
        self._last.clear()

    def _look_into(self, found: Iterable[tuple[str, Any]]) -> list[tuple[str, nn.Module]]:
        """Find what holds what. Returns the modules."""
        modules: list[tuple[str, nn.Module]] = []
        waiting = deque(found)
        owners = {id(owner) for _, owner in self._owners}
        while waiting:
            name, value = waiting.popleft()
            if id(value) in self._seen:
                continue
            if isinstance(value, nn.Module):
                modules.append((name, value))
                continue
            self._seen[id(value)] = value
            if isinstance(value, nn.Parameter):
                self.parameters.append(value)
                continue
            kinds = self._kinds_here(name, value, is_owner=id(value) in owners)
            if kinds is None:
                self._unknown.append(name)
                continue
            for kind in kinds:
                alike = self._alike.get(kind) or _Alike(kind)
                if kind is not _FIXED:
                    self._alike[kind] = alike
                inner = alike.add(name, value, self._last)
                waiting.extend((f"{name}.{each}".strip("."), value) for each, value in inner)
        return modules

    def _kinds_here(self, name: str, value: Any, *, is_owner: bool) -> tuple[_Kind, ...] | None:
        if type(value) not in self._kinds:
            self._kinds[type(value)] = _kinds_of(value)
        kinds = self._kinds[type(value)]
        if kinds is None:
            return None
        if is_owner:
            return kinds if _ATTRIBUTES in kinds or not hasattr(value, "__dict__") else (*kinds, _ATTRIBUTES)
        if kinds and kinds[0] in (_DICT, _ITEMS, _NUMBERS):
            return (_LENGTH,) if len(value) >= _LONG else (_ROW,) if name.endswith(_LOG) else kinds
        return kinds


# --- What may change, and how it is copied and brought back. ---


class _Kind(NamedTuple):
    # Returns a copy of what is held.
    read: Callable[[Any], Any]
    # Gets what is held, and a copy that it is to be like again.
    write: Callable[[Any, Any], object]
    # Returns what is in a copy and may change too: in a dictionary, or a list. None: nothing may.
    inside: Callable[[Any], Iterable[Any]] | None = None
    # Returns what is read and written.
    of: Callable[[Any], Any] = lambda value: value
    # In place of `read` where there is a copy of before.
    read_again: Callable[[Any, Any], Any] | None = None
    # Whether it has changed since a copy and cannot be brought back. None: it can.
    is_lost: Callable[[Any, Any], bool] | None = None


class _Alike:
    """Objects of one kind. `notes` is what they held when they were last looked at; little of a look runs in Python."""

    def __init__(self, kind: _Kind, *, is_of_modules: bool = False) -> None:
        self.kind = kind
        self.is_of_modules = is_of_modules
        self.names: list[str] = []
        self.values: list[Any] = []
        self.notes: list[Any] = []
        # The dictionary of an object's attributes does not keep it alive.
        self._owners: list[Any] = []
        self._inside: list[Any] = []
        self._changeable: list[Any] = []
        self.lacks_some = False

    def add(self, name: str, owner: Any, last: dict[int, Any]) -> Sequence[tuple[Any, Any]]:
        """Note one more. Returns what is in it and may change too, by name."""
        kind, value = self.kind, self.kind.of(owner)
        is_known = kind.read_again is not None and id(value) in last
        note = kind.read_again(value, last[id(value)]) if kind.read_again and is_known else kind.read(value)
        self.names.append(name)
        self._owners.append(owner)
        self.values.append(value)
        self.notes.append(note)
        if kind.inside is None:
            return ()
        self._inside += kind.inside(note)
        named = note.items() if type(note) is dict else enumerate(note)
        changeable = [(name, each) for name, each in named if type(each) not in _IS_ATOM]
        self._changeable += [each for _, each in changeable]
        found = [(name, each) for name, each in changeable if name not in _DATA]
        return found if len(found) <= _MOST_INSIDE else ()

    def looks_other(self) -> bool:
        """Note what they hold now. Returns whether other objects that may change are in them than before."""
        kind = self.kind
        if kind.read_again is not None:
            self.notes = list(map(kind.read_again, self.values, self.notes))
        else:
            try:
                self.notes = list(map(kind.read, self.values))
            except KeyError:
                # An attribute is gone, and another one may have come.
                self.lacks_some = True
        if kind.inside is None:
            return False
        before, self._inside = self._inside, list(chain.from_iterable(map(kind.inside, self.notes)))
        if _are_same(before, self._inside):
            return False
        then, self._changeable = self._changeable, [each for each in self._inside if type(each) not in _IS_ATOM]
        return not _are_same(then, self._changeable)


def _are_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


@dataclass(slots=True)
class SavedTensor:
    """A tensor at one moment. Without a `copy` it is only known whether it has been written to."""

    tensor: Tensor
    version: int
    copy: Tensor | bytes | None = None

    @property
    def is_written(self) -> bool:
        return self.tensor._version != self.version

    @property
    def is_lost(self) -> bool:
        return self.copy is None and self.is_written

    @property
    def has_other_values(self) -> bool:
        if self.copy is None:
            return self.is_written
        if isinstance(self.copy, bytes):
            return bytes_of(self.tensor, _SMALL_BYTES) != self.copy
        return not torch.equal(self.copy.to(self.tensor.device), self.tensor)

    def restore(self) -> None:
        # Those who look at versions, as later micro-batches that have no copy, would take a write for a forward's.
        if self.copy is None or not self.has_other_values:
            return
        copy = self.copy
        if isinstance(copy, bytes):
            copy = torch.frombuffer(bytearray(copy), dtype=self.tensor.dtype).view(self.tensor.shape)
        with torch.no_grad():
            self.tensor.copy_(copy)
        self.version = self.tensor._version


def _read_tensor(tensor: Tensor, last: SavedTensor | None = None) -> SavedTensor | None:
    # Those of inference mode have no versions.
    if tensor.is_inference() or not is_plain(tensor):
        return None
    copy: Tensor | bytes | None = None
    if tensor.nbytes <= _SMALL_BYTES:
        # Bytes show a write past the versions too.
        copy = bytes_of(tensor, _SMALL_BYTES)
        if copy is None:
            is_known = last is not None and last.version == tensor._version
            copy = last.copy if last is not None and is_known else tensor.detach().clone()
    return SavedTensor(tensor, tensor._version, copy)


def _put_entries_back(entries: dict[Any, Any], found: dict[Any, Any]) -> None:
    now, then = (list(map(id, chain(each, each.values()))) for each in (entries, found))
    if now != then:
        # Not by methods of a subclass, such as a Counter's, which adds; an OrderedDict keeps more than a dict does.
        methods: Any = OrderedDict if isinstance(entries, OrderedDict) else dict
        methods.clear(entries)
        methods.update(entries, found)


def _put_items_back(items: Any, found: list[Any]) -> None:
    items.clear()
    (items.update if isinstance(items, set) else items.extend)(found)


def _put_settings_back(attributes: dict[str, Any], found: dict[str, Any]) -> None:
    for name in [name for name, value in attributes.items() if name not in found and type(value) in _IS_ATOM]:
        del attributes[name]
    attributes.update((name, value) for name, value in found.items() if type(value) in _IS_ATOM)


def _parts_of(value: Any) -> dict[Any, Any]:
    match value:
        case partial():
            return {"func": value.func, "args": value.args, "keywords": value.keywords}
        case MethodType():
            return {"": value.__self__}
        case _:
            return dict(enumerate(value))


def _hash_of(values: Any) -> int:
    return hash(values.tobytes())


_DICT = _Kind(dict, _put_entries_back, inside=dict.values)
_ATTRIBUTES = _DICT._replace(of=vars)
# Numbers and words that are attributes of an object of a library.
_SETTINGS = _Kind(dict, _put_settings_back, of=vars)
_SLOTS = _Kind(Slots.read, Slots.write, inside=dict.values, of=Slots)
_ITEMS = _Kind(list, _put_items_back, inside=iter)
# A list whose entries stay as they are.
_ROW = _ITEMS._replace(inside=None)
_NUMBERS = _Kind(itemgetter(slice(None)), lambda value, note: value.__setitem__(slice(None), note))
_LENGTH = _Kind(
    len,
    # A list that has grown is cut.
    lambda value, note: value.__delitem__(slice(note, None)) if isinstance(value, list) else None,
    is_lost=lambda value, note: len(value) < note if isinstance(value, list) else len(value) != note,
)
# It cannot change itself, but hold what can.
_FIXED = _Kind(_parts_of, lambda value, note: None, inside=dict.values)
_TENSOR = _Kind(
    _read_tensor,
    lambda value, note: note and note.restore(),
    read_again=_read_tensor,
    is_lost=lambda value, note: note is not None and note.is_lost,
)
_ARRAY = _Kind(
    # The values of a large one are hashed once. Whether it has changed since is asked where memory has run out.
    lambda value: value.copy() if value.nbytes <= _SMALL_BYTES else _hash_of(value),
    lambda value, note: value.__setitem__(..., note) if isinstance(note, np.ndarray) else None,
    read_again=lambda value, last: value.copy() if value.nbytes <= _SMALL_BYTES else last,
    is_lost=lambda value, note: not isinstance(note, np.ndarray) and _hash_of(value) != note,
)
_TORCH_GENERATOR = _Kind(lambda value: value.get_state(), lambda value, note: value.set_state(note))
_PYTHON_RANDOM = _Kind(lambda value: value.getstate(), lambda value, note: value.setstate(note))
_OLD_NUMPY_RANDOM = _Kind(lambda value: value.get_state(legacy=False), lambda value, note: value.set_state(note))
_NUMPY_RANDOM = _Kind(
    lambda bits: bits.state,
    lambda bits, note: setattr(bits, "state", note),
    of=lambda value: getattr(value, "bit_generator", value),
)
_KINDS: tuple[tuple[Any, _Kind | None], ...] = (
    (Tensor, _TENSOR),
    (dict, _DICT),
    ((list, deque, set, bytearray), _ITEMS),
    ((tuple, frozenset, partial, MethodType), _FIXED),
    (torch.Generator, _TORCH_GENERATOR),
    # It has no state.
    (random.SystemRandom, None),
    (random.Random, _PYTHON_RANDOM),
    (np.random.RandomState, _OLD_NUMPY_RANDOM),
    ((np.random.Generator, np.random.BitGenerator), _NUMPY_RANDOM),
    (np.ndarray, _ARRAY),
    (array, _NUMBERS),
)


def _kinds_of(value: object) -> tuple[_Kind, ...] | None:
    """Return what of the values of a class may change: nothing of one that is left alone. None: it cannot be told."""
    cls = type(value)
    # What is written to files is not undone. Arrays in files are data.
    if isinstance(value, (*_ATOMS, ModuleType, io.IOBase, np.memmap)):
        return ()
    kind = next((kind for base, kind in _KINDS if isinstance(value, base)), None)
    if kind is None and hasattr(cls, "__next__"):
        # An iterator does not tell where it stands, and does not go back.
        return None
    found = () if kind is None else (kind,)
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__}
    if packages & _OPAQUE or kind is _FIXED:
        # A mode or a hook that is derived from torch's watches the step from outside.
        own = packages - {"torch"} | {cls.__module__.partition(".")[0]}
        return (_SETTINGS,) if not found and own & _WITH_SETTINGS and hasattr(value, "__dict__") else found
    slots = (_SLOTS,) if slot_names(cls) else ()
    return (*found, *slots, _ATTRIBUTES) if hasattr(value, "__dict__") else (*found, *slots)


# --- Modules. ---

# In place of a tensor that is not brought back.
_LEFT = object()


class _Modules:
    """Modules with all those inside: which there are, and their attributes but for `_STANDARD`, a plan's and functions.

    There may be thousands: the attributes of those with the same names are read together, by one getter.
    """

    def __init__(self, roots: Sequence[tuple[str, nn.Module]]) -> None:
        self._roots = [root for _, root in roots]
        named: dict[nn.Module, str] = {}
        for name, root in roots:
            for path, module in root.named_modules():
                named.setdefault(module, f"{name}.{path}".strip("."))
        self.modules = list(named)
        self._holders = [each._modules for each in named if each._modules or _package(each) not in _OF_MANY]
        self._num_children = list(map(len, self._holders))
        self._children = self._children_now()
        self._num_looks = 0
        # What wraps a model holds an engine.
        owned = [(path, each) for each, path in named.items() if not isinstance(each, DistributedDataParallel)]
        self._all = [(path, vars(each), len(vars(each)), vars(each).keys() - _STANDARD) for path, each in owned]
        self._watched = [vars(each) for _, each in owned if _package(each) not in _OF_MANY]
        self._num_watched = list(map(len, self._watched))
        alike: dict[tuple[str, ...], _Alike] = {}
        for path, each in owned:
            if own := _own_names(vars(each), vars(each), _package(each)):
                # A getter of one name would return no tuple.
                names = tuple(own if len(own) > 1 else own * 2)
                kind = _Kind(itemgetter(*names), partial(_put_attributes_back, names), inside=iter)
                alike.setdefault(names, _Alike(kind, is_of_modules=True)).add(path, vars(each), {})
        self._names = list(alike)
        self.alike = list(alike.values())

    def inside(self) -> Iterator[tuple[str, Any]]:
        """Yield what modules hold that may change, by name."""
        for names, alike in zip(self._names, self.alike, strict=True):
            for path, note in zip(alike.names, alike.notes, strict=True):
                named = zip(names, note, strict=True)
                yield from ((f"{path}.{name}".strip("."), each) for name, each in named if type(each) not in _IS_ATOM)

    def is_of(self, roots: Sequence[nn.Module]) -> bool:
        return _are_same(roots, self._roots) and self.has_same_names() and self._is_current()

    def looks_current(self) -> bool:
        """Whether as many modules are there; now and then, whether the same."""
        self._num_looks += 1
        # Most of what modules get later they get in the first step.
        if self._num_looks <= 2 or self._num_looks % _LOOKS == 0:
            return self._is_current()
        return list(map(len, self._holders)) == self._num_children

    def _is_current(self) -> bool:
        return not self.names_of_new() and self.has_same_children()

    def has_same_children(self) -> bool:
        return self._children_now() == self._children

    def _children_now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._holders)))

    def has_same_names(self) -> bool:
        # But for what modules get of which there are many.
        is_whole = not any(alike.lacks_some for alike in self.alike)
        return is_whole and list(map(len, self._watched)) == self._num_watched

    def names_of_new(self) -> list[str]:
        """Name the attributes of which nobody knows whether they came in the step or before it."""
        watched = set(map(id, self._watched))
        return [
            f"{path}.{name}"
            for path, attributes, size, known in self._all
            if len(attributes) != size and id(attributes) not in watched
            for name in _own_names(attributes, attributes.keys() - known)
        ]

    def drop_new(self) -> None:
        """Take away the attributes that have come."""
        for _, attributes, _, known in self._all:
            for name in _own_names(attributes, attributes.keys() - known):
                del attributes[name]


def _put_attributes_back(names: Sequence[str], attributes: dict[str, Any], found: Sequence[Any]) -> None:
    attributes.update((name, value) for name, value in zip(names, found, strict=True) if value is not _LEFT)


def _own_names(attributes: dict[str, Any], names: Iterable[str], package: str = "") -> list[str]:
    return [
        name
        for name in names
        if name not in _STANDARD
        and not name.startswith(_OF_A_PLAN)
        and not isinstance(attributes[name], FunctionType | MethodType | partial)
        and (package != "peft" or name not in CONSTANT_IN_RUN)
    ]


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.nbytes > _SMALL_BYTES
