"""Packages that not every installation has: the extra that brings each, and what to type where one is missing."""

from __future__ import annotations

import importlib.util

from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe.install_command import install_command
from hf_ckpt.recipe.recipe import Recipe

EXTRAS = {
    "datasets": "finetune",
    "bitsandbytes": "qlora",
    "deepspeed": "deepspeed",
    "matplotlib": "plot",
    "gradio": "ui",
}
"""The extra that brings a package. trl's is refused when a recipe is read (`hf_ckpt.recipe.trainer_kinds`)."""
_OF_ALL_THAT_TRAIN = "finetune"


def require(*packages: str) -> None:
    """Refuse to go on without packages, before any is imported, and say how to install those that are missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise RecipeError(missing_text(*missing))


def missing_text(*packages: str) -> str:
    """Return what to say of packages that are not installed."""
    extras = {EXTRAS[package] for package in packages}
    if len(extras) > 1:
        # Those of other ways to train bring it along.
        extras.discard(_OF_ALL_THAT_TRAIN)
    what = "which is not installed" if len(packages) == 1 else "which are not installed"
    return f"hf-ckpt needs {' and '.join(packages)}, {what}. Run: {install_command(*extras)}"


def require_for(recipe: Recipe, *packages: str) -> None:
    """Refuse to go on without `packages`, or without those that the recipe's model is made with."""
    require(*packages, *([] if recipe.quantization is None else ["bitsandbytes"]))
