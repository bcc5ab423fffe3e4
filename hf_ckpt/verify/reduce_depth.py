"""Fewer layers, and the plan and the adapters carried over to them.

Each kept layer stands for layers of the full-size model that are like it and that the plan treats alike. Configs
describe their layers in many ways, so a config with fewer layers is a proposal: the caller builds it and checks it with
`same_layers`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_ckpt.policy.options import TO_DISK, Tiles
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.policy.policy import REVOLVE, Mode
from hf_ckpt.policy.resolve_rules import binomial
from hf_ckpt.recipe.recipe import Values
from hf_ckpt.structure.layers import Layer, Stack

Kind = tuple[object, ...]
Adapters = dict[str, Any]
"""Of each module with an adapter, by its name in the base model: rank and alpha of LoRA, the class of another kind."""
_PER_KIND = 2
_PER_SCHEDULE = 5
"""Layers in a row that run one segment with a snapshot and one without."""
_FEW_TILES = 3
_COUNT = re.compile(r"num_(hidden_)?layers|n_layers?|depth|num_blocks|(encoder|decoder)_layers|num_(en|de)coder_layers")
_LISTED_INDICES = re.compile(r".*(_indices|_indexes|_idxs?|_ids|_layers)")
_COUNT_FROM_START = re.compile(
    r"first_k_dense_replace|num_dense_layers|n_dense_layers|max_window_layers|moe_layer_start_index"
)
_COUNT_FROM_END = re.compile(r"num_kv_shared_layers")
_PATTERN_TEXT = re.compile(r".*pattern")
_NUMBER = re.compile(r"\d+")
_PREFIX = "base_model.model."
_ADAPTER = "default"
_BY_NUMBER = ("layers_to_transform", "layers_pattern", "exclude_modules", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class KeptStack:
    """What is left of one stack. Each tuple has one item for each kept layer."""

    path: str  # as in the plan
    num_layers: int  # at full size
    config_layers: tuple[int, ...]  # the layers that the config keeps
    indices: tuple[int, ...]  # the full-size layer whose plan it gets
    entries: tuple[LayerPlan, ...]
    groups: tuple[tuple[int, ...], ...]  # all layers of the full-size model that it stands for
    types: tuple[str | None, ...]  # in the model's own word, if it has one

    @property
    def is_whole(self) -> bool:
        """Whether every layer is kept."""
        return self.indices == tuple(range(self.num_layers))

    @property
    def name_in_base(self) -> str:
        """Path in the model without adapters around it."""
        return self.path.removeprefix(_PREFIX)


def all_layers(stack: Stack, entries: Sequence[LayerPlan]) -> KeptStack:
    """Keep every layer of a stack."""
    return _kept(stack, entries, range(len(stack.layers)))


def two_of_each_kind(stack: Stack, entries: Sequence[LayerPlan]) -> KeptStack:
    """Keep two layers of each kind and entry of the plan, and two layers of two segments of each kind."""
    single = [group for group in _groups_alike(stack, entries) if entries[group[0]].segment is None]
    chosen = {idx for group in single for idx in group[:_PER_KIND]}
    return _kept(stack, entries, sorted(chosen | set(_of_segments(stack, entries))))


def first_layers(stack: Stack, entries: Sequence[LayerPlan]) -> KeptStack:
    """Keep the first layers of a stack, as many as needed to have two for each kind and entry of the plan.

    For models whose config gives the kinds of layers as a period. Entries go to layers of their kind, wherever they
    stand in the plan. Segments need their own layers: then every layer is kept.
    """
    if any(entry.segment is not None for entry in entries):
        return all_layers(stack, entries)
    kinds = [(layer_kind(layer), flags_of(layer)) for layer in stack.layers]
    left: dict[Hashable, list[int]] = {}
    for group in _groups_alike(stack, entries):
        kind = kinds[group[0]]
        left[kind] = sorted([*left.get(kind, []), *group[:_PER_KIND]])
    stands: list[int] = []
    for idx, kind in enumerate(kinds):
        if not any(left.values()):
            break
        # More layers of a kind than entries: the rest keep their own plan.
        stands.append(left[kind].pop(0) if left[kind] else idx)
    return _kept(stack, entries, stands, range(len(stands)))


def same_layers(kept: Sequence[KeptStack], full: Sequence[Stack], built: Sequence[Stack]) -> bool:
    """Whether the layers of a built model are of the same kinds as those that they stand for."""
    if [stack.path for stack in kept] != [stack.path for stack in built]:
        return False
    for ours, theirs, small in zip(kept, full, built, strict=True):
        if [layer_kind(theirs.layers[idx]) for idx in ours.indices] != [layer_kind(layer) for layer in small.layers]:
            return False
    return True


def same_plan(kept: Sequence[KeptStack], plan: Plan) -> bool:
    """Whether a plan does with each kept layer what the plan of the full-size model does.

    Not compared: reasons, as a layer without the part that a rule names is here left out by index; where a layer
    offloads to; and whether the last layer offloads, which it never does.
    """
    ours = [_without_reasons(stack.entries) for stack in kept]
    return ours == [_without_reasons(stack.layers) for stack in plan.stacks]


def with_fewer_layers(fields: Mapping[str, Any], kept: KeptStack) -> dict[str, Any]:
    """Return the fields, as JSON types, of the config that a stack is built from, with the kept layers only."""
    return {name: _shortened(name, value, kept) for name, value in fields.items()}


def policy_rules(kept: Sequence[KeptStack], disk: Path) -> list[dict[str, Any]]:
    """Return the plan of the kept layers as the rules of a policy; those that offload to a disk use the folder `disk`.

    Tensors of any size are offloaded: those of a reduced model are under any size that pays.
    """
    found = [rule for stack in kept for rule in _rules_of(stack, len(kept) > 1, disk)]
    return found or [{"mode": Mode.NONE.value}]


def describe_kept_layers(stack: KeptStack) -> str:
    """Return on one line which layers of the full-size model the kept layers stand for."""
    if stack.is_whole:
        return f"all {stack.num_layers} layers"
    shares: dict[tuple[int, ...], list[int]] = {}
    for position, group in enumerate(stack.groups):
        shares.setdefault(group, []).append(position)
    parts = [
        f"{', '.join(str(stack.indices[at]) for at in kept)} for {_description_of(stack, kept[0])}"
        for kept in shares.values()
    ]
    return f"{len(stack.indices)} of {stack.num_layers} layers: {'; '.join(parts)}"


# --- Which layers are kept. ---


def _group_key(layer: Layer, entry: LayerPlan) -> Hashable:
    # Segments with more or fewer snapshots run the same code.
    alike = replace(entry, segment=None, snapshots=None if entry.snapshots is None else 0)
    return layer_kind(layer), flags_of(layer), alike, entry.segment is not None


def _groups_alike(stack: Stack, entries: Sequence[LayerPlan]) -> list[list[int]]:
    """Group the layers that are alike and that the plan treats alike."""
    groups: dict[Hashable, list[int]] = {}
    for layer, entry in zip(stack.layers, entries, strict=True):
        groups.setdefault(_group_key(layer, entry), []).append(layer.layer_idx)
    return list(groups.values())


def _of_segments(stack: Stack, entries: Sequence[LayerPlan]) -> Iterator[int]:
    """Yield at least two layers of two segments of each make: the same kinds of layers, nested or not, one or more."""
    segments: dict[int, list[int]] = {}
    for idx, entry in enumerate(entries):
        if entry.segment is not None:
            segments.setdefault(entry.segment, []).append(idx)
    makes: dict[Hashable, int] = {}
    for members in segments.values():
        firsts = {_group_key(stack.layers[idx], entries[idx]): idx for idx in reversed(members)}
        make = frozenset(firsts), len(members) > 1
        makes[make] = makes.get(make, 0) + 1
        if makes[make] <= _PER_KIND:
            yield from firsts.values()
            yield from members[: _PER_KIND if entries[members[0]].snapshots is None else _PER_SCHEDULE]


def _kept(
    stack: Stack, entries: Sequence[LayerPlan], indices: Sequence[int], config_layers: Sequence[int] | None = None
) -> KeptStack:
    group_of = {idx: tuple(group) for group in _groups_alike(stack, entries) for idx in group}
    # A segment has the number of its first layer.
    starts: dict[int | None, int | None] = {None: None}
    for position, idx in enumerate(indices):
        starts.setdefault(entries[idx].segment, position)
    kept = [replace(entries[idx], segment=starts[entries[idx].segment]) for idx in indices]
    return KeptStack(
        path=stack.path,
        num_layers=len(stack.layers),
        config_layers=tuple(indices if config_layers is None else config_layers),
        indices=tuple(indices),
        entries=tuple(kept) if len(kept) == len(entries) else _with_own_schedule(kept),
        groups=tuple(group_of[idx] for idx in indices),
        types=tuple(stack.layers[idx].layer_type for idx in indices),
    )


def _with_own_schedule(entries: list[LayerPlan]) -> tuple[LayerPlan, ...]:
    """Return the entries with those that have snapshots under the schedule of so few layers, with one snapshot.

    In fewer layers there would be none to place.
    """
    for row in _rows_with_snapshots(entries):
        short = [(idx, replace(entries[idx], snapshots=None)) for idx in row]
        for idx, entry in binomial(1, row) if len(row) >= _PER_SCHEDULE else short:
            entries[idx] = entry
    return tuple(entries)


def _rows_with_snapshots(entries: Sequence[LayerPlan]) -> Iterator[list[int]]:
    for has_snapshots, run in itertools.groupby(enumerate(entries), key=lambda each: each[1].snapshots is not None):
        if has_snapshots:
            yield [idx for idx, _ in run]


def _without_reasons(entries: Sequence[LayerPlan]) -> list[tuple[LayerPlan, bool]]:
    last = len(entries) - 1
    return [
        (
            replace(entry, why="", offload=None, tiles=_tiles_of_trial(entry.tiles)),
            entry.offload is not None and idx < last,
        )
        for idx, entry in enumerate(entries)
    ]


# --- Which layers are alike: the same modules, flags and type, whatever their width. ---


def layer_kind(layer: Layer) -> Kind:
    """Return the modules of a layer as a value that is equal for layers that are alike.

    Adapters are modules too: a layer with adapters differs from one without. Experts of a list count as one.
    """
    modules = {(_NUMBER.sub("#", name), type(module).__name__) for name, module in layer.module.named_modules()}
    return layer.layer_type, layer.parts, frozenset(modules)


def flags_of(layer: Layer) -> Kind:
    """Return the settings by which layers of one kind may still differ: what is on, off, named or missing.

    Example: layers that take keys and values from an earlier one. Weights, sizes and indices are left out.
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
                # Only whether there is a value, as in `sliding_window: None` and `sliding_window: 4096`.
                yield where, attribute, "a number"


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


