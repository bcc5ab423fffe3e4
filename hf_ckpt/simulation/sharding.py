"""A step of the whole model, turned into that of one rank under DDP, FSDP or ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.ddp_fsdp_tape import (
    EMBEDDINGS,
    HAS_UNITS_AT_THE_ENDS,
    HEAD,
    MASTER_DTYPE,
    InSegment,
    RankTape,
    UnitKey,
    Weight,
)
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.tape import Tape
from hf_ckpt.simulation.zero_tape import ZeroTape
from hf_ckpt.structure.layers import Stack


def compute_dtype(step: Step, tensor: Tensor) -> torch.dtype:
    """Return the dtype in which an engine passes a parameter to the computation."""
    engine, dtype = step.sharding.engine, step.autocast
    gathers_in_half = engine.startswith(("fsdp", "zero")) and dtype is not None and tensor.is_floating_point()
    return getattr(torch, dtype) if gathers_in_half and dtype is not None else tensor.dtype


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


def weights_of(model: nn.Module, stacks: Sequence[Stack], step: Step) -> dict[str, Weight]:
    """Return the parameters of a model by name. The model is whole, in the dtypes that it was loaded in."""
    has_ends = step.sharding.engine == "zero3" or (step.sharding.engine == "fsdp2" and HAS_UNITS_AT_THE_ENDS)
    units = _units_at_the_ends(model) if has_ends else {}
    for number, stack in enumerate(stacks):
        for layer in stack.layers:
            units |= dict.fromkeys(layer.outer.parameters(), (number, layer.layer_idx))
    weights = {}
    for name, parameter in model.named_parameters():
        stored = parameter.element_size()
        computed = compute_dtype(step, parameter).itemsize
        if step.sharding.engine.startswith("fsdp") and step.autocast is not None and parameter.requires_grad:
            stored = MASTER_DTYPE.itemsize
        elif step.sharding.engine.startswith("zero"):
            stored = computed
        shape, world_size = tuple(parameter.shape) or (1,), step.sharding.world_size
        rows = -(-shape[0] // world_size) if step.sharding.engine == "fsdp2" else shape[0] / world_size
        numel = parameter.numel()
        weights[name] = Weight(
            units.get(parameter),
            numel,
            numel * stored,
            numel * computed,
            -int(-(rows * (numel // max(1, shape[0])) * stored) // 1),
            parameter.requires_grad,
        )
    return weights


def _units_at_the_ends(model: nn.Module) -> dict[nn.Parameter, UnitKey]:
    """Return the units of the embeddings and of the head, where they are not tied."""
    embeddings, head = (getattr(model, f"get_{name}_embeddings", lambda: None)() for name in ("input", "output"))
    if head is not None and head.weight is getattr(embeddings, "weight", None):
        return {}
    ends = ((embeddings, EMBEDDINGS), (head, HEAD))
    return {parameter: key for module, key in ends if module is not None for parameter in module.parameters()}


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
