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
from collections.abc import Callable, Iterable, Sequence
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

    _noted: Sequence[tuple[_Held | _SmallContainers, Any]]
    _modules: _Modules
    _in_modules: list[Any]
    _unknown: list[str]

    def without_large_tensors(self) -> Attributes:
        """Return the same, but for large tensors that modules hold: they are left as they are."""
        in_modules = self._in_modules
        if any(map(_is_large, in_modules)):
            in_modules = [_LEFT if _is_large(value) else value for value in in_modules]
        return Attributes(self._noted, self._modules, in_modules, self._unknown)

    def restore(self) -> None:
        """Bring it back, each object with its own identity: others may hold it too."""
        for held, note in self._noted:
            held.write(note)
        self._modules.write(self._in_modules)

    def describe_lost(self, large: str) -> str | None:
        """Say what has changed, or may have, and cannot be brought back; None if nothing. `large`: of large tensors."""
        lost = [held for held, note in self._noted if held.is_lost(note)]
        if tensors := [held.name for held in lost if isinstance(held.value, Tensor)]:
            return f"{large}: {', '.join(tensors[:_MOST_NAMES])}"
        if names := [*self._unknown, *(held.name for held in lost), *self._modules.names_of_new()]:
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
        self._held: dict[tuple[int, _Kind], _Held] = {}
        self._modules = _Modules([])
        self._find()

    @property
    def modules(self) -> list[nn.Module]:
        """Those among the owners and in what they hold, with all modules inside."""
        return self._modules.modules

    def now(self, *, is_later: bool = False) -> Attributes:
        """Return what they hold now; `is_later` in a step in which modules have been looked for already."""
        every: list[_Held | _SmallContainers] = [*self._held.values(), self._small]
        # All of them look, as each notes anew what it holds.
        look_other = [each.looks_other() for each in every] + [self._modules.looks_other()]
        if any(look_other) or not (is_later or self._modules.looks_current()):
            self._find()
            every = [*self._held.values(), self._small]
        noted = [(each, each.note) for each in every]
        return Attributes(noted, self._modules, self._modules.note, self._unknown)

    def _find(self) -> None:
        known, self._held = self._held, {}
        self._seen: dict[int, object] = {}
        self._unknown: list[str] = []
        self.parameters: list[nn.Parameter] = []
        roots = self._look_into(self._owners, known)
        num_roots, small = -1, list[Any]()
        # What modules hold may lead to others.
        while len(roots) != num_roots:
            num_roots = len(roots)
            if not self._modules.is_of([root for _, root in roots]):
                self._modules = _Modules(roots)
            entries = self._modules.inside()
            small = [value for _, value in entries if _SmallContainers.takes(value)]
            more = self._look_into((entry for entry in entries if not _SmallContainers.takes(entry[1])), known)
            inside = set(map(id, self._modules.modules))
            roots += [(name, module) for name, module in more if id(module) not in inside]
        self._small = _SmallContainers(small)
        self._seen.clear()

    def _look_into(
        self, found: Iterable[tuple[str, Any]], known: dict[tuple[int, _Kind], _Held]
    ) -> list[tuple[str, nn.Module]]:
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
                held = known.get((id(value), kind)) or _Held(name, value, kind)
                if kind is not _FIXED:
                    self._held[id(value), kind] = held
                waiting.extend((f"{name}.{each}".strip("."), inner) for each, inner in held.inside())
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
    # Gets what is held, and its last note or None; returns a copy.
    read: Callable[[Any, Any], Any]
    # Gets what is held, and a note that it is to be like again.
    write: Callable[[Any, Any], object]
    # Whether what is in a note may change too: in a dictionary, or a list.
    is_open: bool = False
    # Returns what is read and written.
    of: Callable[[Any], Any] = lambda value: value
    # Whether it has changed since a note and cannot be brought back.
    is_lost: Callable[[Any, Any], bool] = lambda value, note: False


