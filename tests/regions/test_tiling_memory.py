"""Tiles: what they hold, and what runs once more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from hf_ckpt.regions.tiling import Tiling, run_tiled
from hf_ckpt.simulation.devices import CPU, DEVICES
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Phase
from tests import exactness, plain_models
from tests.regions.tiled_models import LENGTH, llama, tiled

core = pytest.mark.core
pytestmark = [pytest.mark.slow, core]


def saved(run: Callable[[], Tensor]) -> list[Tensor]:
    """What autograd saves in a forward."""
    found: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return found


def test_projections_keep_one_copy_of_the_input_that_they_share() -> None:
    case = llama()
    attention, hidden = case.model.model.layers[0].self_attn, torch.randn(2, LENGTH, 64, requires_grad=True)
    with tiled(case.model, 4):
        found = saved(lambda: sum(getattr(attention, f"{name}_proj")(hidden).sum() for name in "qkv"))
    assert {tensor.data_ptr() for tensor in found} == {hidden.data_ptr()}


def test_an_ffn_keeps_nothing_but_its_input() -> None:
    case = llama()
    hidden = torch.randn(2, LENGTH, 64, requires_grad=True)
    with tiled(case.model, 4):
        found = saved(lambda: case.model.model.layers[0].mlp(hidden))
    assert [tensor.shape for tensor in found] == [hidden.shape]


def test_inputs_are_freed_with_the_backward_though_the_loss_is_kept() -> None:
    module, hidden = plain_models.Mlp(), torch.randn(2, 6, plain_models.WIDTH)
    loss = run_tiled(Tiling(3), module, None, hidden).sum()
    kept = weakref.ref(hidden)
    del hidden
    assert kept() is not None
    loss.backward()
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("ends", ["after forward", "after backward"])
def test_a_call_holds_no_more_than_its_input_and_output(ends: str) -> None:
    module, hidden = plain_models.Mlp(), torch.randn(2, 6, plain_models.WIDTH, requires_grad=True)
    module.requires_grad_(False)
    before = tensors_alive()
    output = run_tiled(Tiling(3), module, None, hidden)
    if ends == "after backward":
        output.sum().backward()
    pointers = {tensor.data_ptr() for tensor in (hidden, output, hidden.grad) if tensor is not None}
    found = [tensor for number, tensor in tensors_alive().items() if number not in before and tensor.numel() > 1]
    assert [tensor.shape for tensor in found if tensor.data_ptr() not in pointers] == []


def tensors_alive() -> dict[int, Tensor]:
    """Return all tensors that Python knows of, by id; without random states."""
    gc.collect()
    return {id(each): each for each in gc.get_objects() if type(each) is Tensor and each.dtype != torch.uint8}


def test_a_layer_that_is_recomputed_too_runs_its_ffn_no_third_time() -> None:
    case = llama()
    with hf_ckpt.apply(case.model, "full", tiles=4), exactness.counted_entries(case.model) as (forward, backward):
        # The first call is compared with some tokens alone.
        exactness.step(case)
        forward.clear(), backward.clear()
        exactness.step(case)
    assert (forward["model.layers.1.mlp.up_proj"], backward["model.layers.1.mlp.up_proj"]) == (4, 4)


def test_transients_shrink_with_the_tiles() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 512, "num_attention_heads": 1, "vocab_size": 16}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    model.requires_grad_(False).get_input_embeddings().requires_grad_(True)
    step = Step(batch_size=1, seq_length=512, optim=None)

    def transient(**options: Any) -> int:
        policy = hf_ckpt.Policy.parse("full", **options)
        memory = simulate_step(model, policy, step, CPU)
        totals = zip(memory.timeline.places, memory.timeline.total_bytes(), strict=True)
        return max(total for place, total in totals if place.part == "ffn" and place.phase is not Phase.FORWARD)

    whole, quarter, most = transient(), transient(tiles=4), transient(tiles=16)
    assert most < quarter < whole / 2


def test_a_long_layer_needs_little_more_than_its_attention_output() -> None:
    """Llama-3.1-8B with LoRA: a checkpointed layer in units of its input, over its weights.

    The kernel's backward holds 9: queries 1, keys and values 1/2, output and its gradient 2, their gradients 1 1/2, and
    of its own 2 for dq in float32, 2 for dk and dv of each query head. The rest are the layer's input and its norm.
    """
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=16)).bfloat16()
    model = get_peft_model(model, LoraConfig(r=32, target_modules="all-linear"), low_cpu_mem_usage=True)
    length = 157_000
    step = Step(batch_size=1, seq_length=length, optim=None, autocast="bfloat16")
    memory = simulate_step(model, hf_ckpt.Policy.parse("full", tiles="auto"), step, DEVICES["a100-80gb"])
    totals = zip(memory.timeline.places, memory.timeline.total_bytes(), strict=True)
    peak = max(total for place, total in totals if place.layer_idx == 0)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert (peak - weights) / (2 * length * 4096) == pytest.approx(11.1, abs=0.2)


def test_a_simulated_step_tells_recomputation_from_backward() -> None:
    """Without attention's own product, which lies outside of tiles, all products of the layer run again."""
    step = Step(batch_size=1, seq_length=64, optim=None)
    model = exactness.build("llama", num_layers=1).model
    none, tiles = (
        simulate_step(model, hf_ckpt.Policy.parse("none", **options), step, CPU).num_flops
        for options in ({}, {"tiles": 4})
    )
    linear = 2 * 64 * sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    assert Phase.RECOMPUTATION not in none
    assert tiles[Phase.RECOMPUTATION] == linear
    assert [tiles[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)] == [
        none[phase] for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]
