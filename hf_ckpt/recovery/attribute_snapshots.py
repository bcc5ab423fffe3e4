"""What objects hold, noted and brought back: counters, records and generators that a repeated step would move on.

Each object that may change is looked at by itself, however many names it has, and brought back with its own identity.
What it holds is copied one level deep; what is in there and may change too is an object of its own. Which objects there
are is found once, and again only where one of them holds other ones than before.

Not reached: what functions find in closures and globals, attributes of classes, and the insides of objects of torch,
transformers, accelerate, peft and datasets, but for numbers and words, and of what reports runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_ckpt.recovery.saved_values import (
    ATTRIBUTES,
    DICT,
    FIXED,
    IS_ATOM,
    ITEMS,
    LENGTH,
    NUMBERS,
    ROW,
    SMALL_BYTES,
    Kind,
    SavedBuffers,
    kinds_of,
)
from hf_ckpt.structure.stored import Missing
from hf_ckpt.upstream.peft import CONSTANT_IN_RUN
from hf_ckpt.upstream.transformers import FUNCTION, IS_INITIALIZED

# A container of so many entries is data rather than a record of a run: only its length is noted.
_LONG = 10_000
# Where more entries than these of one container may change (rows of data), all are noted by reference.
_MOST_INSIDE = 1000
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


@dataclass
class Attributes:
    """What some objects held at one moment. See `AttributeSnapshots`."""

    _noted: list[tuple[_Alike, list[Any]]]
    _modules: _Modules
    _unknown: list[str]

    def without_large_tensors(self) -> Attributes:
        """Return the same, but for large tensors that modules hold: they are left as they are."""
        noted = [
            (alike, [tuple(Missing if _is_large(each) else each for each in note) for note in notes])
            if alike.is_of_modules and any(map(_is_large, chain.from_iterable(notes)))
            else (alike, notes)
            for alike, notes in self._noted
        ]
        return Attributes(noted, self._modules, self._unknown)

    def changed_buffers(self) -> list[str]:
        """Name those that have other values than they had, or of which there is no copy to tell."""
        found = [note for _, notes in self._noted for note in notes if isinstance(note, SavedBuffers)]
        return [name for saved in found for name in saved.changed()]

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
        if modules := [name for name, value in lost if isinstance(value, nn.Module)]:
            return f"it has written to buffers that it left alone before: of {', '.join(modules[:_MOST_NAMES])}"
        if tensors := [name for name, value in lost if isinstance(value, Tensor)]:
            return f"it has written to large tensors: {', '.join(tensors[:_MOST_NAMES])}"
        if names := [*self._unknown, *(name for name, _ in lost), *self._modules.names_of_new()]:
            return f"nothing brings back {', '.join(names[:_MOST_NAMES])} (an iterator, too large to be copied, or new)"
        return None if self._modules.has_same_children() else "modules have come or gone in it"


class AttributeSnapshots:
    """Notes what objects hold, again and again."""

    # Each owner is looked into, of whatever class it is; messages give it the name that comes with it. `buffers` says
    # how those of modules are noted, `BUFFERS` or `SENT_BUFFERS`; None leaves them out.

    def __init__(self, *owners: tuple[str, object], buffers: Kind | None = None) -> None:
        self._owners: Sequence[tuple[str, object]] = owners
        self._buffers = buffers
        self._kinds: dict[type, tuple[Kind, ...] | None] = {}
        self._alike: dict[Kind, _Alike] = {}
        self._modules = _Modules([])
        self._is_found = False

    @property
    def modules(self) -> Mapping[nn.Module, str]:
        """Those among the owners and in what they hold, with all modules inside, and their names."""
        return self._modules.named

    def look_into(self, *owners: tuple[str, object]) -> bool:
        """Look into these owners from here on. Returns whether they are others than before."""
        before, self._owners = self._owners, owners
        if _are_same([owner for _, owner in before], [owner for _, owner in owners]):
            return False
        self._is_found = False
        return True

    def now(self, *, is_later: bool = False) -> Attributes:
        """Return what they hold now; `is_later` in a step in which modules have been looked for already."""
        # All of them look, as each notes anew what it holds.
        look_other = [alike.looks_other() for alike in self._every()] if self._is_found else [True]
        if any(look_other) or not (self._modules.has_same_names() and (is_later or self._modules.looks_current())):
            self._find()
            self._is_found = True
        return Attributes([(alike, alike.notes) for alike in self._every()], self._modules, self._unknown)

    def _every(self) -> list[_Alike]:
        return [*self._alike.values(), *self._modules.alike]

    def _find(self) -> None:
        before, self._alike = list(self._alike.values()), {}
        self._last = {id(held): note for each in before for held, note in zip(each.values, each.notes, strict=True)}
        self._seen: dict[int, object] = {}
        self._unknown: list[str] = []
        # Those that are held outside of modules.
        self.parameters: list[nn.Parameter] = []
        roots = self._look_into(self._owners)
        num_roots = -1
        # What modules hold may lead to others.
        while len(roots) != num_roots:
            num_roots = len(roots)
            if not self._modules.is_of([root for _, root in roots]):
                self._modules = _Modules(roots)
            more = self._look_into(self._modules.inside())
            roots += [(name, module) for name, module in more if module not in self.modules]
        if self._buffers is not None:
            self._alike[self._buffers] = _Alike(self._buffers)
            for module, path in self.modules.items():
                if module._buffers:
                    self._alike[self._buffers].add(path, module, self._last)
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
                if kind is not FIXED:
                    self._alike[kind] = alike
                inner = alike.add(name, value, self._last)
                waiting.extend((f"{name}.{each}".strip("."), value) for each, value in inner)
        return modules

    def _kinds_here(self, name: str, value: Any, *, is_owner: bool) -> tuple[Kind, ...] | None:
        if type(value) not in self._kinds:
            self._kinds[type(value)] = kinds_of(value)
        kinds = self._kinds[type(value)]
        if kinds is None:
            return None
        if is_owner:
            return kinds if ATTRIBUTES in kinds or not hasattr(value, "__dict__") else (*kinds, ATTRIBUTES)
        if kinds and kinds[0] in (DICT, ITEMS, NUMBERS):
            return (LENGTH,) if len(value) >= _LONG else (ROW,) if name.endswith(_LOG) else kinds
        return kinds


class _Alike:
    """Objects of one kind. `notes` is what they held when they were last looked at; little of a look runs in Python."""

    def __init__(self, kind: Kind, *, is_of_modules: bool = False) -> None:
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
        changeable = [(name, each) for name, each in named if type(each) not in IS_ATOM]
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
        then, self._changeable = self._changeable, [each for each in self._inside if type(each) not in IS_ATOM]
        return not _are_same(then, self._changeable)


def _are_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


# --- Modules. ---


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
        self.named = named
        self._holders = [each._modules for each in named if each._modules or _package(each) not in _OF_MANY]
        self._num_children = list(map(len, self._holders))
        self._children = self._children_now()
        self._with_buffers = {module for module in named if module._buffers}
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
                kind = Kind(itemgetter(*names), partial(_put_attributes_back, names), inside=iter)
                alike.setdefault(names, _Alike(kind, is_of_modules=True)).add(path, vars(each), {})
        self._names = list(alike)
        self.alike = list(alike.values())

    def inside(self) -> Iterator[tuple[str, Any]]:
        """Yield what modules hold that may change, by name."""
        for names, alike in zip(self._names, self.alike, strict=True):
            for path, note in zip(alike.names, alike.notes, strict=True):
                named = zip(names, note, strict=True)
                yield from ((f"{path}.{name}".strip("."), each) for name, each in named if type(each) not in IS_ATOM)

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
        """Take away the attributes that have come, and the buffers of modules that had none."""
        for _, attributes, _, known in self._all:
            for name in _own_names(attributes, attributes.keys() - known):
                del attributes[name]
        for module in self.named:
            if module._buffers and module not in self._with_buffers:
                for name in list(module._buffers):
                    delattr(module, name)


def _put_attributes_back(names: Sequence[str], attributes: dict[str, Any], found: Sequence[Any]) -> None:
    attributes.update((name, value) for name, value in zip(names, found, strict=True) if value is not Missing)


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
    return isinstance(value, Tensor) and value.nbytes > SMALL_BYTES
