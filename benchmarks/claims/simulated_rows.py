"""Steps at the sizes of large models, simulated, and a result's row of one. Needs no GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from torch import nn

from benchmarks.cases import CASES, Case, build
from benchmarks.claims.following import activation_peak
from benchmarks.claims.formulas import GIB
from benchmarks.claims.overhead import without_early_stop
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step_memory import StepMemory

A100, H100, RTX4090 = "a100-80gb", "h100-80gb", "rtx4090"

LORA_7B = replace(CASES["llama2_7b_lora_2048"], batch=1)
FULL_7B = replace(LORA_7B, method="full")
SUBJECTS = {
    "llama2_7b_lora": LORA_7B,
    "llama2_7b_full": FULL_7B,
    "llama32_1b_full": CASES["llama32_1b_full_2048"],
    "qwen3_06b_full": CASES["qwen3_06b_full_2048"],
}
"""Whole steps that several claims are about."""

Rows = dict[str, Any]


def model_of(case: Case) -> nn.Module:
    """Return the model of a case on `meta`; it is built once for all rows and lengths."""
    return _model(_key(replace(case, batch=1, tokens=2048)))


def simulated(case: Case, device: str, policy: object = "none", *, accumulation: int = 1, **options: Any) -> StepMemory:
    """Return a step of a case under a policy, with the case's sizes. Each is simulated once.

    Args:
        case: the model, and the sizes of the step.
        device: its name.
        policy: in the user's words.
        accumulation: micro-batches.
        options: of the policy.
    """
    return _simulated(_key(case), device, accumulation, json.dumps([policy, options], sort_keys=True))


def _key(case: Case) -> str:
    # A case has a mapping in it, which no cache takes.
    return json.dumps(asdict(case), sort_keys=True)


@cache
def _model(key: str) -> nn.Module:
    return build(Case(**json.loads(key)), "meta")


@cache
def _simulated(key: str, device: str, accumulation: int, written: str) -> StepMemory:
    case = Case(**json.loads(key))
    policy, options = json.loads(written)
    step = replace(case.step, gradient_accumulation_steps=accumulation)
    return simulate_step(model_of(case), Policy.parse(policy, **options), step, find_device(device))


def to_the_end(case: Case, device: str) -> StepMemory:
    """Return a step under full checkpointing whose recomputation does not stop early."""
    return simulate_step(model_of(case), None, case.step, find_device(device), changed_by=without_early_stop)


def row(memory: StepMemory, none: StepMemory | None = None) -> Rows:
    """Return the figures of a step, and what they are of those without checkpointing.

    Held is what lives from the forward of the layers to their backward; peaks are of the whole step, weights among it;
    the time of backward has that of recomputation in it.
    """
    time = memory.time
    figures: Rows = {
        "peak_bytes": memory.peak_bytes,
        "peak_gib": memory.peak_bytes / GIB,
        "activation_peak_gib": activation_peak(memory) / GIB,
        "held_bytes": held(memory),
        "held_gib": held(memory) / GIB,
        "step_time_ms": 1000 * time.total,
        "forward_ms": 1000 * time.forward,
        "backward_ms": 1000 * (time.backward + time.recomputation),
        "recomputation_ms": 1000 * time.recomputation,
        "total_flops": sum(memory.num_flops.values()),
    }
    if none is None:
        return figures
    base = row(none)
    ratios = {
        "flops_ratio": figures["total_flops"] / base["total_flops"],
        "time_ratio": figures["step_time_ms"] / base["step_time_ms"],
        "held_ratio": figures["held_bytes"] / base["held_bytes"],
        "peak_ratio": figures["peak_bytes"] / base["peak_bytes"],
        "activation_peak_ratio": figures["activation_peak_gib"] / base["activation_peak_gib"],
    }
    return {
        **figures,
        **ratios,
        "flops_added": ratios["flops_ratio"] - 1,
        "time_added": ratios["time_ratio"] - 1,
        "held_saved": 1 - ratios["held_ratio"],
        "peak_saved": 1 - ratios["peak_ratio"],
    }


def held(memory: StepMemory) -> int:
    """Return the bytes that the first forward of a step leaves for its backward, logits and loss left out."""
    return sum(tensor.num_bytes for tensor in memory.ledger)
