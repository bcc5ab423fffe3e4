"""Weights that wait on the host: predicted against steps that really run, and on the link."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ckpt.planner.search import StepPlanner
from hf_ckpt.policy.allowances import allowed_by
from hf_ckpt.policy.options import EmbeddingPlace
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.fit import Capacity, Fit
from hf_ckpt.simulation.op_costs import copy_seconds
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Step
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
    "embedding": Run(policy="full", adapters=LORA, options={"embedding": "cpu"}, accumulation=2),
    "layers alone": Run(policy="full", adapters=LORA, options={"weights": "cpu", "embedding": "device"}, bf16=True),
    "some": Run(policy=[{"layers": "1:4", "mode": "full", "weights": "cpu"}], adapters=LORA, layers=5),
}


def with_weights(run: Run) -> Run:
    return run if "cpu" in str((run.policy, run.options)) or run.options else replace(run, options={"weights": "cpu"})


@pytest.mark.parametrize("name", RUNS)
def test_a_real_step_needs_what_was_predicted(name: str, tmp_path: Path) -> None:
    run = with_weights(RUNS[name])
    simulated, followed = run.simulated(), run.followed(tmp_path)
    assert max(map(abs, following.differences(simulated, followed).values())) < 0.01
    without = replace(run, policy="full", options={}).simulated()
    assert simulated.host_bytes == followed.host_bytes > 0
    assert followed.by_category != without.by_category


def test_rows_that_are_looked_up_come_over_the_link() -> None:
    run = RUNS["embedding"]
    simulator = StepSimulator(run.model(), run.step, find_device("rtx4090"))
    plain, waiting = (simulator.plan_of(Policy.parse("full", embedding=place)) for place in ("device", "cpu"))
    (before, _), (after, num_bytes) = (
        (simulator.memory(plan), simulator.memory(plan).host_bytes) for plan in (plain, waiting)
    )
    # 512 rows of 64 numbers in float32; what is looked up are 2 x 64 rows in each of two micro-batches.
    assert num_bytes == 512 * 64 * 4
    assert before.peak_bytes - after.peak_bytes == num_bytes
    expected = 2 * copy_seconds(2 * 64 * 64 * 4, find_device("rtx4090"))
    assert after.time.total - before.time.total == pytest.approx(expected, rel=1e-6)
    assert after.time.copies == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"weights": "cpu"}, True),
        ({"embedding": "cpu"}, True),
        ({"weights": "cpu", "embedding": "device"}, False),
        ({}, False),
    ],
)
def test_the_planner_lets_the_embedding_wait_where_it_may(options: dict[str, str], found: bool) -> None:
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=2**15)
    with torch.device("meta"):
        model = get_peft_model(LlamaForCausalLM(config), LORA, low_cpu_mem_usage=True)
    simulator = StepSimulator(model, Step(batch_size=2, seq_length=256), find_device("rtx4090"))
    # 16 MiB less than a step without a plan needs; the embedding is 32 MiB.
    capacity = Capacity(simulator.needs(None).reserved_bytes - 2**24)
    planned = StepPlanner(simulator, allowed=allowed_by(options)).plan_for(capacity)
    assert (planned.plan.embedding is EmbeddingPlace.CPU) is found
    assert planned.verdict.fit is Fit.YES
    if found:
        assert {entry.in_short() for entry in planned.plan.stacks[0].layers} <= {"none", "none + weights"}
        assert planned.memory.time.copies > 0


@pytest.mark.parametrize(("card", "gains"), [("gb10", False), ("rtx4090", True)])
def test_where_the_devices_memory_is_the_hosts_nothing_is_gained(card: str, gains: bool) -> None:
    run = RUNS["full"]
    simulator = StepSimulator(run.model(), run.step, find_device(card))
    plain, waiting = (simulator.plan_of(Policy.parse("full", weights=weights)) for weights in (None, "cpu"))
    assert (simulator.memory(waiting).peak_bytes < simulator.memory(plain).peak_bytes) is gains
    evaluated = [simulator.evaluate(plan).memory.by_category[Category.PARAMETERS] for plan in (plain, waiting)]
    assert (evaluated[1] < evaluated[0]) is gains