# --- Rules and text. ---


def _rules_of(stack: KeptStack, is_named: bool, disk: Path) -> Iterator[dict[str, Any]]:
    where: dict[str, Any] = {"stack": stack.path} if is_named else {}
    for row in _rows_with_snapshots(stack.entries):
        yield {**where, "layers": row, "mode": Mode.FULL.value, "nested": REVOLVE, "snapshots": 1}
    groups: dict[LayerPlan, list[int]] = {}
    for idx, entry in enumerate(stack.entries):
        if entry.recomputes and entry.snapshots is None:
            groups.setdefault(replace(entry, why=""), []).append(idx)
    for entry, layers in groups.items():
        rule = {**where, "layers": layers, "mode": entry.mode.value}
        if entry.segment is not None:
            rule |= {"segment_size": len(layers), "nested": entry.nested}
        if entry.save:
            rule["save"] = list(entry.save)
        if entry.offload is not None:
            path = str(disk) if entry.offload.to == TO_DISK else None
            rule["offload"] = replace(entry.offload, path=path, min_bytes=0).to_dict()
        if entry.tiles is not None:
            rule["tiles"] = _tiles_of_trial(entry.tiles)
        yield rule


def _tiles_of_trial(tiles: Tiles | None) -> Tiles | None:
    """Return a fixed number of tiles in place of `auto`, which would not cut rows as short as those of a trial."""
    return _FEW_TILES if tiles == "auto" else tiles


