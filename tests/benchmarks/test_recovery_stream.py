"""The stream beside auto_find_batch_size and no recovery, for a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recovery_stream
from benchmarks.runner import main

pytestmark = pytest.mark.sweep


def test_steps_lost_and_changed_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The fourth batch has the first long row.
    names = ["escalate", "auto_find_batch_size", "no_recovery", "full_4"]
    monkeypatch.setattr(recovery_stream, "contenders", lambda: names)
    main("benchmarks.recovery_stream", ["--steps", "5", "--out", str(tmp_path / "stream.json")])
    result = json.loads((tmp_path / "stream.json").read_text())
    found = result["contenders"]
    keys = ("steps_lost", "steps_missing", "steps_changed")
    assert {name: tuple(found[name][key] for key in keys) for name in names} == {
        "escalate": (0, 0, 0),
        "auto_find_batch_size": (3, 0, 5),
        "no_recovery": (3, 2, 0),
        "full_4": (0, 0, 0),
    }
    assert found["escalate"]["ckpt/oom_recovered"] == 1
    assert result["best_fixed"] == "full_4"
    assert 1 < found["escalate"]["flops_over_no_limit"] < found["full_4"]["flops_over_no_limit"]
