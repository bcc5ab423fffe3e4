"""A step of the whole model, turned into that of one rank under DDP, FSDP or ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.ddp_fsdp_tape import InSegment, RankTape
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.sharded_weights import MASTER_DTYPE, weights_of
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.tape import Tape
from hf_ckpt.simulation.zero_tape import ZeroTape
from hf_ckpt.structure.layers import Stack


def let_adapters_cast(model: nn.Module, step: Step) -> None:
    """Let the adapters of a copy cast their input to the dtype that PEFT finds their weights in under FSDP1.

    Each adapter is a unit of its own, and PEFT looks before it is gathered: then it has the dtype of the shares.
    """
    if step.sharding.engine == "fsdp1" and step.autocast is not None:
        for module in model.modules():
            adapted: Any = module
            if hasattr(adapted, "base_layer") and hasattr(adapted, "_cast_input_dtype"):
                adapted._cast_input_dtype = partial(_cast_as_shares, adapted._cast_input_dtype)


def _cast_as_shares(cast: Callable[[Any, torch.dtype], Any], inputs: Any, dtype: torch.dtype) -> Any:
    return cast(inputs, MASTER_DTYPE)


def one_rank_tape(
    tape: Tape, model: nn.Module, stacks: Sequence[Stack], step: Step, device: Device, plan: Plan | None = None
) -> Tape:
    """Return one rank's tape, made of that of the whole model under a plan, whose storages name their parameters."""
    if step.sharding.world_size == 1 or step.sharding.engine in ("none", "tp"):
        return tape
    weights = weights_of(model, stacks, step)
    if step.sharding.engine.startswith("zero"):
        return ZeroTape(tape, weights, step, device).tape()
    return RankTape(tape, weights, step, device, {} if plan is None else _in_segments(plan)).tape()


def _in_segments(plan: Plan) -> dict[tuple[str, int], InSegment]:
    """Return the layers in segments, by the path of their stack and their index in it."""
    return {
        (stack.path, idx): InSegment((number, idx), entry.snapshots is not None)
        for number, stack in enumerate(plan.stacks)
        for idx, entry in enumerate(stack.layers)
        if entry.segment is not None
    }
