"""What a command is asked about: a recipe, or a model in its place: `hf-ckpt estimate Qwen/Qwen3-8B --lora 16`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_ckpt.cli.shared_options import count, quiet
from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe import shipped
from hf_ckpt.recipe.optional_packages import require
from hf_ckpt.recipe.recipe import DEFAULT_RANK, METHODS, Recipe, Training, load_recipe

_OPTIONS = (*METHODS, "lora_experts", "length", "batch", "classes", "reward", "images", "pixels")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


_IN_PLACE = "RECIPE may be a model: its id on the hub, its folder, or a config.json"


def add_model_options(
    parser: argparse.ArgumentParser, title: str = "in place of a recipe", text: str | None = _IN_PLACE
) -> None:
    """Add how a model is trained, on what sizes and for what, to the parser of a command."""
    group = parser.add_argument_group(title, text)
    method = group.add_mutually_exclusive_group()
    on_attention = "LoRA of this rank, in a mixture of experts on the attention"
    for name, text in (("lora", on_attention), ("qlora", "LoRA over 4-bit weights")):
        method.add_argument(f"--{name}", type=count, nargs="?", const=DEFAULT_RANK, metavar="R", help=f"{text} (16)")
    method.add_argument("--full", action="store_const", const=True, help="all weights")
    group.add_argument("--lora-experts", action="store_const", const=True, help="LoRA on experts too")
    group.add_argument("--length", type=count, metavar="N", help=f"tokens of a sequence ({Training.length})")
    group.add_argument("--batch", type=count, metavar="N", help=f"sequences of a micro-batch ({Training.batch})")
    task = group.add_mutually_exclusive_group()
    task.add_argument("--classes", type=count, metavar="N", help="give each sequence one of N classes")
    task.add_argument("--reward", action="store_const", const=True, help="give each sequence a score, by pairs")
    task.add_argument("--images", type=count, metavar="N", help="read N images in each sequence")
    group.add_argument("--pixels", type=count, metavar="M", help=f"of the largest image ({Training.pixels})")


def read_recipe(options: argparse.Namespace) -> Recipe:
    """Read the recipe that the command was given."""
    path = Path(options.recipe)
    if not _is_recipe(path) and _is_model(options.recipe) and not _lacks_config(path):
        raise RecipeError(
            f"{options.recipe}: there is no such recipe. If it is a model, write a recipe for it: "
            f"hf-ckpt init {options.recipe} --data rows.jsonl --out my_recipe.yaml"
        )
    return load_recipe(options.recipe, options.overrides)


def read_recipe_or_model(options: argparse.Namespace) -> Recipe:
    """Read the recipe that the command was given, or make one for the model, which is going to be simulated."""
    given = _given(options)
    if not _is_recipe(Path(options.recipe)) and (given or _is_model(options.recipe)):
        recipe = recipe_for(
            training_of(options), _model(options.recipe), options.overrides, with_experts=on_experts(options)
        )
    elif given:
        written = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise RecipeError(
            f"{options.recipe} is a recipe, and {written} says how to train a model that has none. Override the "
            "recipe's own keys instead, such as lora.r=16 data.max_length=2048."
        )
    else:
        _check_owner(options.recipe)
        recipe = load_recipe(options.recipe, options.overrides)
    require_for(recipe)
    return recipe


def require_for(recipe: Recipe, *packages: str) -> None:
    """Refuse to go on without `packages`, or without those that the recipe's model is made with."""
    require(*packages, *([] if recipe.quantization is None else ["bitsandbytes"]))


def _check_owner(name: str) -> None:
    """Refuse the id of a model without its owner, where a recipe was to be named."""
    from hf_ckpt.loading.config_files import known_configs
    from hf_ckpt.loading.similar_models import completed

    if not _is_recipe(Path(name)) and (whole := completed(name, known_configs())) is not None:
        raise RecipeError(f"{name}: there is no such recipe, and a model is named with its owner. Write {whole}.")


def training_of(options: argparse.Namespace) -> Training:
    """Return what the options say of the training."""
    given = _given(options)
    method = next((name for name in METHODS if name in given), Training.method)
    if "pixels" in given and "images" not in given:
        raise RecipeError("--pixels bounds an image, and no images were asked for. Add --images 1, or leave it out.")
    sizes = {name: given[name] for name in ("length", "batch", "classes", "images", "pixels") if name in given}
    rank = given.get(method, DEFAULT_RANK)
    rank = DEFAULT_RANK if rank is True else rank
    return Training(method=method, rank=rank, is_reward="reward" in given, **sizes)


def on_experts(options: argparse.Namespace) -> bool:
    """Return whether LoRA is asked for on experts."""
    given = _given(options)
    if "lora_experts" in given and "full" in given:
        raise RecipeError("--lora-experts says what LoRA is on, and --full trains all weights. Leave one of them out.")
    return "lora_experts" in given


def recipe_for(training: Training, model: str, overrides: Sequence[str] = (), *, with_experts: bool = False) -> Recipe:
    """Return the recipe for a model; of a mixture it names what LoRA is on, with the experts if asked for."""
    from hf_ckpt.loading.config_files import may_have_experts

    # What is wrong otherwise is refused before torch is loaded.
    recipe = training.recipe_for(model, overrides)
    if training.method == "full" or not (with_experts or may_have_experts(recipe.model)):
        return recipe
    with quiet():
        from hf_ckpt.loading.mixture_targets import mixture_targets

        found = mixture_targets(recipe)
    if found is not None:
        experts = found.experts if with_experts else ()
        training = replace(training, targets=found.attention, experts=experts, has_experts=True)
        return training.recipe_for(model, overrides)
    if with_experts:
        raise RecipeError(
            f"--lora-experts: {model} is no mixture with a parameter for all experts of a layer, or its config was "
            "not found. Leave the option out: LoRA is on all linear layers, experts among them."
        )
    return recipe


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}


def _is_recipe(path: Path) -> bool:
    is_file = not path.is_dir() and path.exists() and path.suffix != ".json"
    return is_file or shipped.named(path) is not None


def _is_model(name: str) -> bool:
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return True
    # `recipes/llama.yaml`, or a name in a folder that is here, is a slip in the path of a recipe.
    return _HUB_ID.fullmatch(name) is not None and path.suffix not in (".yaml", ".yml") and not path.parent.is_dir()


def model_of(name: str) -> str:
    """Return the id or the folder of a model for a recipe; what is a recipe itself, or no such folder, is refused."""
    from hf_ckpt.loading.config_files import is_path

    if _is_recipe(Path(name)):
        raise RecipeError(f"{name} is a recipe. Name a model: its id on the hub, or its folder.")
    model = _model(name)
    if is_path(model) and not Path(model).expanduser().is_dir():
        raise RecipeError(f"{name}: there is no such folder. Check the path, or give the model's id on the hub.")
    return model


def _lacks_config(path: Path) -> bool:
    return path.is_dir() and not (path / "config.json").is_file()


def _model(name: str) -> str:
    path = Path(name)
    if _lacks_config(path):
        raise RecipeError(f"{name}: this folder holds no config.json, which describes a model.")
    if path.suffix != ".json":
        return name
    if path.name != "config.json" or not path.is_file():
        raise RecipeError(f"{name}: a model is described by a file config.json. There is no such file.")
    return str(path.parent)
