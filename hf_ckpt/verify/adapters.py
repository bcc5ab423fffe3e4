"""The adapters of a model, carried over to a model with fewer layers.

A `lora` section may name layers by number. Where the same section would reach other layers than those that the kept
ones stand for, it is written out: module by module, with ranks and scales.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn

from hf_ckpt.recipe.recipe import Values
from hf_ckpt.verify.reduce_depth import KeptStack

_PREFIX = "base_model.model."
_ADAPTER = "default"
_BY_NUMBER = ("layers_to_transform", "layers_pattern", "exclude_modules", "rank_pattern", "alpha_pattern")

Adapters = dict[str, tuple[int, float]]
"""Rank and alpha of each module with adapters, by its name in the base model."""


def adapters_of(model: nn.Module) -> Adapters:
    """Return the LoRA adapters of a model."""
    return {
        name.removeprefix(_PREFIX): (module.r[_ADAPTER], module.lora_alpha[_ADAPTER])
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def carried_over(adapters: Adapters, kept: Sequence[KeptStack]) -> Adapters:
    """Return the adapters that a model with the kept layers should have."""
    found: Adapters = {}
    for name, size in adapters.items():
        stack, idx, rest = _placed(name, kept)
        if stack is None:
            found[name] = size
            continue
        path = stack.path.removeprefix(_PREFIX)
        found |= {f"{path}.{at}.{rest}": size for at, kept_idx in enumerate(stack.indices) if kept_idx == idx}
    return found


def written_out(section: Values, adapters: Adapters) -> dict[str, Any]:
    """Return a `lora` section that reaches exactly these modules.

    Args:
        section: the recipe's.
        adapters: what it is to make.
    """
    kept = {key: value for key, value in section.items() if key not in _BY_NUMBER}
    rank, alpha = section.get("r", 8), section.get("lora_alpha", 8)
    return {
        **kept,
        "target_modules": sorted(adapters),
        "rank_pattern": {f"^{re.escape(name)}$": own for name, (own, _) in adapters.items() if own != rank},
        "alpha_pattern": {f"^{re.escape(name)}$": own for name, (_, own) in adapters.items() if own != alpha},
    }


def _placed(name: str, kept: Sequence[KeptStack]) -> tuple[KeptStack | None, int, str]:
    """Return the stack that a module stands in, the index of its layer, and its name in the layer."""
    for stack in kept:
        path = stack.path.removeprefix(_PREFIX)
        if name.startswith(f"{path}."):
            idx, _, rest = name.removeprefix(f"{path}.").partition(".")
            return stack, int(idx), rest
    return None, 0, ""


def lets_layers_go(section: Values | None) -> bool:
    """Tell whether layers can be left out: not where a `lora` section repeats layers by number."""
    return section is None or not section.get("layer_replication")
