"""The trainer that a recipe names, made of its model, data and arguments."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments

from hf_ckpt.errors import RecipeError
from hf_ckpt.loading.model import adapter_config, base_model, build_model
from hf_ckpt.loading.rewards import is_model
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.trainer_kinds import REWARDS

_FEW_PARAMETERS = 1 << 22
"""A model with fewer of them is tiny: its operators take microseconds."""


def use_one_thread_if_tiny(model: torch.nn.Module) -> None:
    """Compute in one thread where more would only wait for each other, unless the user has said how many.

    On a machine that does something else meanwhile, or a container with fewer cores than it sees, they make tiny steps
    slower many times over.
    """
    if "OMP_NUM_THREADS" not in os.environ and sum(each.numel() for each in model.parameters()) < _FEW_PARAMETERS:
        torch.set_num_threads(1)


def build_trained_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Build the model that a recipe's trainer takes: trl puts the adapter on it, so that it knows what is beneath."""
    if recipe.kind.of_trl:
        return base_model(recipe, tokenizer)
    model: Any = build_model(recipe, tokenizer)
    if recipe.kind.scores_rows:
        # The score is that of the last token that is no padding.
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model


def make_trainer(
    recipe: Recipe,
    model: Any,
    args: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    data: Any,
    callbacks: list[TrainerCallback],
    *,
    reward_funcs: Sequence[Any] = (),
    made_of: type[Trainer] | None = None,
    is_empty: bool = False,
) -> Trainer:
    """Make the trainer of a recipe.

    Args:
        recipe: the recipe.
        model: of `build_trained_model`.
        args: the recipe's.
        tokenizer: of the data.
        data: has `train`, `evaluation` and `collator`.
        callbacks: of the trainer.
        reward_funcs: functions and names of models that reward completions, where they are generated.
        made_of: the trainer's class, if not that of transformers or the one that trl has.
        is_empty: whether the model has no weights.

    Raises:
        RecipeError: the trainer refuses model, data or arguments.
    """
    given = {
        "model": model,
        "args": args,
        "train_dataset": data.train,
        "eval_dataset": data.evaluation,
        "data_collator": data.collator,
        "processing_class": tokenizer,
        "callbacks": callbacks,
    }
    if not recipe.kind.of_trl:
        return (made_of or Trainer)(**given)
    given |= {"peft_config": adapter_config(recipe, is_empty=is_empty)}
    if recipe.kind.generates:
        given |= {"reward_funcs": list(reward_funcs)}
        del given["data_collator"]
    if _needs_reference(recipe, args):
        # trl would load it by its name, without what the recipe says of dtype, quantisation and code.
        given["ref_model"] = copy.deepcopy(model)
    kind = made_of or trainer_class(recipe)
    try:
        return kind(**given)
    except (ValueError, NotImplementedError) as error:
        raise RecipeError(f"trainer {recipe.trainer}: trl refuses the recipe: {error}") from error
    except OSError as error:
        models = ", ".join(filter(is_model, recipe.reward_funcs))
        if not models:
            raise
        what = str(error).partition("\n")[0].rstrip(".")
        raise RecipeError(f"{REWARDS}: of the models {models} one cannot be loaded: {what}.") from error


def check_reads_text(recipe: Recipe, command: str) -> None:
    """Refuse a recipe whose batches a command cannot make.

    Raises:
        RecipeError: names what they hold.
    """
    if recipe.kind.generates:
        raise RecipeError(
            f"trainer {recipe.trainer} trains on what it generates, and {command} makes its batches itself. Write a "
            f"recipe without trainer with the same model, adapter and checkpointing, and {command} that."
        )
    if recipe.kind.reads_images:
        raise RecipeError(
            f"data.format = images: {command} makes its batches of text. Write a recipe on text with the same model, "
            f"adapter and checkpointing, and {command} that."
        )


def trainer_class(recipe: Recipe) -> type[Trainer]:
    """Return the class of trl's trainer."""
    import trl

    found: type[Trainer] = getattr(trl, f"{recipe.kind.of_trl}Trainer")
    return found


def _needs_reference(recipe: Recipe, args: Any) -> bool:
    """Whether the trainer asks a second model: with an adapter it asks the model without it."""
    has_one = hasattr(args, "precompute_ref_log_probs")
    return has_one and recipe.adapter_section is None and not args.precompute_ref_log_probs
