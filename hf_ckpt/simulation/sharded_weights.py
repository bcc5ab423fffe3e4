"""The weights of a model as engines share them out: in which units, how large, whole and one rank's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.tape import FlatParameter
from hf_ckpt.structure.layers import Stack
from hf_ckpt.structure.stored import inside_adapters, stored
from hf_ckpt.upstream.peft import CASTS_INPUT

UnitKey = tuple[int, int] | str | None
"""Number of the stack and `layer_idx`; path of an adapter; `EMBEDDINGS`, `HEAD`; None for the rest of the model."""

EMBEDDINGS, HEAD = "embeddings", "head"

MASTER_DTYPE = torch.float32
"""In which weights are kept and stepped."""

# Before accelerate 1.14 they are part of the root, which has the last layer gathered when the loss runs backward.
HAS_UNITS_AT_THE_ENDS = TorchVersion(accelerate.__version__) >= "1.14"


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One parameter."""

    unit: UnitKey
    """The unit that it belongs to: its layer's, as a rule."""
    numel: int
    """Of its storage: a 4-bit weight is packed."""
    loaded_bytes: int
    """Whole, in the dtype that it was loaded in."""
    num_bytes: int
    """Whole, in the dtype that it is stored in."""
    compute_bytes: int
    """Whole, in the dtype that it is gathered in."""
    shard_bytes: int
    """Of one rank."""
    is_trained: bool
    """Whether it gets a gradient."""


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
            if hasattr(adapted, "base_layer") and hasattr(adapted, CASTS_INPUT):
                setattr(adapted, CASTS_INPUT, partial(_cast_as_shares, getattr(adapted, CASTS_INPUT)))


def _cast_as_shares(cast: Callable[[Any, torch.dtype], Any], inputs: Any, dtype: torch.dtype) -> Any:
    return cast(inputs, MASTER_DTYPE)


def weights_of(model: nn.Module, stacks: Sequence[Stack], step: Step) -> dict[str, Weight]:
    """Return the parameters of a model by name. The model is whole, in the dtypes that it was loaded in."""
    has_ends = step.sharding.engine == "zero3" or (step.sharding.engine == "fsdp2" and HAS_UNITS_AT_THE_ENDS)
    units = _units_at_the_ends(model) if has_ends else {}
    for number, stack in enumerate(stacks):
        for layer in stack.layers:
            units |= dict.fromkeys(layer.outer.parameters(), (number, layer.layer_idx))
    # Around adapters PEFT's policy for FSDP1 makes units within those of the layers.
    frozen = {units.get(parameter) for parameter in model.parameters() if not parameter.requires_grad} - {None}
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
        numel, unit = parameter.numel(), units.get(parameter)
        if step.sharding.engine == "fsdp1" and parameter.requires_grad and unit in frozen:
            unit = name.rpartition(".")[0]
        weights[name] = Weight(
            unit,
            numel,
            numel * parameter.element_size(),
            numel * stored,
            numel * computed,
            -int(-(rows * (numel // max(1, shape[0])) * stored) // 1),
            parameter.requires_grad,
        )
    return weights


def _units_at_the_ends(model: nn.Module) -> dict[nn.Parameter, UnitKey]:
    """Return the units of the embeddings and of the head, where they are not tied."""
    embeddings, head = (getattr(model, f"get_{name}_embeddings", lambda: None)() for name in ("input", "output"))
    weight = None if head is None else stored(inside_adapters(head), "weight")
    if weight is not None and weight is stored(embeddings, "weight"):
        return {}
    ends = ((embeddings, EMBEDDINGS), (head, HEAD))
    return {parameter: key for module, key in ends if module is not None for parameter in module.parameters()}


def flat_parameter(weights: Sequence[Weight], step: Step) -> FlatParameter:
    """Return the unit of FSDP1 that has these weights."""
    world_size, is_trained = step.sharding.world_size, all(weight.is_trained for weight in weights)
    of_each = ((weight.loaded_bytes, weight.num_bytes, weight.compute_bytes) for weight in weights)
    loaded, kept, gathered = (sum(each) for each in zip(*of_each, strict=True))
    share = sum(weight.shard_bytes for weight in weights)
    is_mixed = is_trained and kept != gathered
    return FlatParameter(
        weights=tuple(weight.loaded_bytes for weight in weights if weight.loaded_bytes),
        is_broadcast=step.sharding.broadcasts_weights,
        loaded_bytes=-(-loaded // world_size) if is_trained and loaded != kept else share,
        share_bytes=share,
        emptied=(-(-gathered // world_size), gathered, kept) if is_mixed else (gathered,),
    )


def numel_on_last_rank(weight: Weight, unit: Sequence[Weight], world_size: int) -> int:
    """Return how much of a weight the last rank has where a unit is cut into equal parts (FSDP1)."""
    before = sum(each.numel for each in takewhile(lambda each: each is not weight, unit))
    part = -(-sum(each.numel for each in unit) // world_size)
    return max(0, before + weight.numel - max(before, part * (world_size - 1)))
