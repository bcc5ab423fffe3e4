"""Late events are tried seed by seed, and one result says what became of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.runner import main

pytestmark = pytest.mark.sweep


def test_a_range_of_seeds_is_counted_by_verdict(tmp_path: Path) -> None:
    out = tmp_path / "late_events.json"
    main("benchmarks.late_events", ["--seeds", "5:8", "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["num_tried"] == sum(result["verdicts"].values()) == 3
    assert sum(result["num_tried_by_event"].values()) == 3
    assert result["failed"] == {}


def test_one_seed_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    main("benchmarks.late_events", ["--seed", "5"])
    assert " seed 5: " in capsys.readouterr().out


def test_seeds_that_are_no_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("benchmarks.late_events", ["--seeds", "7:3"])
    assert "--seeds is 7:3." in capsys.readouterr().err
