"""What attributes of objects hold, noted and brought back: counters and records that a repeated step would add to."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

_LONG = 10_000
"""Entries from which on a container is data rather than a record of a run: of a list only its length is noted."""


class Attributes:
    """The attributes of some objects, or the entries of containers, as they are now.

    Tensors and other objects are noted by reference; with `copies_tensors` the values of an owner's own small tensors
    are too, such as those of counters.
    """

    def __init__(self, *owners: object, copies_tensors: bool = False) -> None:
        contents = [owner if isinstance(owner, _CONTAINERS) else vars(owner) for owner in owners]
        self._noted = [_noted(content, math.inf) for content in contents]
        copied = [each for content in contents if copies_tensors for each in _tensors(content)]
        self._copies = [(tensor, tensor.detach().clone()) for tensor in copied]

    def restore(self) -> None:
        """Bring them back, containers with their own identity: others may hold them too."""
        for noted in self._noted:
            noted.restore()
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)


_SMALL_BYTES = 4096
_CONTAINERS = (dict, list, deque, set)


def _tensors(content: Any) -> list[Tensor]:
    values = content.values() if isinstance(content, dict) else content
    return [each for each in values if isinstance(each, Tensor) and each.nbytes <= _SMALL_BYTES]


class _Dict:
    def __init__(self, value: dict[Any, Any]) -> None:
        self._value = value
        self._entries = {key: _noted(each) for key, each in value.items()}

    def restore(self) -> Any:
        entries = {key: each.restore() if isinstance(each, _NOTED) else each for key, each in self._entries.items()}
        self._value.clear()
        self._value.update(entries)
        return self._value


class _Sequence:
    def __init__(self, value: list[Any] | deque[Any]) -> None:
        self._value = value
        self._entries = list(value)

    def restore(self) -> Any:
        self._value.clear()
        self._value.extend(self._entries)
        return self._value


class _LongList:
    def __init__(self, value: list[Any]) -> None:
        self._value = value
        self._length = len(value)

    def restore(self) -> Any:
        del self._value[self._length :]
        return self._value


class _Set:
    def __init__(self, value: set[Any]) -> None:
        self._value = value
        self._entries = set(value)

    def restore(self) -> Any:
        self._value.clear()
        self._value.update(self._entries)
        return self._value


_NOTED = (_Dict, _Sequence, _LongList, _Set)


def _noted(value: Any, long: float = _LONG) -> Any:
    """Return a value, or a note of what a container holds."""
    match value:
        case dict() if len(value) < long:
            return _Dict(value)
        case list() if len(value) >= long:
            return _LongList(value)
        case list() | deque():
            return _Sequence(value)
        case set() if len(value) < long:
            return _Set(value)
        case _:
            return value
