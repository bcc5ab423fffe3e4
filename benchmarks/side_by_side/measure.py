"""One case: every contender counted or measured in one process, in turn, on one model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.side_by_side.budgets import budgets_of, compare, device_for, plans, verdict
from benchmarks.side_by_side.cases import Case, batch_of, build
from benchmarks.side_by_side.contender import Contender, NotHereError
from benchmarks.side_by_side.counting import count
from benchmarks.side_by_side.ours import planned
from benchmarks.side_by_side.step import TrainingStep
from benchmarks.side_by_side.timing import Times, empty, turn
from hf_ckpt.errors import HFCkptError
from hf_ckpt.memory.timeline import StepMemory
from hf_ckpt.patch import plan_of

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure.

    Args:
        num_rounds: turns that each contender gets; 0 for no times.
        num_warmup: steps of a turn before the timed ones.
        num_steps: timed steps of a turn.
        num_budgets: plans to make.
        limit_s: no round begins that would end after so many seconds; None for no limit.
    """

    num_rounds: int = 3
    num_warmup: int = 1
    num_steps: int = 1
    num_budgets: int = 6
    limit_s: float | None = None


class Bench:
    """A case on a device: a model that contenders take turns on.

    Args:
        case: or its twin.
        device: `cpu` or `cuda`.
    """

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.place = torch.device(device)
        self._step: TrainingStep | None = None

    @property
    def step(self) -> TrainingStep:
        """The step of the case; the model is built where there is none."""
        if self._step is None:
            model = self._built()
            self._step = self._started(model)
        return self._step

    @contextmanager
    def entered(self, contender: Contender) -> Iterator[tuple[TrainingStep, nn.Module]]:
        """Let a contender in; yields the step, and what to call.

        Raises:
            NotHereError: it cannot run.
        """
        if not contender.is_reversible:
            # Parameters may become others: they need an optimizer of their own.
            self._step = None
            with contender.enter(self._built()) as called:
                yield self._started(called), called
        else:
            with contender.enter(self.step.model) as called:
                yield self.step, called
            self.step.optimizer.zero_grad()
        empty(self.place)

    def _built(self) -> nn.Module:
        empty(self.place)
        return build(self.case, self.place.type)

    def _started(self, model: nn.Module) -> TrainingStep:
        """Return a step whose optimizer has its state, which it makes when it first steps."""
        step = TrainingStep(model, self.case, batch_of(self.case, self.place.type))
        step.run(model)
        return step


def measure(
    case: Case, device: str, contenders: Sequence[Contender], effort: Effort, say: Say = lambda text: None
) -> dict[str, Any]:
    """Measure contenders on a case, and plans for the budgets that their peaks set.

    Args:
        case: or its twin.
        device: `cpu`, where operations and bytes are counted and times are good for ratios only, or `cuda`.
        contenders: in the order of the result, `none` first.
        effort: how much.
        say: is told what goes on.
    """
    started = time.monotonic()
    bench = Bench(case, device)
    records = {contender.name: _record(contender) for contender in contenders}
    for contender in contenders:
        _first_look(bench, contender, records[contender.name], say)
    autos = _planned(bench, device, records, effort, say) if effort.num_budgets else []
    for contender in autos:
        _first_look(bench, contender, records[contender.name], say)
    rounds = _rounds(bench, [*contenders, *autos], records, effort, started, say)
    _relate(records)
    timed = [name for name, record in records.items() if "step_time_ms" in record]
    result = {
        "case": case.name,
        "title": case.title,
        "device": device,
        "is_small": case.is_small,
        "model": case.facts(),
        "effort": asdict(effort) | {"num_rounds": rounds},
        "contenders": records,
    }
    if autos and timed:
        rows = compare(records, _median)
        result |= {"budgets": rows, "verdict": verdict(rows)}
    if autos and device == "cpu":
        rows = compare(records, _operations)
        result |= {"budgets_by_flops": rows, "verdict_by_flops": verdict(rows)}
    return result


def _median(record: dict[str, Any]) -> float:
    return float(record["step_time_ms"]["median"]) if "step_time_ms" in record else float("inf")


def _operations(record: dict[str, Any]) -> float:
    return float(record["total_flops"])


def _record(contender: Contender) -> dict[str, Any]:
    return {"title": contender.title, "group": contender.group, "plan": None, "not_run": None}


