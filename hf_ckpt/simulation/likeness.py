"""Which layers of a stack do the same thing in a step: equal modules, sizes, settings, neighbours and plan.

A unit is a layer by itself, or the layers of a segment.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from hf_ckpt.policy.plan import LayerPlan, StackPlan
from hf_ckpt.structure.layers import Layer, Stack

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that run, and run again, together.

    Args:
        layers: their `layer_idx`, in order.
        likeness: equal for units that do the same thing, their neighbours left out.
    """

    layers: tuple[int, ...]
    likeness: Hashable

    @property
    def first(self) -> int:
        """The first layer."""
        return self.layers[0]


def units_of(stack: Stack, plan: StackPlan | None) -> tuple[Unit, ...]:
    """Return the units of a stack, in order.

    Args:
        stack: its layers.
        plan: what they do; None where nothing is checkpointed.
    """
    entries = plan.layers if plan is not None else (LayerPlan(),) * len(stack.layers)
    units = []
    for indices in _grouped(entries):
        segment = entries[indices[0]].segment
        # What the embeddings return may stay where it is: the first layer is unlike the others to the one behind it.
        is_first_to_send = indices[0] == 0 and entries[0].offload is not None
        likeness = tuple(
            (
                *(_layer_likeness(stack.layers[idx]), entries[idx].alone, segment is None, entries[idx].nested),
                is_first_to_send,
            )
            for idx in indices
        )
        units.append(Unit(tuple(indices), likeness))
    return tuple(units)


def traced_units(units: Sequence[Unit]) -> tuple[dict[int, int], set[int]]:
    """Choose which units are traced, and which stands for each of the others.

    A unit stands for another where both, and the neighbours of both, are alike; its neighbours are traced too.

    Args:
        units: of one stack.

    Returns:
        For each unit that is not traced, the one that stands for it; and those that are traced. All are numbers.
    """
    first: dict[Hashable, int] = {}
    triples = list(_triples(units))
    for number, triple in enumerate(triples):
        first.setdefault(triple, number)
    traced = {near for number in first.values() for near in (number - 1, number, number + 1) if 0 <= near < len(units)}
    while (gap := _uneven_gap(units, traced)) is not None:
        traced.add(gap)
    return {n: first[triples[n]] for n in range(len(units)) if n not in traced}, traced


def _grouped(entries: Sequence[LayerPlan]) -> Iterator[list[int]]:
    group: list[int] = []
    for idx, entry in enumerate(entries):
        if group and (entry.segment is None or entry.segment != entries[group[0]].segment):
            yield group
            group = []
        group.append(idx)
    if group:
        yield group


def _triples(units: Sequence[Unit]) -> Iterator[tuple[Hashable, Hashable, Hashable]]:
    likenesses: list[Hashable] = [None, *(unit.likeness for unit in units), None]
    yield from zip(likenesses, likenesses[1:], likenesses[2:], strict=False)


def _uneven_gap(units: Sequence[Unit], traced: set[int]) -> int | None:
    """Return a unit to trace as well, where what meets over a gap differs from what met before it was made."""
    ordered = sorted(traced)
    for before, after in itertools.pairwise(ordered):
        if after - before == 1:
            continue
        is_even = (
            units[before].likeness == units[after - 1].likeness and units[after].likeness == units[before + 1].likeness
        )
        if not is_even:
            return before + 1
    return None


def _layer_likeness(layer: Layer) -> Hashable:
    """Return what a layer is built of and set to, as a value that is equal for layers that do the same."""
    modules = [
        (_NUMBER.sub("#", name), type(module).__name__, tuple(_settings(module)), tuple(_tensors(module)))
        for name, module in layer.module.named_modules()
    ]
    return layer.layer_type, layer.needs_gradient, layer.outer.training, tuple(modules)


def _settings(module: nn.Module) -> Iterator[Hashable]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name == "layer_idx":
            continue
        if value is None or isinstance(value, bool | int | float | str):
            yield name, _NUMBER.sub("#", value) if isinstance(value, str) else value


def _tensors(module: nn.Module) -> Iterator[Hashable]:
    for kind in (module._parameters, module._buffers):
        for name, tensor in kind.items():
            if tensor is not None:
                yield name, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
