"""What attributes of objects hold, noted and brought back: counters and records that a repeated step would add to."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_LONG = 10_000
"""Entries from which on a container is data rather than a record of a run: of a list only its length is noted."""
_SMALL_BYTES = 4096
"""Of a tensor that may count or record, and is copied."""


class Attributes:
    """The attributes of some objects, or the entries of containers, as they are now.

    Other objects in them are noted by reference. So are large tensors; `lost` names those written to since.
    """

    def __init__(self, *owners: object) -> None:
        contents = [owner if isinstance(owner, _CONTAINERS) else vars(owner) for owner in owners]
        self._noted = [_noted(content, math.inf) for content in contents]

    def restore(self) -> None:
        """Bring them back, containers with their own identity: others may hold them too."""
        for noted in self._noted:
            noted.restore()

    def lost(self) -> list[str]:
        """Return the names of large tensors that have been written to, of which there is no copy."""
        return [name for noted in self._noted for name in _lost(noted)]


_CONTAINERS = (dict, list, deque, set)
_CHANGEABLE = (*_CONTAINERS, Tensor)


class _Dict:
    def __init__(self, value: dict[Any, Any]) -> None:
        self._value = value
        self.entries = {key: _noted(each) for key, each in value.items()}

    def restore(self) -> Any:
        entries = {key: each.restore() if isinstance(each, _NOTED) else each for key, each in self.entries.items()}
        self._value.clear()
        self._value.update(entries)
        return self._value


class _Items:
    """Of a list, a deque or a set: `add` is its own method."""

    def __init__(self, value: Any, entries: Iterable[Any], add: Callable[[Iterable[Any]], None]) -> None:
        self._value = value
        self._entries = entries
        self._add = add

    def restore(self) -> Any:
        self._value.clear()
        self._add(self._entries)
        return self._value


class _LongList:
    def __init__(self, value: list[Any]) -> None:
        self._value = value
        self._length = len(value)

    def restore(self) -> Any:
        del self._value[self._length :]
        return self._value


class _Tensor:
    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._version = value._version
        self._copy = value.detach().clone() if value.nbytes <= _SMALL_BYTES else None

    @property
    def is_lost(self) -> bool:
        return self._copy is None and self._value._version != self._version

    def restore(self) -> Any:
        # A write would be seen as one by those who look at versions.
        if self._copy is not None and self._value._version != self._version:
            with torch.no_grad():
                self._value.copy_(self._copy)
        return self._value


_NOTED = (_Dict, _Items, _LongList, _Tensor)


def _noted(value: Any, long: float = _LONG) -> Any:
    """Return a value, or a note of what a container or a tensor holds."""
    # Most values are none of them, and each of the cases costs time in each micro-batch.
    if not isinstance(value, _CHANGEABLE):
        return value
    match value:
        case dict() if len(value) < long:
            return _Dict(value)
        case list() if len(value) >= long:
            return _LongList(value)
        case list() | deque():
            return _Items(value, list(value), value.extend)
        case set() if len(value) < long:
            return _Items(value, set(value), value.update)
        # Those of inference mode have no versions.
        case Tensor() if not value.is_inference():
            return _Tensor(value)
        case _:
            return value


def _lost(noted: Any) -> list[str]:
    if not isinstance(noted, _Dict):
        return []
    own = [str(name) for name, each in noted.entries.items() if isinstance(each, _Tensor) and each.is_lost]
    return [*own, *(name for each in noted.entries.values() for name in _lost(each))]
