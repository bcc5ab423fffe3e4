"""A step on a device, with and without a policy, bit by bit; the same code runs small on the CPU."""

from __future__ import annotations

import pytest
import torch

import hf_ckpt
from benchmarks.repeatable import repeatable_kernels
from tests import exactness, zoo

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MODELS = ["llama", "gemma3_text", "gpt2", "mixtral", "t5"]


def on_device(model_type: str, device: str, **options: object) -> zoo.Case:
    """Build a case of the zoo and move it."""
    torch.manual_seed(0)
    case = zoo.build(model_type, **options)
    case.model.to(device)
    return zoo.Case(**{**vars(case), "inputs": {name: value.to(device) for name, value in case.inputs.items()}})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("policy", exactness.POLICIES)
def test_every_policy_is_exact(model_type: str, policy: str, device: str) -> None:
    case = on_device(model_type, device, attn_implementation="eager")
    expected = exactness.step(case)
    assert exactness.differences(expected, exactness.step(case)) == [], "the step itself is not repeatable"
    assert exactness.check(case, policy) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", exactness.POLICIES)
def test_adapters_with_dropout_draw_the_same_masks_again(policy: str, device: str) -> None:
    # What the first layer is given needs no gradient: torch's checkpoint does not learn from it which device draws.
    case = exactness.lora(on_device("llama", device, attn_implementation="eager"), lora_dropout=0.5)
    case.model.to(device)
    expected = exactness.step(case)
    assert exactness.differences(expected, exactness.step(case, seed=1)), "dropout must matter"
    assert exactness.check(case, policy) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["full", "attention", "ffn", "segments_2", "nested"])
def test_bf16_autocast_with_sdpa_is_exact(policy: str, device: str) -> None:
    case = on_device("llama", device)
    # Fused attention repeats itself only where operators that cannot may fail; this model has none.
    with repeatable_kernels(warn_only=False), torch.autocast(device, dtype=torch.bfloat16):
        expected = exactness.step(case)
        mode, options = exactness.POLICIES[policy]
        with hf_ckpt.apply(case.model, mode, **options):
            got = exactness.step(case)
    assert exactness.differences(expected, got) == []


@pytest.mark.parametrize("device", DEVICES)
def test_dropout_draws_the_same_masks_again(device: str) -> None:
    case = on_device("gpt2", device, attn_implementation="eager", dropout=0.5)
    expected = exactness.step(case)
    other = exactness.step(case, seed=1)
    assert exactness.differences(expected, other), "dropout must matter for this test to say anything"
    assert exactness.check(case, "segments_2") == []


@pytest.mark.gpu
def test_full_frees_memory_on_the_device() -> None:
    case = on_device("llama", "cuda", attn_implementation="eager", num_layers=8)
    # Of two short rows the layers keep less than their weights' gradients take.
    for name, value in case.inputs.items():
        case.inputs[name] = value.repeat(16, 1)

    def peak() -> int:
        case.model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        exactness.step(case)
        return torch.cuda.max_memory_allocated() - before

    # cuBLAS takes its workspaces in the first step.
    peak()
    without = peak()
    with hf_ckpt.apply(case.model, "full"):
        with_full = peak()
    # Counted with the operators of a CPU: 20.2 and 3.8 MiB.
    assert with_full < without / 2
