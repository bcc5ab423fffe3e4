"""Fewer layers, and the plan carried over to them.

Each kept layer stands for layers of the full-size model that are like it and that the plan treats alike. Configs say
what their layers are in many ways, so that a config with fewer layers is a proposal: whoever takes it builds it and
asks `represents` whether everything is still there.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_ckpt.policy.modifiers import TO_DISK, Offload, Tiles
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.structure.layers import Layer, Stack
from hf_ckpt.verify.kinds import flags_of, kind_of

_PER_KIND = 2
_FEW_TILES = 3

_COUNT = re.compile(r"num_(hidden_)?layers|n_layers?|depth|num_blocks|(encoder|decoder)_layers|num_(en|de)coder_layers")
_LISTED_INDICES = re.compile(r".*(_indices|_indexes|_idxs?|_ids|_layers)")
_COUNT_FROM_START = re.compile(
    r"first_k_dense_replace|num_dense_layers|n_dense_layers|max_window_layers|moe_layer_start_index"
)
_COUNT_FROM_END = re.compile(r"num_kv_shared_layers")
_PATTERN_TEXT = re.compile(r".*pattern")


@dataclass(frozen=True)
class KeptStack:
    """What is left of one stack.

    Args:
        path: dotted path of the stack, as in the plan.
        num_layers: layers at full size.
        config_layers: which layers the config keeps.
        indices: for each kept layer, the full-size layer whose plan it carries out.
        entries: the plan of each kept layer.
        groups: for each kept layer, all layers of the full-size model that it stands for.
        types: the type of each kept layer in the model's own word, if it has one.
    """

    path: str
    num_layers: int
    config_layers: tuple[int, ...]
    indices: tuple[int, ...]
    entries: tuple[LayerPlan, ...]
    groups: tuple[tuple[int, ...], ...]
    types: tuple[str | None, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every layer is kept."""
        return self.indices == tuple(range(self.num_layers))


def whole(stack: Stack, plan: StackPlan | None) -> KeptStack:
    """Keep every layer of a stack."""
    return _kept(stack, plan, list(range(len(stack.layers))))


def two_of_each(stack: Stack, plan: StackPlan | None) -> KeptStack:
    """Keep two layers of each kind and entry of the plan, and two layers of two segments of each kind."""
    entries = _entries(stack, plan)
    single = [group for group in _like_layers(stack, entries) if entries[group[0]].segment is None]
    chosen = {idx for group in single for idx in group[:_PER_KIND]}
    return _kept(stack, plan, sorted(chosen | set(_of_segments(stack, entries))))


def beginning(stack: Stack, plan: StackPlan | None) -> KeptStack:
    """Keep the first layers of a stack, as many as it takes to have two for each kind and entry of the plan.

    For models whose config gives the kinds of layers as a period. The entries go to the layers of their kind, wherever
    in the plan they stand. Segments need their own layers: then every layer is kept.
    """
    entries = _entries(stack, plan)
    if any(entry.segment is not None for entry in entries):
        return whole(stack, plan)
    kinds = [(kind_of(layer), flags_of(layer)) for layer in stack.layers]
    wanted: dict[Hashable, list[int]] = {}
    for group in _like_layers(stack, entries):
        wanted.setdefault(kinds[group[0]], []).extend(group[:_PER_KIND])
    length = _shortest(kinds, {kind: len(indices) for kind, indices in wanted.items()})
    left = {kind: sorted(indices) for kind, indices in wanted.items()}
    stands: list[int] = []
    for idx, kind in enumerate(kinds[:length]):
        # More layers of a kind than entries: the rest keep what the plan gives them.
        stands.append(left[kind].pop(0) if left[kind] else idx)
    return _kept(stack, plan, stands, range(length))


def represents(kept: Sequence[KeptStack], full: Sequence[Stack], built: Sequence[Stack]) -> bool:
    """Tell whether the layers of a built model are those that they stand for."""
    if [stack.path for stack in kept] != [stack.path for stack in built]:
        return False
    for ours, theirs, small in zip(kept, full, built, strict=True):
        if [kind_of(theirs.layers[idx]) for idx in ours.indices] != [kind_of(layer) for layer in small.layers]:
            return False
    return True


