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
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_ckpt.regions.fingerprints import bytes_of, is_plain
from hf_ckpt.regions.put_back import Slots, slot_names
from hf_ckpt.upstream.peft import CONSTANT_IN_RUN
from hf_ckpt.upstream.transformers import FUNCTION, IS_INITIALIZED

_LONG = 10_000
"""Entries from which on a container is data rather than a record of a run: only its length is noted."""
_MOST_INSIDE = 1000
"""Entries that may change, of one container; where there are more (rows of data), all are noted by reference."""
_SMALL_BYTES = 4096
"""Of a tensor or an array that may count or record, and is copied."""
_DATA = frozenset({"train_dataset", "eval_dataset"})
"""Attributes of a Trainer that no step changes, and that may be long."""
_LOG = "log_history"
"""Of a Trainer's state: grows with the run, by entries that stay as they are."""
_OF_A_PLAN = ("_hf_ckpt", FUNCTION)
"""How attributes of modules begin that are not the forward's to change."""
_FIXED = frozenset(
    {*"in_features out_features num_embeddings embedding_dim normalized_shape _keys".split(), IS_INITIALIZED}
)
"""What most modules have, and nothing else: sizes of weights, names in a ParameterDict, a mark of transformers."""
_OF_MANY = ("torch", "peft")
"""Packages of whose modules there may be thousands: what they get as new attributes is seen only now and then."""
_LOOKS = 16
"""So many steps are between two looks at which modules there are. How many there are is looked at more often."""
_ATOMS = (int, float, complex, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size, np.generic)
_IS_ATOM = frozenset((*_ATOMS, *np.sctypeDict.values()))
_OPAQUE = frozenset(
    "torch transformers accelerate peft datasets tokenizers hf_ckpt logging threading concurrent multiprocessing "
    "wandb mlflow comet_ml tensorboardX neptune clearml aim swanlab trackio tqdm ray".split()
)
"""Packages into whose objects nobody looks, nor into those of classes derived from theirs: what a step changes of the
engine's is undone elsewhere, and what a thread works on cannot be."""
_WITH_SETTINGS = frozenset({"torch", "transformers", "accelerate", "peft"})
"""Of these numbers and words are noted all the same: a loss may anneal one in a config or in the arguments."""

_MOST_NAMES = 4


class Attributes:
    """What some objects held at one moment. See `AttributeSnapshots`."""

    def __init__(self, noted: list[tuple[_Holder, Any]], unknown: list[str], tree: _ModuleTree) -> None:
        self._noted = noted
        self._unknown = unknown
        self._tree = tree

    def without_large_tensors(self) -> Attributes:
        """Return the same, but for large tensors that modules hold: they are left as they are."""
        of_modules, note = self._noted[-1]
        assert isinstance(of_modules, _OfModules), "modules come last"
        return Attributes(
            [*self._noted[:-1], (of_modules, of_modules.without_large_tensors(note))], self._unknown, self._tree
        )

    def restore(self) -> None:
        """Bring it back, each object with its own identity: others may hold it too."""
        for holder, note in self._noted:
            holder.write(note)

    def describe_lost(self, large: str) -> str | None:
        """Say what has changed, or may have, and cannot be brought back; None if nothing. `large`: of large tensors."""
        lost = [holder for holder, note in self._noted if holder.is_lost(note)]
        if tensors := [holder.name for holder in lost if isinstance(holder, _Tensor)]:
            return f"{large}: {', '.join(tensors[:_MOST_NAMES])}"
        if names := [*self._unknown, *(holder.name for holder in lost), *self._tree.attributes.lost_names()]:
            return f"nothing brings back {', '.join(names[:_MOST_NAMES])} (an iterator, too large to be copied, or new)"
        return None if self._tree.has_same_children() else "modules have come or gone in it"


