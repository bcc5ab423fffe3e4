"""The suite's own rules work: each is broken on purpose in a suite of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def run_suite(tmp_path: Path) -> Callable[..., str]:
    """Run one test file under our conftest and configuration, with further words; return what pytest printed."""

    def run(text: str, *words: str) -> str:
        shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
        shutil.copy(Path(__file__).parents[1] / "pyproject.toml", tmp_path)
        (tmp_path / "test_broken.py").write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False).stdout

    return run


def test_deprecated_use_of_transformers_fails_the_test(run_suite: Callable[..., str]) -> None:
    printed = run_suite(
        "import logging\n"
        "def test_it():\n"
        "    logging.getLogger('transformers.trainer').warning('`old` is deprecated: use `new`')\n"
    )
    assert "transformers reports deprecated use:\ntransformers.trainer: `old` is deprecated: use `new`" in printed
    assert "= 1 failed in" in printed


def test_warning_fails_the_test(run_suite: Callable[..., str]) -> None:
    assert "= 1 failed in" in run_suite("import warnings\ndef test_it():\n    warnings.warn('odd')\n")


def test_environment_is_put_back_after_a_test(run_suite: Callable[..., str]) -> None:
    printed = run_suite(
        "import os\n"
        "def test_first():\n"
        "    os.environ['ACCELERATE_USE_FSDP'] = 'true'\n"
        "def test_second():\n"
        "    assert 'ACCELERATE_USE_FSDP' not in os.environ\n"
    )
    assert "= 2 passed in" in printed


def test_unknown_marker_is_an_error(run_suite: Callable[..., str]) -> None:
    printed = run_suite("import pytest\n@pytest.mark.cor\ndef test_it():\n    pass\n")
    assert "'cor' not found in `markers` configuration option" in printed


def test_warnings_of_unknown_versions_fail_nothing_where_that_is_asked_for(run_suite: Callable[..., str]) -> None:
    text = (
        "import logging, warnings\n"
        "def test_it():\n"
        "    warnings.warn('odd')\n"
        "    logging.getLogger('transformers.trainer').warning('`old` is deprecated: use `new`')\n"
    )
    printed = run_suite(text, "-W", "default")
    assert "UserWarning: odd" in printed
    assert "= 1 passed, 1 warning in" in printed
