"""`hf-ckpt init` writes a recipe that is whole, or nothing."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import load_recipe
from hf_ckpt.cli.main import main

SHAPE = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_recipe_is_what_the_options_say() -> None:
    words = ["--qlora", "8", "--length", "1024", "--batch", "4", "--data", "rows.jsonl", "--out", "own.yaml"]
    assert main(["init", "Qwen/Qwen3-8B", *words]) == 0
    recipe = load_recipe("own.yaml")
    assert recipe.model["name_or_path"] == "Qwen/Qwen3-8B"
    assert recipe.lora is not None
    assert recipe.lora["r"] == 8
    assert recipe.quantization is not None
    assert (recipe.data["path"], recipe.data["max_length"]) == ("rows.jsonl", 1024)
    assert recipe.training["per_device_train_batch_size"] == 4
    assert recipe.is_auto


def test_what_is_left_out_is_asked_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("full\nsome/model\nown.yaml\n\n"))
    assert main(["init", "--data", "rows.jsonl"]) == 0
    asked = capsys.readouterr().err
    assert "Method (lora, qlora, full) [lora]: Model (id on the hub, or folder): Write the recipe to: Card to " in asked
    recipe = load_recipe("own.yaml")
    assert (recipe.model["name_or_path"], recipe.lora) == ("some/model", None)


def test_recipe_for_a_card_is_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(SHAPE))
    words = ["--full", "--length", "64", "--data", "rows.jsonl", "--device", "rtx4090"]
    assert main(["init", "shape", *words, "--out", "own.yaml"]) == 0
    printed = capsys.readouterr()
    assert "rows.jsonl is not there yet. Each row of it has a `text`, " in printed.err
    assert printed.out.splitlines()[-1].startswith("The planner's choice fits on rtx4090: ")


@pytest.mark.parametrize(
    ("words", "answers", "message"),
    [
        (["some/model"], None, "init needs --data, --out."),
        ([], None, "init needs a model, --data, --out."),
        (["some/model", "--data", "x"], Terminal("lora\n\n"), "nothing was answered, and nothing was written."),
        (["some/model", "--data", "x"], Terminal("ppo\n"), '"ppo" is no method. Choose one of lora, qlora, full.'),
        (["some/model", "--data", "x", "--out", "own"], None, "recipes are YAML files. Write own.yaml."),
        (["some/model", "--data", "x", "--out", "gone/own.yaml"], None, "there is no folder"),
        (["some/model", "--data", "x", "--out", "there.yaml"], None, "this file is there already"),
        (["some/model", "--data", "x"], None, "init needs --out. Give it, or"),
        (["./gone", "--data", "x", "--out", "own.yaml"], None, "./gone: there is no such folder."),
        (["llama7b_lora", "--data", "x", "--out", "own.yaml"], None, "llama7b_lora is a recipe. Name a model"),
    ],
)
def test_wrong_words_write_nothing(
    words: list[str],
    answers: Any,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    monkeypatch.setattr(sys, "stdin", answers or io.StringIO())
    assert main(["init", *words]) == 2
    assert message in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("there.yaml", "mine")]
