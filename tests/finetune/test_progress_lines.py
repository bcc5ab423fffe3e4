"""Progress into a pipe: lines now and then, no bars, and how long a run will take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_ckpt.cli.finetune import main
from hf_ckpt.finetune import run_report
from hf_ckpt.finetune.run_report import ProgressLines, duration
from tests import small_recipes

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"


def said(
    monkeypatch: pytest.MonkeyPatch, *, seconds: float, num_steps: int, is_periodic: bool, start: int = 0
) -> list[str]:
    """What is said in a run whose steps take so many seconds."""
    lines: list[str] = []
    clock = [100.0]
    monkeypatch.setattr(run_report.time, "monotonic", lambda: clock[0])
    progress = ProgressLines(lines.append, is_periodic=is_periodic)
    state: Any = SimpleNamespace(global_step=start, max_steps=num_steps)
    ignored: Any = None
    progress.on_train_begin(ignored, state, ignored)
    for step in range(start + 1, num_steps + 1):
        clock[0] += seconds
        state.global_step = step
        progress.on_step_end(ignored, state, ignored)
    clock[0] += 31
    progress.on_prediction_step(ignored, state, ignored)
    return lines


def test_a_line_comes_every_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, seconds=8, num_steps=13, is_periodic=True) == [
        "Step 4 of 13; about 72 s left.",
        "Step 5 of 13; about 64 s left.",
        "Step 9 of 13; about 32 s left.",
        "Step 13 of 13; about 0 s left.",
        "Step 13 of 13; evaluating.",
    ]


def test_how_long_it_takes_is_said_once_after_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, seconds=8, num_steps=1000, is_periodic=False) == ["Step 5 of 1,000; about 2.2 h left."]
    assert said(monkeypatch, seconds=8, num_steps=1000, is_periodic=False, start=900) == [
        "Step 905 of 1,000; about 13 min left."
    ]
    # Not of what is over at once.
    assert said(monkeypatch, seconds=0.1, num_steps=100, is_periodic=False) == []


def test_times_are_said_as_people_do() -> None:
    assert [duration(seconds) for seconds in (3.4, 89, 100, 5000, 6000)] == ["3 s", "89 s", "2 min", "83 min", "1.7 h"]


def test_run_into_a_pipe_writes_no_bars(tmp_path: Path) -> None:
    recipe = small_recipes.write(tmp_path, training={"max_steps": 2})
    # A process of its own: libraries ask whether they may show bars when they are imported.
    done = subprocess.run([sys.executable, SCRIPT, recipe], capture_output=True, text=True, check=True)
    assert "0%|" not in done.stdout + done.stderr
    assert len(done.stderr) < 2000


def test_lines_are_said_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_report, "SECONDS_BETWEEN", 0.0)
    recipe = small_recipes.write(tmp_path, training={"max_steps": 2})
    assert main([str(recipe)]) == 0
    assert "Step 1 of 2; about " in capsys.readouterr().out


def test_bars_that_a_recipe_asks_for_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small_recipes.write(tmp_path, training={"max_steps": 2, "disable_tqdm": False})
    assert main([str(recipe)]) == 0
    assert "%|" in capsys.readouterr().err
