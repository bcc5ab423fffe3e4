"""A recipe's optimizer step as `Step`: the largest batch that the run can produce, its precision and its optimizer."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from transformers import TrainingArguments

from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH
from hf_ckpt.simulation.step import Sharding, Step

_OPTIMIZER_FIELDS = (
    *("optim_args", "optim_target_modules", "learning_rate", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon"),
)
_NOT_SIMULATED = {
    "torch_compile": ("false", "a compiled model fuses operators, and keeps other tensors than those of the code"),
    "use_liger_kernel": ("false", "Liger's kernels replace modules when training begins"),
    "label_smoothing_factor": ("0", "label smoothing takes the loss out of the model"),
    "neftune_noise_alpha": ("null", "noise is added to the embeddings"),
}
"""Fields of the `training` section that change what is held: the value without it, and why it is not followed."""


def step_of(recipe: Recipe, sharding: Sharding) -> Step:
    """Return the step of a recipe, with rows of `data.max_length` tokens.

    Args:
        recipe: the recipe.
        sharding: the engine, and how many ranks share.

    Raises:
        RecipeError: the recipe asks for something that is not simulated.
    """
    for name, (without, reason) in _NOT_SIMULATED.items():
        if recipe.training.get(name):
            raise RecipeError(
                f"training.{name} = {recipe.training[name]} cannot be simulated: {reason}. Simulate without it "
                f"(training.{name}={without})."
            )
    batch_size = training_value(recipe, "per_device_train_batch_size")
    length = int(recipe.data.get("max_length", DEFAULT_MAX_LENGTH))
    is_packed = bool(recipe.data.get("packing", False))
    return Step(
        # The examples of a packed micro-batch are one row.
        batch_size=1 if is_packed else batch_size,
        seq_length=length * batch_size if is_packed else length,
        is_padded=not is_packed and batch_size > 1,
        is_packed=is_packed,
        autocast=_autocast(recipe),
        gradient_accumulation_steps=training_value(recipe, "gradient_accumulation_steps"),
        max_grad_norm=float(training_value(recipe, "max_grad_norm")),
        optim=str(getattr(optim := training_value(recipe, "optim"), "value", optim)),
        optim_arguments={name: recipe.training[name] for name in _OPTIMIZER_FIELDS if name in recipe.training},
        sharding=sharding,
        is_proven=(recipe.checkpointing or {}).get("prove") != "off",
    )


def evaluation_step_of(recipe: Recipe, step: Step) -> Step | None:
    """Return a batch of the recipe's evaluation, or None where it does not evaluate.

    Args:
        recipe: the recipe.
        step: its training step.
    """
    training = recipe.training
    is_asked = training.get("eval_strategy", "no") != "no" or training.get("do_eval") or training.get("eval_on_start")
    if not is_asked:
        return None
    rows = training_value(recipe, "per_device_eval_batch_size")
    length = int(recipe.data.get("max_length", DEFAULT_MAX_LENGTH))
    if step.is_packed:
        return replace(step, seq_length=length * rows)
    return replace(step, batch_size=rows, is_padded=rows > 1)


def training_value(recipe: Recipe, name: str) -> Any:
    """Return a field of the `training` section, or the default of `TrainingArguments`."""
    value = recipe.training.get(name)
    return _defaults()[name] if value is None else value


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(TrainingArguments)}


def _autocast(recipe: Recipe) -> str | None:
    return "bfloat16" if recipe.training.get("bf16") else "float16" if recipe.training.get("fp16") else None
