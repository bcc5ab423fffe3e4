"""How each kind of value is copied, and how what holds it is brought back: containers, attributes, tensors, generators.

What a container or an object holds is copied one level deep; what is in there is a value of its own.
"""

from __future__ import annotations

import io
import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hf_ckpt.regions.fingerprints import bytes_of, is_plain
from hf_ckpt.regions.put_back import Slots, slot_names

# A tensor or an array of up to so many bytes may count or record, and is copied.
SMALL_BYTES = 4096
# A buffer of more bytes, such as packed weights, is not copied to find out whether forwards change it.
_LARGE_BYTES = 2**26
_ATOMS = (int, float, complex, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size, np.generic)
IS_ATOM = frozenset((*_ATOMS, *np.sctypeDict.values()))
# Packages into whose objects nobody looks, nor into those of classes derived from theirs: what a step changes of the
# engine's is undone elsewhere, and what a thread works on cannot be.
_OPAQUE = frozenset(
    "torch transformers accelerate peft datasets tokenizers hf_ckpt logging threading concurrent multiprocessing "
    "wandb mlflow comet_ml tensorboardX neptune clearml aim swanlab trackio tqdm ray".split()
)
# Of these numbers and words are noted all the same: a loss may anneal one in a config or in the arguments.
_WITH_SETTINGS = frozenset({"torch", "transformers", "accelerate", "peft"})


class Kind(NamedTuple):
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
            return bytes_of(self.tensor, SMALL_BYTES) != self.copy
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


class SavedBuffers:
    """The buffers of a module at one moment, and whether forwards change them; None before one is through."""

    def __init__(self, module: nn.Module, last: SavedBuffers | None = None) -> None:
        self._module = module
        self._are_changed: bool | None = None if last is None else last._are_changed
        if last is not None and last._are_changed is None:
            # Kernels of normalization write running statistics past the versions of tensors.
            self._are_changed = bool(last.changed(or_written=True))
        self._saved = {name: each if each is None else self._save(each) for name, each in module._buffers.items()}

    def _save(self, buffer: Tensor) -> SavedTensor:
        copied: Tensor | None = None
        if self._are_changed:
            copied = buffer.detach().clone()
        elif self._are_changed is None and buffer.nbytes <= _LARGE_BYTES:
            # Before the first micro-batch all but very large ones, such as packed weights, are copied to the host.
            copied = buffer.detach().to("cpu", copy=True)
        return SavedTensor(buffer, buffer._version, copied)

    def changed(self, *, or_written: bool = False) -> list[str]:
        """Name those that are others, have other values, or of which there is no copy to tell."""
        now = self._module._buffers
        return [
            name
            for name, each in self._saved.items()
            if each is not None
            and (now.get(name) is not each.tensor or (or_written and each.is_written) or each.has_other_values)
        ]

    def are_lost(self) -> bool:
        return any(each is not None and each.is_lost for each in self._saved.values())

    def restore(self) -> None:
        """Bring them back, and take those away that were not there."""
        for name in [name for name in self._module._buffers if name not in self._saved]:
            # Not from the dictionary alone: the module also lists those that are not to be saved.
            delattr(self._module, name)
        for name, each in self._saved.items():
            self._module._buffers[name] = None if each is None else each.tensor
            if each is not None:
                each.restore()


def _read_tensor(tensor: Tensor, last: SavedTensor | None = None) -> SavedTensor | None:
    # Those of inference mode have no versions.
    if tensor.is_inference() or not is_plain(tensor):
        return None
    copy: Tensor | bytes | None = None
    if tensor.nbytes <= SMALL_BYTES:
        # Bytes show a write past the versions too.
        copy = bytes_of(tensor, SMALL_BYTES)
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
    for name in [name for name, value in attributes.items() if name not in found and type(value) in IS_ATOM]:
        del attributes[name]
    attributes.update((name, value) for name, value in found.items() if type(value) in IS_ATOM)


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


