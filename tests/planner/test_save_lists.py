"""Between full and selective: the costs of lists of operators to keep, told from one step, against simulated ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.planner.chain import FULL, NONE, Chain, Cost
from hf_ckpt.planner.costs_from_tape import StepReading
from hf_ckpt.planner.dynamic_programming import ChainPlanner
from hf_ckpt.planner.layer_costs import chain_of
from hf_ckpt.planner.save_lists import save_list_options
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.simulation.devices import DEVICES
from hf_ckpt.simulation.simulator import StepSimulator, simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Phase
from tests import exactness, zoo
from tests.following import Run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

# Without what the host needs beside, which depends on the number of outputs alone (`costs.chain_of` adds it).
A100 = replace(next(device for device in DEVICES.values() if device.capability == (8, 0)), selective_seconds=0.0)
STEP = Step(batch_size=2, seq_length=512, optim=None)
LONG = replace(STEP, batch_size=1, seq_length=4096)
SELECTIVE = LayerPlan(Mode.SELECTIVE)
MIDDLE = (0, 1)
"""A layer: of the first stack, with neighbours."""


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "llama":
        # Layers of a 7B model: in tiny ones the time is that of starting operators.
        with torch.device("meta"):
            return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, max_position_embeddings=4096)).to(torch.bfloat16)
    if name == "llama-lora":
        adapters = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
        return get_peft_model(zoo.build("llama", num_layers=3).model, adapters)
    built = zoo.build(name.removesuffix("-eager"), num_layers=3).model
    if name.endswith("-eager"):
        built.set_attn_implementation("eager")
    return built


def reading(built: nn.Module, policy: Any, step: Step = STEP, **options: Any) -> StepReading:
    plan = make_plan(built, Policy.parse(policy, **options))
    return StepReading(StepSimulator(built, step, A100).trace(plan).tape, step)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2-eager"])
def test_frontier_is_convex_and_monotone_from_full_to_selective(name: str) -> None:
    built = model(name)
    full = reading(built, "full")
    points = save_list_options(full, MIDDLE)
    ends = [full.cost(MIDDLE), reading(built, "selective").cost(MIDDLE)]
    costs = sorted([*points.values(), *ends], key=lambda cost: cost.kept_bytes)
    assert len(costs) >= 4
    assert [costs[0], costs[-1]] == ends
    slopes = [
        (after.seconds - before.seconds) / (after.kept_bytes - before.kept_bytes)
        for before, after in itertools.pairwise(costs)
    ]
    assert all(slope < 0 for slope in slopes)
    assert slopes == sorted(slopes)


@pytest.mark.parametrize("name", ["llama-lora", "qwen3_moe"])
@pytest.mark.sweep(keep=1)
def test_cost_of_a_list_is_that_of_the_step_that_keeps_it(name: str) -> None:
    built, step = model(name), replace(STEP, gradient_accumulation_steps=3)
    points = save_list_options(reading(built, "full", step), MIDDLE)
    option, told = list(points.items())[len(points) // 2]
    simulated = reading(built, "selective", step, save=list(option.save)).cost(MIDDLE)
    for what in ("kept_bytes", "forward_bytes", "backward_bytes", "seconds"):
        assert getattr(told, what) == pytest.approx(getattr(simulated, what), rel=0.01), what
    assert simulated.kept_bytes > full_cost(built, step).kept_bytes


def full_cost(built: nn.Module, step: Step) -> Cost:
    return reading(built, "full", step).cost(MIDDLE)


@pytest.mark.sweep
def test_every_list_of_a_chain_can_be_applied_and_there_are_few() -> None:
    built = model("llama-lora")
    chain = chain_of(StepSimulator(built, STEP, A100))
    assert [layer.costs.keys() for layer in chain.layers] == [chain.layers[0].costs.keys()] * 3
    lists = [option for option in chain.layers[0].costs if option.save]
    assert 2 <= len(lists) <= 6
    for option in lists:
        assert make_plan(built, Policy.parse("selective", save=option.save)).stacks[0].layers[0] == option


def test_lists_for_a_card_are_kept_where_another_kernel_runs() -> None:
    lists = {option.save for option in save_list_options(reading(model("llama"), "full", LONG), MIDDLE)}
    assert any("attention_output" in names for names in lists)
    # With dropout no kernel fits on a CPU: attention is computed step by step.
    case = exactness.build("llama", dropout=0.1)
    expected = exactness.step(case)
    for names in lists:
        with hf_ckpt.apply(case.model, "selective", save=names):
            assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.sweep
def test_chain_keeps_attention_only_in_the_layers_that_have_it() -> None:
    chain = chain_of(
        StepSimulator(zoo.build("lfm2_moe", num_layers=2).model, Step(batch_size=1, seq_length=4, optim=None), A100)
    )
    assert [LayerPlan(Mode.SELECTIVE_ATTENTION) in layer.costs for layer in chain.layers] == [False, True]
    assert [LayerPlan(Mode.FULL) in layer.costs for layer in chain.layers] == [True, True]


def test_planner_moves_in_small_steps_between_full_and_none() -> None:
    built = model("llama").requires_grad_(False)
    # Gradients of weights would come and go beside what is recomputed.
    built.get_submodule("model.embed_tokens").requires_grad_(True)
    chain = longer(chain_of(StepSimulator(built, STEP, A100)), 16)
    coarse = replace(chain, layers=tuple(replace(each, costs=without_selective(each.costs)) for each in chain.layers))
    fine, few = ChainPlanner(chain), ChainPlanner(coarse)
    assert len(fine.peaks) > 1.5 * len(few.peaks)
    budgets = [fine.peaks[0] + (fine.peaks[-1] - fine.peaks[0]) * part // 8 for part in range(1, 8)]
    gains = [few.choose(budget).seconds - fine.choose(budget).seconds for budget in budgets]
    assert min(gains) >= 0
    assert sum(gain > 0 for gain in gains) >= 4


def without_selective(costs: Any) -> dict[LayerPlan, Cost]:
    return {option: cost for option, cost in costs.items() if not option.mode.startswith("selective")}


def longer(chain: Chain, num_layers: int) -> Chain:
    """The chain with so many layers like its middle one, without a head that hides them."""
    layers = tuple(replace(chain.layers[1], layer_idx=idx) for idx in range(num_layers))
    return replace(chain, layers=layers, head_bytes=0, head_backward_bytes=0, fixed_peak_bytes=0)


def test_selective_holds_at_most_55_percent_of_what_a_layer_of_a_7b_llama_holds() -> None:
    built = model("llama")
    step = Step(batch_size=1, seq_length=4096, optim=None)
    held = {}
    for mode in ("none", "selective", "full"):
        memory = simulate_step(built, mode, step, A100)
        held[mode] = sum(tensor.num_bytes for tensor in memory.ledger if tensor.place.layer_idx == 1)
    assert held["full"] == 2 * 4096 * 4096
    assert held["full"] < held["selective"] <= 0.55 * held["none"]


def test_modes_that_the_model_refuses_are_no_options() -> None:
    # It hands layers a cache that recomputed ones could not read.
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    built = get_peft_model(zoo.build("gpt2", num_layers=2).model, prefix)
    costs = chain_of(StepSimulator(built, STEP, A100)).layers[0].costs
    assert NONE in costs
    assert not {FULL, SELECTIVE} & costs.keys()


def test_products_with_4_bit_weights_count_as_those_with_whole_ones() -> None:
    pytest.importorskip("bitsandbytes")
    whole, packed = (Run(adapters=True, is_4bit=is_4bit).simulated().num_flops for is_4bit in (False, True))
    assert packed[Phase.FORWARD] == whole[Phase.FORWARD] > 0
