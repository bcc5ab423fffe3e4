"""What befalls one process ends the others, with a message that says what it was, and soon."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).with_name("failing_rank.py")
LIMIT_S = 60
"""How long the other process may live on."""

GONE = "Process {victim} has stopped: its process is gone (killed, or out of memory)"
LEFT = "Process {victim} has stopped: it left training before its end; its own output may tell more."
RAISED = "Process {victim} has stopped: ValueError: a layer failed. Process {other} cannot train on without it"
# What the other process says.
ABOUT = {
    "raises": RAISED,
    "raises and lingers": RAISED,
    "leaves and lingers": LEFT,
    "exits while saving": LEFT,
    "is killed": GONE,
    "is killed before training": GONE,
    "is killed in the command": GONE,
    "has another policy": "PlanMismatchError: Another policy was asked for in process 1 than in process 0",
    "has no policy": "OtherProcessError: Process {victim} has not come to making the plan within 5 s of process",
    "cannot be planned": "OtherProcessError: Process {victim} failed while applying the policy: Layer 1 of",
}


@pytest.fixture(scope="module")
def starter() -> Iterator[subprocess.Popen[str]]:
    """A process that starts runs; see its file."""
    with subprocess.Popen(
        [sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


@pytest.mark.parametrize(
    ("fault", "victim"), [*((fault, 1) for fault in ABOUT), ("is killed", 0), ("is killed in the command", 0)]
)
def test_other_process_ends_and_says_why(
    starter: subprocess.Popen[str], tmp_path: Path, fault: str, victim: int
) -> None:
    print(json.dumps([fault, victim, str(tmp_path)]), file=starter.stdin, flush=True)
    ends = json.loads(starter.stdout.readline())
    other = 1 - victim
    said = (tmp_path / f"stderr {other}").read_text()
    assert ABOUT[fault].format(victim=victim, other=other) in said
    assert (ends[victim][0] != 0) is (fault != "exits while saving")
    assert ends[other][0] != 0
    # Whoever waits for a process that lingers is done for before that.
    assert ends[other][1] - ends[victim][1] < (0 if fault.endswith("lingers") else LIMIT_S)


def test_process_that_is_slow_or_stopped_is_left_alone(starter: subprocess.Popen[str], tmp_path: Path) -> None:
    print(json.dumps(["is slow", 1, str(tmp_path)]), file=starter.stdin, flush=True)
    ends = json.loads(starter.stdout.readline())
    said = [(tmp_path / f"stderr {rank}").read_text() for rank in range(2)]
    assert [status for status, _ in ends] == [0, 0], said
    assert "has stopped" not in "".join(said)


def test_torchrun_ends_and_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(SCRIPT), "is killed", "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL) received by PID" in done.stderr
