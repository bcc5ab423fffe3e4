"""Plans for a sweep of budgets: they fit, and no fixed policy that fits is faster. `benchmarks/budgets.py`, small."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.budgets import CASES, build, sweep, verdict
from hf_ckpt.errors import BudgetError
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.planner.chain import Chain
from hf_ckpt.planner.dynamic_programming import ChainPlanner
from hf_ckpt.planner.layer_costs import chain_of
from hf_ckpt.planner.peak_formulas import Choice, to_plan
from hf_ckpt.planner.search import Planned, StepPlanner, _Chains, binomial_choices, fixed_choices
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.options import HeadMode
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import CPU, find_device
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.simulator import StepSimulator, simulate_step
from hf_ckpt.simulation.step import Step

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

TINY = CASES["tiny"]
# Where the message matters, not the plan.
SHALLOW = replace(TINY, config={**TINY.config, "num_hidden_layers": 2})


def silent(text: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module")
def chain() -> Chain:
    return chain_of(StepSimulator(build(TINY), TINY.step, find_device(TINY.device)))


@pytest.fixture(scope="module")
def result() -> dict[str, object]:
    return sweep(TINY, 3, silent)


@pytest.mark.sweep
def test_no_plan_exceeds_its_budget(result: dict[str, object]) -> None:
    assert verdict(result)["num_over_budget"] == 0


@pytest.mark.sweep
def test_no_fixed_policy_that_fits_is_faster(result: dict[str, object]) -> None:
    assert verdict(result)["num_slower"] == 0


@pytest.mark.sweep
def test_most_budgets_between_the_extremes_have_a_plan_that_beats_every_fixed_policy(result: dict[str, object]) -> None:
    counted = verdict(result)
    assert counted["num_faster_between"] >= counted["num_between"] / 2


def test_the_same_question_has_the_same_answer_and_it_survives_json(chain: Chain) -> None:
    model, device = build(TINY), find_device(TINY.device)
    peaks = ChainPlanner(chain).peaks
    budget = peaks[len(peaks) // 2]
    first, second = (
        StepPlanner(StepSimulator(model, TINY.step, device), chain=chain).plan_for(Capacity(budget)) for _ in range(2)
    )
    assert first.plan == second.plan == Plan.from_json(first.plan.to_json())
    assert first.memory.peak_bytes <= budget


@pytest.mark.sweep
def test_a_budget_below_every_plan_says_what_would_fit() -> None:
    step = replace(TINY.step, batch_size=4, seq_length=512)
    with pytest.raises(BudgetError) as error:
        StepPlanner(StepSimulator(build(TINY), step, CPU), allowed=Allowed(head=False)).plan_for(Capacity(272_629_760))
    message = str(error.value)
    assert "No plan fits memory_budget=260.0 MiB. Lowest predicted peak is" in message
    assert "logits and loss" in message
    assert "With each of these lines one fits, as simulated:\n  memory_budget=" in message
    assert "per_device_train_batch_size" in message
    assert re.search(r"\n  head=\"chunked\" +# [\d.]+ MiB", message)


def test_a_chunked_head_is_chosen_where_nothing_fits_without() -> None:
    step = replace(TINY.step, batch_size=4, seq_length=512)
    found = StepPlanner(StepSimulator(build(TINY), step, CPU)).plan_for(Capacity(272_629_760))
    assert found.plan.head is HeadMode.CHUNKED
    assert found.memory.peak_bytes <= 272_629_760


@pytest.mark.sweep
def test_a_budget_below_the_weights_alone_says_where_the_memory_is() -> None:
    with pytest.raises(BudgetError, match="weights"):
        StepPlanner(StepSimulator(build(SHALLOW), Step(batch_size=1, seq_length=64), CPU)).plan_for(Capacity(1_000_000))


@pytest.mark.sweep
def test_smallest_plan_is_found_within_its_own_budget(chain: Chain) -> None:
    model, device = build(TINY), find_device(TINY.device)
    choice = ChainPlanner(chain).smallest_peak
    plan = to_plan(choice, chain, make_plan(model, Policy.parse("none")))
    needed = simulate_step(model, plan, TINY.step, device).peak_bytes
    found = StepPlanner(StepSimulator(model, TINY.step, device), chain=chain).plan_for(Capacity(needed))
    assert found.memory.peak_bytes <= needed


def test_what_the_chain_knows_to_exceed_the_budget_is_not_simulated(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = ChainPlanner(chain).peaks
    budget = peaks[0] + (peaks[-1] - peaks[0]) * 3 // 14
    tried = list[Choice]()

    def planned(chains: _Chains, chain: Chain, choice: Choice, capacity: Capacity) -> Planned:
        tried.append(choice)
        return simulated(chains, chain, choice, capacity)

    simulated = _Chains.planned
    monkeypatch.setattr(_Chains, "planned", planned)
    simulator = StepSimulator(build(TINY), TINY.step, find_device(TINY.device))
    found = StepPlanner(simulator, chain=chain).plan_for(Capacity(budget))
    assert found.memory.peak_bytes == pytest.approx(found.choice.peak_bytes, rel=1e-3)
    # Of policies that a user would write the chain may be less sure.
    of_user = {choice.entries for choice in fixed_choices(chain)}
    assert [choice.peak_bytes > budget for choice in tried if choice.entries not in of_user] == [False]


@pytest.mark.sweep
def test_a_budget_below_all_segments_is_met_by_a_binomial_schedule() -> None:
    with torch.device("meta"):
        deep = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=64, intermediate_size=64, num_hidden_layers=16, num_attention_heads=2, vocab_size=32
            )
        )
    simulator = StepSimulator(deep, Step(seq_length=16384, optim="sgd"), find_device(TINY.device))
    planner = StepPlanner(simulator)
    segments = ChainPlanner(planner.chain).smallest_peak
    budget = int(segments.peak_bytes * 0.97)
    found = planner.plan_for(Capacity(budget))
    assert any(entry.snapshots is not None for entry in found.plan.stacks[0].layers)
    assert found.memory.peak_bytes <= budget
    assert found.memory.peak_bytes == pytest.approx(found.choice.peak_bytes, rel=1e-3)
    assert found.memory.time.total > segments.seconds
    # What it saves is inputs: in short rows there is nothing that it could bring.
    short = chain_of(simulator.with_step(Step(seq_length=64, optim="sgd")))
    assert binomial_choices(short) == ()