def _description_of(stack: KeptStack, position: int) -> str:
    """Return the layers that a kept layer stands for, and what the plan does with them."""
    group, entry, layer_type = stack.groups[position], stack.entries[position], stack.types[position]
    is_run = group == tuple(range(group[0], group[-1] + 1))
    segments = "" if entry.segment is None else f" in segments{', nested' if entry.nested else ''}"
    if is_run:
        where = f"{group[0]} to {group[-1]}" if len(group) > 1 else f"{group[0]}"
    else:
        where = f"{len(group)} {f'{layer_type} ' if layer_type else ''}layers"
    return f"{where} ({entry.describe()}{segments})"


# --- Adapters, carried over to fewer layers. ---


def adapters_of(model: nn.Module) -> Adapters:
    """Return rank and scale of the LoRA adapters of a model; of other kinds, the class."""
    return {
        name.removeprefix(_PREFIX): (module.r[_ADAPTER], module.lora_alpha[_ADAPTER])
        if isinstance(module, LoraLayer)
        else type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    }


def adapters_of_kept(adapters: Adapters, kept: Sequence[KeptStack]) -> Adapters:
    """Return the adapters that a model with only the kept layers should have."""
    found: Adapters = {}
    stacks = {stack.name_in_base: stack.indices for stack in kept}
    for name, size in adapters.items():
        path = next((path for path in stacks if name.startswith(f"{path}.")), None)
        if path is None:
            found[name] = size
            continue
        idx, _, rest = name.removeprefix(f"{path}.").partition(".")
        found |= {f"{path}.{at}.{rest}": size for at, kept_idx in enumerate(stacks[path]) if kept_idx == int(idx)}
    return found


def explicit_section(section: Values, adapters: Adapters) -> dict[str, Any]:
    """Return the recipe's `lora` section, rewritten so that it makes exactly these adapters, module by module.

    The recipe's own may name layers by number, and would reach other layers than those that the kept ones stand for.
    """
    kept = {key: value for key, value in section.items() if key not in _BY_NUMBER}
    rank, alpha = section.get("r", 8), section.get("lora_alpha", 8)
    return {
        **kept,
        "target_modules": sorted(adapters),
        "rank_pattern": {f"^{re.escape(name)}$": own for name, (own, _) in adapters.items() if own != rank},
        "alpha_pattern": {f"^{re.escape(name)}$": own for name, (_, own) in adapters.items() if own != alpha},
    }
