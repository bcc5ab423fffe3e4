"""The model that a recipe describes: loaded or built from a config, quantised, with adapters.

`rehearse` builds it without weights first, so that what does not suit it is refused before anything large is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_ckpt.errors import RecipeError
from hf_ckpt.patch.apply import apply
from hf_ckpt.policy.allowances import ALLOWANCES
from hf_ckpt.policy.modifiers import parse_offload
from hf_ckpt.policy.policy import AUTO, Mode
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.schema import OF_AUTO
from hf_ckpt.regions.offload.files import check_path

# What says where adapters go. The rest, such as initial values made from the weights, needs the weights.
_ADAPTER_SHAPE = (
    *("task_type", "r", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("layer_replication", "modules_to_save", "target_parameters", "rank_pattern", "bias"),
)
# What the callback takes and `apply` does not.
_CALLBACK_ONLY = ("input_require_grads", "on_mismatch", "strict_resume", *OF_AUTO)


def rehearse(recipe: Recipe, shape: Mapping[str, Any]) -> torch.nn.Module:
    """Build the model on the `meta` device, and see that adapters and policy suit it.

    Takes a second; loading large weights, or training a base, takes minutes.

    Args:
        recipe: the recipe.
        shape: the `model` section that tells the model's shape: the recipe's, or that of the recipe which makes its
            weights.

    Returns:
        The model on `meta`, with adapters and without a plan.

    Raises:
        RecipeError: the config cannot be had, or a section does not suit the model.
        PolicyError: the policy does not suit the model.
        StructureError: the layers cannot be found.
        UnsupportedError: a mode could not be exact on a layer.
    """
    with torch.device("meta"):
        model: torch.nn.Module = made(_config_of(shape), shape)
    if recipe.lora is not None:
        section = {key: recipe.lora[key] for key in _ADAPTER_SHAPE if key in recipe.lora}
        model = with_adapter(model, section, low_cpu_mem_usage=True)
    if recipe.checkpointing is not None:
        _check_folders(recipe.checkpointing)
        section = {key: value for key, value in recipe.checkpointing.items() if key not in _CALLBACK_ONLY}
        if section["policy"] == AUTO:
            # It is planned when the step is known; what any plan would be refused for is refused now.
            section = {key: value for key, value in section.items() if key not in ALLOWANCES}
            section["policy"] = Mode.NONE.value
        apply(model, **section).remove()
    return model


def _check_folders(checkpointing: Mapping[str, Any]) -> None:
    """Refuse a folder to offload to that cannot be written, of the policy or of one of its rules."""
    policy = checkpointing["policy"]
    rules = policy if isinstance(policy, list) else [policy]
    written = [rule.get("offload") for rule in (checkpointing, *rules) if isinstance(rule, Mapping)]
    for offload in filter(None, map(parse_offload, written)):
        if offload.path is not None:
            check_path(offload.path)


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
    return model if recipe.lora is None else with_adapter(model, recipe.lora)


def load_base(recipe: Recipe, *, is_quantized: bool) -> PreTrainedModel:
    """Load the weights that `model.name_or_path` names.

    Args:
        recipe: the recipe.
        is_quantized: whether to quantise them as the recipe says.

    Raises:
        RecipeError: the weights cannot be had.
    """
    name = recipe.model["name_or_path"]
    options = _options(recipe.model, "revision", "attn_implementation")
    if is_quantized and recipe.quantization is not None:
        options["quantization_config"] = BitsAndBytesConfig(**recipe.quantization)  # type: ignore[no-untyped-call]
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            name, dtype=recipe.model.get("dtype", "auto"), use_safetensors=True, **options
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise RecipeError(_loading_advice(name, error)) from error
    return model


def holds_weights(folder: Path) -> bool:
    """Tell whether a folder holds a model that can be loaded."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _options(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    # Where nothing is said of remote code, transformers asks on the terminal.
    return {"trust_remote_code": False} | {key: section[key] for key in ("trust_remote_code", *keys) if key in section}


