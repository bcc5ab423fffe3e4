"""A model takes the place of a recipe: by its id, its folder or its config.json."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import RecipeError
from hf_ckpt.cli.main import main
from hf_ckpt.cli.model_options import add_model_options, read_recipe_or_model
from hf_ckpt.recipe.recipe import METHODS, Recipe, Training
from tests import small_recipes

KNOWN = "meta-llama/Llama-3.1-8B-Instruct"
SHAPE = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)


def read(*words: str) -> Recipe:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    add_model_options(parser)
    return read_recipe_or_model(parser.parse_intermixed_args(words))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("lora", 16, 2048, 1)),
        (["--lora"], ("lora", 16, 2048, 1)),
        (["--lora", "64", "--length", "4096", "--batch", "2"], ("lora", 64, 4096, 2)),
        (["--qlora", "8"], ("qlora", 8, 2048, 1)),
        (["--full", "--length", "100"], ("full", None, 100, 1)),
    ],
)
def test_options_are_those_of_the_recipe(words: list[str], expected: tuple[Any, ...]) -> None:
    recipe = read(KNOWN, *words)
    method = "full" if recipe.lora is None else "lora" if recipe.quantization is None else "qlora"
    rank = None if recipe.lora is None else recipe.lora["r"]
    rows = recipe.training["per_device_train_batch_size"]
    assert (method, rank, recipe.data["max_length"], rows) == expected
    assert recipe.model["name_or_path"] == KNOWN
    assert recipe.is_auto


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MIXTURE = {
    **SHAPE,
    "model_type": "deepseek_v3",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    ("model", "attention", "experts"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", ATTENTION, "mlp.experts"),
        ("Qwen/Qwen3-30B-A3B", ATTENTION, "mlp.experts"),
        ("openai/gpt-oss-20b", ATTENTION, "mlp.experts"),
        ("zai-org/GLM-4.5-Air", ATTENTION, "mlp.experts"),
        # Its router is a linear layer that PEFT cannot adapt.
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", ATTENTION, "feed_forward.experts"),
        # A mixer of states counts as attention.
        (
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
            ["in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION],
            "mlp.experts",
        ),
        # Neither its first ffn nor its shared experts, which are linear layers.
        ("mixture", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], "mlp.experts"),
    ],
)
@pytest.mark.sweep(keep=3)
def test_of_a_mixture_lora_is_on_the_attention_and_on_experts_if_asked(
    model: str, attention: list[str], experts: str, tmp_path: Path
) -> None:
    (tmp_path / "mixture").mkdir()
    (tmp_path / "mixture" / "config.json").write_text(json.dumps(MIXTURE))
    for words in (["--lora", "8"], ["--qlora", "8"]):
        lora = read(model, *words).lora
        assert lora == {"r": 8, "lora_alpha": 16, "target_modules": attention}
        both = read(model, *words, "--lora-experts").lora
        assert both == {**lora, "target_parameters": [f"{experts}.gate_up_proj", f"{experts}.down_proj"]}
    # What the user names is what it is on.
    assert read(model, "lora.target_modules=[q_proj]").lora["target_modules"] == ["q_proj"]


def test_a_dense_model_keeps_all_linear_layers_and_loads_no_torch_to_find_out() -> None:
    assert read("shape", "--lora").lora["target_modules"] == "all-linear"
    program = (
        "import argparse, sys; from hf_ckpt.cli.model_options import *; "
        "print(recipe_for(Training(), 'shape').lora['target_modules'], 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["all-linear", "False"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["shape", "--lora-experts"],
            "--lora-experts: shape is no mixture with a parameter for all experts of a layer",
        ),
        (["some/model", "--lora-experts"], "or its config was not found"),
        (["shape", "--full", "--lora-experts"], "--lora-experts says what LoRA is on, and --full trains all weights."),
        (["llama7b_lora", "--lora-experts"], "llama7b_lora is a recipe, and --lora-experts says how to train a model"),
    ],
)
def test_experts_that_are_not_there_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        read(*words)
    assert message in str(refused.value)


@pytest.mark.parametrize("method", METHODS)
def test_recipe_of_every_method_is_a_whole_one(method: str) -> None:
    recipe = Training(method=method).recipe_for(KNOWN, ["training.max_steps=3"])
    assert recipe.training["max_steps"] == 3
    assert str(recipe.path) == KNOWN


@pytest.mark.parametrize(
    ("named", "model"),
    [("shape", "shape"), ("shape/config.json", "shape"), ("some/model", "some/model"), ("./shape", "./shape")],
)
def test_model_is_an_id_a_folder_or_a_file(named: str, model: str) -> None:
    assert read(named).model["name_or_path"] == model


def test_bare_word_is_a_model_where_options_say_so() -> None:
    assert read("gpt2", "--full").model["name_or_path"] == "gpt2"
    with pytest.raises(RecipeError, match="there is no file gpt2"):
        read("gpt2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama7b_lora", "--lora", "8"], "llama7b_lora is a recipe, and --lora says how to train a model"),
        (["recipes/llama7b_lora"], 'there is no file recipes/llama7b_lora. Did you mean "llama7b_lora"'),
        (["some/model.yaml"], "there is no file some/model.yaml"),
        (["gone/config.json"], "gone/config.json: a model is described by a file config.json. There is no such file."),
        (["some/model", "training.learning_rat=1"], 'Did you mean "learning_rate"?'),
    ],
)
def test_what_is_neither_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        read(*words)
    assert message in str(refused.value)


def test_recipe_of_ones_own_is_read_as_before(tmp_path: Path) -> None:
    path = small_recipes.write(tmp_path)
    assert read(str(path), "training.seed=7").training["seed"] == 7


@pytest.mark.sweep
def test_answer_for_a_model_is_that_for_its_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "rtx4090", "--quick", "--json"]
    assert main(["estimate", "shape/config.json", "--lora", "4", "--length", "64", "--batch", "2", *words]) == 0
    asked = json.loads(capsys.readouterr().out)
    (tmp_path / "own.yaml").write_text(Training(rank=4, length=64, batch=2).recipe_for("shape").to_yaml())
    assert main(["estimate", "own.yaml", *words]) == 0
    written = json.loads(capsys.readouterr().out)
    assert [row["peak_bytes"] for row in asked["rows"]] == [row["peak_bytes"] for row in written["rows"]]
    assert asked["rows"][0]["peak_bytes"] > 0
