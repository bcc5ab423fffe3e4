"""Recipes with an `adapter` section: trained, saved, loaded again, predicted and verified."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ckpt import RecipeError, load_recipe
from hf_ckpt.cli.main import main
from hf_ckpt.estimate.step_of_recipe import subject_of
from hf_ckpt.finetune import train
from hf_ckpt.loading.model import build_model, rehearse
from hf_ckpt.upstream import OLD_NAMES
from tests import small_recipes

pytestmark = [
    pytest.mark.slow,
    # PEFT's own words: on adapted norms, and on generation with virtual tokens.
    pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
]

TWO = ["q_proj", "v_proj"]
VIRTUAL = {"num_virtual_tokens": 4}
KINDS: dict[str, dict[str, Any]] = {
    "ia3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "vera": {"r": 4, "target_modules": TWO},
    "oft": {"r": 0, "oft_block_size": 8, "target_modules": TWO},
    "ln_tuning": {},
    "prompt_tuning": VIRTUAL,
    "prefix_tuning": VIRTUAL,
    "p_tuning": {**VIRTUAL, "encoder_hidden_size": 16},
}
POLICIES = {"prefix_tuning": {"policy": "ffn"}}


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "_NUM_SAMPLE_TOKENS", 8)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with its tokenizer, in a folder."""
    folder = tmp_path_factory.mktemp("base")
    train.finetune(load_recipe(small_recipes.write(folder), ["training.max_steps=1"]))
    return folder / "run"


def recipe_of(kind: str, folder: Path, base: Path, **more: Any) -> Path:
    model = {"config": None, "tokenizer": None, "name_or_path": str(base)}
    sections: dict[str, Any] = {"adapter": {"type": kind, **KINDS[kind]}, **more}
    if kind in POLICIES:
        sections["checkpointing"] = POLICIES[kind]
    return small_recipes.write(folder, model=model, **sections)


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_is_trained_and_can_be_loaded_again(kind: str, tmp_path: Path, base: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", OLD_NAMES)
        summary = train.finetune(load_recipe(recipe_of(kind, tmp_path, base)))
    assert len([entry for entry in summary.log_history if "loss" in entry]) == 4
    saved = tmp_path / "run"
    assert load_file(saved / "adapter_model.safetensors")
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    ids = AutoTokenizer.from_pretrained(base)("Water boils", return_tensors="pt").input_ids
    with torch.no_grad():
        without = plain(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(plain, saved).eval()
        logits = adapted(input_ids=ids).logits[:, -ids.shape[1] :]
    assert adapted.active_peft_config.peft_type.value == kind.upper()
    assert not torch.equal(logits, without)


@pytest.mark.parametrize("kind", KINDS)
def test_model_on_meta_has_the_adapter_of_the_real_one(kind: str, tmp_path: Path, base: Path) -> None:
    recipe = load_recipe(recipe_of(kind, tmp_path, base))
    real = build_model(recipe, AutoTokenizer.from_pretrained(base))
    for empty in (subject_of(recipe).model, rehearse(recipe, recipe.model)):
        assert shapes_of(empty) == shapes_of(real)


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[torch.Size, bool]]:
    return {name: (parameter.shape, parameter.requires_grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["ia3", "prompt_tuning", "prefix_tuning"])
@pytest.mark.sweep
def test_commands_take_the_adapter(kind: str, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe_of(kind, tmp_path, base)
    assert main(["inspect", str(path)]) == 0
    assert main(["estimate", str(path), "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "The recipe's plan fits on cpu" in printed
    assert ('full: Layer 0 of base_model.model.layers is set to "full", but PEFT' in printed) == (
        kind == "prefix_tuning"
    )
    assert main(["plan", str(path)]) == 0
    assert "The plan fits on cpu" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["vera", "p_tuning", "prefix_tuning"])
@pytest.mark.sweep(keep=1)
def test_verify_holds_for_the_adapter(
    kind: str, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(recipe_of(kind, tmp_path, base))]) == 0
    out = capsys.readouterr().out
    lines = {line.split("  ")[1]: line for line in out.splitlines() if line.startswith("  ")}
    assert "pass" in lines["adapter file"]
    # A line is as wide as the terminal.
    assert "gives the same logits, bit by bit" in " ".join(out.split())
    assert ("pass" in lines["merge"]) == ("pass" in lines["resume"]) == (kind == "vera")


def test_what_peft_cannot_do_with_virtual_tokens_is_refused(tmp_path: Path, base: Path) -> None:
    recipe = load_recipe(recipe_of("prompt_tuning", tmp_path, base))
    with pytest.raises(RecipeError, match="--merge: PEFT cannot merge an adapter of type prompt_tuning into its"):
        train.finetune(recipe, is_merged=True)
    with pytest.raises(RecipeError, match="--resume: PEFT trains virtual tokens that were saved no further"):
        train.finetune(recipe, is_resumed=True)


def test_an_adapter_that_does_not_suit_the_model_is_refused_before_weights_are_loaded(
    tmp_path: Path, base: Path
) -> None:
    path = recipe_of("vera", tmp_path, base)
    recipe = load_recipe(path, ["adapter.target_modules=[query]"])
    with pytest.raises(RecipeError, match=r"vera does not suit LlamaForCausalLM: .* Its linear layers are "):
        train.finetune(recipe)