def carries(kept: Sequence[KeptStack], plan: Plan) -> bool:
    """Tell whether a plan does with each kept layer what the plan of the full-size model does.

    Reasons are left out: a layer that is left alone because it has no such part is left alone by name. So is where a
    layer offloads to; the last one never does.
    """
    ours = [_without_reasons(stack.entries) for stack in kept]
    return ours == [_without_reasons(stack.layers) for stack in plan.stacks]


def offloads(kept: Sequence[KeptStack]) -> bool:
    """Tell whether the plan of the kept layers moves anything off the device."""
    return any(entry.offload is not None for stack in kept for entry in stack.entries)


def with_layers(fields: Mapping[str, Any], kept: KeptStack) -> dict[str, Any]:
    """Return the fields of one config with the layers of one stack left out.

    Args:
        fields: of the config that the stack is built from, as JSON types.
        kept: which layers are left.
    """
    return {name: _shortened(name, value, kept) for name, value in fields.items()}


def rules(kept: Sequence[KeptStack], disk: Path) -> list[dict[str, Any]]:
    """Return the plan of the kept layers as the rules of a policy.

    Args:
        kept: the layers.
        disk: where layers offload to that do so to a disk. However small, everything is offloaded: the tensors of a
            reduced model are under any size that pays.
    """
    found = [rule for stack in kept for rule in _rules_of(stack, len(kept) > 1, disk)]
    return found or [{"mode": Mode.NONE.value}]


def describe(stack: KeptStack) -> str:
    """Return on one line which layers of the full-size model the kept layers stand for."""
    if stack.is_whole:
        return f"all {stack.num_layers} layers"
    shares: dict[tuple[int, ...], list[int]] = {}
    for position, group in enumerate(stack.groups):
        shares.setdefault(group, []).append(position)
    parts = [
        f"{', '.join(str(stack.indices[at]) for at in kept)} for {_like(stack, kept[0])}" for kept in shares.values()
    ]
    return f"{len(stack.indices)} of {stack.num_layers} layers: {'; '.join(parts)}"


# --- Choosing. ---


def _entries(stack: Stack, plan: StackPlan | None) -> tuple[LayerPlan, ...]:
    return tuple(LayerPlan() for _ in stack.layers) if plan is None else plan.layers


def _key(layer: Layer, entry: LayerPlan) -> Hashable:
    return kind_of(layer), flags_of(layer), replace(entry, segment=None), entry.segment is not None


def _like_layers(stack: Stack, entries: Sequence[LayerPlan]) -> list[list[int]]:
    """Return the layers in groups that are alike and that the plan treats alike."""
    groups: dict[Hashable, list[int]] = {}
    for layer, entry in zip(stack.layers, entries, strict=True):
        groups.setdefault(_key(layer, entry), []).append(layer.layer_idx)
    return list(groups.values())


def _of_segments(stack: Stack, entries: Sequence[LayerPlan]) -> Iterator[int]:
    """Yield two layers at least of two segments of each make: the same kinds of layers, nested or not, long or not."""
    segments: dict[int, list[int]] = {}
    for idx, entry in enumerate(entries):
        if entry.segment is not None:
            segments.setdefault(entry.segment, []).append(idx)
    makes: dict[Hashable, int] = {}
    for members in segments.values():
        firsts = {_key(stack.layers[idx], entries[idx]): idx for idx in reversed(members)}
        make = frozenset(firsts), len(members) > 1
        makes[make] = makes.get(make, 0) + 1
        if makes[make] <= _PER_KIND:
            yield from firsts.values()
            yield from members[:_PER_KIND]


def _shortest(kinds: Sequence[Hashable], needed: Mapping[Hashable, int]) -> int:
    """Return how many first layers hold as many of each kind as are needed."""
    counts: dict[Hashable, int] = dict.fromkeys(needed, 0)
    for length, kind in enumerate(kinds, start=1):
        counts[kind] += 1
        if all(counts[kind] >= number for kind, number in needed.items()):
            return length
    return len(kinds)


def _kept(
    stack: Stack, plan: StackPlan | None, indices: Sequence[int], config_layers: Sequence[int] | None = None
) -> KeptStack:
    entries = _entries(stack, plan)
    group_of = {idx: tuple(group) for group in _like_layers(stack, entries) for idx in group}
    starts: dict[int, int] = {}
    for position, idx in enumerate(indices):
        if (segment := entries[idx].segment) is not None:
            starts.setdefault(segment, position)
    return KeptStack(
        path=stack.path,
        num_layers=len(stack.layers),
        config_layers=tuple(indices if config_layers is None else config_layers),
        indices=tuple(indices),
        entries=tuple(_renumbered(entries[idx], starts) for idx in indices),
        groups=tuple(group_of[idx] for idx in indices),
        types=tuple(stack.layers[idx].layer_type for idx in indices),
    )


