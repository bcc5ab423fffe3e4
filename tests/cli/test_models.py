"""`hf-ckpt models`, and what is said of an id without its owner."""

from __future__ import annotations

import json

import pytest

from hf_ckpt.cli.main import main
from hf_ckpt.cli.shared_options import HOLDS, WRONG_INPUT
from hf_ckpt.loading.config_files import LEFT_OUT, known_configs


def test_every_known_model_is_listed_with_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == HOLDS
    text = capsys.readouterr().out
    assert set(known_configs()) <= set(text.split())
    assert "openai/gpt-oss-20b 20.91 B" in " ".join(text.split())
    assert all(f"Left out: {name}" in text for name in LEFT_OUT)


def test_sources_are_listed_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "-v"]) == HOLDS
    assert "20,914,757,184 parameters: debaditc/kvfit" in " ".join(capsys.readouterr().out.split())
    assert main(["models", "--json"]) == HOLDS
    document = json.loads(capsys.readouterr().out)
    assert [hub_id for model in document["models"] for hub_id in model["ids"]].count("Qwen/Qwen3-8B") == 1


def test_id_without_its_owner_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "qwen3-8b"]) == WRONG_INPUT
    assert capsys.readouterr().err == (
        "qwen3-8b: there is no such recipe, and a model is named with its owner. Write Qwen/Qwen3-8B.\n"
    )
    assert main(["estimate", "qwen3-8b", "--lora"]) == WRONG_INPUT
    assert 'Did you mean "Qwen/Qwen3-8B"?' in capsys.readouterr().err
