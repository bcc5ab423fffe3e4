"""The model that a recipe describes: loaded or built from a config, quantised, with adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_ckpt.errors import RecipeError
from hf_ckpt.finetune.recipe import Recipe

_LOADING_KEYS = ("revision", "trust_remote_code", "attn_implementation")


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> torch.nn.Module:
    """Build what the recipe's `model`, `quantization` and `lora` sections describe.

    Args:
        recipe: the recipe.
        tokenizer: tells the vocabulary size and special tokens of a model that is built from a config.

    Returns:
        A `PreTrainedModel`, or a `peft.PeftModel` around one.

    Raises:
        RecipeError: the weights cannot be had, or a section does not suit the model.
    """
    model: torch.nn.Module = _base_model(recipe, tokenizer)
    return model if recipe.lora is None else _with_adapter(model, recipe.lora)


def load_base(recipe: Recipe, *, is_quantized: bool) -> PreTrainedModel:
    """Load the weights that `model.name_or_path` names.

    Args:
        recipe: the recipe.
        is_quantized: whether to quantise them as the recipe says.

    Raises:
        RecipeError: the weights cannot be had.
    """
    name = recipe.model["name_or_path"]
    options = {key: recipe.model[key] for key in _LOADING_KEYS if key in recipe.model}
    if is_quantized and recipe.quantization is not None:
        options["quantization_config"] = BitsAndBytesConfig(**recipe.quantization)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            name, dtype=recipe.model.get("dtype", "auto"), use_safetensors=True, **options
        )
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(_loading_advice(name, error)) from error
    return model


def _base_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    if "name_or_path" in recipe.model:
        return load_base(recipe, is_quantized=True)
    options = {key: recipe.model[key] for key in ("attn_implementation",) if key in recipe.model}
    config = _config(recipe.model["config"], tokenizer)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=_dtype(recipe.model.get("dtype", "float32")), **options
        )
    except (ValueError, ImportError) as error:
        raise RecipeError(f"model.config does not make a model: {error}") from error
    return model


def _config(section: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Return the config, with what only the tokenizer knows filled in."""
    known = {"vocab_size": len(tokenizer)} | {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    fields = {**known, **section}
    try:
        config: PreTrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"model.config is not a config of transformers: {error}") from error
    if config.vocab_size < len(tokenizer):
        raise RecipeError(
            f"model.config.vocab_size is {config.vocab_size}, but the tokenizer has {len(tokenizer)} tokens. Raise it, "
            "or leave it out to take the tokenizer's."
        )
    return config


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RecipeError(f'model.dtype is "{name}", which a model built from a config cannot have. Use "float32".')
    return dtype


def _with_adapter(model: PreTrainedModel, section: Mapping[str, Any]) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    try:
        return get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **section}))
    except (ValueError, TypeError) as error:
        raise RecipeError(f"lora does not suit {type(model).__name__}: {error}") from error


def _loading_advice(name: str, error: Exception) -> str:
    """Say what to do about weights that did not load."""
    first_line = str(error).strip().partition("\n")[0]
    if isinstance(error, ImportError):
        return f"model.name_or_path: {name} needs a package that is not installed: {first_line}"
    text = f"{type(error.__cause__).__name__} {error}".lower()
    if "gated" in text or "401" in text or "403" in text:
        return (
            f"model.name_or_path: {name} is gated. Accept its licence on its page, log in with `hf auth login`, or give "
            "the path of a local copy."
        )
    if isinstance(error, ValueError):
        return f"model.name_or_path: {name} cannot be loaded: {first_line}"
    return (
        f"model.name_or_path: {name} is neither a local folder with a model nor to be had from the hub ({first_line}) "
        "Check the name, log in with `hf auth login` if it is gated or private, or give the path of a local copy."
    )
