"""Refuses what cannot be kept exact, before the model is touched, with an `UnsupportedError`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_ckpt.distributed import deepspeed
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.patch.tileable_modules import tiled_modules
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import MODES_WITH_TRAINED_CACHE, SELECTIVE_MODES, TRAINED_CACHES, WHOLE_LAYER_MODES, Mode
from hf_ckpt.regions.offload.disk import check_path
from hf_ckpt.regions.selective.save_rules import SaveRules, check_save_rules
from hf_ckpt.structure.attention_and_ffn import unwrapped
from hf_ckpt.structure.layers import Layer, Stack, check_is_model, modules_of, path_of
from hf_ckpt.structure.stored import adapter_configs, stored
from hf_ckpt.upstream.torch import CHECKPOINT_WRAPPED, FakeTensor
from hf_ckpt.upstream.transformers import CHECKPOINTING_ARGUMENTS, PIPELINE_STAGE

if TYPE_CHECKING:
    # Importing it brings in the Trainer, and peft and bitsandbytes with it.
    from transformers import TrainingArguments


def check_model(model: nn.Module) -> None:
    """Refuse models that no plan can govern, and a process in which another library has replaced torch's checkpoint."""
    check_is_model(model)
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError(
            "The model is wrapped in nn.DataParallel, whose replicas would run the original's layers. Start one "
            "process for each GPU instead: accelerate launch --multi_gpu <script>, or set "
            "CUDA_VISIBLE_DEVICES to one GPU."
        )
    if checkpoint.__module__ != torch.utils.checkpoint.__name__:
        # unsloth does, for the whole process: its own is reentrant.
        raise UnsupportedError(
            f"torch.utils.checkpoint.checkpoint was {checkpoint.__module__}.{checkpoint.__qualname__} already when "
            "hf_ckpt was imported, and recomputation would go through that. Import hf_ckpt before it is replaced."
        )
    if any(vars(module).get(PIPELINE_STAGE) is not None for module in modules_of(model)):
        raise UnsupportedError(
            "The model was loaded with DistributedConfig(pp_size=...), transformers' pipeline for generation: what a "
            "stage receives has no way back for gradients, so no stage but the last could be trained. Train stages of "
            "torch.distributed.pipelining instead, each with hf_ckpt.apply, or load the model without pp_size."
        )
    check_wrappers(model)


def check_wrappers(model: nn.Module) -> None:
    """Refuse a model on which somebody has put torch's wrapper modules."""
    for module in modules_of(model):
        if CHECKPOINT_WRAPPED in module._modules:
            raise UnsupportedError(
                f"{path_of(model, module)} is wrapped in {type(module).__name__} (accelerate's "
                "fsdp_activation_checkpointing, or apply_activation_checkpointing with torch's wrapper). It renames "
                "parameters, so that PEFT saves an empty adapter, and layers would be recomputed twice. Leave it out: "
                "the policy does its work."
            )


def check_offload_paths(plan: Plan, model: nn.Module) -> None:
    """Refuse directories to offload to where a file cannot be written or locked. A model without values writes none."""
    if any(parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        return
    entries = {entry.offload for stack in plan.stacks for entry in stack.layers}
    for path in sorted({offload.path for offload in entries if offload is not None and offload.path is not None}):
        check_path(path)


def check_engine(args: TrainingArguments) -> None:
    """Refuse several GPUs in one process, and engines together with checkpointing of their own or a reentrant one."""
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"One process would use {args.n_gpu} GPUs through nn.DataParallel, whose replicas run the original's "
            "layers. "
            f"Start one process for each: accelerate launch --num_processes {args.n_gpu} <script>, or set "
            "CUDA_VISIBLE_DEVICES to one GPU."
        )
    deepspeed.check_own_checkpointing(args)
    is_fsdp = bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    is_distributed = args.world_size > 1 or is_fsdp or bool(args.deepspeed)
    asked = [name for name in CHECKPOINTING_ARGUMENTS if getattr(args, name, None)]
    if is_distributed and any((getattr(args, f"{name}_kwargs", None) or {}).get("use_reentrant") for name in asked):
        raise UnsupportedError(
            "The training arguments ask for reentrant activation checkpointing (use_reentrant: True) in addition to "
            "the policy. It runs a backward of its own inside the backward, which DDP, FSDP and DeepSpeed take for the "
            "end of theirs, and the policy is never reentrant. Set gradient_checkpointing=False: the policy does its "
            "work."
        )


