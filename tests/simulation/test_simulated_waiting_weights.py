"""Weights that wait on the host: predicted against steps that really run, and on the link."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig

from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step_memory import Category
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


@pytest.mark.parametrize(("card", "gains"), [("gb10", False), ("rtx4090", True)])
def test_where_the_devices_memory_is_the_hosts_nothing_is_gained(card: str, gains: bool) -> None:
    run = RUNS["full"]
    simulator = StepSimulator(run.model(), run.step, find_device(card))
    plain, waiting = (simulator.plan_of(Policy.parse("full", weights=weights)) for weights in (None, "cpu"))
    assert (simulator.memory(waiting).peak_bytes < simulator.memory(plain).peak_bytes) is gains
    evaluated = [simulator.evaluate(plan).memory.by_category[Category.PARAMETERS] for plan in (plain, waiting)]
    assert (evaluated[1] < evaluated[0]) is gains
