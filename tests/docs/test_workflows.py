"""The files of a project that others can join: workflows that name what is there, and a README of one page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_ckpt

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def commands(path: Path) -> list[str]:
    return [step["run"] for job in jobs(path).values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_files_that_a_workflow_names_exist(path: Path) -> None:
    words = [word for command in commands(path) for word in command.split()]
    named = [word for word in words if re.fullmatch(r"(tests|constraints|scripts)[\w/.-]*", word)]
    made = [word for word, before in zip(words[1:], words, strict=False) if before == "make" and word[0].islower()]
    assert named + made
    assert [name for name in named if not (ROOT / name).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [
        target for target in made if not re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", makefile, re.MULTILINE)
    ] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_ends(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        assert "timeout-minutes" in job or name == "publish"


def test_linux_runs_what_ci_runs() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    made = [re.search(r"\bmake ([\w -]+)", line) for line in lines if ".installed" not in line]
    asked = [target for found in made if found for target in found[1].split()]
    linux = jobs(ROOT / ".github" / "workflows" / "tests.yml")["linux"]
    assert sorted(linux["strategy"]["matrix"]["target"]) == sorted(asked)


def test_a_release_is_held_against_the_version() -> None:
    pattern = 's/^__version__ = "\\(.*\\)"$/\\1/p'
    assert any(pattern in command for command in commands(ROOT / ".github" / "workflows" / "release.yml"))
    assert f'__version__ = "{hf_ckpt.__version__}"\n' in (ROOT / "hf_ckpt" / "__init__.py").read_text(encoding="utf-8")


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["title"], cited["version"]) == ("hf_ckpt", hf_ckpt.__version__)
    assert {"cff-version", "message", "authors", "license"} <= set(cited)


def test_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_nothing_is_said_to_be_sent() -> None:
    assert "No telemetry" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "**No telemetry.**" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
