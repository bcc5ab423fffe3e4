"""Answers with a second process that works ahead are those without one, to the byte, whatever becomes of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import second_process
from hf_ckpt.estimate.estimate import estimate, estimate_as_json
from hf_ckpt.estimate.max_length_and_batch import fitting_sizes
from hf_ckpt.estimate.recipe_plan import plan_as_json, plan_recipe
from hf_ckpt.units import parse_budget
from tests.estimate.small_estimates import CARD, silent, small_subject

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked"),
]

AUTO = "checkpointing={policy: auto}"


def of_table(folder: Path) -> dict[str, Any]:
    return estimate_as_json(estimate(small_subject(folder), [CARD], silent))


def of_auto(folder: Path) -> dict[str, Any]:
    return estimate_as_json(estimate(small_subject(folder, AUTO), [CARD], silent, ("none", "full")))


def of_plan(folder: Path) -> dict[str, Any]:
    budget = parse_budget("750MiB", key="--memory-budget")
    return plan_as_json(plan_recipe(small_subject(folder), CARD, budget, silent), "")


def of_lengths(folder: Path) -> dict[str, Any]:
    return fitting_sizes(small_subject(folder, AUTO), [CARD], is_length=True, say=silent)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What second processes have found; one is allowed from now on, on two cores."""
    found: list[object] = []
    take = second_process._SecondProcess.take

    def noted(process: Any, key: Any) -> Any:
        outcome = take(process, key)
        if outcome is not None:
            found.append(key)
        return outcome

    monkeypatch.setattr(second_process._SecondProcess, "take", noted)
    monkeypatch.setattr(second_process, "_ALLOWED", [True])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(second_process.threading, "active_count", lambda: 1)
    return found


@pytest.mark.parametrize("answer", [of_table, of_auto, of_plan, of_lengths])
def test_answer_is_the_same_with_a_second_process(
    answer: Callable[[Path], dict[str, Any]],
    tmp_path: Path,
    taken: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    helped = json.dumps(answer(tmp_path))
    assert taken
    count = len(taken)
    monkeypatch.setattr(second_process, "_work", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    killed = json.dumps(answer(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    alone = json.dumps(answer(tmp_path))
    assert len(taken) == count
    assert helped == alone
    assert killed == alone
