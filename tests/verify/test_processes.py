"""`hf-ckpt verify --processes 2`, as users start it. The engines: tests/distributed/test_verify_on_two.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt.verify import localize
from tests import small_recipes

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def verified(folder: Path, engine: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of the command in two processes."""
    recipe = small_recipes.write(folder, lora=small_recipes.LORA, checkpointing={"policy": "full"})
    command = [sys.executable, "-m", "hf_ckpt.cli.main", "verify", str(recipe), "--json", "--steps", "2"]
    done = subprocess.run(
        [*command, "--processes", "2", "--engine", engine, *options],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def details(report: dict[str, Any], verdict: str) -> dict[str, str]:
    return {check["name"]: check["detail"] for check in report["checks"] if check["verdict"] == verdict}


@pytest.mark.sweep
def test_fault_of_one_process_fails_all(tmp_path: Path) -> None:
    code, report = verified(tmp_path, "ddp", "--setup", "tests.verify_setups:lose_random_state_in_process_1")
    failed = details(report, "fail")
    assert code == 1
    assert "of 1 forward and backward each, ddp." in details(report, "pass")["run"]
    assert failed["random numbers"].startswith("[process 1] ")
    assert failed["first difference"].startswith("[process 1] ")
    assert localize.RANDOM in failed["first difference"]