class AttributeSnapshots:
    """Notes what objects hold, again and again.

    Args:
        owners: by the name that messages give them; each is looked into, of whatever class it is.

    Attributes:
        modules: those among the owners and in what they hold, with all modules inside.
        parameters: those that are held outside of modules.
    """

    def __init__(self, *owners: tuple[str, object]) -> None:
        self._owners = owners
        self._kinds: dict[type, tuple[type[_Holder], ...]] = {}
        self._holders: dict[tuple[int, type[_Holder]], _Holder] = {}
        self._seen: dict[int, object] = {}
        self._tree = _ModuleTree([])
        self._find()

    @property
    def modules(self) -> list[nn.Module]:
        return self._tree.modules

    def now(self, *, is_later: bool = False) -> Attributes:
        """Return what they hold now; `is_later` in a step in which modules have been looked for already."""
        # All of them look, as each notes anew what it holds.
        looks_other = [holder.looks_other() for holder in self._holders.values()]
        if any(looks_other) or not (is_later or self._tree.looks_current()):
            self._find()
        return Attributes([(holder, holder.note) for holder in self._holders.values()], self._unknown, self._tree)

    def _find(self) -> None:
        known, self._holders = self._holders, {}
        self._unknown: list[str] = []
        self.parameters: list[nn.Parameter] = []
        roots = self._look_into(self._owners, known)
        num_roots, small = -1, list[tuple[str, Any]]()
        # What modules hold may lead to others.
        while len(roots) != num_roots:
            num_roots = len(roots)
            if not self._tree.is_of(roots):
                self._tree = _ModuleTree(roots)
            of_modules = self._tree.attributes
            entries = of_modules.inside(of_modules.note)
            small = [(name, value) for name, value in entries if _SmallContainers.takes(value)]
            more = self._look_into((entry for entry in entries if not _SmallContainers.takes(entry[1])), known)
            inside = set(map(id, self._tree.modules))
            roots += [(name, module) for name, module in more if id(module) not in inside]
        self._holders[id(small), _SmallContainers] = _SmallContainers("modules", small)
        # The last one: see `Attributes.without_large_tensors`.
        self._holders[id(self._tree), _OfModules] = self._tree.attributes
        self._seen.clear()

    def _look_into(
        self, found: Iterable[tuple[str, Any]], known: dict[tuple[int, type[_Holder]], _Holder]
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
            kinds = self._kinds_of(name, value, is_owner=id(value) in owners)
            if _Unknown in kinds:
                self._unknown.append(name)
                continue
            for kind in kinds:
                holder = known.get((id(value), kind)) or kind(name, value)
                self._holders[id(value), kind] = holder
                waiting.extend((f"{name}.{each}".strip("."), inner) for each, inner in holder.inside(holder.note))
        return modules

    def _kinds_of(self, name: str, value: Any, *, is_owner: bool) -> tuple[type[_Holder], ...]:
        cls = type(value)
        if cls not in self._kinds:
            self._kinds[cls] = tuple(_kinds_of(value))
        kinds = self._kinds[cls]
        if is_owner:
            return kinds if _Attributes in kinds or not hasattr(value, "__dict__") else (*kinds, _Attributes)
        if kinds and kinds[0] in (_Dict, _Items, _Numbers):
            if len(value) >= _LONG:
                return (_Long,)
            if name.endswith(_LOG):
                return (_Row,)
        return kinds


def _kinds_of(value: object) -> Iterator[type[_Holder]]:
    """Yield what of the values of a class may change; nothing of one that is left alone."""
    cls = type(value)
    # What is written to files is not undone. Arrays in files are data.
    if isinstance(value, (*_ATOMS, ModuleType, io.IOBase, np.memmap)):
        return
    kind = next((kind for base, kind in _KINDS if isinstance(value, base)), None)
    if kind is None and hasattr(cls, "__next__"):
        # An iterator: where it stands is not told, and it does not go back.
        kind = _Unknown
    if kind is not None:
        yield kind
    packages = {base.__module__.partition(".")[0] for base in cls.__mro__}
    if packages & _OPAQUE or kind is _Fixed:
        # A mode or a hook that is derived from torch's watches the step from outside.
        own = packages - {"torch"} | {cls.__module__.partition(".")[0]}
        if kind is None and own & _WITH_SETTINGS and hasattr(value, "__dict__"):
            yield _Settings
        return
    if slot_names(cls):
        yield _Slots
    if hasattr(value, "__dict__"):
        yield _Attributes


# --- What holds what. ---


class _Holder:
    """An object that may change.

    Attributes:
        name: for messages.
        note: what it held when it was last looked at.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value
        self.note = self.read()
        self._changeable = list(self.changeable(self.note))

    def read(self) -> Any:
        """Return what it holds, copied."""
        return self.value

    def write(self, note: Any) -> None:
        """Bring that back."""

    def is_lost(self, note: Any) -> bool:
        """Whether it has changed and cannot be brought back."""
        return False

    def inside(self, note: Any) -> Sequence[tuple[Any, Any]]:
        """Return what it holds that may change too, by name."""
        return ()

    def changeable(self, note: Any) -> Iterable[Any]:
        """Return what of what it holds may change."""
        return ()

    def looks_other(self) -> bool:
        """Note what it holds now. Returns whether other objects that may change are in it than before."""
        self.note = self.read()
        now, before = list(self.changeable(self.note)), self._changeable
        if len(now) == len(before) and all(map(is_, now, before)):
            return False
        self._changeable = now
        return True


class _Entries(_Holder):
    """A container."""

    def read(self) -> Any:
        return list(self.value)

    def changeable(self, note: Any) -> Iterable[Any]:
        return () if _IS_ATOM.issuperset(map(type, note)) else [each for each in note if type(each) not in _IS_ATOM]

    def inside(self, note: Any) -> Sequence[tuple[object, Any]]:
        return _looked_into(enumerate(note))


class _Dict(_Entries):
    def read(self) -> dict[Any, Any]:
        return dict(self.value)

    def write(self, note: dict[Any, Any]) -> None:
        if list(map(id, _flat(self.value))) == list(map(id, _flat(note))):
            return
        # Not by methods of a subclass, such as a Counter's, which adds; an OrderedDict keeps more than a dict does.
        methods: Any = OrderedDict if isinstance(self.value, OrderedDict) else dict
        methods.clear(self.value)
        methods.update(self.value, note)

    def changeable(self, note: dict[Any, Any]) -> Iterable[Any]:
        return super().changeable(note.values())

    def inside(self, note: dict[Any, Any]) -> Sequence[tuple[object, Any]]:
        return _looked_into((key, value) for key, value in note.items() if key not in _DATA)


def _flat(entries: dict[Any, Any]) -> Iterable[Any]:
    return chain(entries, entries.values())


class _Items(_Entries):
    """A list, a deque, a set, or bytes."""

    def write(self, note: list[Any]) -> None:
        self.value.clear()
        (self.value.update if isinstance(self.value, set) else self.value.extend)(note)


class _Row(_Items):
    """A list whose entries stay as they are."""

    def changeable(self, note: Any) -> Iterable[Any]:
        return ()

    def inside(self, note: Any) -> Sequence[tuple[object, Any]]:
        return ()


class _Numbers(_Items):
    """An array of the standard library."""

    def write(self, note: list[Any]) -> None:
        self.value[:] = array(self.value.typecode, note)


class _Long(_Holder):
    """A container of which the length is noted: a list that has grown is cut."""

    def read(self) -> int:
        return len(self.value)

    def write(self, note: int) -> None:
        if isinstance(self.value, list):
            del self.value[note:]

    def is_lost(self, note: int) -> bool:
        return len(self.value) < note if isinstance(self.value, list) else len(self.value) != note


class _Attributes(_Dict):
    """Of an object that keeps them in a dictionary."""

    def __init__(self, name: str, value: Any) -> None:
        self._owner = value  # A dictionary does not keep it alive.
        super().__init__(name, vars(value))


class _Settings(_Attributes):
    """Numbers and words that are attributes of an object of a library."""

    def write(self, note: dict[Any, Any]) -> None:
        for name in [name for name, value in self.value.items() if name not in note and type(value) in _IS_ATOM]:
            del self.value[name]
        self.value.update((name, value) for name, value in note.items() if type(value) in _IS_ATOM)

    def changeable(self, note: dict[Any, Any]) -> Iterable[Any]:
        return ()

    def inside(self, note: dict[Any, Any]) -> Sequence[tuple[object, Any]]:
        return ()


class _Slots(_Holder):
    def __init__(self, name: str, value: Any) -> None:
        self._slots = Slots(value)
        super().__init__(name, value)

    def read(self) -> dict[str, Any]:
        return self._slots.read()

    def write(self, note: dict[str, Any]) -> None:
        self._slots.write(note)

    def changeable(self, note: dict[str, Any]) -> Iterable[Any]:
        return [each for each in note.values() if type(each) not in _IS_ATOM]

    def inside(self, note: dict[str, Any]) -> Sequence[tuple[object, Any]]:
        return _looked_into(note.items())


class _Fixed(_Holder):
    """What cannot change itself, but holds what can."""

    def inside(self, note: Any) -> Sequence[tuple[object, Any]]:
        match note:
            case partial():
                return [("func", note.func), ("args", note.args), ("keywords", note.keywords)]
            case MethodType():
                return [("", note.__self__)]
            case _:
                return _looked_into(enumerate(note))


def _looked_into(entries: Iterable[tuple[object, Any]]) -> Sequence[tuple[object, Any]]:
    found = [(name, value) for name, value in entries if type(value) not in _IS_ATOM]
    return found if len(found) <= _MOST_INSIDE else ()


# --- Numbers and generators. ---


class _Tensor(_Holder):
    def read(self) -> tuple[int, Tensor | bytes | None]:
        value: Tensor = self.value
        # Those of inference mode have no versions.
        if value.is_inference() or not is_plain(value):
            return -1, None
        if value.nbytes > _SMALL_BYTES:
            return value._version, None
        before: tuple[int, Tensor | bytes | None] | None = vars(self).get("note")
        if before is not None and before[0] == value._version and isinstance(before[1], Tensor):
            return before
        # Bytes show a write past the versions too.
        return value._version, bytes_of(value, _SMALL_BYTES) or value.detach().clone()

    def is_lost(self, note: tuple[int, Tensor | bytes | None]) -> bool:
        return note[1] is None and note[0] >= 0 and self.value._version != note[0]

    def write(self, note: tuple[int, Tensor | bytes | None]) -> None:
        version, copy = note
        value: Tensor = self.value
        if copy is None:
            return
        # A write would be seen as one by those who look at versions.
        if isinstance(copy, bytes):
            if bytes_of(value, _SMALL_BYTES) == copy:
                return
            copy = torch.frombuffer(bytearray(copy), dtype=value.dtype).view(value.shape)
        elif value._version == version:
            return
        with torch.no_grad():
            value.copy_(copy)


class _Array(_Holder):
    """Of numpy."""

    def read(self) -> Any:
        if self.value.nbytes <= _SMALL_BYTES:
            return self.value.copy()
        # Its values are hashed once. Whether it has changed since then is asked where memory has run out.
        return _hash_of(self.value) if not hasattr(self, "note") else self.note

    def is_lost(self, note: Any) -> bool:
        return not isinstance(note, np.ndarray) and _hash_of(self.value) != note

    def write(self, note: Any) -> None:
        if isinstance(note, np.ndarray):
            self.value[...] = note


def _hash_of(values: Any) -> int:
    return hash(values.tobytes())


class _TorchGenerator(_Holder):
    def read(self) -> Tensor:
        state: Tensor = self.value.get_state()
        return state

    def write(self, note: Tensor) -> None:
        self.value.set_state(note)


class _PythonRandom(_Holder):
    def read(self) -> Any:
        return self.value.getstate()

    def write(self, note: Any) -> None:
        self.value.setstate(note)


class _NumpyRandom(_Holder):
    """A generator of numpy's, of the old kind or the new one, or what is below it."""

    def read(self) -> Any:
        if isinstance(self.value, np.random.RandomState):
            return self.value.get_state(legacy=False)
        return self._bits().state

    def write(self, note: Any) -> None:
        if isinstance(self.value, np.random.RandomState):
            self.value.set_state(note)
        else:
            self._bits().state = note

    def _bits(self) -> Any:
        return getattr(self.value, "bit_generator", self.value)


class _Unknown(_Holder):
    """What cannot be brought back, and may have changed."""


_KINDS: tuple[tuple[Any, type[_Holder]], ...] = (
    (Tensor, _Tensor),
    (dict, _Dict),
    ((list, deque, set, bytearray), _Items),
    ((tuple, frozenset, partial, MethodType), _Fixed),
    (torch.Generator, _TorchGenerator),
    # It has no state.
    (random.SystemRandom, _Holder),
    (random.Random, _PythonRandom),
    ((np.random.Generator, np.random.RandomState, np.random.BitGenerator), _NumpyRandom),
    (np.ndarray, _Array),
    (array, _Numbers),
)


# --- Modules. ---


class _ModuleTree:
    """Modules with all those inside, and what is an attribute of theirs."""

    def __init__(self, roots: Sequence[tuple[str, nn.Module]]) -> None:
        self._roots = list(roots)
        named: dict[nn.Module, str] = {}
        for name, root in roots:
            for path, module in root.named_modules():
                named.setdefault(module, f"{name}.{path}".strip("."))
        self.modules = list(named)
        own = [each._modules for each in self.modules if _package(each) not in _OF_MANY]
        of_many = [each._modules for each in self.modules if each._modules and _package(each) in _OF_MANY]
        self._lists = [*own, *of_many]
        self._children = self._children_now()
        # Of many, every so many-th: adapters come and go in all layers.
        turns = ([*own, *of_many[turn::_LOOKS]] for turn in range(_LOOKS))
        self._turns = [(lists, list(map(len, lists))) for lists in turns]
        self._num_looks = 0
        self.attributes = _OfModules("modules", named)

    def is_of(self, roots: Sequence[tuple[str, nn.Module]]) -> bool:
        return (
            self.is_current()
            and len(roots) == len(self._roots)
            and all(one[1] is other[1] for one, other in zip(roots, self._roots, strict=True))
        )

    def is_current(self) -> bool:
        """Whether the same modules are there, with attributes of the same names."""
        is_known = self.attributes.has_same_names() and not self.attributes.lost_names()
        return is_known and self.has_same_children()

    def looks_current(self) -> bool:
        """Whether as many modules are there; now and then, whether the same."""
        self._num_looks += 1
        # Most of what modules get later they get in the first step.
        if self._num_looks <= 2 or self._num_looks % _LOOKS == 0:
            return self.is_current()
        lists, sizes = self._turns[self._num_looks % _LOOKS]
        return list(map(len, lists)) == sizes

    def has_same_children(self) -> bool:
        return self._children_now() == self._children

    def _children_now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self._lists)))


