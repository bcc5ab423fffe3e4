"""FSDP: what is sharded, what stands in the way of a plan there, and torch's own way in.

The plan is applied after wrapping. Both versions are meant: FSDP1 (`FullyShardedDataParallel`) and FSDP2
(`fully_shard`), whoever did the wrapping: accelerate, transformers' `DistributedConfig`, or the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, FSDPModule, FullyShardedDataParallel

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.structure.layers import Layer, Stack, class_name, is_unit, modules_of, path_of
from hf_ckpt.structure.stored import stored
from hf_ckpt.upstream.torch import (
    FSDP_WRAPPED,
    flat_parameter,
    flattened_modules,
    frees_after_forward,
    local_shard,
    owner_of,
    shard_of,
    sharded_parameters,
    visitor_of_modules,
)


def shards(model: nn.Module) -> dict[nn.Module, list[Callable[[], Tensor]]]:
    """Return what reads this rank's share of the weights that train in each module; whole ones come and go."""
    found: dict[nn.Module, list[Callable[[], Tensor]]] = {}
    for unit in modules_of(model):
        if isinstance(unit, FullyShardedDataParallel):
            flat = flat_parameter(unit)
            if flat is not None and flat.requires_grad:
                for module in flattened_modules(flat):
                    found.setdefault(module, []).append(partial(local_shard, flat))
        elif isinstance(unit, FSDPModule):
            for parameter in sharded_parameters(unit):
                if parameter.sharded_param.requires_grad:
                    found.setdefault(owner_of(parameter), []).append(partial(shard_of, parameter))
    return found


def let_go(unit: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered for a forward during backward, where it frees them after forward."""
    # Left alone, it holds them until the unit's own backward.
    if isinstance(unit, FSDPModule) and frees_after_forward(unit):
        unit.reshard()


def set_in_place(model: nn.Module, settings: dict[nn.Module, list[Callable[[], None]]]) -> None:
    """Make settings on modules through torch's `apply_activation_checkpointing`."""

    # Its `checkpoint_wrapper_fn` may return what it was given: the settings are made in place, no module is wrapped,
    # and so no name changes, which PEFT and state dicts rely on.
    def set_on(module: nn.Module) -> nn.Module:
        for make in settings.pop(module, []):
            make()
        return module

    visitor_of_modules()(model, checkpoint_wrapper_fn=set_on, check_fn=lambda module: module in settings)
    assert not settings, "torch visits every module below the model"


def check_units(model: nn.Module, stacks: Sequence[Stack]) -> None:
    """Refuse a sharded model of which no decoder layer is a unit of its own: it would be gathered whole."""
    units = [module for module in modules_of(model) if is_unit(module)]
    layers = [layer for stack in stacks for layer in stack.layers]
    if not units or any(_is_gathered_apart(layer, model) for layer in layers):
        return
    names = sorted({class_name(layer.module) for layer in layers})
    raise UnsupportedError(
        f"FSDP wrapped {len(units)} module{'s' * (len(units) > 1)} of {class_name(model)}, but none of its "
        f"{len(layers)} decoder layers: every device would gather the whole model at once. Set "
        f"fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP and fsdp_transformer_layer_cls_to_wrap: {','.join(names)}."
    )


def _is_gathered_apart(layer: Layer, model: nn.Module) -> bool:
    if layer.outer is not model and is_unit(layer.outer):
        return True
    # A policy by size may have taken the parts instead.
    return any(is_unit(layer.module.get_submodule(name)) for name in (*layer.attention, *layer.ffn))


def check_prefetch(model: nn.Module) -> None:
    """Refuse to recompute layers whose adapters FSDP1 gathers before: PEFT would find them in another dtype."""
    units = (module for module in modules_of(model) if isinstance(module, FullyShardedDataParallel))
    changing = set(filter(_changes_dtype_ahead, units))
    # It casts inputs to the dtype of the adapter's weights before the adapter, a unit of its own, is gathered: in
    # forward that of the shares, and once gathered ahead that of the computation. torch's own checkpointing fails there
    # too.
    for module in modules_of(model) if changing else ():
        if stored(module, "base_layer") is not None and not changing.isdisjoint(modules_of(module)):
            adapted = str(path_of(model, module)).replace(f"{FSDP_WRAPPED}.", "")
            raise UnsupportedError(
                f"FSDP1 gathers the adapters of {adapted} before their layer is recomputed (BACKWARD_PRE), in "
                "another dtype than in the forward, and PEFT casts to the dtype that it finds: the recomputation "
                "would not be the forward. Set fsdp_backward_prefetch: BACKWARD_POST, or use FSDP2."
            )


def _changes_dtype_ahead(unit: FullyShardedDataParallel) -> bool:
    computed, flat = unit.mixed_precision.param_dtype, flat_parameter(unit)
    is_changed = computed is not None and flat is not None and computed != flat.dtype
    return is_changed and unit.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
