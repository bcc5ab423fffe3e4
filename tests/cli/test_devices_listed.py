"""`hf-ckpt devices`, and what `init` and `estimate` do with cards of which not all is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hf_ckpt.cli.estimate import ESTIMATE
from hf_ckpt.cli.main import main
from hf_ckpt.cli.shared_options import HOLDS, WRONG_INPUT
from hf_ckpt.simulation.card_files import LEFT_OUT
from hf_ckpt.simulation.devices import DEVICES

MODEL = "Qwen/Qwen3-0.6B"


def test_every_device_is_listed_with_its_memory_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "-v"]) == HOLDS
    text = capsys.readouterr().out
    words = text.split()
    assert all(name in words and f"{name}:" in words for name in DEVICES)
    assert all(f"Left out: {name}" in text for name in LEFT_OUT)
    assert main(["devices", "--json"]) == HOLDS
    document = json.loads(capsys.readouterr().out)
    assert [device["name"] for device in document["devices"]] == list(DEVICES)
    assert all(device["source"] for device in document["devices"])


def test_memory_alone_has_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", MODEL, "--lora", "--device", "24GiB", "--quick", "--json", "--no-cache"]) == HOLDS
    document = json.loads(capsys.readouterr().out)
    assert {row["seconds"] for row in document["rows"]} == {None}
    assert document["rows"][0]["exactness"]["of_none"] is None
    (device,) = document["devices"]
    assert device["remarks"] == ["its rates are not known: no times, and plans are put in order as on an A100"]


def test_pictures_of_time_are_refused_without_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["estimate", MODEL, "--lora", "--device", "24GiB", "--html", str(tmp_path / "page.html")]
    assert main(asked) == WRONG_INPUT
    assert "--html shows time against memory, and of --device 24GiB no times are known" in capsys.readouterr().err


def test_cards_that_run_a_step_in_other_ways_are_asked_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", MODEL, "--lora", "--device", "rtx4090", "--device", "gb10", "--no-cache"]) == WRONG_INPUT
    assert "Ask for each by itself." in capsys.readouterr().err


@pytest.mark.parametrize(("device", "method", "stored"), [("t4", "--qlora", "float16"), ("v100", "--full", "float32")])
def test_recipe_for_a_card_without_bfloat16_is_in_float16(
    device: str, method: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_ckpt.cli.init.ESTIMATE", replace(ESTIMATE, run=lambda options: HOLDS))
    path = tmp_path / "recipe.yaml"
    assert main(["init", MODEL, method, "--data", "rows.jsonl", "--device", device, "--out", str(path)]) == HOLDS
    recipe = yaml.safe_load(path.read_text())
    assert recipe["model"]["dtype"] == stored
    assert recipe["training"]["fp16"] is True
    assert "bf16" not in recipe["training"]
    if "quantization" in recipe:
        assert recipe["quantization"]["bnb_4bit_compute_dtype"] == "float16"


def test_bfloat16_on_such_a_card_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main(["estimate", MODEL, "--lora", "--device", "t4", "--quick", "--no-cache"])
    text = " ".join(capsys.readouterr().out.split())
    assert "t4: it has no matrix units for bfloat16: float16 products are up to 8 times as fast" in text