def _renumbered(entry: LayerPlan, starts: Mapping[int, int]) -> LayerPlan:
    return replace(entry, segment=None if entry.segment is None else starts[entry.segment])


def _without_reasons(entries: Sequence[LayerPlan]) -> list[tuple[LayerPlan, bool]]:
    last = len(entries) - 1
    return [
        (replace(entry, why="", offload=None, tiles=_some(entry.tiles)), entry.offload is not None and idx < last)
        for idx, entry in enumerate(entries)
    ]


# --- Fields of a config. ---


def _shortened(name: str, value: Any, kept: KeptStack) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _count(name, value, kept)
    if isinstance(value, str):
        is_pattern = _PATTERN_TEXT.fullmatch(name) and len(value) == kept.num_layers
        return "".join(value[idx] for idx in kept.config_layers) if is_pattern else value
    if (
        "layer" in name
        and isinstance(value, Mapping)
        and value
        and all(re.fullmatch(r"\d+", str(key)) for key in value)
    ):
        by_layer = {int(key): item for key, item in value.items()}
        return {str(at): by_layer[idx] for at, idx in enumerate(kept.config_layers) if idx in by_layer}
    if not isinstance(value, list | tuple) or not value:
        return value
    if len(value) == kept.num_layers and kept.num_layers > 1:
        return [value[idx] for idx in kept.config_layers]
    if _LISTED_INDICES.fullmatch(name) and all(type(item) is int and 0 <= item < kept.num_layers for item in value):
        return [position for position, idx in enumerate(kept.config_layers) if idx in value]
    return value


def _count(name: str, value: int, kept: KeptStack) -> int:
    if _COUNT.fullmatch(name) and value == kept.num_layers:
        return len(kept.config_layers)
    if _COUNT_FROM_START.fullmatch(name):
        return sum(idx < value for idx in kept.config_layers)
    if _COUNT_FROM_END.fullmatch(name):
        return sum(idx >= kept.num_layers - value for idx in kept.config_layers)
    return value


# --- Rules and words. ---


def _rules_of(stack: KeptStack, is_named: bool, disk: Path) -> Iterator[dict[str, Any]]:
    where: dict[str, Any] = {"stack": stack.path} if is_named else {}
    groups: dict[LayerPlan, list[int]] = {}
    for idx, entry in enumerate(stack.entries):
        if entry.recomputes:
            groups.setdefault(replace(entry, why=""), []).append(idx)
    for entry, layers in groups.items():
        rule = {**where, "layers": layers, "mode": entry.mode.value}
        if entry.segment is not None:
            rule |= {"segment_size": len(layers), "nested": entry.nested}
        if entry.save:
            rule["save"] = list(entry.save)
        if entry.offload is not None:
            rule["offload"] = _here(entry.offload, disk).to_dict()
        if entry.tiles is not None:
            rule["tiles"] = _some(entry.tiles)
        yield rule


def _some(tiles: Tiles | None) -> Tiles | None:
    """Return a number of tiles for the rows of a trial, which are so short that `auto` would not cut them."""
    return _FEW_TILES if tiles == "auto" else tiles


def _here(offload: Offload, disk: Path) -> Offload:
    path = str(disk) if offload.to == TO_DISK else None
    return replace(offload, path=path, min_bytes=0)


def _like(stack: KeptStack, position: int) -> str:
    """Return the layers that a kept layer stands for, and what the plan does with them."""
    group, entry, layer_type = stack.groups[position], stack.entries[position], stack.types[position]
    is_run = group == tuple(range(group[0], group[-1] + 1))
    segments = "" if entry.segment is None else f" in segments{', nested' if entry.nested else ''}"
    if is_run:
        where = f"{group[0]} to {group[-1]}" if len(group) > 1 else f"{group[0]}"
    else:
        where = f"{len(group)} {f'{layer_type} ' if layer_type else ''}layers"
    return f"{where} ({entry.describe()}{segments})"