_LEFT = object()
"""In place of a tensor that is not brought back."""


class _OfModules(_Holder):
    """The attributes of modules that are not torch's own, nor of a plan, nor functions: one holder for all of them."""

    def __init__(self, name: str, modules: dict[nn.Module, str]) -> None:
        self._standard = frozenset((*vars(nn.Module()), *_FIXED, "gradient_checkpointing"))
        # What wraps a model holds an engine.
        found = {module: path for module, path in modules.items() if not isinstance(module, DistributedDataParallel)}
        self._all = [
            (path, vars(module), len(vars(module)), frozenset(vars(module)) - self._standard)
            for module, path in found.items()
        ]
        watched = [vars(module) for module in found if _package(module) not in _OF_MANY]
        self._watched, self._sizes = watched, list(map(len, watched))
        self._is_stale = False
        # Modules with the same names are read together.
        alike: dict[tuple[str, ...], list[tuple[str, dict[str, Any]]]] = {}
        for module, path in found.items():
            if own := self._own(vars(module), list(vars(module)), _package(module)):
                # A getter of one name would return no tuple.
                names = tuple(own) if len(own) > 1 else (*own, *own)
                alike.setdefault(names, []).append((path, vars(module)))
        self._getters = [itemgetter(*names) for names in alike]
        self._places = [[attributes for _, attributes in each] for each in alike.values()]
        self._names = [
            (path, attributes, name) for names, each in alike.items() for path, attributes in each for name in names
        ]
        super().__init__(name, None)

    def _own(self, attributes: dict[str, Any], names: list[str], library: str = "") -> list[str]:
        return [
            name
            for name in names
            if name not in self._standard
            and not name.startswith(_OF_A_PLAN)
            and not isinstance(attributes[name], FunctionType | MethodType | partial)
            and (library != "peft" or name not in CONSTANT_IN_RUN)
        ]

    def has_same_names(self) -> bool:
        """Whether no module has got or lost an attribute, but for those of which there are many."""
        return not self._is_stale and list(map(len, self._watched)) == self._sizes

    def lost_names(self) -> list[str]:
        """Name the attributes of which nobody knows whether they came in the step or before it."""
        watched = set(map(id, self._watched))
        return [
            f"{path}.{name}"
            for path, attributes, size, known in self._all
            if len(attributes) != size and id(attributes) not in watched
            for name in self._own(attributes, list(attributes.keys() - known))
        ]

    def read(self) -> list[Any]:
        try:
            return list(chain.from_iterable(chain.from_iterable(map(map, self._getters, self._places))))
        except KeyError:
            # One is gone, and another one may have come.
            self._is_stale = True
            return []

    def changeable(self, note: list[Any]) -> Iterable[Any]:
        return [each for each in note if type(each) not in _IS_ATOM]

    def looks_other(self) -> bool:
        before, self.note = self.note, self.read()
        if self._is_stale or not self.has_same_names():
            return True
        # Far from all of them are looked at one by one.
        if all(map(is_, self.note, before)):
            return False
        then, self._changeable = self._changeable, list(self.changeable(self.note))
        return len(then) != len(self._changeable) or not all(map(is_, then, self._changeable))

    def inside(self, note: list[Any]) -> Sequence[tuple[str, Any]]:
        found = [(*place, value) for place, value in zip(self._names, note, strict=True) if type(value) not in _IS_ATOM]
        return [(f"{path}.{name}".strip("."), value) for path, _, name, value in found]

    def without_large_tensors(self, note: list[Any]) -> list[Any]:
        if not any(map(_is_large, self._changeable)):
            return note
        return [_LEFT if _is_large(value) else value for value in note]

    def write(self, note: list[Any]) -> None:
        for _, attributes, _, known in self._all:
            for name in self._own(attributes, list(attributes.keys() - known)):
                del attributes[name]
        for (_, attributes, name), value in zip(self._names, note, strict=True):
            if value is not _LEFT:
                attributes[name] = value


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.nbytes > _SMALL_BYTES


