"""`quantization.prepare_model_for_kbit_training`: what PEFT's function does, in the run and in what is predicted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_ckpt import RecipeError, load_recipe
from hf_ckpt.estimate.step_of_recipe import subject_of
from hf_ckpt.loading.model import build_model
from hf_ckpt.loading.sharding_engine import check_engine_suits
from hf_ckpt.loading.trainer import training_arguments
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.schema import PREPARE_FOR_KBIT
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.simulator import simulate_step
from tests import small_recipes
from tests.following import LENGTH, Run, differences

pytestmark = pytest.mark.slow

RUN = Run(layers=4, dtype="bfloat16", bf16=True, rows="padded", policy="full")
# The Trainer's own few numbers of 4 bytes, as in test_simulated_against_real.py.
TOLERANCE = 1e-3
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    RUN.model().save_pretrained(folder)  # type: ignore[operator]
    return folder


def recipe_of(folder: Path, weights: Path, **quantization: Any) -> Recipe:
    path = small_recipes.write(
        folder,
        model={"config": None, "tokenizer": None, "name_or_path": str(weights), "dtype": "bfloat16"},
        lora={"r": 4, "lora_dropout": 0.1, "target_modules": "all-linear"},
        quantization=quantization,
        data={"max_length": LENGTH},
        checkpointing={"policy": "full", "input_require_grads": False},
    )
    return load_recipe(path)


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def built(recipe: Recipe) -> nn.Module:
    # The tokenizer is for models that are made from a config.
    return build_model(recipe, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [NF4, {"load_in_8bit": True}], ids=["4-bit", "8-bit"])
def test_all_that_is_not_quantised_is_float32_in_both(bits: dict[str, Any], tmp_path: Path, weights: Path) -> None:
    plain, prepared = (recipe_of(tmp_path, weights, **bits, **{PREPARE_FOR_KBIT: is_on}) for is_on in (False, True))
    real, empty = built(prepared), subject_of(prepared).model
    assert dtypes_of(real) == dtypes_of(empty)
    assert torch.bfloat16 not in dtypes_of(real).values()
    assert dtypes_of(built(plain)) == dtypes_of(subject_of(plain).model)
    assert Counter(dtypes_of(built(plain)).values())[torch.bfloat16] == 2 + 2 * RUN.layers + 1
    assert not any(getattr(module, "gradient_checkpointing", False) for module in real.modules())


def test_simulated_peak_follows(tmp_path: Path, weights: Path) -> None:
    peaks = []
    for is_on in (False, True):
        recipe = recipe_of(tmp_path, weights, **NF4, **{PREPARE_FOR_KBIT: is_on})
        followed = follow_trainer(RUN.trainer(tmp_path, built(recipe)))
        simulated = simulate_step(subject_of(recipe).model, "full", RUN.step, CPU)
        off = differences(simulated, followed)
        assert {name: value for name, value in off.items() if abs(value) > TOLERANCE} == {}
        peaks.append(simulated.peak_bytes)
    assert peaks[1] > 1.1 * peaks[0]


def test_fsdp1_is_refused(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, weights, **NF4, bnb_4bit_quant_storage="bfloat16", **{PREPARE_FOR_KBIT: True})
    args = training_arguments(recipe)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(RecipeError, match=f"quantization.{PREPARE_FOR_KBIT} makes norms and the head float32, but"):
        check_engine_suits(recipe, args)
