"""Four layers of 7B width with adapters and flash attention, bit by bit; the same code runs tiny ones on the CPU.

Kernels are chosen by size: what tiny layers show says little of the products and the attention of a real model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_ckpt
from benchmarks.cases import LLAMAS, build_llama
from benchmarks.offload import TO_HOST
from benchmarks.repeatable import repeatable_kernels
from tests import exactness, zoo
from tests.gpu.test_exact_on_device import DEVICES

# The head is not what is looked at, and 32,000 rows of it take longer to make than the layers take to train.
WIDE = replace(LLAMAS["llama_7b"], layers=4, vocabulary=1024)
TINY = replace(LLAMAS["llama_tiny"], layers=4, batch=1, tokens=64, dtype=torch.bfloat16)
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "selective": ("selective", {}),
    "ffn": ("ffn", {}),
    "full_offload": ("full", {"offload": TO_HOST}),
}


def with_adapters(device: str) -> zoo.Case:
    model, inputs = build_llama(WIDE if device == "cuda" else TINY, device)
    # Adapters that start at zero would give their first matrices no gradient.
    config = LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear", init_lora_weights=False)
    return zoo.Case("llama", get_peft_model(model, config).to(device, torch.bfloat16), inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plan", PLANS)
def test_layers_of_7b_width_are_exact(plan: str, device: str) -> None:
    case = with_adapters(device)
    policy, options = PLANS[plan]
    # The backward of flash attention repeats itself only where operators that cannot may fail; this model has none.
    with repeatable_kernels(warn_only=False), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = exactness.step(case)
        assert exactness.differences(expected, exactness.step(case)) == [], "the step itself is not repeatable"
        assert exactness.differences(expected, exactness.step(case, seed=1)), "dropout must matter"
        with hf_ckpt.apply(case.model, policy, **options) as applied:
            # The first step is proven, the second is as all later ones.
            for _ in range(2):
                assert exactness.differences(expected, exactness.step(case)) == []
            sent = [(offloader.stats.bytes_out, offloader.stats.bytes_in) for offloader in applied.offloaders]
    # In two steps the inputs of all layers but the last one, in 16 bits.
    hidden = case.inputs["input_ids"].numel() * case.model.config.hidden_size * 2
    assert sent == ([(2 * 3 * hidden, 2 * 3 * hidden)] if "offload" in options else [])
    trained = [gradient for gradient in expected[1].values() if gradient is not None]
    assert len(trained) == 2 * 7 * 4
    assert all(gradient.isfinite().all() and gradient.any() for gradient in trained)
