"""What a further run of a module changes is put back when it ends: attributes, tensors, arguments."""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map_only

from hf_ckpt.regions.module_state import is_managed

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


def held_tensors(module: nn.Module) -> list[Tensor]:
    """Return the buffers below a module, and tensors that are plain attributes there."""
    held = (value for inner in module.modules() for each in (vars(inner), inner._buffers) for value in each.values())
    return [value for value in held if isinstance(value, Tensor) and not value.is_inference()]


@contextmanager
def state_put_back(module: nn.Module, written: Sequence[Tensor]) -> Iterator[None]:
    """Put attributes of the modules below one back when the block ends, and the values of tensors that it writes to."""
    copies = [tensor.detach().clone() for tensor in written]
    attributes = [(inner, dict(vars(inner))) for inner in module.modules()]
    containers: list[tuple[Any, Any]] = [
        (value, copy.copy(value))
        for inner, found in attributes
        for name, value in found.items()
        if isinstance(value, CONTAINERS) and not (is_managed(inner) and _is_weight(name, value))
    ]
    with _unsafe_preserve_version_counter(tuple(written)):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, values in zip(written, copies, strict=True):
                    tensor.copy_(values)
            for inner, before in attributes:
                now = vars(inner)
                if is_managed(inner):
                    # The engine exchanges the weights, some for attributes.
                    kept = {name: value for name, value in before.items() if not _is_weight(name, value)}
                    before = kept | {name: value for name, value in now.items() if _is_weight(name, value)}
                put_back(now, before)
            for container, found in containers:
                put_container_back(container, found)


def _is_weight(name: str, value: object) -> bool:
    return name == "_parameters" or isinstance(value, Tensor)


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
