"""Offload, tiles and the chunked head in simulated steps, in the costs of layers, and in what the planner chooses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ckpt.errors import BudgetError
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.planner.chain import FULL, NONE, Chain
from hf_ckpt.planner.dynamic_programming import ChainPlanner
from hf_ckpt.planner.layer_costs import chain_of, offloaded, with_chunked_head, with_gaps, with_tiles
from hf_ckpt.planner.peak_formulas import predict, to_plan
from hf_ckpt.planner.search import StepPlanner
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.options import HeadMode, Offload
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.policy.policy import Mode, Policy
from hf_ckpt.simulation.devices import CPU, DEVICES
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.simulator import StepSimulator, simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

A100 = next(device for device in DEVICES.values() if device.capability == (8, 0))
LAYERS, HIDDEN, LENGTH, VOCAB = 4, 256, 4096, 2048
INPUT_BYTES = 2 * LENGTH * HIDDEN
STEP = Step(batch_size=1, seq_length=LENGTH, optim=None)
CPU_OFFLOAD = Offload(fraction=1.0)
FULL_OFFLOAD = replace(FULL, offload=CPU_OFFLOAD)


# Where the planner has nothing to do with it: each adapter adds a tenth to what a step takes to simulate.
FEW = ["q_proj", "down_proj"]


def llama(*, dropout: float | None = None, vocab: int = VOCAB, adapted: Any = "all-linear") -> nn.Module:
    """A small Llama in bfloat16 without data, whose layers have adapters, with dropout or not."""
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_attention_heads": 4}
    with torch.device("meta"):
        built = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=vocab)).to(torch.bfloat16)
    settings = LoraConfig(r=2, target_modules=adapted, lora_dropout=dropout or 0.0)
    return get_peft_model(built, settings, low_cpu_mem_usage=True)


def simulated(
    policy: str, step: Step = STEP, device: Any = A100, built: nn.Module | None = None, **options: Any
) -> StepMemory:
    return simulate_step(built or llama(adapted=FEW), Policy.parse(policy, **options), step, device)


# --- Simulated steps. ---


def test_layer_inputs_wait_on_the_host_but_for_the_last_layers() -> None:
    on_device, on_host = simulated("full"), simulated("full", offload="cpu")
    assert (on_device.host_bytes, on_host.host_bytes) == (0, (LAYERS - 1) * INPUT_BYTES)
    saved = [memory.by_category[Category.SAVED] for memory in (on_device, on_host)]
    assert saved[0] - saved[1] >= (LAYERS - 2) * INPUT_BYTES


def test_a_fraction_of_the_layers_offloads() -> None:
    half = simulated("full", offload={"to": "cpu", "fraction": 0.6})
    assert half.host_bytes == 2 * INPUT_BYTES
    assert half.plan is not None
    assert half.plan.stacks[0].layers[0].offload == Offload(fraction=0.6)


def test_copies_take_time_only_where_the_link_is_slower_than_the_layers() -> None:
    step = replace(STEP, gradient_accumulation_steps=2)
    fast, slow = (
        simulated("full", step, replace(A100, host_link=link), offload="cpu") for link in (A100.host_link * 100, 1e8)
    )
    copies = 2 * 2 * (LAYERS - 1) * INPUT_BYTES / (1e8 * A100.link_efficiency)
    # The first copy back has nothing to hide behind.
    assert fast.time.copies < 1e-5
    assert slow.time.copies == pytest.approx(copies, rel=0.1)
    assert slow.time.total - slow.time.copies == pytest.approx(fast.time.total - fast.time.copies)


def test_kept_outputs_go_to_the_host_too() -> None:
    kept = simulated("selective_attention", offload="cpu").host_bytes
    # The input, the attention's output, and its statistics where they are large enough.
    assert kept == 2 * (LAYERS - 1) * INPUT_BYTES


def test_logits_are_never_held_with_a_chunked_head() -> None:
    vocab = 32768
    plain, chunked = (
        simulated("full", built=llama(vocab=vocab, adapted=FEW), head=head) for head in ("plain", "chunked")
    )
    logits = LENGTH * vocab * 4
    assert plain.by_category[Category.LOSS] > logits
    assert chunked.peak_bytes < plain.peak_bytes - logits
    assert chunked.by_category.get(Category.LOSS, 0) < logits / 2


def test_tiles_shrink_what_a_layer_needs_while_it_is_recomputed() -> None:
    whole, tiled = (simulated("full", tiles=tiles).peak_of(Phase.RECOMPUTATION) for tiles in (None, 4))
    assert whole - tiled > 4 * INPUT_BYTES


def test_selective_modes_take_time_on_the_host_for_each_operator_of_their_layers() -> None:
    slow, fast = replace(CPU, selective_seconds=1.0), replace(CPU, selective_seconds=0.0)
    none, full = ([simulated(mode, device=device).time.total for device in (slow, fast)] for mode in ("none", "full"))
    assert (none[0], full[0]) == (none[1], full[1])
    mixed = simulate_step(
        llama(),
        Policy.parse([{"layers": "0", "mode": "selective"}]),
        STEP,
        slow,
    )
    added = mixed.time.total - simulate_step(llama(), mixed.plan, STEP, fast).time.total
    # One second each: operators of one layer, forward and again.
    assert added == pytest.approx(round(added), abs=1e-6)
    assert 20 < added < 200


@pytest.mark.sweep
def test_costs_of_layers_have_that_time_in_each_micro_batch() -> None:
    def added(num_micro_batches: int) -> dict[str, float]:
        step = replace(STEP, gradient_accumulation_steps=num_micro_batches)
        devices = [replace(CPU, selective_seconds=seconds) for seconds in (1.0, 0.0)]
        slow, fast = (chain_of(StepSimulator(llama(), step, device)).layers[0].costs for device in devices)
        return {str(option): slow[option].seconds - fast[option].seconds for option in slow}

    once = added(1)
    assert max(once.values()) > 5
    assert added(16) == pytest.approx({option: 16 * seconds for option, seconds in once.items()}, abs=1e-6)


# --- Costs of layers. ---


@pytest.fixture(scope="module")
def chain() -> Chain:
    return chain_of(StepSimulator(llama(), STEP, A100), Allowed(offload=Offload()))


@pytest.mark.sweep
def test_the_last_layer_does_not_offload(chain: Chain) -> None:
    does = [any(option.offload for option in layer.costs) for layer in chain.layers]
    assert does == [True] * (LAYERS - 1) + [False]


@pytest.mark.sweep
def test_cost_of_offload_is_that_of_the_simulated_step(chain: Chain) -> None:
    for option in (FULL, LayerPlan(Mode.SELECTIVE_ATTENTION)):
        entries = [replace(option, offload=CPU_OFFLOAD)] * (LAYERS - 1) + [option]
        choice = predict(chain, entries)
        template = make_plan(llama(), Policy.parse("none"))
        memory = simulate_step(llama(), to_plan(choice, chain, template), STEP, A100)
        assert choice.peak_bytes == pytest.approx(memory.peak_bytes, rel=0.01)
        assert choice.seconds == pytest.approx(memory.time.total, rel=0.02)
        assert choice.host_bytes == pytest.approx(memory.host_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("inputs", "by_layer"),
    [
        (0, [0, 0, 0, 0]),
        (2, [1, 1, 0, 0]),
        # Enough for every layer's input, not for what other modes keep.
        (5, [1, 1, 1, 0]),
        (1000, [3, 3, 3, 0]),
    ],
)
def test_any_choice_of_layers_that_offload_fits_the_host(chain: Chain, inputs: int, by_layer: list[int]) -> None:
    asked = Offload(host_memory=inputs * INPUT_BYTES)
    layers = offloaded(chain, A100, asked).layers
    assert [sum(option.offload == asked for option in layer.costs) for layer in layers] == by_layer


def test_with_gaps_only_every_nth_layer_offloads_and_only_what_a_selective_mode_keeps(chain: Chain) -> None:
    found = [
        [[option.mode for option in layer.costs if option.offload] for layer in gapped.layers]
        for gapped in with_gaps(chain, A100, Offload())
    ]
    modes = Mode.SELECTIVE, Mode.SELECTIVE_ATTENTION
    assert found == [
        [[mode], [], [mode] * (every == 2), [mode] * (every == 3) and []] for mode in modes for every in (2, 3, 4)
    ]
    assert list(with_gaps(chain, A100, None)) == []


def test_layers_that_offload_with_gaps_fit_the_host(chain: Chain) -> None:
    room = chain.layers[0].costs[LayerPlan(Mode.SELECTIVE)].kept_bytes
    gapped = next(with_gaps(chain, A100, Offload(host_memory=room)))
    assert [any(option.offload for option in layer.costs) for layer in gapped.layers] == [True, False, False, False]


def test_a_gap_hides_the_copy_that_one_layer_does_not(chain: Chain) -> None:
    """With a link so slow that a copy takes as long as one layer and a half."""
    option = replace(LayerPlan(Mode.SELECTIVE), offload=CPU_OFFLOAD)
    layer = chain.layers[0]
    kept, forward = layer.costs[LayerPlan(Mode.SELECTIVE)].kept_bytes, layer.forward_seconds
    assert forward is not None
    slow = replace(A100, host_link=kept / (1.5 * forward) / A100.link_efficiency)
    alone = offloaded(chain, slow, CPU_OFFLOAD).layers[0].costs[option].seconds
    apart = next(with_gaps(chain, slow, CPU_OFFLOAD)).layers[0].costs[option].seconds
    assert alone - apart == pytest.approx(0.5 * forward, rel=0.3)


@pytest.mark.sweep
def test_plans_for_one_budget_after_the_other_are_those_for_each_by_itself(chain: Chain) -> None:
    built, allowed = llama(), Allowed(offload=Offload(), tiles=False, head=False)
    plans = StepPlanner(StepSimulator(built, STEP, A100), allowed=allowed, chain=chain)
    least, most = ChainPlanner(chain).smallest_peak.peak_bytes, predict(chain, [NONE] * LAYERS).peak_bytes
    for budget in (least + (most - least) // 2, most):
        found = StepPlanner(StepSimulator(built, STEP, A100), allowed=allowed, chain=chain).plan_for(Capacity(budget))
        assert plans.plan_for(Capacity(budget)).plan == found.plan


@pytest.mark.sweep
def test_tiles_are_no_option_where_dropout_lies_inside_unless_they_are_allowed() -> None:
    built = llama(dropout=0.1, adapted=FEW)
    base = chain_of(StepSimulator(built, STEP, A100))
    asked = {
        allowed: any(
            option.tiles
            for layer in with_tiles(base, StepSimulator(built, STEP, A100), allowed).layers
            for option in layer.costs
        )
        for allowed in (Allowed(), Allowed(tiles=False), Allowed(tiles=True))
    }
    assert list(asked.values()) == [False, False, True]


def test_chunked_head_is_cheaper_in_bytes_and_no_layer_changes(chain: Chain) -> None:
    chunked = with_chunked_head(chain, StepSimulator(llama(), STEP, A100))
    assert chunked is not None
    assert chunked.head is HeadMode.CHUNKED
    assert chunked.head_bytes < chain.head_bytes / 2
    assert chunked.layers == chain.layers
    headless = llama().get_base_model().model
    assert with_chunked_head(chain, StepSimulator(headless, STEP, A100)) is None


# --- What is chosen. ---


@pytest.mark.sweep
def test_offload_is_chosen_only_where_it_is_allowed_and_advised_where_it_would_fit(chain: Chain) -> None:
    built, allowed = llama(), Allowed(offload=Offload(), tiles=False, head=False)
    layers = (
        replace(layer, costs={option: cost for option, cost in layer.costs.items() if not option.offload})
        for layer in chain.layers
    )
    without = replace(chain, layers=tuple(layers))
    budget = simulate_step(built, Policy.parse("full", offload="cpu"), STEP, A100).peak_bytes + INPUT_BYTES // 2
    assert budget < ChainPlanner(without).smallest_peak.peak_bytes
    found = StepPlanner(StepSimulator(built, STEP, A100), allowed=allowed, chain=chain).plan_for(Capacity(budget))
    assert any(entry.offload for entry in found.plan.stacks[0].layers)
    assert found.memory.peak_bytes <= budget
    assert found.memory.host_bytes > 0
    with pytest.raises(BudgetError) as error:
        StepPlanner(StepSimulator(built, STEP, A100), allowed=replace(allowed, offload=None), chain=without).plan_for(
            Capacity(budget)
        )
    # Alone it would reserve more than that, in whole blocks.
    assert re.search(r"\n  .*offload=\"cpu\" +# [\d.]+ MiB, with [\d.]+ MiB of host memory", str(error.value))


# --- All of it together. ---


@pytest.mark.sweep
def test_a_long_layer_needs_less_than_fourteen_of_its_inputs() -> None:
    # As wide as a layer of Llama 3.1 8B. Its attention alone needs seven: queries, output and their gradients, and what
    # the kernel adds up in float32 and for each head of the queries.
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        built = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, vocab_size=64)).to(torch.bfloat16)
    adapted = get_peft_model(built, LoraConfig(r=32, target_modules="all-linear"), low_cpu_mem_usage=True)
    step = Step(batch_size=1, seq_length=65536, autocast="bfloat16", optim="sgd")
    memory = simulated("full", step, built=adapted, offload="cpu", tiles=8, head="chunked")
    weights = sum(memory.by_category[each] for each in (Category.PARAMETERS, Category.GRADIENTS))
    assert memory.peak_bytes - weights < 14 * 2 * 65536 * 4096
