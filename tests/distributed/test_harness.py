"""The rules of this folder work: broken on purpose in a suite of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
BROKEN = """
import os
import torch, torch.distributed as dist

def test_both_count():
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones == 2

def test_one_fails():
    assert os.environ["RANK"] == "0", "this is the other one"

def test_both_count_again():
    test_both_count()
"""


@pytest.mark.sweep
def test_failure_of_one_rank_is_told_by_rank_0_and_fails_the_launch(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(BROKEN)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    suite = ["-m", "pytest", "-p", "tests.distributed.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run([*launch, *suite], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.count("test session starts") == 1
    assert "failed on rank 1:" in done.stdout
    assert "AssertionError: this is the other one" in done.stdout
    assert "= 1 failed, 2 passed in" in done.stdout.splitlines()[-1]
