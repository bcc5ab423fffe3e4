"""Each example runs with `--small`, without a network, under the plan that it names."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import Plan

FOLDER = Path(__file__).parents[2] / "examples"
# What the layers of each stack do, in short.
PLANS = {
    "plain_trainer": "layers: 4 none",
    "sft": "layers: 4 ffn",
    "dpo": "layers: 2 full, 2 none",
    "own_loop": None,
    "vision_language": "model.vision_tower.encoder.layers: 3 full; model.language_model.layers: 4 ffn",
}

pytestmark = [
    pytest.mark.slow,
    # trl's trainers tell of what they are about to change.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [name, "--small"])
    try:
        return runpy.run_path(str(FOLDER / f"{name}.py"))
    finally:
        sys.modules.pop("small", None)


def test_every_example_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"small"} == set(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_example_trains_under_its_plan(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in ("sft", "dpo"):
        pytest.importorskip("trl")
    names = run(name, tmp_path, monkeypatch)
    if PLANS[name] is None:
        assert "step 1: loss " in capsys.readouterr().out
        return
    plan = Plan.from_json((tmp_path / "runs" / name / "hf_ckpt_plan.json").read_text(encoding="utf-8"))
    assert plan.describe().replace("base_model.model.model.", "").replace("vision_model.", "") == PLANS[name]
    assert names["trainer"].state.global_step == 2
