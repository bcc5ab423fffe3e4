"""Weights that wait on the host: predicted against steps that really run, and on the link."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig

from tests import following
from tests.following import Run

LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
RUNS = {
    "none": Run(policy="none", adapters=LORA),
    "full": Run(policy="full", adapters=LORA),
    "selective": Run(policy="selective", adapters=LORA, layers=5),
    "4bit": Run(policy="full", adapters=LORA, is_4bit=True, dtype="bfloat16"),
    "accumulation": Run(policy="full", adapters=LORA, accumulation=3),
    "resident": Run(policy="full", adapters=LORA, layers=5, options={"weights": {"resident": 3}}),
    "one": Run(policy="full", adapters=LORA, layers=5, options={"weights": {"resident": 1}}),
    "some": Run(policy=[{"layers": "1:4", "mode": "full", "weights": "cpu"}], adapters=LORA, layers=5),
}


def with_weights(run: Run) -> Run:
    return run if "weights" in str((run.policy, run.options)) else replace(run, options={"weights": "cpu"})


@pytest.mark.parametrize("name", RUNS)
def test_a_real_step_needs_what_was_predicted(name: str, tmp_path: Path) -> None:
    run = with_weights(RUNS[name])
    simulated, followed = run.simulated(), run.followed(tmp_path)
    assert max(map(abs, following.differences(simulated, followed).values())) < 0.01
    without = replace(run, policy="full", options={}).simulated()
    assert simulated.host_bytes == followed.host_bytes > 0
    assert followed.by_category != without.by_category
