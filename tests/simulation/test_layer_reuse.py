"""Tracing equal layers once changes nothing: neither bytes nor places, neither times nor what is held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation import simulator
from hf_ckpt.simulation.devices import DEVICES
from hf_ckpt.simulation.layer_reuse import LayerReuse
from hf_ckpt.simulation.simulator import StepSimulator, simulate_step
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.simulation.tape import Tape
from hf_ckpt.simulation.tape_expansion import CannotReuseError
from tests import zoo

pytestmark = pytest.mark.slow

A100 = next(device for device in DEVICES.values() if device.capability == (8, 0))
STEP = Step(batch_size=2, seq_length=16, optim="sgd")
MIXED = [
    {"layers": "0:1", "mode": "ffn"},
    {"layers": "1:13", "mode": "full", "segment_size": 2, "nested": True},
    {"layers": "13", "mode": "attention"},
]
SHRINKING = [
    {"layers": f"{start}:{stop}", "mode": "full", "segment_size": stop - start, "nested": True}
    for start, stop in ((0, 6), (6, 11), (11, 15), (15, 18))
]
REVOLVED = [
    {"layers": "0:6", "mode": "full", "nested": "revolve", "snapshots": 2},
    {"layers": "6:14", "mode": "full"},
]
SMALL = {"to": "cpu", "min_bytes": 1}
BETWEEN = [{"layers": "2:8", "mode": "full", "offload": SMALL}]
# Model type, layers, policy and its options, and how many layers need no tracing.
CASES: dict[str, tuple[str, int, Any, dict[str, Any], int]] = {
    "llama-every-2": ("llama", 8, "full", {"every_n_layers": 2}, 2),
    "llama-mixed": ("llama", 14, MIXED, {}, 6),
    "gemma3-full": ("gemma3_text", 11, "full", {}, 4),
    "qwen3-moe-ffn": ("qwen3_moe", 7, "ffn", {}, 4),
    "gpt2-range": ("gpt2", 8, [{"layers": "1:7", "mode": "full"}], {}, 3),
    "gpt-oss-attention": ("gpt_oss", 11, "attention", {}, 4),
    "bamba-none": ("bamba", 11, None, {}, 4),
    "llama-selective": ("llama", 7, "selective", {}, 4),
    "llama-full-offload": ("llama", 9, "full", {"offload": SMALL}, 4),
    "qwen3-moe-selective-attention-offload": ("qwen3_moe", 9, "selective_attention", {"offload": SMALL}, 4),
    "llama-offload-between": ("llama", 10, BETWEEN, {}, 2),
    "llama-segments": ("llama", 16, "full", {"segment_size": 4}, 8),
    "llama-segments-and-a-rest": ("llama", 14, "full", {"segment_size": 3}, 6),
    "llama-segments-of-all-lengths": ("llama", 18, SHRINKING, {}, 5),
    "gemma3-segments-nested": ("gemma3_text", 20, "full", {"segment_size": 4, "nested": True}, 12),
    "llama-revolve": ("llama", 14, REVOLVED, {}, 7),
    "llama-tiles-chunked-head": ("llama", 7, "full", {"tiles": 2, "head": "chunked"}, 4),
}


def model(model_type: str, num_layers: int, task: str = "causal") -> nn.Module:
    torch.manual_seed(0)
    return zoo.build(model_type, task=task, num_layers=num_layers).model


def both(built: nn.Module, policy: Any, step: Step = STEP, **options: Any) -> tuple[StepMemory, StepMemory]:
    """Simulate a step with equal layers traced once, and with all traced."""
    parsed = None if policy is None else Policy.parse(policy, **options)
    return simulate_step(built, parsed, step, A100), simulate_step(built, parsed, step, A100, traces_all=True)


@contextmanager
def counted_copies() -> Iterator[list[int]]:
    """Count the layers that were not traced, in each step that was made up of the others."""
    counts: list[int] = []
    expanded = LayerReuse.expanded

    def counted(reuse: LayerReuse, tape: Tape) -> Tape:
        found = expanded(reuse, tape)
        counts.append(sum(len(stack.representatives) for stack in reuse.stacks))
        return found

    with mock.patch.object(LayerReuse, "expanded", counted):
        yield counts


def assert_equal(once: StepMemory, whole: StepMemory) -> None:
    assert once.timeline.bytes_by_category == whole.timeline.bytes_by_category
    assert once.timeline.places == whole.timeline.places
    assert once.ledger == whole.ledger
    # The same seconds, added up in another order.
    assert once.timeline.seconds == pytest.approx(whole.timeline.seconds, rel=1e-9)
    assert replace(once, timeline=whole.timeline) == whole


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(keep=1)
def test_a_step_traced_once_is_the_step_traced_whole(name: str) -> None:
    model_type, num_layers, policy, options, count = CASES[name]
    with counted_copies() as counts:
        once, whole = both(model(model_type, num_layers), policy, **options)
    assert counts == [count]
    assert_equal(once, whole)


class AddsBetween(LlamaModel):
    """Adds something to what some of its layers return, as Qwen3-VL does with features of images."""

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        positions = self.rotary_emb(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
        for idx, layer in enumerate(self.layers):
            hidden = layer(hidden, attention_mask=None, position_embeddings=positions)
            if idx in (1, 2, 6):
                hidden = hidden + hidden.tanh()
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


@pytest.mark.parametrize("policy", [None, "full", "attention"])
@pytest.mark.sweep(keep=1)
def test_layers_next_to_what_comes_between_are_traced(policy: str | None) -> None:
    built = model("llama", 14)
    built.model.__class__ = AddsBetween
    with counted_copies() as counts:
        once, whole = both(built, policy)
    # 0 to 8 are traced, 9 too as the one before the one that represents others, and the last.
    assert counts == [3]
    assert_equal(once, whole)


def test_what_sets_layers_apart_is_found_once() -> None:
    built = model("llama", 14)
    built.model.__class__ = AddsBetween
    simulated = StepSimulator(built, STEP, A100)
    with mock.patch.object(StepSimulator, "_trace", autospec=True, side_effect=StepSimulator._trace) as traced:
        for policy in (None, "full", "ffn"):
            simulated.simulate(policy)
    assert traced.call_count == 4
    assert all(call.kwargs["reuse"] is not None for call in traced.call_args_list)


def test_layers_that_all_differ_are_traced_at_the_first_try() -> None:
    with mock.patch.object(StepSimulator, "_trace", autospec=True, side_effect=StepSimulator._trace) as traced:
        simulate_step(model("llama", 6), Policy.parse("full", nested="revolve", snapshots=1), STEP, A100)
    assert [call.kwargs["reuse"] for call in traced.call_args_list] == [None]


@pytest.mark.sweep
def test_adapters_and_micro_batches_are_traced_once() -> None:
    settings = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1)
    step = replace(STEP, gradient_accumulation_steps=3)
    with counted_copies() as counts:
        once, whole = both(get_peft_model(model("llama", 7), settings), "full", step)
    assert counts == [4]
    assert_equal(once, whole)


@pytest.mark.sweep
def test_a_segment_lets_go_of_the_proof_of_layers_that_are_not_traced() -> None:
    policy = [{"layers": "0:7", "mode": "full", "segment_size": 7}, {"layers": "7:13", "mode": "full"}]
    with counted_copies() as counts:
        once, whole = both(model("llama", 13), policy, replace(STEP, is_proven=True))
    assert counts == [5]
    assert_equal(once, whole)


def test_segments_are_cut_though_the_last_one_makes_more_for_its_proof() -> None:
    """The last layer of a kind is held to the original. The segment's first layer frees what that makes."""
    with mock.patch.object(StepSimulator, "_trace", autospec=True, side_effect=StepSimulator._trace) as traced:
        once, whole = both(model("llama", 22), "full", replace(STEP, is_proven=True), segment_size=8)
    assert [call.kwargs["reuse"] is not None for call in traced.call_args_list] == [True, False]
    assert_equal(once, whole)


