"""What the first step's proof launches at full width, counted here, is what the committed result says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.proof_launches import CASES, counted
from benchmarks.runner import RESULTS

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

NUM_LAYERS = 32


def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "proof_launches.json").read_text(encoding="utf-8"))["cases"]
    return found


@pytest.mark.parametrize("case", ["full_2048", "full_8192"])
def test_a_layer_launches_what_the_result_says(case: str) -> None:
    two, three = (counted(case, number) for number in (2, 3))
    for name, value in two.items():
        whole = value + (NUM_LAYERS - 2) * (three[name] - value)
        # Other versions of upstream may have a module more or less.
        assert whole == pytest.approx(committed()[case]["here"][name], rel=0.1)


def test_the_proof_is_small_beside_a_forward() -> None:
    cases = committed()
    assert list(cases) == list(CASES)
    assert cases["full_8192"]["here"]["num_launches"] <= 20_000
    for case in ("full_2048", "full_8192", "full_131072"):
        assert cases[case]["here"]["share_of_forward"] <= 0.5
