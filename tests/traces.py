"""What the modules of a model hold, before and after, to be compared attribute by attribute."""

from __future__ import annotations

import copy

from torch import Tensor, nn
from transformers import PretrainedConfig


def snapshot(model: nn.Module) -> dict[str, dict[str, object]]:
    """Return what the instances of all modules hold: containers copied, tensors and functions as they are."""
    return {name: _copied(module.__dict__) for name, module in model.named_modules()}


def _copied(value: object) -> object:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, PretrainedConfig):
        return _copied(vars(value))
    return copy.copy(value) if isinstance(value, list | set) else value


def differences(before: dict[str, dict[str, object]], after: dict[str, dict[str, object]]) -> list[str]:
    """Name what differs between two results of `snapshot`, as `module: attribute`."""
    left = [f"{name}: module" for name in before.keys() ^ after.keys()]
    for name, attributes in before.items():
        now = after.get(name, {})
        left += [f"{name}: {key}" for key in attributes.keys() ^ now.keys()]
        left += [f"{name}: {key}" for key in attributes.keys() & now.keys() if not _is_same(attributes[key], now[key])]
    return sorted(left)


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(item, other[key]) for key, item in one.items())
    if isinstance(one, list | set):
        return one == other
    return one is other or (not isinstance(one, Tensor) and one == other)
