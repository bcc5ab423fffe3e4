"""Why each tensor is held: the operators whose backward needs it. Asking does not change what is held."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import StepMemory

pytestmark = pytest.mark.usefixtures("remembered_simulations")


def simulated(*, explains: bool) -> StepMemory:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2)
        )
    step = Step(batch_size=2, seq_length=16, autocast="bfloat16")
    return simulate_step(model, None, step, find_device("rtx4090"), explains=explains)


@pytest.fixture(scope="module")
def explained() -> StepMemory:
    return simulated(explains=True)


def reasons(memory: StepMemory, layer_idx: int) -> dict[tuple[str, str], str]:
    """Return by module and operator why a tensor of a layer is held."""
    return {
        (held.place.module.rpartition(f"{layer_idx}.")[2], held.place.operator): held.why
        for held in memory.ledger
        if held.place.layer_idx == layer_idx
    }


def test_each_held_tensor_has_a_reason(explained: StepMemory) -> None:
    assert [held for held in explained.ledger if held.place.layer_idx is not None and not held.why] == []


# Layer 3 is passed through, and another one stands for it.
@pytest.mark.parametrize("layer_idx", [1, 3])
def test_reasons_name_operator_and_module(explained: StepMemory, layer_idx: int) -> None:
    found = reasons(explained, layer_idx)
    assert found["mlp.act_fn", "aten.silu.default"] == "mul of mlp"
    assert "silu of mlp.act_fn" in found["mlp.gate_proj", "aten.mm.default"]
    attention = "aten._scaled_dot_product_flash_attention.default"
    assert "scaled_dot_product_flash_attention of self_attn" in found["self_attn", attention]


def test_asking_changes_nothing(explained: StepMemory) -> None:
    plain = simulated(explains=False)
    assert (explained.peak_bytes, explained.by_category) == (plain.peak_bytes, plain.by_category)
    assert [held.num_bytes for held in explained.ledger] == [held.num_bytes for held in plain.ledger]
    assert all(not held.why for held in plain.ledger)
