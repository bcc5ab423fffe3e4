"""Do commands contradict each other, and is the planner's choice ever slower than a policy that a user would write?

Random models of two to four layers with the widths of real ones, methods, lengths, and cards whose memory lies around
what the step needs. All of it simulated. Needs no GPU.

    python -m benchmarks.verdicts --number 300
"""

from __future__ import annotations

import json
import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.environment import describe
from benchmarks.result_files import write
from benchmarks.runner import RESULTS, add_out, main
from hf_ckpt.errors import BudgetError
from hf_ckpt.estimate.estimate import FIXED, Estimate, Row, estimate, estimate_as_json, judged
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.recipe_plan import plan_as_json, plan_recipe
from hf_ckpt.estimate.step_of_recipe import Subject, subject_of_model
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.simulation.devices import Device, find_device
from hf_ckpt.simulation.fit import Fit
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Step

CARDS = ("rtx3060", "rtx4090", "a6000", "a100-80gb", "h100", "t4")
"""Whose speed is taken, and what lies outside of torch's allocator."""
_ON_DEVICE = tuple(name for name, options in FIXED.items() if "offload" not in options)
"""Offload takes memory of the host, which nobody has granted to the planner."""
_SAME_TIME = 1 + 1e-6
"""Times of one step may differ in the last digits of a sum."""


@dataclass(frozen=True)
class Case:
    """A model, its step, and a card that has so much of what lies between the least and the most of its plans."""

    config: PreTrainedConfig
    is_lora: bool
    step: Step
    device: str
    share: float

    def describe(self) -> dict[str, Any]:
        """Return it as JSON types."""
        config: Any = self.config
        return {
            "model": config.model_type,
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "method": "lora" if self.is_lora else "full",
            "rows": self.step.batch_size,
            "tokens": self.step.seq_length,
            "micro_batches": self.step.gradient_accumulation_steps,
            "device": self.device,
        }


