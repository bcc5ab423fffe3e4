"""`hf-ckpt profile` of recipes that name a trainer: the trainer's own loss is what is measured."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_ckpt.errors import RecipeError
from hf_ckpt.estimate import profiled_recipe
from hf_ckpt.estimate.profiled_recipe import measure
from hf_ckpt.estimate.step_of_recipe import random_base, subject_of
from hf_ckpt.measure.calibrate import calibrate
from hf_ckpt.recipe.recipe import load_recipe
from tests import small_recipes

pytest.importorskip("trl", minversion="1.16")

# trl 1.16 uses the names that transformers 5.23 gives up.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning"),
]

CPU = torch.device("cpu")


def recipe_of(folder: Path, trainer: str, **sections: Any) -> Any:
    model = {"config": small_recipes.CONFIG}
    return load_recipe(small_recipes.of_trainer(folder, trainer, **{"model": model, **sections}))


@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto", "reward", "classification"])
def test_every_layer_of_a_trainers_step_is_measured(
    tmp_path: Path, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How long this machine is measured for does not matter here.
    monkeypatch.setattr(profiled_recipe, "calibrate", partial(calibrate, seconds=0.1))
    policy = {"policy": "full"}
    found = measure(
        recipe_of(tmp_path, trainer, checkpointing=policy), lambda line: None, num_steps=1, trace=None, folder=tmp_path
    )
    layers = found.profile.layers
    assert [each.layer_idx for each in layers] == [0, 1]
    assert all(each.forward > 0 and each.recomputation > 0 for each in layers)


@pytest.mark.parametrize("lora", [None, {**small_recipes.LORA, "lora_dropout": 0.0}])
def test_loss_that_is_measured_asks_a_reference(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    from hf_ckpt.estimate.own_loss import running_step

    recipe = recipe_of(tmp_path, "dpo", lora=lora, checkpointing={"policy": "none"})
    subject = subject_of(recipe)
    _, inputs, loss_of = running_step(recipe, random_base(recipe, CPU), subject.step, CPU)
    # Before training the model is its own reference.
    assert loss_of(inputs).item() == pytest.approx(math.log(2))
    # Both texts of each pair, of the longest length.
    assert inputs["input_ids"].shape == (2 * subject.step.batch_size, subject.step.seq_length)


def test_images_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "sft", data={"format": "images"}, model=small_recipes.on_weights(tmp_path))
    with pytest.raises(RecipeError, match=r"data\.format = images: profile makes its batches of text"):
        measure(recipe, print, num_steps=1, trace=None, folder=tmp_path)
