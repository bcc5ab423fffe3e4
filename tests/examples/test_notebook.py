"""The notebook runs, cell after cell, small and in float32 on the CPU; what needs a GPU is marked in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "qlora_on_a_free_gpu.ipynb"

pytestmark = pytest.mark.slow


def cells(kind: str) -> list[str]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def test_nothing_was_left_in_the_notebook() -> None:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert [cell["outputs"] for cell in found if cell.get("outputs")] == []
    assert NOTEBOOK.read_text(encoding="utf-8").isascii()


def test_the_first_cell_asserts_versions_and_the_text_says_what_was_not_run() -> None:
    assert "assert Version(" in cells("code")[0]
    assert "The float16 path needs a GPU, and has not been run on one yet." in cells("markdown")[0]


def test_notebook_runs_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_CKPT_NOTEBOOK", "small")
    names: dict[str, Any] = {"__name__": "notebook"}
    for number, text in enumerate(cells("code")):
        exec(compile(text, f"cell {number}", "exec"), names)
    assert names["dtype"] is torch.float32
    assert names["trainer"].state.global_step == 2
    assert names["callback"].prediction.startswith("plain training would need ")
    assert (tmp_path / "runs" / "qlora_on_a_free_gpu" / "adapter" / "adapter_model.safetensors").is_file()