def cases(seed: int) -> Iterator[Case]:
    """Yield cases, the same ones for a seed."""
    drawn = random.Random(seed)
    while True:
        heads = drawn.choice((8, 16, 32))
        kind = drawn.choice((LlamaConfig, Qwen2Config, Qwen3Config))
        config = kind(
            hidden_size=heads * 64,
            intermediate_size=heads * drawn.choice((128, 176, 256)),
            num_hidden_layers=drawn.choice((2, 3, 4)),
            num_attention_heads=heads,
            num_key_value_heads=drawn.choice((heads, heads // 4)),
            head_dim=64,
            vocab_size=drawn.choice((8192, 32000, 128256)),
            max_position_embeddings=2**17,
        )
        step = Step(
            batch_size=drawn.choice((1, 1, 2, 4)),
            seq_length=drawn.choice((512, 1024, 2048, 4096, 8192)),
            autocast="bfloat16",
            gradient_accumulation_steps=drawn.choice((1, 1, 4)),
        )
        # Now and then more than the most.
        yield Case(config, drawn.random() < 0.6, step, drawn.choice(CARDS), drawn.uniform(-0.1, 1.2))


@dataclass(frozen=True, kw_only=True)
class SharedSubject(Subject):
    """A subject whose steps are simulated once for all that is asked about it."""

    simulators: dict[str, StepSimulator] = field(default_factory=dict)

    def simulator(self, device: Device) -> StepSimulator:
        """Return the same one for each card of a kind, however much memory it has."""
        if device.name not in self.simulators:
            self.simulators[device.name] = super().simulator(device)
        return self.simulators[device.name]


def subject_of_case(case: Case) -> Subject:
    """Return what is asked about."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(case.config, dtype=torch.bfloat16)
    if case.is_lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=16)
        model = get_peft_model(model, adapters, low_cpu_mem_usage=True)
    found = subject_of_model(model.train(), case.step)
    return SharedSubject(title=found.title, model=found.model, step=found.step, stacks=found.stacks)


def device_of(case: Case, subject: Subject) -> Device:
    """Return the card, with so much memory that some plans fit and some do not."""
    card = find_device(case.device)
    predictor = Predictor(subject, card)
    needed = [
        predictor.verdict(plan, predictor.capacity(replace(card, memory_bytes=2**50))).needed_bytes
        for plan in (None, subject.resolve("full"))
    ]
    least, most = min(needed), max(needed)
    return replace(card, memory_bytes=int(least + case.share * (most - least)))


def contradictions(subject: Subject, device: Device) -> tuple[list[str], dict[str, Any]]:
    """Ask both commands about a step, and return what contradicts itself, and what was answered."""
    told: list[str] = []
    asked = estimate(subject, [device], told.append, _ON_DEVICE)
    rows = {row.name: row for row in asked.rows}
    found = [*_rows_against_each_other(rows), *_plan_against(asked, device)]
    fits = any(line.startswith("Fits on ") for line in told)
    if fits and _fit(rows[AUTO]) is not Fit.YES:
        found.append("progress says that a plan fits, and auto does not")
    document = estimate_as_json(asked)
    of_rows = {row["name"]: row["fits"][device.name] for row in document["rows"] if "fits" in row}
    if document["verdicts"][0]["fits"] != of_rows["none"]:
        found.append("the verdict on no plan is not that of its row")
    auto = rows[AUTO]
    return found, {
        "memory_bytes": device.memory_bytes,
        "auto": _fit(auto),
        "fits": of_rows,
        "seconds": None if auto.memory is None else auto.memory.time.total,
    }


def _rows_against_each_other(rows: dict[str, Row]) -> Iterator[str]:
    auto, none = rows[AUTO], rows["none"]
    fixed = {name: row for name, row in rows.items() if name in FIXED and row.memory}
    for name, row in fixed.items():
        if _fit(row) is Fit.YES and _fit(auto) is not Fit.YES:
            yield f"{name} fits, and auto: {_fit(auto)}"
        elif _fit(row) is not Fit.NO and _fit(auto) is Fit.NO:
            yield f"{name}: {_fit(row)}, and auto does not fit"
        elif _fit(row) is Fit.YES and _seconds(auto) > _seconds(row) * _SAME_TIME:
            yield f"{name} fits and takes {_seconds(row):.4g} s, auto {_seconds(auto):.4g}"
    plan = None if auto.memory is None else auto.memory.plan
    if _fit(none) is Fit.YES and not (plan is not None and plan.does_nothing):
        yield "none fits, and auto is another plan"


def _plan_against(asked: Estimate, device: Device) -> Iterator[str]:
    """Ask for the plan alone, which knows nothing of the rows."""
    auto = next(row for row in asked.rows if row.name == AUTO)
    try:
        found = plan_recipe(asked.subject, device, None, lambda _: None, with_fixed=False)
    except BudgetError:
        if auto.memory is not None:
            yield "plan finds none, and estimate does"
        return
    verdict = plan_as_json(found, "")["verdict"]
    if auto.memory is None or found.planned.plan != auto.memory.plan:
        yield "plan chooses another plan than estimate"
    elif verdict["fits"] != _fit(auto) or verdict != estimate_as_json(replace(asked, decides=AUTO))["verdicts"][0]:
        yield f"plan: {verdict['fits']}, estimate: {_fit(auto)}"
    again = judged(Predictor(asked.subject, device), AUTO, found.planned.plan, [device])
    if _fit(again) is not found.planned.verdict.fit:
        yield "the chosen plan is judged otherwise by itself"


def _fit(row: Row) -> Fit:
    return next((verdict.fit for verdict in row.verdicts.values()), Fit.NO)


def _seconds(row: Row) -> float:
    assert row.memory is not None, "it fits"
    return row.memory.time.total


def _answer(case: Case) -> dict[str, Any]:
    subject = subject_of_case(case)
    found, answer = contradictions(subject, device_of(case, subject))
    return {**case.describe(), **answer, "contradictions": found}


def add_arguments(parser: ArgumentParser) -> None:
    """Add what this suite is asked."""
    parser.add_argument("--number", type=int, default=300, help="of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="that share the work")
    add_out(parser, RESULTS, None)


def run(options: Namespace) -> int:
    """Ask about each case and write the result."""
    answered = []
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for number, answer in enumerate(pool.map(_answer, islice(cases(options.seed), options.number))):
            answered.append(answer)
            print(number, answer["auto"], answer["contradictions"], flush=True)
    counted = {str(fit): sum(each["auto"] == fit for each in answered) for fit in Fit}
    wrong = sum(bool(each["contradictions"]) for each in answered)
    result = {**describe(), "seed": options.seed, "num_cases": len(answered), "num_contradicting": wrong}
    path = options.out / "verdicts.json"
    write(path, {**result, "auto": counted, "cases": answered})
    print(json.dumps({"num_contradicting": wrong, **counted}), path)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(__name__))
