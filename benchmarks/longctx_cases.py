"""The case of the longest context: recipes/llama3_8b_qlora_longctx.yaml, on `meta` for predictions and for real.

One micro-batch of one row is an optimizer step here, so that a measured step takes as long as a row does. Weights are
random and made on the device: neither hub nor disk is needed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.quantize import quantize
from hf_ckpt.estimate.step_of_recipe import Subject, subject_of
from hf_ckpt.loading.config_files import known_configs
from hf_ckpt.loading.model import find_config, made, with_empty_adapter
from hf_ckpt.recipe.checkpointing import NO_CHECKPOINTING
from hf_ckpt.recipe.recipe import Recipe, load_recipe

RECIPE = Path(__file__).parents[1] / "recipes" / "llama3_8b_qlora_longctx.yaml"
GIB = 2**30

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Fields of a tiny model of the same kind, for the CPU."""


def recipe_of(*, num_layers: int | None = None, is_small: bool = False, optim: str | None = None) -> Recipe:
    """Return the recipe with the model's config in the place of its name.

    Args:
        num_layers: so many of the model's layers; all of them if left out.
        is_small: a tiny model of the same kind, trained on the CPU.
        optim: another optimizer than the recipe's.
    """
    shorter = ["data.max_length=256"] if is_small else []
    recipe = load_recipe(RECIPE, ["training.gradient_accumulation_steps=1", *shorter])
    config = dict(known_configs()[recipe.model["name_or_path"]])
    config |= SMALL if is_small else {}
    config |= {} if num_layers is None else {"num_hidden_layers": num_layers}
    section = {key: recipe.model[key] for key in ("dtype", "attn_implementation")}
    training = {**recipe.training, "use_cpu": True} if is_small else recipe.training
    training = {**training, "optim": optim} if optim is not None else training
    lora = {**(recipe.lora or {}), "r": 4} if is_small else recipe.lora
    # Of the tiny model everything is small.
    offload = {"to": "cpu", "min_bytes": 0} if is_small else "cpu"
    # Beside libraries that prove nothing.
    checkpointing = (recipe.checkpointing or NO_CHECKPOINTING).with_options(offload=offload, prove="off")
    changed = {"training": training, "lora": lora, "checkpointing": checkpointing}
    return replace(recipe, model={**section, "config": config}, **changed)


def subject(recipe: Recipe) -> Subject:
    """Return the model on `meta` and its step; rows may be longer than it has positions for."""
    return replace(subject_of(recipe), longest=None)


def build(recipe: Recipe, place: torch.device) -> Any:
    """Return the model with random weights in 4 bits and its adapters.

    Args:
        recipe: of `recipe_of`.
        place: where it trains. All weights are there in 16 bits for a moment.
    """
    torch.manual_seed(0)
    with place:
        model: Any = made(find_config(recipe).config, dict(recipe.model), recipe, dtype=torch.bfloat16)
    section = recipe.quantization or {}
    options = {"compress_statistics": "bnb_4bit_use_double_quant", "quant_type": "bnb_4bit_quant_type"}
    quantize(model, {name: section[key] for name, key in options.items()})
    return with_empty_adapter(model, recipe, low_cpu_mem_usage=False).to(place)
