"""Is the planned step ever slower than a fixed mode or an every-N that fits the same budget? All of it simulated.

Budgets go from the smallest peak that any plan reaches to that of no checkpointing at all. Needs no GPU.

    python benchmarks/budgets.py --case llama7b_lora_2048
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.environment import describe
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, add_case, add_out, main
from hf_ckpt.errors import BudgetError
from hf_ckpt.planner.dynamic_programming import ChainPlanner
from hf_ckpt.planner.layer_costs import chain_of
from hf_ckpt.planner.search import StepPlanner
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.fit import Capacity, Fit, capacity_of
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Step


@dataclass(frozen=True)
class Case:
    """A model, its step and where it runs."""

    config: dict[str, Any]
    step: Step
    device: str
    is_lora: bool


_LORA_STEP: dict[str, Any] = {"autocast": "bfloat16", "gradient_accumulation_steps": 16}
CASES = {
    "llama7b_lora_2048": Case({}, Step(seq_length=2048, **_LORA_STEP), "rtx4090", is_lora=True),
    "llama7b_lora_8192": Case({}, Step(seq_length=8192, **_LORA_STEP), "a100-80gb", is_lora=True),
    "llama1b_full_2048": Case(
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        Step(batch_size=4, seq_length=2048, autocast="bfloat16"),
        "a100-80gb",
        is_lora=False,
    ),
    "tiny": Case(
        {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 6, "num_attention_heads": 4},
        Step(batch_size=2, seq_length=256),
        "cpu",
        is_lora=False,
    ),
}


def build(case: Case) -> nn.Module:
    """Return the model of a case on `meta`."""
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**case.config))
    model = model.to(torch.bfloat16)
    if not case.is_lora:
        return model
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=16, lora_alpha=32, lora_dropout=0.05)
    adapted: nn.Module = get_peft_model(model, adapters, low_cpu_mem_usage=True)
    return adapted


def fixed_policies(num_layers: int) -> Iterator[tuple[str, Policy]]:
    """Yield what a user would set by hand: each mode, every-N, and segments."""
    for mode in ("none", "full", "attention", "ffn"):
        yield mode, Policy.parse(mode)
    for every in (2, 3, 4, 6, 8):
        if every < num_layers:
            yield f"full, every_n_layers={every}", Policy.parse("full", every_n_layers=every)
    yield "full, segment_size=sqrt", Policy.parse("full", segment_size="sqrt")
    yield "full, segment_size=sqrt, nested", Policy.parse("full", segment_size="sqrt", nested=True)


def sweep(case: Case, num_budgets: int, say: Any = print) -> dict[str, Any]:
    """Return what fits each budget, and how long it takes."""
    model, device = build(case), find_device(case.device)
    started = time.perf_counter()
    simulator = StepSimulator(model, case.step, device)
    chain = chain_of(simulator)
    seconds_to_plan = time.perf_counter() - started
    # Of no size: what it needs is what is asked.
    capacity = capacity_of(device, budget_bytes=device.memory_bytes)
    fixed = list(_fixed(simulator, capacity, len(chain.layers), say))
    most = max(entry["needed_bytes"] for entry in fixed if entry["name"] == "none")
    plans = StepPlanner(simulator, allowed=Allowed(exact=False), chain=chain)
    least = _least(simulator, plans, capacity, ChainPlanner(chain).peaks[0])
    budgets = [least + (most - least) * number // (num_budgets - 1) for number in range(num_budgets)]
    swept = []
    for budget in budgets:
        planned = plans.plan_for(capacity.with_bytes(budget))
        fitting = [entry for entry in fixed if entry["needed_bytes"] <= budget]
        best = min(fitting, key=lambda entry: entry["seconds"], default=None)
        swept.append(
            {
                "budget_bytes": budget,
                "peak_bytes": planned.memory.peak_bytes,
                "needed_bytes": planned.verdict.needed_bytes,
                "seconds": planned.memory.time.total,
                "best_fixed": best and best["name"],
                "best_fixed_seconds": best and best["seconds"],
                "plan": planned.plan.summary().splitlines()[1:],
            }
        )
        say(f"{budget / 2**30:7.2f} GiB: auto {swept[-1]['seconds']:.3f} s; {best and best['name']}")
    return {"device": case.device, "seconds_to_simulate": seconds_to_plan, "fixed": fixed, "budgets": swept}


def _least(simulator: StepSimulator, plans: StepPlanner, capacity: Capacity, peak_bytes: int) -> int:
    """Return the least that a plan needs, of those that are found for more and more."""
    budget = capacity.needed_bytes(peak_bytes)
    while True:
        with suppress(BudgetError):
            found = plans.plan_for(capacity.with_bytes(budget))
            if found.verdict.fit is Fit.YES:
                return simulator.verdict(found.plan, capacity).needed_bytes
        budget += budget // 100


def _fixed(simulator: StepSimulator, capacity: Capacity, num_layers: int, say: Any) -> Iterator[dict[str, Any]]:
    for name, policy in fixed_policies(num_layers):
        plan = simulator.plan_of(policy)
        memory = simulator.memory(plan)
        needed = capacity.needed_bytes(simulator.reserved_bytes(plan))
        say(f"{name}: {memory.peak_bytes / 2**30:.2f} GiB, needs {needed / 2**30:.2f}, {memory.time.total:.3f} s")
        yield {
            "name": name,
            "peak_bytes": memory.peak_bytes,
            "needed_bytes": needed,
            "seconds": memory.time.total,
        }


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """Return on how many budgets the plan is slower, equal or faster, and whether it always fits."""
    # A plan that is the same as a fixed mode takes the same time to the last digits of a sum.
    slack = 1e-9
    rows = [row for row in result["budgets"] if row["best_fixed_seconds"] is not None]
    between = result["budgets"][1:-1]
    return {
        "num_budgets": len(result["budgets"]),
        "num_over_budget": sum(row["needed_bytes"] > row["budget_bytes"] for row in result["budgets"]),
        "num_slower": sum(row["seconds"] > row["best_fixed_seconds"] * (1 + slack) for row in rows),
        "num_between": len(between),
        # Where no fixed mode fits at all, the plan beats them all.
        "num_faster_between": sum(
            row["best_fixed_seconds"] is None or row["seconds"] < row["best_fixed_seconds"] * (1 - slack)
            for row in between
        ),
    }


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    add_case(parser, CASES, "llama7b_lora_2048")
    parser.add_argument("--budgets", type=int, default=10, help="how many, the smallest and the largest among them")
    add_out(parser, RESULTS, None)


def run(options: Namespace) -> None:
    """Sweep the budgets of one case and write the result."""
    result = sweep(CASES[options.case], options.budgets)
    result = {**describe(), "case": options.case, **result, "verdict": verdict(result)}
    path = options.out / f"budgets_{options.case}.json"
    write(path, result)
    print(json.dumps(result["verdict"]), path)


if __name__ == "__main__":
    sys.exit(main(__name__))
