"""Where the config of a recipe's model lies, found without torch: a folder, the cache of the hub, the hub, or here.

`known_models/` holds the shapes of models that people fine-tune, for where the hub cannot be reached or a model is
gated. Each file says by which ids a model is known, where its shape was read, how many parameters others count and
where, and its config: `model_type`, and what differs from transformers' defaults. `counted_as` is the class that was
counted, where it is not the one that a recipe takes first.
"""

from __future__ import annotations

import functools
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from hf_ckpt.errors import RecipeError
from hf_ckpt.loading.similar_models import suggested
from hf_ckpt.recipe.recipe import Recipe, load_recipe

KNOWN_MODELS = Path(__file__).with_name("known_models")
_SECONDS_TO_ANSWER = 5

LEFT_OUT = {
    "google/gemma-3n with images and sound": "its towers come from timm; google/gemma-3n-E4B-it is its text model",
    "meta-llama/Llama-4-Scout with images": "no forward of it ends in transformers 5.24; the id is its text model",
    "google/gemma-3n-E2B": "no source of its layers' widths was found",
}
"""Models that people name and that are not known here, with why."""


def check_config(recipe: Recipe) -> None:
    """Refuse a recipe whose model's config cannot be had, as far as that can be known without transformers."""
    section = shaping_recipes(recipe)[-1].model
    if "config" in section:
        return
    name = section["name_or_path"]
    folder = Path(name)
    if folder.is_dir():
        path = folder / "config.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RecipeError(f"model.name_or_path: {path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise RecipeError(f"model.name_or_path: {path} is not valid JSON: {error}.") from error
        if not isinstance(fields, Mapping):
            raise RecipeError(f"model.name_or_path: {path} describes no model.")
    elif is_path(name):
        raise RecipeError(f"model.name_or_path: there is no folder {name}. Check the path, or give a hub id.")
    elif in_hub_cache(name, section.get("revision")) is None and name not in known_configs() and not is_reachable():
        raise RecipeError(not_to_be_had(name, "it is not cached, and the hub cannot be reached"))


def may_have_experts(section: Mapping[str, Any]) -> bool:
    """Tell whether a `model` section may name a mixture of experts, by its config as far as it is here."""
    name = section.get("name_or_path")
    if name is None:
        return _counts_experts(section.get("config"))
    folder = Path(name) if Path(name).is_dir() else in_hub_cache(name, section.get("revision"))
    try:
        fields = (
            known_configs().get(name)
            if folder is None
            else json.loads((folder / "config.json").read_text(encoding="utf-8"))
        )
    except (OSError, ValueError):
        return False
    # What cannot be had is refused elsewhere, before anything large is imported.
    return is_reachable() if fields is None else _counts_experts(fields)


def _counts_experts(fields: object) -> bool:
    if not isinstance(fields, Mapping):
        return False
    return any(
        _counts_experts(value) or ("expert" in str(key) and isinstance(value, int) and value > 1)
        for key, value in fields.items()
    )


def not_to_be_had(name: str, reason: str) -> str:
    """Say what to do about a config that was not found."""
    return (
        f"model.name_or_path: the config of {name} was not found ({reason}).{suggested(name, known_configs())} "
        "Check the name, go online, log in with `hf auth login` if it is gated or private, or give the path of a "
        "folder with its config.json; weights are not needed. A recipe may describe the shape instead, in model.config."
    )


def documents() -> list[dict[str, Any]]:
    """Return what every file of `known_models/` says."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(KNOWN_MODELS.glob("*.json"))]


@functools.cache
def known_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the fields of every known config, by id on the hub."""
    return {hub_id: document["config"] for document in documents() for hub_id in document["ids"]}


def source_options(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return what a `model` section says of its source, as options of transformers: of remote code, and `keys`."""
    # Where nothing is said of remote code, transformers asks on the terminal.
    return {"trust_remote_code": False} | {key: section[key] for key in ("trust_remote_code", *keys) if key in section}


def shaping_recipes(recipe: Recipe) -> list[Recipe]:
    """Return the recipe, the one that makes its base, and so on: the last says the model's shape."""
    base = recipe.model.get("base_recipe")
    if base is None or (Path(recipe.model["name_or_path"]) / "config.json").is_file():
        return [recipe]
    return [recipe, *shaping_recipes(load_recipe(base))]


def is_path(name: str) -> bool:
    """Tell a path from a hub id, which has at most one slash."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_dir()


def in_hub_cache(name: str, revision: str | None) -> Path | None:
    """Return the folder of a hub repository that has been fetched, with its config."""
    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
    folder = repository / "snapshots" / (commit or "main")
    return folder if (folder / "config.json").is_file() else None


def is_reachable() -> bool:
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
