"""A recipe's file as YAML: what can be read, and which value is read as what."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hf_ckpt.recipe import document
from hf_ckpt.recipe.recipe import load_recipe
from tests.recipe.recipe_texts import mistakes_in, text_of, training, write

pytestmark = pytest.mark.core


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="libyaml is not installed")
@pytest.mark.parametrize("text", ["# a comment\n", "\n", "%FOO bar\n", "x\n"])
def test_long_text_is_read_by_libyaml_alone(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "_Reader", None)
    path = write(tmp_path, text * 200_000)
    assert len(mistakes_in(path)) == 1


@pytest.mark.parametrize("name", ["x" * 5_000, "null\0.yaml"])
def test_name_that_no_file_can_have_is_one_message(name: str) -> None:
    (line,) = mistakes_in(Path(name))
    assert "no file can be read by this name: " in line
    assert len(line) < 400


def test_value_without_content_is_not_called_missing_too(tmp_path: Path) -> None:
    path = write(tmp_path, "model:\ndata: {path: }\ntraining: {output_dir: x}\nlora:\n")
    assert mistakes_in(path) == [
        f"{path}:1: model: has no value. Write null if there is to be none.",
        f"{path}:2: data.path: has no value. Write null if there is to be none.",
        f"{path}:4: lora: has no value. Write null if there is to be none.",
    ]


def test_missing_file_names_the_nearest_recipe(tmp_path: Path) -> None:
    write(tmp_path, text_of(), "llama.yaml")
    path = tmp_path / "lama.yaml"
    assert mistakes_in(path) == [f'{path}: there is no file {path}. Did you mean "llama.yaml"?']


def test_folder_is_no_recipe(tmp_path: Path) -> None:
    (line,) = mistakes_in(tmp_path)
    assert line.startswith(f"{tmp_path}: a recipe is a YAML file in UTF-8, and this cannot be read:")


def test_text_has_to_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes("model: {name_or_path: caf\u00e9}".encode("latin-1"))
    (line,) = mistakes_in(path)
    assert "UTF-8" in line


# --- Values. ---


@pytest.mark.parametrize(
    ("written", "value"),
    [
        # As YAML 1.2 has it, and not as YAML 1.1.
        ("no", "no"),
        ("off", "off"),
        ("y", "y"),
        ("8:24", "8:24"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0x1F", "0x1F"),
        ("1e-4", 1e-4),
        ("2E5", 2e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("010", 10),
        ("-3", -3),
        ("true", True),
        ("False", False),
        ("~", None),
        ("'1e-4'", "1e-4"),
        ("!!str 5", "5"),
        ("[1, [a, {b: null}]]", [1, ["a", {"b": None}]]),
    ],
)
def test_yaml_value_is_read_as(written: str, value: object, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, training(f"lr_scheduler_kwargs: {{x: {written}}}")))
    read = recipe.training["lr_scheduler_kwargs"]["x"]
    assert (type(read), read) == (type(value), value)


def test_word_no_turns_a_strategy_off(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, training("save_strategy: no"))).training["save_strategy"] == "no"


def test_anchors_repeat_values(tmp_path: Path) -> None:
    text = text_of(checkpointing='{policy: [&rule {mode: full, layers: "0:2"}, *rule]}')
    first, second = load_recipe(write(tmp_path, text)).checkpointing["policy"]
    assert first == second == {"mode": "full", "layers": "0:2"}