def check_exact(plan: Plan, stacks: Sequence[Stack], model: nn.Module) -> None:
    """Refuse entries of a plan that would not keep loss, gradients and buffers of a model as they are."""
    _check_trained_cache(plan, model)
    treated: dict[nn.Module, tuple[object, str]] = {}
    for stack_plan, stack in zip(plan.stacks, stacks, strict=True):
        for entry, layer in zip(stack_plan.layers, stack.layers, strict=True):
            _check_shared(entry, layer, stack, treated)
            if entry.mode is not Mode.NONE:
                _check_layer(entry, layer, stack)
            if entry.tiles is not None:
                tiled_modules(layer)
        _check_saves(stack_plan, stack)


def _check_trained_cache(plan: Plan, model: nn.Module) -> None:
    """Refuse to recompute an attention that reads the keys and values which an adapter of PEFT trains."""
    configs = adapter_configs(unwrapped(model))
    kinds = [config.peft_type.value for config in configs.values() if config.peft_type.lower() in TRAINED_CACHES]
    for stack in plan.stacks if kinds else ():
        for layer_idx, entry in enumerate(stack.layers):
            if entry.mode not in MODES_WITH_TRAINED_CACHE:
                raise UnsupportedError(
                    f'Layer {layer_idx} of {stack.path} is set to "{entry.mode}", but PEFT\'s {kinds[0]} hands layers '
                    "a key/value cache, which recomputed layers can neither read nor fill: the loss would change "
                    'without a word. Use mode "none" or "ffn", or prompt tuning.'
                )


def _check_saves(plan: StackPlan, stack: Stack) -> None:
    """Refuse names that none of the layers which keep them has: layers of a stack need not be alike."""
    kept: dict[SaveRules, list[nn.Module]] = {}
    for entry, layer in zip(plan.layers, stack.layers, strict=True):
        if entry.mode in SELECTIVE_MODES:
            kept.setdefault(SaveRules.of(entry.mode.value, entry.save), []).append(layer.module)
    for saves, modules in kept.items():
        check_save_rules(saves, *modules)


def _check_shared(entry: LayerPlan, layer: Layer, stack: Stack, treated: dict[nn.Module, tuple[object, str]]) -> None:
    """Refuse a module that two layers share and that the plan treats differently in each."""
    for name, module, treatment in _treatments(entry, layer):
        where = f"{stack.path}.{layer.layer_idx}{name}"
        other, other_where = treated.setdefault(module, (treatment, where))
        if other != treatment:
            # The last layer of a stack never offloads.
            without = "offload" if any(map(_offloads, (other, treatment))) else "segment_size"
            raise UnsupportedError(
                f"{other_where} and {where} are the same module ({type(module).__name__}), but the plan differs "
                f"there. Give both layers one mode, without {without}."
            )


def _treatments(entry: LayerPlan, layer: Layer) -> Iterator[tuple[str, nn.Module, object]]:
    """Yield the layer and its parts with what the entry makes of each; None where it is left alone."""
    is_whole = entry.mode in WHOLE_LAYER_MODES or (entry.mode is Mode.FFN and layer.ffn_is_inline)
    # A link of a segment knows its place, so that one module cannot be two of them.
    place = layer.layer_idx if entry.segment is not None else None
    yield "", layer.module, (entry, place) if is_whole else None
    for mode, names in ((Mode.ATTENTION, layer.attention), (Mode.FFN, layer.ffn)):
        for name in names:
            yield f".{name}", layer.submodule(name), (mode if entry.mode is mode else None, entry.tiles)


def _offloads(treatment: object) -> bool:
    parts = treatment if isinstance(treatment, tuple) else ()
    return any(isinstance(part, LayerPlan) and part.offload is not None for part in parts)


def _check_layer(entry: LayerPlan, layer: Layer, stack: Stack) -> None:
    where = f"Layer {layer.layer_idx} of {stack.path}"
    if stored(layer.module, "backward_pass") is not None:
        raise UnsupportedError(
            f'{where} is set to "{entry.mode}", but {type(layer.module).__name__} computes its own backward (a '
            "reversible layer), which already recomputes. Leave it out of the policy."
        )
