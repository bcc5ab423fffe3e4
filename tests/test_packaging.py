"""What pyproject.toml promises, and what the constraints pin, agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# torch is the same on both ends: one build serves a machine.
OLDEST = ["transformers", "accelerate", "peft", "datasets"]


def requirements() -> dict[str, Requirement]:
    """All requirements by name, without those that name the package's own extras."""
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    found = {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}
    return {name: requirement for name, requirement in found.items() if name != "hf-ckpt"}


def pins(file_name: str) -> dict[str, Version]:
    text = (ROOT / file_name).read_text(encoding="utf-8")
    return {
        canonicalize_name(name): Version(pin) for name, pin in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    }


def lower_bound(requirement: Requirement) -> Version:
    (bound,) = [clause.version for clause in requirement.specifier if clause.operator == ">="]
    return Version(bound)


@pytest.mark.parametrize("name", sorted(requirements()))
def test_tested_versions_satisfy_the_requirements(name: str) -> None:
    assert requirements()[name].specifier.contains(pins("constraints.txt")[name])


@pytest.mark.parametrize("name", OLDEST)
def test_oldest_tested_version_is_the_lower_bound(name: str) -> None:
    assert pins("constraints-oldest.txt")[name] == lower_bound(requirements()[name])


def test_torch_is_the_same_in_both_environments() -> None:
    assert pins("constraints.txt")["torch"] == pins("constraints-oldest.txt")["torch"] == Version("2.13.0")


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_core_requirement_has_no_upper_bound(name: str) -> None:
    assert {clause.operator for clause in requirements()[name].specifier} == {">="}


@pytest.mark.parametrize("file_name", ["constraints.txt", "constraints-oldest.txt"])
def test_nothing_that_belongs_to_a_torch_build_is_pinned(file_name: str) -> None:
    assert [name for name in pins(file_name) if name == "triton" or name.startswith(("nvidia-", "cuda-"))] == []


def test_nothing_is_needed_that_transformers_and_peft_do_not_bring() -> None:
    needed = [Requirement(line).name for line in PROJECT["dependencies"]]
    assert needed == ["torch", "transformers", "accelerate", "numpy", "tqdm", "pyyaml", "peft"]


def test_optional_libraries_are_extras() -> None:
    needed = {Requirement(line).name for line in PROJECT["dependencies"] + EXTRAS["finetune"]}
    assert needed.isdisjoint({"bitsandbytes", "liger-kernel", "matplotlib", "trl"})
