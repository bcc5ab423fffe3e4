"""The optimizer step that `TrainingArguments` describe, as `Step`: of a Trainer about to train, or of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import TrainingArguments

from hf_ckpt.auto.batch_bounds import Batch
from hf_ckpt.distributed import fsdp
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.simulation.step import Sharding, Step

OPTIMIZER_FIELDS = (
    *("optim_args", "optim_target_modules", "learning_rate", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon"),
)
"""Fields of `TrainingArguments` that the optimizer reads."""

NOT_SIMULATED = {
    "torch_compile": ("false", "a compiled model fuses operators, and keeps other tensors than those of the code"),
    "use_liger_kernel": ("false", "Liger's kernels replace modules when training begins"),
    "label_smoothing_factor": ("0", "label smoothing takes the loss out of the model"),
    "neftune_noise_alpha": ("null", "noise is added to the embeddings"),
}
"""Fields of `TrainingArguments` that change what is held: the value without it, and why it is not followed."""

_WHOLE_LAYERS_IN_BACKWARD = ("FULL_SHARD", "HYBRID_SHARD")


def check_can_be_simulated(args: TrainingArguments, model: nn.Module) -> None:
    """Refuse a run that `auto` cannot plan for.

    Raises:
        UnsupportedError: names the argument, or the model's input.
    """
    for name, (without, reason) in NOT_SIMULATED.items():
        if getattr(args, name, None):
            raise UnsupportedError(
                f'Policy "auto" simulates the step, and {name}={getattr(args, name)} cannot be simulated: {reason}. '
                f"Use {name}={without}, or another policy."
            )
    main_input = getattr(model, "main_input_name", "input_ids")
    if main_input != "input_ids":
        raise UnsupportedError(
            f'Policy "auto" simulates models that read token ids, and {type(model).__name__} reads {main_input}. Use '
            "another policy."
        )


def step_of(args: TrainingArguments, batch: Batch, sharding: Sharding, *, is_proven: bool = False) -> Step:
    """Return the step that a Trainer runs; `batch` is its largest micro-batch."""
    optim_arguments = {name: getattr(args, name) for name in OPTIMIZER_FIELDS if hasattr(args, name)}
    return step_from(partial(getattr, args), batch, sharding, optim_arguments, is_proven=is_proven)


def step_from(
    value_of: Callable[[str], Any],
    batch: Batch,
    sharding: Sharding,
    optim_arguments: dict[str, Any],
    *,
    is_proven: bool,
) -> Step:
    """Return the step of so large a micro-batch; `value_of` gives fields of `TrainingArguments` by name."""
    optim = value_of("optim")
    return Step(
        batch_size=batch.rows,
        seq_length=batch.length,
        is_padded=batch.is_padded,
        is_packed=batch.is_packed,
        autocast="bfloat16" if value_of("bf16") else "float16" if value_of("fp16") else None,
        gradient_accumulation_steps=value_of("gradient_accumulation_steps"),
        max_grad_norm=float(value_of("max_grad_norm") or 0.0),
        optim=str(getattr(optim, "value", optim)),
        optim_arguments=optim_arguments,
        sharding=sharding,
        is_proven=is_proven,
    )


def sharding_of(args: TrainingArguments, model: nn.Module) -> Sharding:
    """Return the engine around a model that is about to be trained.

    The model comes as the callback gets it: bare under DDP and DeepSpeed, wrapped under FSDP.
    """
    world_size, plugin = args.world_size, fsdp.accelerate_plugin()
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        reshards = bool(getattr(plugin, "reshard_after_forward", True))
        return Sharding(engine="fsdp2", world_size=world_size, reshards_after_forward=reshards)
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        strategy: Any = getattr(plugin, "sharding_strategy", None)
        reshards = strategy is None or getattr(strategy, "name", str(strategy)) in _WHOLE_LAYERS_IN_BACKWARD
        return Sharding(engine="fsdp1", world_size=world_size, reshards_after_forward=reshards)
    deepspeed: Any = getattr(args, "deepspeed_plugin", None)
    if deepspeed is not None and deepspeed.zero_stage:
        return Sharding(engine=f"zero{deepspeed.zero_stage}", world_size=world_size)
    return Sharding(engine="ddp" if world_size > 1 else "none", world_size=world_size)
