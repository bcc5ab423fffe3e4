"""Which layers of a model are alike: the same modules, flags and type, whatever their width.

Knows no plan and no config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from hf_ckpt.structure.layers import Layer

_NUMBER = re.compile(r"\d+")

Kind = tuple[object, ...]


def kind_of(layer: Layer) -> Kind:
    """Return what a layer is built of, as a value that is equal for layers that are alike.

    Adapters are modules too, so that a layer with adapters differs from one without. Experts of a list count as one.
    """
    modules = {(_NUMBER.sub("#", name), type(module).__name__) for name, module in layer.module.named_modules()}
    return layer.layer_type, layer.parts, frozenset(modules)


def flags_of(layer: Layer) -> Kind:
    """Return the settings by which layers of one kind may still differ: what is on, off, named or missing.

    Such as the layers that take keys and values from an earlier one. Weights, sizes and indices are left out.
    """
    return tuple(sorted(set(_flags(layer.module))))


def _flags(layer: nn.Module) -> Iterator[tuple[str, str, str]]:
    for name, module in layer.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or attribute == "training":
                continue
            where = _NUMBER.sub("#", name)
            if value is None or isinstance(value, bool):
                yield where, attribute, str(value)
            elif isinstance(value, str):
                yield where, attribute, _NUMBER.sub("#", value)
            elif isinstance(value, int | float):
                # Only whether there is a value: `sliding_window: None` beside `sliding_window: 4096`.
                yield where, attribute, "a number"
