"""`hf-ckpt init` writes a recipe that is whole, or nothing."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import load_recipe
from hf_ckpt.cli.main import main


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
    monkeypatch.setattr(sys, "stdin", Terminal("full\nsome/model\nown.yaml\n"))
    assert main(["init", "--data", "rows.jsonl"]) == 0
    asked = capsys.readouterr().err
    assert "Method (lora, qlora, full) [lora]: Model (id on the hub, or folder): Write the recipe to: " in asked
    recipe = load_recipe("own.yaml")
    assert (recipe.model["name_or_path"], recipe.lora) == ("some/model", None)


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
