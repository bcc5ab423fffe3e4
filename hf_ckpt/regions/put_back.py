"""What a further run of a module changes is put back when it ends: containers, arguments."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from operator import is_
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

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
        return put_back(container, found)
    if len(container) == len(found) and all(map(is_, container, found)):
        return False
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(found)
    return True


def put_back(now: dict[Any, Any], found: dict[Any, Any]) -> bool:
    """See `put_container_back`."""
    if list(now) == list(found) and all(map(is_, now.values(), found.values())):
        return False
    now.clear()
    now.update(found)
    return True
