"""Which layers of a stack a reduced model keeps, and the plan and the adapters carried over to them.

Each kept layer stands for the layers of the full-size model that are like it and that the plan treats alike.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_ckpt.policy.options import TO_DISK
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.policy.policy import REVOLVE, Mode
from hf_ckpt.structure.layers import Layer, Stack
from hf_ckpt.structure.stored import adapted_parameter, path_without_adapters

_PER_KIND = 2
_PER_SCHEDULE = 5  # with fewer, no segment runs with a snapshot beside one that runs without
_FEW_TILES = 3
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class KeptLayers:
    """What is left of one stack."""

    stack: Stack  # at full size
    entries: Sequence[LayerPlan]  # of all its layers
    kinds: Sequence[Hashable]  # of all its layers, equal where they are alike and the plan treats them alike
    model_type: str  # of the config that it is built from
    indices: Sequence[int]  # of the layers that are kept

    @property
    def is_whole(self) -> bool:
        """Whether every layer is kept."""
        return len(self.indices) == len(self.entries)

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Return what the kept layers have of a value for each layer."""
        return [values[idx] for idx in self.indices]

    def describe(self) -> str:
        """Return on one line which layers the kept ones stand for."""
        if self.is_whole:
            return f"all {len(self.entries)} layers"
        parts = []
        for kind in dict.fromkeys(self.kinds):
            group = [idx for idx, other in enumerate(self.kinds) if other == kind]
            first, last, entry = group[0], group[-1], self.entries[group[0]]
            where = f"{first} to {last}" if last > first else f"{first}"
            if last - first >= len(group):
                where = " ".join(filter(None, (str(len(group)), self.stack.layers[first].layer_type, "layers")))
            segments = "" if entry.segment is None else f" in segments{', nested' if entry.nested else ''}"
            kept = ", ".join(str(idx) for idx in self.indices if idx in group)
            parts.append(f"{kept} for {where} ({entry.describe()}{segments})")
        return f"{len(self.indices)} of {len(self.entries)} layers: {'; '.join(parts)}"


def two_of_each_kind(stack: Stack, entries: Sequence[LayerPlan], model_type: str) -> KeptLayers:
    """Keep two layers of each kind; of segments two that hold the same kinds, and in each two layers of each kind."""
    kinds: list[Hashable] = []
    segments: dict[int | None, list[int]] = {}
    for layer, entry in zip(stack.layers, entries, strict=True):
        # Segments with more or fewer snapshots run the same code.
        treated = replace(entry, segment=None, snapshots=None if entry.snapshots is None else 0)
        kinds.append((modules_of(layer), _flags_of(layer), treated, entry.segment is not None))
        segments.setdefault(entry.segment, []).append(layer.layer_idx)
    chosen: list[int] = []
    num_kept = Counter[Hashable]()
    for members in segments.values():
        # Longer segments run the same code too, but for those of one layer.
        held = frozenset(kinds[idx] for idx in members)
        num_kept[held, len(members) > 1] += 1
        if num_kept[held, len(members) > 1] > _PER_KIND:
            continue
        few = _PER_KIND if entries[members[0]].snapshots is None else _PER_SCHEDULE
        for kind in held:
            chosen += [idx for idx in members if kinds[idx] == kind][:few]
    return KeptLayers(stack, entries, kinds, model_type, sorted(chosen))


def modules_of(layer: Layer) -> Hashable:
    """Return type and modules of a layer, adapters among them, whatever their width. Experts of a list count as one."""
    modules = {(_NUMBER.sub("#", name), type(module).__name__) for name, module in layer.module.named_modules()}
    return layer.layer_type, layer.parts, frozenset(modules)


def _flags_of(layer: Layer) -> Hashable:
    """Return what is on, off, named or missing in a layer, as whether it takes keys and values from an earlier one."""
    flags = set()
    for name, module in layer.module.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or attribute == "training" or not isinstance(value, str | int | float | None):
                continue
            # Only whether there is a number, as in `sliding_window: None` and `sliding_window: 4096`.
            shown = "#" if type(value) in (int, float) else _NUMBER.sub("#", str(value))
            flags.add((_NUMBER.sub("#", name), attribute, shown))
    return frozenset(flags)


# --- The plan and the adapters of the kept layers. ---


def policy_rules(kept: Sequence[KeptLayers], disk: Path) -> list[dict[str, Any]]:
    """Return the plan of the kept layers as the rules of a policy; what offloads to a disk uses the folder `disk`."""
    rules: list[dict[str, Any]] = []
    for each in kept:
        stack = {"stack": each.stack.path} if len(kept) > 1 else {}
        alike: dict[LayerPlan, list[int]] = {}
        entries = enumerate(each.of(each.entries))
        for has_snapshots, run in itertools.groupby(entries, key=lambda entry: entry[1].snapshots is not None):
            row = dict(run)
            if has_snapshots and len(row) >= _PER_SCHEDULE:
                rules.append({**stack, "layers": [*row], "mode": Mode.FULL.value, "nested": REVOLVE, "snapshots": 1})
                continue
            for at, entry in row.items():
                alike.setdefault(replace(entry, why="", snapshots=None), []).append(at)
        does = ((entry, at) for entry, at in alike.items() if entry.recomputes or entry.weights is not None)
        rules += [{**stack, **_rule(entry, at, disk)} for entry, at in does]
    return rules or [{"mode": Mode.NONE.value}]


def _rule(entry: LayerPlan, layers: list[int], disk: Path) -> dict[str, Any]:
    rule: dict[str, Any] = {"layers": layers, "mode": entry.mode.value}
    if entry.save:
        rule["save"] = list(entry.save)
    if entry.tiles is not None:
        # `auto` would not cut rows as short as those of a trial.
        rule["tiles"] = _FEW_TILES if entry.tiles == "auto" else entry.tiles
    if entry.segment is not None:
        rule |= {"segment_size": len(layers), "nested": entry.nested}
    if entry.offload is not None:
        # Of any size: tensors of a reduced model are under any size that pays.
        path = str(disk) if entry.offload.to == TO_DISK else None
        rule["offload"] = replace(entry.offload, path=path, min_bytes=0).to_dict()
    if entry.weights is not None:
        rule["weights"] = entry.weights.to_dict()
    return rule


class LoraSizes(NamedTuple):
    """Of LoRA on one module or parameter."""

    rank: int
    alpha: int
    is_on_parameter: bool


def adapters_of(model: nn.Module, kept: Sequence[KeptLayers] = ()) -> dict[str, LoraSizes | str]:
    """Return LoRA's sizes, or the class of another adapter, by the module or parameter of the base that it is on.

    `kept`: leave out its other layers, and give those that are kept the numbers that they will have.
    """
    inside = tuple(f"{each.stack.path}." for each in kept)
    # Some layers share a module with an adapter: it counts at each place.
    named = [each for each in model.named_modules(remove_duplicate=False) if not each[0].startswith(inside)]
    for each in kept:
        for at, layer in enumerate(each.of(each.stack.layers)):
            named += layer.module.named_modules(prefix=f"{each.stack.path}.{at}", remove_duplicate=False)
    adapters: dict[str, LoraSizes | str] = {}
    for path, module in named:
        parameter = adapted_parameter(module)
        if not isinstance(module, BaseTunerLayer):
            continue
        name = path.removeprefix("base_model.model.")
        if parameter is not None:
            name = f"{path_without_adapters(name)}.{parameter.name}"
        if isinstance(module, LoraLayer):
            adapters[name] = LoraSizes(module.r["default"], module.lora_alpha["default"], parameter is not None)
        else:
            adapters[name] = type(module).__name__
    return adapters
