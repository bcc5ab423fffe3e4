"""Adapters on the experts of a mixture: trained by a recipe, saved, loaded again, merged and verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ckpt import RecipeError, load_recipe
from hf_ckpt.cli.main import main
from hf_ckpt.finetune import train
from hf_ckpt.loading.model import rehearse
from tests import small_recipes

pytestmark = pytest.mark.slow

_SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**small_recipes.MIXTURE, "num_hidden_layers": 4},
    # Its experts lie the other way round, and have biases.
    "gpt_oss": {"model_type": "gpt_oss", **_SIZES, "intermediate_size": 48, "head_dim": 16, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "sliding_window": 16},
    # PEFT turns names of these two into others.
    "mixtral": {"model_type": "mixtral", **_SIZES, "intermediate_size": 48, "num_local_experts": 4},
    "olmoe": {"model_type": "olmoe", **_SIZES, "intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS}
MERGED = 2.0**-13
"""Relative: as `hf-ckpt verify` allows. Each weight is rounded to float32 once more."""


def recipe_of(folder: Path, base: Path, **sections: Any) -> Path:
    return small_recipes.write(folder, **{"model": small_recipes.on_weights(base), "lora": LORA, **sections})


def logits_of(model: torch.nn.Module, base: Path) -> Tensor:
    ids = AutoTokenizer.from_pretrained(base)("Water boils at a hundred", return_tensors="pt").input_ids
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=ids).logits
    return found


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.sweep(keep=2)
def test_what_was_trained_is_what_is_loaded_and_what_is_merged(
    name: str, tmp_path: Path, bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, trained = bases[name], dict[str, Any]()
    make = train.make_trainer

    def kept(*args: Any, **kwargs: Any) -> Any:
        trainer = make(*args, **kwargs)
        # The sample is written in evaluation mode; a summary's further steps would train on.
        monkeypatch.setattr(train, "measured_peak", lambda *args: None)
        trained["model"] = trainer.model
        return trainer

    monkeypatch.setattr(train, "make_trainer", kept)
    summary = train.finetune(load_recipe(recipe_of(tmp_path, base)), is_merged=True)
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "run")
    saved = load_file(tmp_path / "run" / "adapter_model.safetensors")
    # Of four layers: two matrices for each of four modules and parameters.
    assert len(saved) == 32
    wanted = {key: tensor.clone() for key, tensor in trained["model"].named_parameters() if tensor.requires_grad}
    assert sorted(map(tuple, (each.shape for each in saved.values()))) == sorted(
        map(tuple, (each.shape for each in wanted.values()))
    )
    expected = logits_of(trained["model"], base)
    assert torch.equal(logits_of(reloaded, base), expected)
    with trained["model"].disable_adapter():
        assert not torch.allclose(logits_of(trained["model"], base), expected, rtol=1e-2)
    assert summary.merged is not None
    merged = logits_of(AutoModelForCausalLM.from_pretrained(summary.merged), base)
    assert float((merged - expected).abs().max() / expected.abs().max()) <= MERGED


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.sweep(keep=1)
def test_verify_holds(name: str, tmp_path: Path, bases: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(recipe_of(tmp_path, bases[name]))]) == 0
    lines = {line.split("  ")[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert all("pass" in lines[check] for check in ("adapter file", "reload", "merge", "resume", "gradients"))


@pytest.mark.sweep
def test_verify_holds_where_layers_are_left_out_and_parameters_named_by_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = {
        **LORA,
        "target_parameters": [f"layers.5.{EXPERTS[0]}", f"layers.6.{EXPERTS[1]}"],
        "rank_pattern": {f"layers.6.{EXPERTS[1]}": 2},
    }
    model = {"config": {**MIXTURES["qwen3_moe"], "num_hidden_layers": 8}}
    path = small_recipes.write(tmp_path, model=model, lora=lora, checkpointing={"policy": "full"})
    assert main(["verify", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 of 8 layers: 0, 1 for 6 layers (full); 5 for 5 (full); 6 for 6 (full)" in said


REFUSED = {
    "no such parameter": (
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_porj"]},
        "lora.target_parameters: mlp.experts.down_porj is no parameter of Qwen3MoeForCausalLM. Its experts are "
        "mlp.experts.gate_up_proj, mlp.experts.down_proj.",
    ),
    "no such module": (
        {"target_modules": ["query"]},
        "lora.target_modules: Qwen3MoeForCausalLM has no module of these",
    ),
    "no such pattern": (
        {"rank_pattern": {"up_proj": 2}},
        "lora.rank_pattern: up_proj matches nothing that the adapter",
    ),
    "a vector": ({"target_parameters": ["input_layernorm.weight"]}, "1 dimensional Parameter, but only 2d and 3d"),
    "module and parameter": ({"target_parameters": ["q_proj.weight"]}, "also targeted with `target_modules`"),
}


@pytest.mark.parametrize(("change", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_matches_nothing_is_refused_before_weights_are_loaded(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = small_recipes.write(tmp_path, model={"config": MIXTURES["qwen3_moe"]}, lora={**LORA, **change})
    recipe = load_recipe(path)
    with pytest.raises(RecipeError) as refused:
        rehearse(recipe, recipe.model)
    assert said in str(refused.value)


def test_a_dense_model_says_that_it_has_no_experts(tmp_path: Path) -> None:
    recipe = load_recipe(small_recipes.write(tmp_path, lora=LORA))
    with pytest.raises(RecipeError, match="It has no experts that are one parameter"):
        rehearse(recipe, recipe.model)


def test_patterns_that_peft_adds_itself_are_not_warned_of(tmp_path: Path) -> None:
    lora = {"r": 4, "target_modules": "all-linear"}
    recipe = load_recipe(small_recipes.write(tmp_path, model={"config": MIXTURES["mixtral"]}, lora=lora))
    # A warning is an error here.
    model = rehearse(recipe, recipe.model)
    assert any("experts.base_layer.lora_A" in name for name, _ in model.named_parameters())


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("trainer", ["dpo"])
def test_trl_and_merging_warn_of_nothing(trainer: str, tmp_path: Path, bases: dict[str, Path]) -> None:
    # PEFT adds patterns of its own for the experts that it makes of `all-linear`.
    lora = {"r": 4, "target_modules": "all-linear"}
    model = small_recipes.on_weights(bases["mixtral"])
    recipe = small_recipes.of_trainer(tmp_path, trainer, lora=lora, model=model, checkpointing=None)
    summary = train.finetune(load_recipe(recipe, ["training.max_steps=1"]), is_merged=True)
    assert summary.merged is not None
    assert (summary.merged / "config.json").is_file()
