"""Where the config of a recipe's model comes from: the recipe, a folder, the cache, the hub, or what we know."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from transformers import AutoConfig, PreTrainedConfig

from hf_ckpt.errors import RecipeError
from hf_ckpt.loading.model import holds_weights
from hf_ckpt.recipe.known_configs import known_config
from hf_ckpt.recipe.recipe import Recipe, load_recipe

_SECONDS_TO_ANSWER = 5
# No tokenizer is there yet, and the shape of the layers does not depend on it.
_NO_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@dataclass(frozen=True)
class Found:
    """The config of a recipe's model at its full size.

    Args:
        config: the config.
        source: where it was found, in words.
        section: the `model` section that describes the shape: the recipe's, or that of the recipe which makes its base.
        has_weights: whether `section` also names weights that can be had.
    """

    config: PreTrainedConfig
    source: str
    section: Mapping[str, Any]
    has_weights: bool


def find_config(recipe: Recipe) -> Found:
    """Find the config of a recipe's model, in the quickest place that has it.

    Args:
        recipe: the recipe.

    Raises:
        RecipeError: it is nowhere to be had; says what to do.
    """
    section, by = _section_with_shape(recipe), ""
    if section is not recipe.model:
        by = f" of {Path(recipe.model['base_recipe']).name}"
    if "config" in section:
        return Found(_from_fields(section["config"]), f"model.config{by}", section, has_weights=False)
    name = section["name_or_path"]
    if Path(name).expanduser().is_dir():
        config = _load(section, local_files_only=True)
        return Found(config, f"the folder {name}", section, has_weights=holds_weights(Path(name).expanduser()))
    return _of_hub(section)


def _section_with_shape(recipe: Recipe) -> Mapping[str, Any]:
    path = recipe.model.get("base_recipe")
    if path is None or (Path(recipe.model["name_or_path"]).expanduser() / "config.json").is_file():
        return recipe.model
    return _section_with_shape(load_recipe(path))


def _from_fields(fields: Mapping[str, Any]) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**{**_NO_TOKENS, **fields})
    except (ValueError, TypeError) as error:
        raise RecipeError(f"model.config is not a config of transformers: {error}") from error
    return config


def _of_hub(section: Mapping[str, Any]) -> Found:
    name = section["name_or_path"]
    try:
        return Found(_load(section, local_files_only=True), "the cache of the hub", section, has_weights=True)
    except RecipeError as error:
        refusal = error
    if _is_reachable():
        try:
            return Found(_load(section, local_files_only=False), "the hub", section, has_weights=True)
        except RecipeError as error:
            refusal = error
    if (config := known_config(name)) is not None:
        why = f"{name} is neither cached nor to be had from the hub"
        return Found(config, f"the shapes that hf_ckpt knows ({why})", section, has_weights=False)
    raise refusal


def _load(section: Mapping[str, Any], *, local_files_only: bool) -> PreTrainedConfig:
    # Where nothing is said of remote code, transformers asks on the terminal.
    options = {"trust_remote_code": section.get("trust_remote_code", False), "local_files_only": local_files_only}
    if "revision" in section:
        options["revision"] = section["revision"]
    name = section["name_or_path"]
    folder = Path(name).expanduser()
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder) if folder.is_dir() else name, **options)
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(_advice(name, error)) from error
    return config


def _advice(name: str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if "trust_remote_code" in str(error):
        return (
            f"model.name_or_path: {name} brings code of its own, which would run here. Read it, and set "
            "model.trust_remote_code=true if you trust it."
        )
    return (
        f"model.name_or_path: the config of {name} is not to be had ({reason}). Its weights are not needed here. "
        "Check the name, go online, log in with `hf auth login` if it is gated or private, give the path of a folder "
        "with its config.json, or describe its shape: model.name_or_path=null model.config='{model_type: llama, ...}' "
        "model.tokenizer='{train: {vocab_size: 512}}'."
    )


def _is_reachable() -> bool:
    """Tell whether the hub answers; left to itself, a download tries for half a minute before it gives up."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_SECONDS_TO_ANSWER)
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True
