"""What of DeepSpeed cannot run together with a plan, and what a plan cannot do under ZeRO.

DeepSpeed is an optional library, and never imported here: all is read from the Trainer's configuration, from what ZeRO
has left on the parameters, and from the loaded modules.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelerate.utils import compare_versions
from torch import nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.policy.plan import Plan
from hf_ckpt.structure.layers import Stack
from hf_ckpt.upstream.deepspeed import ITS_CHECKPOINTING, KEEPS_FROZEN_WEIGHTS, PARTITIONED

if TYPE_CHECKING:
    # Importing it brings in the Trainer, and peft and bitsandbytes with it.
    from transformers import TrainingArguments

_SECTION = "activation_checkpointing"


def is_hooked(module: nn.Module) -> bool:
    """Whether ZeRO-3 gathers weights before this module's forward, lets go of them after it, and hands on copies."""
    return PARTITIONED in vars(module)


def is_sharded(model: nn.Module) -> bool:
    """Whether ZeRO-3 has sharded the model, or a part of it."""
    return any(hasattr(parameter, PARTITIONED) for parameter in model.parameters())


def check_own_checkpointing(args: TrainingArguments) -> None:
    """Refuse DeepSpeed's own activation checkpointing, by configuration or `deepspeed.checkpointing.configure`."""
    # The plugin holds the configuration that is in use, whether `deepspeed=` or accelerate's launcher gave it.
    plugin: Any = getattr(args, "deepspeed_plugin", None)
    section: Mapping[str, Any] = (plugin and plugin.deepspeed_config.get(_SECTION)) or {}
    requested = [key for key, value in section.items() if value]
    if requested:
        raise UnsupportedError(
            f"DeepSpeed's configuration asks for its own activation checkpointing ({_SECTION}: {', '.join(requested)}) "
            "in addition to the policy, and layers would be recomputed by both. Take that section out: the policy does "
            "its work. Or leave HFCkptCallback out."
        )
    checkpointing = sys.modules.get(ITS_CHECKPOINTING)
    if checkpointing is not None and checkpointing.is_configured():
        raise UnsupportedError(
            "deepspeed.checkpointing.configure() was called, for layers that recompute themselves through DeepSpeed's "
            "own activation checkpointing. With the policy they would be recomputed twice. Leave that call out: the "
            "policy does its work. Or leave HFCkptCallback out."
        )


def check_version(plan: Plan, stacks: Sequence[Stack]) -> None:
    """Refuse frozen weights in recomputed layers under ZeRO-3 of a version that empties them (before 0.19.3)."""
    # To be called after DeepSpeed has partitioned the parameters.
    if _recomputes_frozen_shards(plan, stacks) and compare_versions("deepspeed", "<", KEEPS_FROZEN_WEIGHTS):
        raise UnsupportedError(
            "The policy recomputes layers with frozen weights, which ZeRO-3 has sharded, but DeepSpeed "
            f"{importlib.metadata.version('deepspeed')} empties weights that were gathered for a recomputation before "
            "they are used. Install DeepSpeed "
            f"{KEEPS_FROZEN_WEIGHTS} or later (pip install 'deepspeed>={KEEPS_FROZEN_WEIGHTS}'), or use ZeRO-2."
        )


def _recomputes_frozen_shards(plan: Plan, stacks: Sequence[Stack]) -> bool:
    return any(
        hasattr(parameter, PARTITIONED) and not parameter.requires_grad
        for planned, stack in zip(plan.stacks, stacks, strict=True)
        for entry, layer in zip(planned.layers, stack.layers, strict=True)
        if entry.recomputes
        for parameter in layer.module.parameters()
    )
