"""Mixtures with experts in 4 bits: under every plan the step of no plan, bit by bit; nothing dequantised is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_ckpt
from hf_ckpt.simulation.tracker import parameters_and_buffers
from tests import exactness, live_storages, modes
from tests.quantized_experts import dequantized, mixture

pytest.importorskip("bitsandbytes")

MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "qwen3_next", "jetmoe", "phimoe"]
PLANS: dict[str, tuple[Any, dict[str, Any]]] = {
    **modes.REGIONS,
    "none": ("none", {}),
    **{name: modes.MODES[name] for name in ("full_tile", "selective_offload")},
    "weights": ("full", {"weights": "cpu"}),
    "selective_weights": ("selective", {"weights": "cpu"}),
}


@pytest.mark.parametrize("on_experts", [False, True])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_experts_in_4_bits_compute_as_plain_weights_of_the_same_values(model_type: str, on_experts: bool) -> None:
    case = mixture(model_type, on_experts=on_experts)
    assert exactness.differences(exactness.step(dequantized(case)), exactness.step(case)) == []


@pytest.mark.parametrize("on_experts", [False, True])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_plan_changes_no_bit(model_type: str, plan: str, on_experts: bool) -> None:
    if model_type == "phimoe" and "tile" in plan:
        pytest.skip("its router draws noise, so that it does not run in tiles")
    case = mixture(model_type, on_experts=on_experts)
    expected = exactness.step(case)
    mode, options = PLANS[plan]
    with hf_ckpt.apply(case.model, mode, **options):
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []
    assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.parametrize("experts_implementation", ["eager", "grouped_mm", "batched_mm"])
def test_autograd_keeps_the_packed_values_whatever_computes_the_experts(experts_implementation: str) -> None:
    case = mixture("mixtral")
    case.model.base_model.model.set_experts_implementation(experts_implementation)
    plain = dequantized(case)
    assert exactness.differences(exactness.step(plain), exactness.step(case)) == []

    def kept(model: torch.nn.Module) -> int:
        held = (tensor for _, tensor in parameters_and_buffers(model))
        with live_storages.LiveStorages([*held, *case.inputs.values()]) as live:
            loss = model(**case.inputs, use_cache=False).loss
            assert loss.requires_grad
            return live.num_bytes()

    # What `batched_mm` takes of the experts for each token is its own, and is kept of plain weights too.
    assert kept(case.model) == kept(plain.model)
