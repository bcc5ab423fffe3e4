"""The engine that runs a recipe on one process or on many: what was asked for, what it suits, what came of it.

The launcher's configuration (`accelerate launch --config_file`) chooses it, `training.fsdp` and `training.deepspeed` do
so where the launcher says nothing. Nothing is sharded here: accelerate and the Trainer do that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.schema import NO_PARALLELISM, PREPARE_FOR_KBIT, QUANTIZE_EXPERTS
from hf_ckpt.simulation.shared_tensors import has_shared

_FLOAT_STORAGE = ("bfloat16", "float16", "float32")


class Engine(StrEnum):
    """Who shares the work among processes."""

    NONE = "one process"
    DDP = "DDP"
    FSDP1 = "FSDP1"
    FSDP2 = "FSDP2"
    DEEPSPEED = "DeepSpeed"

    @property
    def is_fsdp(self) -> bool:
        """Whether this is one of the two versions of FSDP."""
        return self in (Engine.FSDP1, Engine.FSDP2)


def check_one_engine(recipe: Recipe) -> None:
    """Refuse a recipe that asks for an engine besides the launcher's. Asked before anything sets the environment."""
    launched = [name for name in ("FSDP", "DeepSpeed") if _is_set(f"ACCELERATE_USE_{name.upper()}")]
    written = [f"training.{key}" for key in ("fsdp", "deepspeed") if recipe.training.get(key)]
    if launched and written:
        raise RecipeError(
            f"{written[0]} asks to shard the model, but it was launched with {launched[0]} already (accelerate's "
            f"configuration). Use {written[0]}=null, or a launch without it."
        )


def asked_engine(args: TrainingArguments) -> Engine:
    """Return the engine that the launcher or the recipe asks for."""
    if args.deepspeed or _is_set("ACCELERATE_USE_DEEPSPEED"):
        return Engine.DEEPSPEED
    if args.fsdp or _is_set("ACCELERATE_USE_FSDP"):
        # accelerate itself takes version 1 where nothing is said.
        return Engine.FSDP2 if _fsdp_option(args, "fsdp_version", default="1") == "2" else Engine.FSDP1
    return Engine.DDP if args.world_size > 1 else Engine.NONE


def _fsdp_option(args: TrainingArguments, name: str, *, default: str) -> str:
    """Return what the recipe says of FSDP, else the launcher, which sets a variable of the same name."""
    of_recipe: dict[str, object] = getattr(args, "fsdp_plugin_args", None) or {}
    variable = f"FSDP_{name.removeprefix('fsdp_').upper()}"
    return str(of_recipe.get(name, os.environ.get(variable, default)))


def check_engine_suits(recipe: Recipe, args: TrainingArguments) -> None:
    """Refuse what the engine that was asked for cannot do with this recipe."""
    # Matrices or rows that a launcher has processes share.
    config = getattr(args, "parallelism_config", None)
    for name in ("tp_size", "cp_size", "sp_size"):
        if (size := getattr(config, name, None) or 1) > 1:
            raise RecipeError(f"The launcher asks for {name}={size}, and {NO_PARALLELISM}")
    engine = asked_engine(args)
    if (engine.is_fsdp or engine is Engine.DEEPSPEED) and (recipe.quantization or {}).get(QUANTIZE_EXPERTS):
        raise RecipeError(
            f"quantization.{QUANTIZE_EXPERTS}: {engine} cannot shard experts in 4 bits. Remove it, and they are "
            "sharded as they were loaded; or launch one process, or DDP."
        )
    if engine.is_fsdp:
        _check_quantization(recipe, engine)
        _check_saving(args, engine)
    if engine is Engine.FSDP2:
        _check_optimizer(args)
    if engine is Engine.DEEPSPEED and recipe.adapter_section is None:
        # Adapters are gathered whatever the configuration says.
        _check_zero3_saving(args)


def _check_quantization(recipe: Recipe, engine: Engine) -> None:
    section = recipe.quantization
    if section is None:
        return
    if section.get("load_in_8bit"):
        raise RecipeError(
            f"quantization.load_in_8bit: bitsandbytes' 8-bit weights cannot be sharded by {engine}. Use load_in_4bit "
            "with bnb_4bit_quant_storage, or launch with DDP."
        )
    if engine is Engine.FSDP1 and section.get(PREPARE_FOR_KBIT):
        raise RecipeError(
            f"quantization.{PREPARE_FOR_KBIT} makes norms and the head float32, but {engine} shards the weights of a "
            "layer in one dtype. Remove it, or launch with FSDP2 or DDP."
        )
    storage, dtype = section.get("bnb_4bit_quant_storage", "uint8"), recipe.model.get("dtype", "auto")
    # FSDP1 flattens all weights of a layer into one tensor.
    is_float = storage in _FLOAT_STORAGE
    if not is_float or (engine is Engine.FSDP1 and dtype != storage):
        wanted = dtype if dtype in _FLOAT_STORAGE else "bfloat16"
        raise RecipeError(
            f"quantization.bnb_4bit_quant_storage is {storage}, but {engine} shards floating-point weights only"
            f"{' of one dtype' if is_float else ''}: 4-bit weights would stay whole on each device, or fail. Use "
            f"quantization.bnb_4bit_quant_storage={wanted} and model.dtype={wanted}."
        )