class _Held:
    """One of the objects that may change. `note` is what it held when it was last looked at."""

    def __init__(self, name: str, owner: Any, kind: _Kind) -> None:
        self.name = name
        # The dictionary of its attributes does not keep it alive.
        self._owner = owner
        self._kind = kind
        self.value = kind.of(owner)
        self.note = kind.read(self.value, None)
        self._changeable = self._changeable_now() if kind.is_open else []

    def _changeable_now(self) -> list[Any]:
        values = self.note.values() if type(self.note) is dict else self.note
        return [] if _IS_ATOM.issuperset(map(type, values)) else [each for each in values if type(each) not in _IS_ATOM]

    def looks_other(self) -> bool:
        """Note what it holds now. Returns whether other objects that may change are in it than before."""
        self.note = self._kind.read(self.value, self.note)
        if not self._kind.is_open:
            return False
        before, self._changeable = self._changeable, self._changeable_now()
        return len(before) != len(self._changeable) or not all(map(is_, before, self._changeable))

    def inside(self) -> Sequence[tuple[Any, Any]]:
        if not self._changeable:
            return ()
        named = self.note.items() if type(self.note) is dict else enumerate(self.note)
        found = [(name, value) for name, value in named if type(value) not in _IS_ATOM and name not in _DATA]
        return found if len(found) <= _MOST_INSIDE else ()

    def write(self, note: Any) -> None:
        self._kind.write(self.value, note)

    def is_lost(self, note: Any) -> bool:
        return self._kind.is_lost(self.value, note)


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


def _read_tensor(tensor: Tensor, last: SavedTensor | None) -> SavedTensor | None:
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


def _parts_of(value: Any, last: object) -> Any:
    match value:
        case partial():
            return {"func": value.func, "args": value.args, "keywords": value.keywords}
        case MethodType():
            return {"": value.__self__}
        case _:
            return list(value)


def _hash_of(values: Any) -> int:
    return hash(values.tobytes())


