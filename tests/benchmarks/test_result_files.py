"""Measurements that are stopped and gone on with, and the processes that they start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import children, result_files
from benchmarks.journal import Entry, Journal, OutOfTimeError

ROOT = Path(__file__).parents[2]


class Measurement:
    """Three entries, and how often each was made."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.fails_at: dict[str, Exception] = {}

    def collect(self, journal: Journal) -> None:
        for key in ("a", "b", "c"):
            journal.entry(key, lambda key=key: self._one(key))

    def _one(self, key: str) -> Entry:
        self.made.append(key)
        if key in self.fails_at:
            raise self.fails_at[key]
        return {"figure": len(self.made)}

    def assemble(self, journal: Journal) -> dict[str, Any]:
        return {key: journal.entries[key].get("figure") for key in ("a", "b", "c") if key in journal.entries}


def carry_out(measurement: Measurement, path: Path) -> dict[str, Any]:
    result = result_files.carry_out(path, measurement.collect, measurement.assemble)
    assert json.loads(path.read_text()) == result
    return {key: value for key, value in result.items() if key != "environment"}


def test_stopped_measurement_is_gone_on_with_and_leaves_only_its_result(tmp_path: Path) -> None:
    path, measurement = tmp_path / "result.json", Measurement()
    measurement.fails_at = {"b": OutOfTimeError("no time")}
    assert carry_out(measurement, path) == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 2
    measurement.fails_at = {}
    assert carry_out(measurement, path) == {"a": 1, "b": 3, "c": 4}
    assert measurement.made == ["a", "b", "b", "c"]
    assert list(tmp_path.iterdir()) == [path]


def test_killed_measurement_keeps_what_it_has_found(tmp_path: Path) -> None:
    path, measurement = tmp_path / "result.json", Measurement()
    measurement.fails_at = {"c": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        carry_out(measurement, path)
    measurement.fails_at = {}
    assert carry_out(measurement, path) == {"a": 1, "b": 2, "c": 4}


def test_what_failed_is_tried_again(tmp_path: Path) -> None:
    path, measurement = tmp_path / "result.json", Measurement()
    measurement.fails_at = {"a": RuntimeError("a stream was lost"), "c": OutOfTimeError("no time")}
    assert carry_out(measurement, path) == {"a": None, "b": 2}
    measurement.fails_at = {}
    assert carry_out(measurement, path) == {"a": 4, "b": 2, "c": 5}


def test_what_another_commit_left_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, measurement = tmp_path / "result.json", Measurement()
    measurement.fails_at = {"c": OutOfTimeError("no time")}
    carry_out(measurement, path)
    monkeypatch.setattr(result_files, "describe", lambda: {"commit": "another"})
    measurement.fails_at = {}
    assert carry_out(measurement, path) == {"a": 4, "b": 5, "c": 6}


# --- Processes. ---

PARENT = """
import sys
from benchmarks import children
child = children.start([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for counts as ended."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_child_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not is_gone(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert eventually(lambda: is_gone(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_end_kills_what_the_child_has_started_too() -> None:
    words = ["sh", "-c", "sleep 60 & echo $!; wait"]
    process = children.start(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    children.end(process)
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    assert eventually(lambda: is_gone(pid))
    # Again: nothing is left to end.
    children.end(process)
