"""A recipe made for GPUs, as it can be tried here: on the CPU where there is no GPU, with nothing left behind.

What it changes is told; what decides over loss and gradients stays the recipe's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from hf_ckpt.recipe.recipe import Recipe

_MOST_ROWS = 2
# Where a run reports, saves, evaluates and goes on from; how it loads data; what is tried out for it.
_LEFT_OUT = (
    *("hub_model_id", "hub_token", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"),
    *("resume_from_checkpoint", "run_name", "logging_dir", "project", "trackio_space_id"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "do_eval", "eval_accumulation_steps"),
    *(
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "save_only_model",
        "auto_find_batch_size",
    ),
    *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    *("warmup_steps", "warmup_ratio", "num_train_epochs", "max_steps"),
)
_NEEDS_GPU = ("tf32", "torch_empty_cache_steps")


def on_this_machine(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return a recipe that can be tried here, and what was changed, one phrase each.

    Args:
        recipe: the recipe as written.
    """
    notes: list[str] = []
    training = {key: value for key, value in recipe.training.items() if key not in _LEFT_OUT}
    training |= {"push_to_hub": False, "report_to": "none", "save_strategy": "no"}
    training["per_device_train_batch_size"] = min(_MOST_ROWS, int(training.get("per_device_train_batch_size", 8)))
    notes.extend(_without_engine(training))
    model = dict(recipe.model)
    if not torch.accelerator.is_available():
        notes.extend(_on_cpu(training))
        notes.extend(_attention_on_cpu(model))
    return replace(recipe, training=training, model=model), notes


def is_distributed() -> bool:
    """Tell whether this is one of several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _without_engine(training: dict[str, Any]) -> Iterator[str]:
    # Its gradients, flags and files are not where a model's are.
    if training.pop("deepspeed", None):
        yield "training.deepspeed left out (DDP and FSDP are what verify runs)"
    if is_distributed():
        return
    training.pop("fsdp_config", None)
    if training.pop("fsdp", None):
        yield "training.fsdp left out on one process (--processes 2 runs it)"


def _on_cpu(training: dict[str, Any]) -> Iterator[str]:
    training["use_cpu"] = True
    for key in _NEEDS_GPU:
        training.pop(key, None)
    if training.get("fp16"):
        training |= {"fp16": False, "bf16": True}
        yield "training.bf16 in place of training.fp16, whose scaled gradients need a GPU"


def _attention_on_cpu(model: dict[str, Any]) -> Iterator[str]:
    wanted = model.get("attn_implementation")
    if wanted not in (None, "eager", "sdpa"):
        model["attn_implementation"] = "sdpa"
        yield f"attention sdpa in place of {wanted}, which needs a GPU"