_DICT = _Kind(lambda value, last: dict(value), _put_entries_back, is_open=True)
_ATTRIBUTES = _DICT._replace(of=vars)
# Numbers and words that are attributes of an object of a library.
_SETTINGS = _Kind(lambda value, last: dict(value), _put_settings_back, of=vars)
_SLOTS = _Kind(lambda value, last: value.read(), Slots.write, is_open=True, of=Slots)
_ITEMS = _Kind(lambda value, last: list(value), _put_items_back, is_open=True)
# A list whose entries stay as they are.
_ROW = _ITEMS._replace(is_open=False)
_NUMBERS = _Kind(lambda value, last: value[:], lambda value, note: value.__setitem__(slice(None), note))
_LENGTH = _Kind(
    lambda value, last: len(value),
    # A list that has grown is cut.
    lambda value, note: value.__delitem__(slice(note, None)) if isinstance(value, list) else None,
    is_lost=lambda value, note: len(value) < note if isinstance(value, list) else len(value) != note,
)
# It cannot change itself, but hold what can.
_FIXED = _Kind(_parts_of, lambda value, note: None, is_open=True)
_TENSOR = _Kind(
    _read_tensor,
    lambda value, note: note and note.restore(),
    is_lost=lambda value, note: note is not None and note.is_lost,
)
_ARRAY = _Kind(
    # The values of a large one are hashed once. Whether it has changed since is asked where memory has run out.
    lambda value, last: value.copy() if value.nbytes <= _SMALL_BYTES else _hash_of(value) if last is None else last,
    lambda value, note: value.__setitem__(..., note) if isinstance(note, np.ndarray) else None,
    is_lost=lambda value, note: not isinstance(note, np.ndarray) and _hash_of(value) != note,
)
_TORCH_GENERATOR = _Kind(lambda value, last: value.get_state(), lambda value, note: value.set_state(note))
_PYTHON_RANDOM = _Kind(lambda value, last: value.getstate(), lambda value, note: value.setstate(note))
_OLD_NUMPY_RANDOM = _Kind(lambda value, last: value.get_state(legacy=False), lambda value, note: value.set_state(note))
_NUMPY_RANDOM = _Kind(
    lambda bits, last: bits.state,
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

    One object for all of them, as there may be thousands: in each step their attributes are read by getters, those of
    modules with the same names together, and little of it runs in Python.
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
        self._is_stale = False
        alike: dict[tuple[str, ...], list[tuple[str, dict[str, Any]]]] = {}
        for path, each in owned:
            if own := _own_names(vars(each), vars(each), _package(each)):
                # A getter of one name would return no tuple.
                alike.setdefault(tuple(own if len(own) > 1 else own * 2), []).append((path, vars(each)))
        self._getters = [itemgetter(*names) for names in alike]
        self._places = [[attributes for _, attributes in each] for each in alike.values()]
        self._names = [(*place, name) for names, each in alike.items() for place in each for name in names]
        self.note = self._read()
        self._changeable = self._changeable_now()

    def is_of(self, roots: Sequence[nn.Module]) -> bool:
        is_same = len(roots) == len(self._roots) and all(map(is_, roots, self._roots))
        return is_same and self._has_same_names() and self._is_current()

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

    def _has_same_names(self) -> bool:
        # But for modules of which there are many.
        return not self._is_stale and list(map(len, self._watched)) == self._num_watched

    def names_of_new(self) -> list[str]:
        """Name the attributes of which nobody knows whether they came in the step or before it."""
        watched = set(map(id, self._watched))
        return [
            f"{path}.{name}"
            for path, attributes, size, known in self._all
            if len(attributes) != size and id(attributes) not in watched
            for name in _own_names(attributes, attributes.keys() - known)
        ]

    def _read(self) -> list[Any]:
        try:
            return list(chain.from_iterable(chain.from_iterable(map(map, self._getters, self._places))))
        except KeyError:
            # One is gone, and another one may have come.
            self._is_stale = True
            return []

    def looks_other(self) -> bool:
        before, self.note = self.note, self._read()
        if not self._has_same_names():
            return True
        # Far from all of them are looked at one by one.
        if all(map(is_, self.note, before)):
            return False
        then, self._changeable = self._changeable, self._changeable_now()
        return len(then) != len(self._changeable) or not all(map(is_, then, self._changeable))

    def _changeable_now(self) -> list[Any]:
        return [each for each in self.note if type(each) not in _IS_ATOM]

    def inside(self) -> list[tuple[str, Any]]:
        named = zip(self._names, self.note, strict=True)
        return [(f"{path}.{name}".strip("."), value) for (path, _, name), value in named if type(value) not in _IS_ATOM]

    def write(self, note: list[Any]) -> None:
        for _, attributes, _, known in self._all:
            for name in _own_names(attributes, attributes.keys() - known):
                del attributes[name]
        for (_, attributes, name), value in zip(self._names, note, strict=True):
            if value is not _LEFT:
                attributes[name] = value


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


class _SmallContainers:
    """Dictionaries, lists and sets of numbers and the like that modules have: there may be thousands in a model."""

    name = "modules"
    value = None

    def __init__(self, values: Sequence[Any]) -> None:
        self._all: list[list[Any]] = [[each for each in values if type(each) is kind] for kind in (dict, list, set)]
        self.note = self._read()

    @staticmethod
    def takes(value: Any) -> bool:
        if type(value) is dict:
            value = value.values()
        elif type(value) not in (list, set):
            return False
        return len(value) < _LONG and _IS_ATOM.issuperset(map(type, value))

    def _read(self) -> list[list[Any]]:
        return [[each.copy() for each in alike] for alike in self._all]

    def looks_other(self) -> bool:
        # Numbers are rarely others than before, and to compare costs less than to copy.
        if self._all == self.note:
            return False
        self.note = self._read()
        dicts, *others = self.note
        values = chain.from_iterable(chain(map(dict.values, dicts), *others))
        return not _IS_ATOM.issuperset(map(type, values))

    def write(self, note: list[list[Any]]) -> None:
        for container, noted in zip(chain(*self._all), chain(*note), strict=True):
            container.clear()
            (container.extend if type(container) is list else container.update)(noted)

    def is_lost(self, note: object) -> bool:
        return False