def _first_look(bench: Bench, contender: Contender, record: dict[str, Any], say: Say) -> None:
    """Run a contender once: on the CPU to count, elsewhere for its peak, which sets a budget."""
    try:
        with bench.entered(contender) as (step, called):
            plan = plan_of(called)
            record["plan"] = None if plan is None else json.loads(plan.to_json())
            is_compiled = contender.group == "compiled"
            # A layer that is kept selectively is compiled when it has been recomputed once.
            for _ in range(2 if is_compiled else 1):
                step.run(called)
            if bench.place.type == "cpu":
                record |= count(step, called, is_compiled=is_compiled)
            else:
                times = Times()
                turn(step, called, times, num_warmup=0, num_steps=1, is_split=False)
                record["peak_bytes"] = max(times.peaks)
    except (NotHereError, HFCkptError, torch.OutOfMemoryError) as error:
        record["not_run"] = " ".join(str(error).split())
        say(f"{contender.name}: not run: {record['not_run']}")
        return
    say(f"{contender.name}: peak {record['peak_bytes'] / 2**20:,.1f} MiB")


def _planned(bench: Bench, device: str, records: dict[str, Any], effort: Effort, say: Say) -> list[Contender]:
    """Plan for the budgets, and enter each plan into the records."""
    made = plans(bench.step.model, bench.case, device_for(device), budgets_of(records, effort.num_budgets), say)
    contenders = []
    for number, (budget, found) in enumerate(made, 1):
        contender = planned(number, f"{budget.num_bytes / 2**20:,.0f} MiB", found.plan)
        record = _record(contender) | {"budget_bytes": budget.num_bytes, "set_by": budget.set_by}
        records[contender.name] = record | {"predicted": predicted(found.memory)}
        contenders.append(contender)
    return contenders


def predicted(memory: StepMemory) -> dict[str, Any]:
    """Return a prediction as JSON types.

    Args:
        memory: of the simulated step.
    """
    return {
        "peak_bytes": memory.peak_bytes,
        "host_bytes": memory.host_bytes,
        "by_category": {category.value: num_bytes for category, num_bytes in memory.by_category.items()},
        "step_time_ms": 1e3 * memory.time.total,
        "time_ms": {phase: 1e3 * seconds for phase, seconds in asdict(memory.time).items()},
        "num_flops": {phase.value: flops for phase, flops in memory.num_flops.items()},
    }


def _rounds(
    bench: Bench,
    contenders: Sequence[Contender],
    records: dict[str, Any],
    effort: Effort,
    started: float,
    say: Say,
) -> int:
    """Let the contenders that run take turns, there and back; return how many rounds there were."""
    # On the CPU compilers get a stand-in that makes no code, so that there is nothing to time.
    running = [
        contender
        for contender in contenders
        if not records[contender.name]["not_run"] and (bench.place.type != "cpu" or contender.group != "compiled")
    ]
    times = {contender.name: Times() for contender in running}
    longest, number = 0.0, 0
    for number in range(1, effort.num_rounds + 1):
        began = time.monotonic()
        if effort.limit_s is not None and began - started + longest > effort.limit_s:
            say(f"no time for round {number} of {effort.num_rounds}")
            number -= 1
            break
        for contender in running[:: 1 if number % 2 else -1]:
            with bench.entered(contender) as (step, called):
                sizes = {"num_warmup": effort.num_warmup, "num_steps": effort.num_steps}
                turn(step, called, times[contender.name], **sizes, is_split=number == 1)
        longest = max(longest, time.monotonic() - began)
        say(f"round {number} of {effort.num_rounds}: {time.monotonic() - began:.0f} s")
    for name, taken in times.items():
        if taken.steps:
            records[name] |= taken.as_json()
    return number


def _relate(records: dict[str, Any]) -> None:
    """Add each record's ratios to the first one that ran, which is `none` where that fits."""
    first = next((record for record in records.values() if not record["not_run"]), None)
    for record in records.values():
        if first is None or record["not_run"]:
            continue
        figures = {"flops": "total_flops", "held": "held_bytes", "peak": "peak_bytes"}
        ratios = {name: record[key] / first[key] for name, key in figures.items() if key in record and first.get(key)}
        if "step_time_ms" in record:
            ratios["step_time"] = _median(record) / _median(first)
        record["ratios"] = ratios