class _SmallContainers(_Holder):
    """Dictionaries, lists and sets of numbers and the like that modules have: there may be thousands in a model."""

    def __init__(self, name: str, value: Sequence[tuple[str, Any]]) -> None:
        self._dicts = [each for _, each in value if type(each) is dict]
        self._lists = [each for _, each in value if type(each) is list]
        self._sets = [each for _, each in value if type(each) is set]
        super().__init__(name, value)

    @staticmethod
    def takes(value: Any) -> bool:
        """Whether a value is one of them."""
        if type(value) is dict:
            value = value.values()
        elif type(value) not in (list, set):
            return False
        return len(value) < _LONG and _IS_ATOM.issuperset(map(type, value))

    def read(self) -> tuple[list[dict[Any, Any]], list[list[Any]], list[set[Any]]]:
        return list(map(dict.copy, self._dicts)), list(map(list.copy, self._lists)), list(map(set.copy, self._sets))

    def looks_other(self) -> bool:
        # Numbers are rarely others than before, and to compare costs less than to copy.
        if (self._dicts, self._lists, self._sets) == self.note:
            return False
        self.note = self.read()
        dicts, lists, sets = self.note
        values = chain.from_iterable(chain(map(dict.values, dicts), lists, sets))
        return not _IS_ATOM.issuperset(map(type, values))

    def write(self, note: tuple[list[dict[Any, Any]], list[list[Any]], list[set[Any]]]) -> None:
        held: Iterable[Any] = chain(self._dicts, self._sets)
        for entries, noted in zip(held, chain(note[0], note[2]), strict=True):
            entries.clear()
            entries.update(noted)
        for items, items_noted in zip(self._lists, note[1], strict=True):
            items[:] = items_noted
