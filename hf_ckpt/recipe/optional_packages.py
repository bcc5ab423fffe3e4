"""Packages that not every installation has: the extra that brings each, and what to type where one is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hf_ckpt.errors import RecipeError

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


def install_command(*extras: str) -> str:
    """Return the command that installs this package with extras, from where it was installed: a checkout too."""
    names = f"[{','.join(sorted(extras))}]"
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f'pip install "{checkout}{names}"'
    try:
        # Where pip took the package from, which it notes where that is no index.
        text = importlib.metadata.distribution("hf_ckpt").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    found: dict[str, Any] = json.loads(text) if text else {}
    address = found.get("url", "")
    if "vcs_info" in found:
        return f'pip install "hf_ckpt{names} @ {found["vcs_info"]["vcs"]}+{address}"'
    folder = Path(unquote(urlsplit(address).path))
    if address.startswith("file:") and (folder / "pyproject.toml").is_file():
        return f'pip install "{folder}{names}"'
    return f'pip install "hf_ckpt{names}"'
