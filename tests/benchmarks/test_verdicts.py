"""No command contradicts another one, and no policy that fits is faster than the planner's choice.

`benchmarks/verdicts.py` on a few of its cases; `results/verdicts.json` has more.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import pytest

from benchmarks import verdicts
from benchmarks.runner import RESULTS
from benchmarks.verdicts import cases, contradictions, device_of, subject_of_case
from hf_ckpt.estimate.estimate import estimate, judged
from hf_ckpt.estimate.step_of_recipe import Subject
from hf_ckpt.policy.policy import AUTO

pytestmark = pytest.mark.slow


CASES = list(islice(cases(seed=1), 40))


@cache
def subject_of(number: int) -> Subject:
    """What a case asks about; its steps are simulated once."""
    return subject_of_case(CASES[number])


@pytest.mark.sweep(keep=1)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_commands_agree_and_nothing_that_fits_is_faster(number: int) -> None:
    subject = subject_of(number)
    assert contradictions(subject, device_of(CASES[number], subject))[0] == []


def test_the_committed_result_has_no_contradiction() -> None:
    result: dict[str, Any] = json.loads((RESULTS / "verdicts.json").read_text(encoding="utf-8"))
    assert result["num_cases"] == len(result["cases"]) == sum(result["auto"].values())
    assert result["num_contradicting"] == 0


def test_a_slower_choice_and_another_verdict_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_of(0)
    device = device_of(replace(CASES[0], share=2.0), subject)

    def slower(*given: Any) -> Any:
        found = estimate(*given)
        auto = judged(found.predictor, AUTO, subject.resolve("full"), [device])
        return replace(
            found, rows=tuple(replace(auto, device=device) if row.name == AUTO else row for row in found.rows)
        )

    monkeypatch.setattr(verdicts, "estimate", slower)
    found, _ = contradictions(subject, device)
    assert any(text.startswith("none fits and takes ") for text in found)
    assert {"none fits, and auto is another plan", "plan chooses another plan than estimate"} <= set(found)