@pytest.mark.parametrize("model_type", ["llama", "phimoe"])
@pytest.mark.parametrize("sharding", [Sharding(), Sharding(engine="zero3", world_size=4)], ids=["whole", "zero3"])
@pytest.mark.sweep
def test_the_first_step_s_proof_is_traced_once(model_type: str, sharding: Sharding) -> None:
    step = Step(batch_size=8, seq_length=64, autocast="bfloat16", is_proven=True, sharding=sharding)
    assert_equal(*both(model(model_type, 8), "full", step))


@pytest.mark.sweep
def test_both_stacks_of_an_encoder_and_a_decoder_are_traced_once() -> None:
    with counted_copies() as counts:
        once, whole = both(model("bart", 7, "seq2seq"), "full")
    assert counts == [7]
    assert_equal(once, whole)


def test_a_layer_that_is_frozen_in_part_is_told_apart() -> None:
    built = model("llama", 10)
    built.model.layers[8].mlp.requires_grad_(False)
    with counted_copies() as counts:
        once, whole = both(built, "full")
    assert counts == [5]
    assert_equal(once, whole)


def test_a_parameter_without_gradient_has_none_in_the_layers_that_are_not_traced() -> None:
    built = model("llama", 6)
    for layer in built.model.layers:
        layer.unused = nn.Linear(64, 64)
    with counted_copies() as counts:
        once, whole = both(built, None, Step(batch_size=2, seq_length=16))
    assert counts == [3]
    assert_equal(once, whole)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "bamba"])
def test_an_evaluation_that_fills_a_cache_is_traced_once(model_type: str) -> None:
    built = model(model_type, 8)
    for module in built.modules():
        if hasattr(module, "config"):
            module.config.use_cache = True
    simulated = StepSimulator(built, STEP, A100)
    with counted_copies() as counts:
        once = simulated.evaluate()
    with mock.patch.object(simulator.LayerReuse, "choose", side_effect=CannotReuseError("no layer is like another")):
        whole = simulated.evaluate()
    assert counts > [0]
    assert once.kept_bytes == whole.kept_bytes
    assert_equal(once.memory, whole.memory)


def test_layers_may_let_go_of_what_a_far_one_has_made() -> None:
    # Layers of gemma3n read keys and values of a far layer.
    assert_equal(*both(model("gemma3n_text", 6), None))