def _check_saving(args: TrainingArguments, engine: Engine) -> None:
    # In what form accelerate saves a sharded model.
    default = "SHARDED_STATE_DICT" if engine is Engine.FSDP2 else "FULL_STATE_DICT"
    form = _fsdp_option(args, "state_dict_type", default=default).upper()
    if args.save_only_model and form != "FULL_STATE_DICT":
        raise RecipeError(
            "training.save_only_model is true, but with fsdp_state_dict_type: SHARDED_STATE_DICT checkpoints hold "
            "shards, which are for resuming only. Use FULL_STATE_DICT, or training.save_only_model=false."
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise RecipeError(
            f"training.load_best_model_at_end: {engine} loads the best model from a checkpoint that can be resumed. "
            "Use training.save_only_model=false."
        )


def _check_optimizer(args: TrainingArguments) -> None:
    name = str(getattr(args.optim, "value", args.optim))
    if any(part in name for part in ("8bit", "paged", "bnb")):
        raise RecipeError(
            f"training.optim is {name}, but bitsandbytes' optimizers have no step for weights that FSDP2 shards. Use "
            "training.optim=adamw_torch_fused: FSDP2 shards its state."
        )


def _check_zero3_saving(args: TrainingArguments) -> None:
    plugin: Any = args.deepspeed_plugin
    config = plugin.hf_ds_config
    key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if config.is_zero3() and config.is_false(key):
        raise RecipeError(
            f"DeepSpeed's {key} is false: the Trainer would save a model without weights. Set it to true "
            "(zero3_save_16bit_model: true in accelerate's configuration)."
        )


def check_engine_runs(trainer: Trainer) -> None:
    """Refuse to go on with another engine than the one that was asked for."""
    asked = asked_engine(trainer.args)
    if asked.is_fsdp and not trainer.is_fsdp_enabled:
        raise RecipeError(
            f"{asked} was asked for, but accelerate shards on GPUs only and would go on with "
            f"{'DDP' if trainer.args.world_size > 1 else 'one process'} here without a word. Launch without FSDP on "
            "this machine: recipes/accelerate/ddp_8gpu.yaml, or no --config_file."
        )


def num_parameters(model: Any, *, only_trainable: bool = False) -> int:
    """Count a model's parameters, sharded or not."""
    if any(hasattr(parameter, "ds_numel") for parameter in model.parameters()):
        counted = [p for p in model.parameters() if p.requires_grad or not only_trainable]
        return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in counted)
    # transformers' own count knows that a 4-bit weight holds two numbers in a byte; PEFT's wrapper hands it on.
    num: int = model.num_parameters(only_trainable=only_trainable)
    return num


# --- What came of it. ---


def gathers_in_forward(trainer: Trainer) -> bool:
    """Tell whether a forward needs all processes, because each holds a part of the weights only."""
    model: Any = trainer.model
    return trainer.is_fsdp_enabled or _zero_stage(trainer) == 3 or has_shared(model)


@contextmanager
def ready_to_generate(trainer: Trainer) -> Iterator[Any]:
    """Give the model for `generate()`, which reaches past the outermost module that gathers weights."""
    # Under FSDP the Trainer's model is the sharded one; under DDP and DeepSpeed it is the one inside.
    model, args = trainer.model, trainer.args
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    autocast = torch.autocast(args.device.type, dtype, enabled=dtype is not None)
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False), autocast:
            yield model.module
    else:
        # FSDP2 gathers where `generate` begins (the Trainer sees to it), ZeRO-3 in each module.
        with autocast:
            yield model


def describe_engine(trainer: Trainer) -> str:
    """Return which engine ran on how many processes, and what it sharded."""
    num, model = trainer.args.world_size, trainer.model_wrapped
    if num == 1 and not gathers_in_forward(trainer):
        return str(Engine.NONE)
    stage = _zero_stage(trainer)
    if stage is not None:
        parts = ("nothing", "optimizer state", "optimizer state and gradients", "weights, gradients, optimizer state")
        return f"DeepSpeed ZeRO-{stage} on {num} processes; sharded: {parts[stage]}"
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return f"FSDP1 on {num} processes; {_units(model, FullyShardedDataParallel)}"
    if has_shared(model):
        sharded = sum(parameter.numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
        share = sharded / sum(parameter.numel() for parameter in model.parameters())
        return f"FSDP2 on {num} processes; {_units(model, FSDPModule)}, {share:.0%} of the weights"
    return f"DDP on {num} processes; sharded: nothing, each holds the whole model"


def _units(model: nn.Module, kind: type[object]) -> str:
    return f"sharded: {sum(isinstance(module, kind) for module in model.modules())} modules"


def _zero_stage(trainer: Trainer) -> int | None:
    if not trainer.is_deepspeed_enabled:
        return None
    stage: int = trainer.accelerator.state.deepspeed_plugin.zero_stage
    return stage


def _is_set(name: str) -> bool:
    return says_yes(os.environ.get(name))


def says_yes(written: object) -> bool:
    """Whether a value of accelerate's configuration, or of a variable that it sets, says yes."""
    return str(written).lower() in ("true", "1")
