"""The sweep over operators that fail, at a few of them; and it sees what is not brought back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recovery_sweep
from benchmarks.runner import main
from hf_ckpt.recovery.replay_proof import ReplayProof
from hf_ckpt.regions.execution_state import RandomState

pytestmark = pytest.mark.sweep


def swept(out: Path, *more: str) -> dict[str, dict[str, object]]:
    main("benchmarks.recovery_sweep", ["--case", "llama", "--stride", "151", "--out", str(out), *more])
    entries: dict[str, dict[str, object]] = json.loads(out.read_text())["entries"]
    return entries


def test_a_few_operators_are_recovered_from_to_the_bit(tmp_path: Path) -> None:
    entries = swept(tmp_path / "sweep.json")
    assert list(entries) == ["llama/before", "llama/after"]
    for moment in recovery_sweep.MOMENTS:
        found = entries[f"llama/{moment}"]
        assert found["num_tried"] == found["num_failed"] == found["num_recovered"] == 5
        assert found["wrong"] == []


def test_random_numbers_that_are_not_brought_back_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomState, "restore", lambda self: None)
    # Else the recovery's own proof ends the run before.
    monkeypatch.setattr(ReplayProof, "_refuse", lambda self, what: None)
    assert swept(tmp_path / "sweep.json")["llama/after"]["wrong"] != []


def test_the_optimizers_step_goes_on_before_its_first_write_and_ends_after_it(tmp_path: Path) -> None:
    entries = swept(tmp_path / "sweep.json", "--optimizer", "--stride", "24")
    for found in entries.values():
        assert found["wrong"] == []
        assert max(found["went_on"]) < min(found["ended"])
