"""Closed formulas of the literature, as checks of sense: simulated steps of real models come out where they say.

Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (square root of L); Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models" (bytes of a layer, 2 sbh for its input).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import CPU, DEVICES, Device
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Phase, StepMemory

pytestmark = pytest.mark.slow

A100 = next(device for device in DEVICES.values() if device.capability == (8, 0))
BF16 = torch.bfloat16
BATCH, LENGTH, HIDDEN, HEADS = 2, 256, 256, 4
INPUT_BYTES = 2 * BATCH * LENGTH * HIDDEN
STEP = Step(batch_size=BATCH, seq_length=LENGTH, optim=None)


def llama(num_layers: int, **sizes: Any) -> nn.Module:
    """A Llama in bfloat16, without data."""
    given = {"hidden_size": HIDDEN, "intermediate_size": 3 * HIDDEN, "num_attention_heads": HEADS, "vocab_size": 512}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**(given | sizes), num_hidden_layers=num_layers)).to(BF16)


def simulated(
    model: nn.Module, policy: str | None, step: Step = STEP, *, device: Device = A100, **options: Any
) -> StepMemory:
    return simulate_step(model, None if policy is None else Policy.parse(policy, **options), step, device)


def held_by_layers(memory: StepMemory) -> Counter[int | None]:
    """Bytes that layers hold for backward, by layer."""
    held: Counter[int | None] = Counter()
    for tensor in memory.ledger:
        held[tensor.place.layer_idx] += tensor.num_bytes
    return held


# --- Checkpointing. ---


def test_full_checkpointing_holds_the_input_of_each_layer() -> None:
    """2 sbh bytes for each of L layers: the embeddings make the first one's input, each layer makes the next one's."""
    memory = simulated(llama(8), "full")
    held = held_by_layers(memory)
    assert [held[layer_idx] for layer_idx in range(8)] == [INPUT_BYTES] * 7 + [0]
    assert [tensor.num_bytes for tensor in memory.ledger if tensor.place.module == "model.embed_tokens"] == [
        INPUT_BYTES
    ]


@pytest.mark.parametrize(("num_layers", "units"), [(16, 8), (64, 16)])
def test_nested_segments_of_sqrt_length_hold_twice_the_root_of_inputs(num_layers: int, units: int) -> None:
    """At worst the inputs of all segments and those of the layers of one are held: 2 sqrt(L)."""
    model = llama(num_layers, hidden_size=16, intermediate_size=32, num_attention_heads=1, vocab_size=16)
    # Gradients of weights would add up beside the inputs.
    model.requires_grad_(False).get_input_embeddings().requires_grad_(True)
    step = Step(batch_size=1, seq_length=512, optim=None)
    # On CUDA empty tensors take 512 bytes, which counts where inputs are so small.
    nested = simulated(model, "full", step, device=CPU, segment_size="sqrt", nested=True)
    whole = simulated(model, "full", step, device=CPU)
    unit = 2 * 512 * 16
    assert math.isqrt(num_layers) * 2 == units
    # What one layer needs beside inputs is the same in both.
    assert (whole.peak_of(Phase.RECOMPUTATION) - nested.peak_of(Phase.RECOMPUTATION)) / unit == pytest.approx(
        num_layers - units, abs=1.5
    )


# --- Work. ---


def flops(memory: StepMemory, *phases: Phase) -> int:
    return sum(memory.num_flops.get(phase, 0) for phase in phases)


def test_a_backward_does_twice_the_work_of_its_forward() -> None:
    memory = simulated(llama(4, vocab_size=16), None, Step(seq_length=64, optim=None))
    ratio = flops(memory, Phase.BACKWARD) / flops(memory, Phase.FORWARD)
    # A little more: attention computes its scores again.
    assert ratio == pytest.approx(2.0, abs=0.05)


def test_full_checkpointing_does_a_third_more_work_less_what_it_may_stop_before() -> None:
    """8 units for 6, less the last product of each layer: early stop leaves out `down_proj`."""
    model, step = llama(4, vocab_size=16), Step(seq_length=64, optim=None)
    none, full = (simulated(model, policy, step) for policy in (None, "full"))
    per_layer = 4 * HIDDEN**2 + 3 * HIDDEN * 3 * HIDDEN
    expected = 1 + (per_layer - 3 * HIDDEN**2) / (3 * per_layer)
    assert flops(full, *Phase) / flops(none, *Phase) == pytest.approx(expected, abs=0.01)


def test_with_adapters_full_checkpointing_does_about_a_half_more_work() -> None:
    """The base has no gradients of weights: 2 + 2 units, and recomputation adds nearly 2."""
    adapters = LoraConfig(r=2, target_modules="all-linear")
    model = get_peft_model(llama(4, vocab_size=16), adapters, low_cpu_mem_usage=True)
    step = Step(seq_length=64, optim=None)
    none, full = (simulated(model, policy, step) for policy in (None, "full"))
    assert flops(full, *Phase) / flops(none, *Phase) == pytest.approx(1.47, abs=0.04)


# --- Bytes of a layer. ---


def test_a_layer_of_gpt2_holds_what_korthikanti_counts() -> None:
    """`sbh (34 + 5 a s / h)` with dropout of one byte: eager attention, and the gelu that the paper has."""
    config = GPT2Config(n_embd=HIDDEN, n_layer=6, n_head=HEADS, n_positions=LENGTH, vocab_size=512)
    config.activation_function, config._attn_implementation = "gelu", "eager"
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).to(BF16)
    held = held_by_layers(simulated(model, None))
    formula = LENGTH * BATCH * HIDDEN * (34 + 5 * HEADS * LENGTH / HIDDEN)
    assert held[3] == pytest.approx(formula, rel=0.05)
