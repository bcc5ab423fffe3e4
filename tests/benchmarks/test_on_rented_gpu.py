"""The script for a bare machine: what a second call goes on from, also where the first one was killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.on_gpu.identity import ROOT

pytestmark = pytest.mark.sweep

SCRIPT = ROOT / "scripts" / "on_rented_gpu.sh"
# In the place of Python: it notes its words as a result, and may take its time.
STAND_IN = '#!/usr/bin/env bash\necho "$@" > "$OUT/results.json"\n[ -z "${SLOW:-}" ] || sleep 30\n'


@pytest.fixture
def given(tmp_path: Path) -> dict[str, str]:
    """Variables under which the script runs, with its wheels installed."""
    (tmp_path / "state" / "site").mkdir(parents=True)
    (tmp_path / "state" / "site" / ".installed").touch()
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return os.environ | {"STATE": str(tmp_path / "state"), "PYTHON": str(python)}


def call(given: dict[str, str], out: Path, *words: str) -> str:
    done = subprocess.run([SCRIPT, *words], env=given | {"OUT": str(out)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return (out / "results.json").read_text()


def test_a_second_call_goes_on_from_the_first(given: dict[str, str], tmp_path: Path) -> None:
    first = call(given, tmp_path / "first", "100", "--device", "cpu")
    # Eight seconds before the caller's limit, and what it took to come here.
    found = re.fullmatch(rf"-m benchmarks.on_gpu --out {tmp_path}/first --seconds (\d+) --device cpu\n", first)
    assert found is not None
    assert 60 < int(found[1]) <= 92
    second = call(given, tmp_path / "second", "100")
    assert second.endswith(f"--resume {tmp_path}/state/results.json\n")


def test_a_call_that_is_killed_leaves_what_it_had(given: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "state" / "results.json"
    process = subprocess.Popen(
        [SCRIPT, "100"], env=given | {"OUT": str(tmp_path / "first"), "SLOW": "1"}, start_new_session=True
    )
    until = time.monotonic() + 30.0
    while not kept.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert call(given, tmp_path / "second", "100").endswith(f"--resume {kept}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "seconds are missing"), (["100"], "OUT is missing"), (["9.5"], "not '9.5'"), (["soon"], "not 'soon'")],
)
def test_what_is_missing_is_said(words: list[str], message: str, given: dict[str, str]) -> None:
    given.pop("OUT", None)
    done = subprocess.run([SCRIPT, *words], env=given, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr
