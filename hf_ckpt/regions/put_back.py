"""What a further run of a module changes is put back when it ends: containers, slots of objects, arguments."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor

from hf_ckpt.upstream.torch import tree_map_only

CONTAINERS = (dict, list, set, deque)


def copied(value: Any) -> Any:
    """Return containers as copies, so that what the original puts into them stays there."""
    return copy.copy(value) if isinstance(value, (*CONTAINERS, UserDict)) else value


def cut_off(value: Any) -> Any:
    """Return what a tuple, a list or a dictionary holds without its graph, through which no backward is to go twice."""
    if isinstance(value, UserDict):
        value.data = cut_off(value.data)
        return value
    return tree_map_only(Tensor, _cut, value) if isinstance(value, tuple | list | dict) else value


def _cut(tensor: Tensor) -> Tensor:
    # No leaf: see `_run_forward`.
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_().view_as(tensor)


def put_container_back(container: Any, found: Any) -> bool:
    """Let one of `CONTAINERS` hold again what it held, and return whether it held something else; `found` is a copy."""
    if isinstance(container, dict):
        if list(container) == list(found) and all(map(is_, container.values(), found.values())):
            return False
        container.clear()
        container.update(found)
        return True
    if len(container) == len(found) and all(map(is_, container, found)):
        return False
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(found)
    return True


class Slots:
    """The slots of an object."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._names = slot_names(type(owner))

    def read(self) -> dict[str, Any]:
        """Return what is in them, by name; empty ones are left out."""
        return {name: getattr(self._owner, name) for name in self._names if hasattr(self._owner, name)}

    def write(self, found: dict[str, Any]) -> None:
        """Let them hold what `read` returned."""
        # Past `__setattr__`, which a frozen class refuses.
        for name in self._names:
            if name in found:
                object.__setattr__(self._owner, name, found[name])
            elif hasattr(self._owner, name):
                object.__delattr__(self._owner, name)


def slot_names(kind: type) -> list[str]:
    """Return the names of the slots of a class and its bases; of what is written in C nobody can list them."""
    return list(dict.fromkeys(chain.from_iterable(map(_slots, kind.__mro__))))


def _slots(kind: type) -> list[str]:
    slots: Any = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    own = f"_{kind.__name__.lstrip('_')}"
    hidden = (own + name if name.startswith("__") and not name.endswith("__") else name for name in names)
    return [name for name in hidden if name not in ("__dict__", "__weakref__")]