DICT = Kind(dict, _put_entries_back, inside=dict.values)
ATTRIBUTES = DICT._replace(of=vars)
# Numbers and words that are attributes of an object of a library.
_SETTINGS = Kind(dict, _put_settings_back, of=vars)
_SLOTS = Kind(Slots.read, Slots.write, inside=dict.values, of=Slots)
ITEMS = Kind(list, _put_items_back, inside=iter)
# A list whose entries stay as they are.
ROW = ITEMS._replace(inside=None)
NUMBERS = Kind(itemgetter(slice(None)), lambda value, note: value.__setitem__(slice(None), note))
LENGTH = Kind(
    len,
    # A list that has grown is cut.
    lambda value, note: value.__delitem__(slice(note, None)) if isinstance(value, list) else None,
    is_lost=lambda value, note: len(value) < note if isinstance(value, list) else len(value) != note,
)
# It cannot change itself, but hold what can.
FIXED = Kind(_parts_of, lambda value, note: None, inside=dict.values)
_TENSOR = Kind(
    _read_tensor,
    lambda value, note: note and note.restore(),
    read_again=_read_tensor,
    is_lost=lambda value, note: note is not None and note.is_lost,
)
BUFFERS = Kind(
    SavedBuffers,
    lambda module, saved: saved.restore(),
    read_again=SavedBuffers,
    is_lost=lambda module, saved: saved.are_lost(),
)
# DistributedDataParallel writes to them, with the values that they have: only the first values tell.
SENT_BUFFERS = BUFFERS._replace(read_again=lambda module, first: first)
_ARRAY = Kind(
    # The values of a large one are hashed once. Whether it has changed since is asked where memory has run out.
    lambda value: value.copy() if value.nbytes <= SMALL_BYTES else _hash_of(value),
    lambda value, note: value.__setitem__(..., note) if isinstance(note, np.ndarray) else None,
    read_again=lambda value, last: value.copy() if value.nbytes <= SMALL_BYTES else last,
    is_lost=lambda value, note: not isinstance(note, np.ndarray) and _hash_of(value) != note,
)
_TORCH_GENERATOR = Kind(lambda value: value.get_state(), lambda value, note: value.set_state(note))
_PYTHON_RANDOM = Kind(lambda value: value.getstate(), lambda value, note: value.setstate(note))
_OLD_NUMPY_RANDOM = Kind(lambda value: value.get_state(legacy=False), lambda value, note: value.set_state(note))
_NUMPY_RANDOM = Kind(
    lambda bits: bits.state,
    lambda bits, note: setattr(bits, "state", note),
    of=lambda value: getattr(value, "bit_generator", value),
)
_KINDS: tuple[tuple[Any, Kind | None], ...] = (
    (Tensor, _TENSOR),
    (dict, DICT),
    ((list, deque, set, bytearray), ITEMS),
    ((tuple, frozenset, partial, MethodType), FIXED),
    (torch.Generator, _TORCH_GENERATOR),
    # It has no state.
    (random.SystemRandom, None),
    (random.Random, _PYTHON_RANDOM),
    (np.random.RandomState, _OLD_NUMPY_RANDOM),
    ((np.random.Generator, np.random.BitGenerator), _NUMPY_RANDOM),
    (np.ndarray, _ARRAY),
    (array, NUMBERS),
)


def kinds_of(value: object) -> tuple[Kind, ...] | None:
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
    if packages & _OPAQUE or kind is FIXED:
        # A mode or a hook that is derived from torch's watches the step from outside.
        own = packages - {"torch"} | {cls.__module__.partition(".")[0]}
        return (_SETTINGS,) if not found and own & _WITH_SETTINGS and hasattr(value, "__dict__") else found
    slots = (_SLOTS,) if slot_names(cls) else ()
    return (*found, *slots, ATTRIBUTES) if hasattr(value, "__dict__") else (*found, *slots)
