"""Recipes that name a trainer: trl's own loss, or that of a classifier, is what is compared with and without a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe.recipe import load_recipe
from hf_ckpt.regions.execution_state import RandomState
from hf_ckpt.verify.report import Report
from hf_ckpt.verify.run import verify
from tests import small_recipes
from tests.planted import random_state_left
from tests.verifying import ALL, OF_ADAPTER, OF_FULL, failed, of

pytest.importorskip("trl", minversion="1.16")

pytestmark = pytest.mark.slow


def report(folder: Path, trainer: str, num_steps: int = 2, **sections: Any) -> Report:
    """Verify a small recipe of a trainer."""
    recipe = load_recipe(small_recipes.of_trainer(folder, trainer, **sections))
    return verify(recipe, num_steps=num_steps, say=lambda line: None)


@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto", "reward", "classification"])
def test_trainer_with_an_adapter_is_the_same_with_a_plan(tmp_path: Path, trainer: str) -> None:
    # Layers 0 and 1 whole, the ffn of layer 2, nothing of layer 3.
    found = report(tmp_path, trainer)
    assert failed(found) == {}
    assert {check.name for check in found.checks} == ALL | OF_ADAPTER
    # A matrix A and a B in each of seven linears, and a head that scores.
    assert of(found, "trainable parameters").detail.startswith(
        f"{57 if trainer in ('reward', 'classification') else 56} trainable parameters got gradients"
    )
    assert of(found, "forward counts").detail.startswith("3 of 4 layers ran again in backward")


def test_reference_is_a_second_model_in_full_fine_tuning(tmp_path: Path) -> None:
    found = report(tmp_path, "dpo", lora=None, checkpointing={"policy": "full", "every_n_layers": 2})
    assert failed(found) == {}
    assert {check.name for check in found.checks} == ALL | OF_FULL


def test_fault_in_a_trainers_own_loss_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomState, "brought_back", random_state_left)
    found = failed(report(tmp_path, "dpo", num_steps=1, checkpointing={"policy": "full"}))
    assert "gradients" in found
    assert "random state was not preserved" in found["first difference"]


def test_generation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="trainer grpo trains on what it generates, and verify makes its batches"):
        report(tmp_path, "grpo")


def test_images_are_refused(tmp_path: Path) -> None:
    model = small_recipes.on_weights(tmp_path)
    path = small_recipes.of_trainer(tmp_path, "sft", data={"format": "images"}, model=model)
    with pytest.raises(RecipeError, match=r"data\.format = images: verify makes its batches of text"):
        verify(load_recipe(path))
