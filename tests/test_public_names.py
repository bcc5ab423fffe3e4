"""The public names, and where they come from."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

import hf_ckpt
from hf_ckpt.recipe.recipe import load_recipe
from tests import small_recipes

PUBLIC_NAMES = [
    "AlreadyAppliedError",
    "BudgetError",
    "DataError",
    "DiskFullError",
    "HFCkptCallback",
    "HFCkptError",
    "HostMemoryError",
    "OffloadError",
    "OtherProcessError",
    "OutOfMemoryError",
    "Plan",
    "PlanMismatchError",
    "Policy",
    "PolicyError",
    "RecipeError",
    "SavedFilesError",
    "StructureError",
    "UnsupportedError",
    "__version__",
    "apply",
    "find_layers",
    "load_recipe",
    "max_length",
    "plan",
    "remove",
    "simulate",
    "verify",
]

pytestmark = pytest.mark.core


def test_public_names_are_these() -> None:
    assert sorted(hf_ckpt.__all__) == PUBLIC_NAMES


def test_dir_lists_every_public_name() -> None:
    assert set(PUBLIC_NAMES) <= set(dir(hf_ckpt))


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(hf_ckpt, name) is not None


@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if name != "__version__"])
def test_public_name_has_a_docstring(name: str) -> None:
    assert getattr(hf_ckpt, name).__doc__


def test_verify_can_be_called_whatever_was_loaded_before(tmp_path: Path) -> None:
    from hf_ckpt.verify import run

    recipe = load_recipe(small_recipes.write(tmp_path, checkpointing=None))
    for verify in (hf_ckpt.verify, run.verify):
        with pytest.raises(hf_ckpt.RecipeError, match="no checkpointing section"):
            verify(recipe)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hf_ckpt' has no attribute 'aply'"):
        _ = hf_ckpt.aply


@pytest.mark.parametrize("name", [name for name in PUBLIC_NAMES if name.endswith("Error")])
def test_error_is_an_hf_ckpt_error(name: str) -> None:
    assert issubclass(getattr(hf_ckpt, name), hf_ckpt.HFCkptError)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("AlreadyAppliedError", RuntimeError),
        ("DataError", ValueError),
        ("DiskFullError", OSError),
        ("PlanMismatchError", RuntimeError),
        ("PolicyError", ValueError),
        ("RecipeError", ValueError),
        ("SavedFilesError", RuntimeError),
        ("StructureError", ValueError),
        ("UnsupportedError", ValueError),
    ],
)
def test_error_is_also_a_builtin_error(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(hf_ckpt, name), builtin)


def test_version_is_that_of_the_installed_package() -> None:
    assert hf_ckpt.__version__ == metadata.version("hf_ckpt") == "0.1.0"