def _config_of(section: Mapping[str, Any]) -> PreTrainedConfig:
    if "config" in section:
        # No tokenizer is there yet, and the shape of the layers does not depend on it.
        return _config(section["config"], {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0})
    name = section["name_or_path"]
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, **_options(section, "revision"))
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(_loading_advice(name, error)) from error
    return config


def _base_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    if "name_or_path" in recipe.model:
        return load_base(recipe, is_quantized=True)
    config = _config(recipe.model["config"], _told_by(tokenizer))
    vocab_size: int = config.get_text_config().vocab_size
    if vocab_size < len(tokenizer):
        raise RecipeError(
            f"model.config.vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} tokens. Raise it, "
            "or leave it out to take the tokenizer's."
        )
    return made(config, recipe.model, dtype=_dtype(recipe.model.get("dtype", "float32")))


def made(config: PreTrainedConfig, section: Mapping[str, Any], **options: Any) -> PreTrainedModel:
    """Return a model with new weights, built as a `model` section says."""
    options |= _options(section, "attn_implementation")
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)  # type: ignore[no-untyped-call]
    except (ValueError, ImportError) as error:
        raise RecipeError(f"model: no causal language model can be made: {error}") from error
    return model


def _told_by(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {"vocab_size": len(tokenizer), **special}


def _config(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> PreTrainedConfig:
    fields = {**defaults, **section}
    try:
        config: PreTrainedConfig = AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"model.config is not a config of transformers: {error}") from error
    return config


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RecipeError(f'model.dtype is "{name}", which a model built from a config cannot have. Use "float32".')
    return dtype


def with_adapter(model: torch.nn.Module, section: Mapping[str, Any], **options: Any) -> torch.nn.Module:
    """Return a model with the adapters that a `lora` section describes.

    Args:
        model: the model, which is changed in place.
        section: fields of `peft.LoraConfig`.
        options: of `peft.get_peft_model`.

    Raises:
        RecipeError: the section does not suit the model.
    """
    from peft import LoraConfig, get_peft_model

    try:
        config = LoraConfig(**{"task_type": "CAUSAL_LM", **section})
        adapted: torch.nn.Module = get_peft_model(cast(PreTrainedModel, model), config, **options)
    except (ValueError, TypeError, ImportError) as error:
        linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        raise RecipeError(
            f"lora does not suit {type(model).__name__}: {error} Its linear layers are {', '.join(sorted(linear))}."
        ) from error
    return adapted


def _loading_advice(name: str, error: Exception) -> str:
    """Say what to do about weights that did not load."""
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, ImportError):
        return f"model.name_or_path: {name} needs a package that is not installed: {reason}."
    if "trust_remote_code" in str(error):
        return (
            f"model.name_or_path: {name} brings code of its own, which would run here. Read it, and set "
            "model.trust_remote_code=true if you trust it."
        )
    if _is_path(name):
        there = Path(name).expanduser().is_dir()
        what = f"{name} cannot be loaded: {reason}" if there else f"there is no folder {name}"
        return f"model.name_or_path: {what}. Check the path, or give a hub id."
    text = f"{type(error.__cause__).__name__} {reason}".lower()
    if "gated" in text or "401" in text or "403" in text:
        return (
            f"model.name_or_path: {name} is gated. Accept its licence on its page, log in with `hf auth login`, or "
            "give the path of a local copy."
        )
    if isinstance(error, ValueError):
        return f"model.name_or_path: {name} cannot be loaded: {reason}."
    return (
        f"model.name_or_path: {name} is neither a local folder with a model nor to be had from the hub ({reason}). "
        "Check the name, log in with `hf auth login` if it is gated or private, or give the path of a local copy."
    )


def _is_path(name: str) -> bool:
    """Tell a path from a hub id, which has at most one slash."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()
