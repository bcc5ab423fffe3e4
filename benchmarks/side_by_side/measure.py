"""One case: every contender counted or measured in one process, in turn, on one model.

`collect` makes an entry of each contender's first look and of each of its turns, `assemble` the result of those that
are there. Plans for budgets are made in between, from the peaks of the first looks, or they come ready.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.cases import Case, batch_of, build
from benchmarks.journal import NO_FIGURES, Entry, Journal
from benchmarks.side_by_side.budgets import budgets_of, compare, device_for, plans, verdict
from benchmarks.side_by_side.contender import Contender, NotHereError
from benchmarks.side_by_side.counting import count
from benchmarks.side_by_side.ours import planned
from benchmarks.side_by_side.step import TrainingStep
from benchmarks.side_by_side.timing import empty, figures_of, turn
from hf_ckpt.errors import HFCkptError
from hf_ckpt.patch.apply import plan_of
from hf_ckpt.policy.plan import HeadMode, Plan
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import format_bytes

Say = Callable[[str], None]
PLANS = "plans"
"""Key of the entry that holds the plans for budgets, each with the fields of `Auto`."""
_PLANNING_LIMIT_S = 3600.0
_EARLY = "timed in a step in which the contender was not yet as it is in all later ones"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure.

    Args:
        num_rounds: turns that each contender gets; 0 for no times.
        num_warmup: steps of a turn before the timed ones; more for contenders that need them.
        num_steps: timed steps of a turn.
        num_budgets: plans to make.
        is_split: whether one more step of the first round tells recomputation from the rest of backward.
    """

    num_rounds: int = 3
    num_warmup: int = 1
    num_steps: int = 1
    num_budgets: int = 6
    is_split: bool = True


@dataclass(frozen=True, kw_only=True)
class Auto:
    """A plan for a budget, as JSON types.

    Args:
        budget_bytes: of the whole step.
        set_by: the contender whose peak it is.
        plan: for the model of the case.
        predicted: of its step, as `predicted` returns it.
    """

    budget_bytes: int
    set_by: str
    plan: dict[str, Any]
    predicted: dict[str, Any]

    def contender(self, number: int) -> Contender:
        """Return it as a contender.

        Args:
            number: counted from 1, by rising budgets.
        """
        return planned(number, format_bytes(self.budget_bytes), Plan.from_json(json.dumps(self.plan)))


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
            self._step = self._started(self._built())
        return self._step

    @contextmanager
    def entered(self, contender: Contender) -> Iterator[tuple[TrainingStep, nn.Module]]:
        """Let a contender in; yields the step, and what to call.

        Raises:
            NotHereError: it cannot run.
        """
        try:
            if not contender.is_reversible:
                # Parameters may become others: they need an optimizer of their own.
                self._step = None
                with contender.enter(self._built()) as called:
                    yield self._started(called), called
            else:
                with contender.enter(self.step.model) as called:
                    yield self.step, called
                self.step.optimizer.zero_grad()
        except NotHereError:
            raise
        except BaseException:
            # Who knows what a step that broke off has left on the model.
            self._step = None
            raise
        finally:
            empty(self.place)

    def _built(self) -> nn.Module:
        empty(self.place)
        return build(self.case, self.place.type)

    def _started(self, model: nn.Module) -> TrainingStep:
        step = TrainingStep(model, self.case, batch_of(self.case, self.place.type))
        step.make_state()
        return step


# --- Entries. ---


def collect(
    journal: Journal,
    case: Case,
    device: str,
    contenders: Sequence[Contender],
    effort: Effort,
    say: Say = lambda text: None,
) -> None:
    """Measure contenders on a case, and plans for budgets.

    Args:
        journal: keeps `first_look/<contender>`, `round_<n>/<contender>` and `plans`, which are made for the budgets
            that the contenders' peaks set unless they are there already.
        case: or its twin.
        device: `cpu`, where operations and bytes are counted and times are good for ratios only, or `cuda`.
        contenders: in the order of the result, `none` first.
        effort: how much.
        say: is called with what goes on.

    Raises:
        OutOfTimeError: the journal's time is over.
        DeviceFaultError: the device does not answer any more.
    """
    bench = Bench(case, device)
    for contender in contenders:
        _look(journal, bench, contender, say)
    if effort.num_budgets:
        make = partial(_made, journal, bench, contenders, effort, say)
        journal.entry(PLANS, make, limit_s=_PLANNING_LIMIT_S)
    everyone = [*contenders, *(one.contender(number) for number, one in enumerate(_autos(journal), 1))]
    for contender in everyone[len(contenders) :]:
        _look(journal, bench, contender, say)
    for number in range(1, effort.num_rounds + 1):
        # There and back, so that no contender always comes after the same other one.
        for contender in everyone[:: 1 if number % 2 else -1]:
            if _is_timed(contender, device) and _reason(journal, contender, number - 1) is None:
                measure = partial(_turn, bench, contender, effort, is_split=effort.is_split and number == 1)
                before = _entry(journal, contender, number - 1) or {}
                journal.entry(_key(contender, number), measure, needs_s=before.get("took_s", 0.0))
        say(f"round {number} of {effort.num_rounds}")


def _is_timed(contender: Contender, device: str) -> bool:
    # On the CPU compilers get a stand-in that makes no code, so that there is nothing to time.
    return device != "cpu" or contender.group != "compiled"


def _key(contender: Contender, number: int) -> str:
    """Return the key of a round, or of the first look, which is round 0."""
    return f"round_{number}/{contender.name}" if number else f"first_look/{contender.name}"


def _entry(journal: Journal, contender: Contender, number: int) -> Entry | None:
    return journal.entries.get(_key(contender, number))


def _reason(journal: Journal, contender: Contender, number: int) -> str | None:
    """Return why a contender does not run up to a round; None if it does."""
    if _entry(journal, contender, 0) is None:
        return "not measured yet"
    for each in range(number + 1):
        found = _entry(journal, contender, each) or {}
        for name in ("not_run", *NO_FIGURES):
            if name in found:
                return f"round {each}: {found[name]}" if each else str(found[name])
    return None


def _look(journal: Journal, bench: Bench, contender: Contender, say: Say) -> None:
    found = journal.entry(_key(contender, 0), partial(_first_look, bench, contender))
    reason = _reason(journal, contender, 0)
    if reason is not None:
        say(f"{contender.name}: not run: {reason}")
    else:
        say(f"{contender.name}: peak {found['peak_bytes'] / 2**20:,.1f} MiB")


def _first_look(bench: Bench, contender: Contender) -> Entry:
    """Run a contender once: on the CPU to count, elsewhere for its peak, which sets a budget."""
    try:
        with bench.entered(contender) as (step, called):
            plan = plan_of(called)
            found: Entry = {"plan": None if plan is None else json.loads(plan.to_json())}
            if bench.place.type != "cpu":
                return found | turn(step, called, num_warmup=contender.num_warmup, num_steps=1, is_split=False)
            for _ in range(contender.num_warmup):
                step.run(called)
            return found | count(step, called, is_compiled=contender.group == "compiled")
    except (NotHereError, HFCkptError) as error:
        return {"not_run": " ".join(str(error).split())}


def _made(journal: Journal, bench: Bench, contenders: Sequence[Contender], effort: Effort, say: Say) -> Entry:
    """Plan for the budgets that peaks set."""
    budgets = budgets_of(_records(journal, contenders), effort.num_budgets)
    made = plans(bench.step.model, bench.case, device_for(bench.place.type), budgets, say)
    autos = [
        Auto(
            budget_bytes=budget.num_bytes,
            set_by=budget.set_by,
            plan=json.loads(found.plan.to_json()),
            predicted=predicted(found.memory),
        )
        for budget, found in made
    ]
    return {"autos": list(map(asdict, autos))}


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


def _turn(bench: Bench, contender: Contender, effort: Effort, *, is_split: bool) -> Entry:
    num_warmup = max(effort.num_warmup, contender.num_warmup)
    with bench.entered(contender) as (step, called):
        return turn(step, called, num_warmup=num_warmup, num_steps=effort.num_steps, is_split=is_split)


# --- The result. ---


def assemble(
    journal: Journal,
    case: Case,
    device: str,
    contenders: Sequence[Contender],
    effort: Effort,
) -> dict[str, Any]:
    """Return the result of the entries that are there; the arguments are those of `collect`."""
    records = _records(journal, contenders)
    everyone = list(contenders)
    for number, auto in enumerate(_autos(journal), 1):
        contender = auto.contender(number)
        everyone.append(contender)
        records[contender.name] = _record(journal, contender) | {
            "budget_bytes": auto.budget_bytes,
            "set_by": auto.set_by,
            "predicted": auto.predicted,
        }
    timed = [one for one in everyone if _is_timed(one, device)]
    num_rounds = _enter_times(journal, timed, records, effort.num_rounds)
    _relate(records)
    losses = {name: record["loss"] for name, record in records.items() if "loss" in record and _is_bitwise(record)}
    result = {
        "case": case.name,
        "title": case.title,
        "device": device,
        "is_small": case.is_small,
        "model": case.facts(),
        "effort": asdict(effort) | {"num_rounds": num_rounds},
        "contenders": records,
        "losses": {"are_equal": len(set(losses.values())) <= 1, "by_contender": losses},
    }
    has_autos = any(one.group == "auto" for one in everyone)
    if has_autos and num_rounds:
        rows = compare({name: record for name, record in records.items() if "step_time_ms" in record}, _median)
        result |= {"budgets": rows, "verdict": verdict(rows)}
    if has_autos and device == "cpu":
        rows = compare(records, _operations)
        result |= {"budgets_by_flops": rows, "verdict_by_flops": verdict(rows)}
    return result


def _autos(journal: Journal) -> list[Auto]:
    """Return the plans that were made."""
    return [Auto(**fields) for fields in journal.entries.get(PLANS, {}).get("autos", ())]


def _records(journal: Journal, contenders: Sequence[Contender]) -> dict[str, dict[str, Any]]:
    return {contender.name: _record(journal, contender) for contender in contenders}


def _record(journal: Journal, contender: Contender) -> dict[str, Any]:
    """Return what the first look has found of a contender."""
    record = {"title": contender.title, "group": contender.group, "plan": None, "not_run": None}
    reason = _reason(journal, contender, 0)
    if reason is not None:
        return record | {"not_run": reason}
    found = _entry(journal, contender, 0) or {}
    return record | {name: figure for name, figure in found.items() if name not in ("took_s", "seconds", "num_warmup")}


def _enter_times(
    journal: Journal, contenders: Sequence[Contender], records: dict[str, dict[str, Any]], num_rounds: int
) -> int:
    """Add times to the records; return how many rounds all that run have taken part in."""
    whole = []
    for contender in contenders:
        record = records[contender.name]
        # On a device the first look, round 0, is timed as well.
        turns = [found for number in range(num_rounds + 1) if (found := _entry(journal, contender, number))]
        good = [found for found in turns if found.get("num_warmup", 0) >= contender.num_warmup]
        early = [found for found in turns if "seconds" in found and found not in good]
        if good:
            record |= figures_of(good)
        elif early:
            record["times_left_out"] = {"reason": _EARLY, "step_time_ms": figures_of(early)["step_time_ms"]}
        record["not_run"] = _reason(journal, contender, num_rounds)
        if record["not_run"] is None:
            whole.append(sum("seconds" in (_entry(journal, contender, n) or {}) for n in range(1, num_rounds + 1)))
    return min(whole, default=0)


def _relate(records: dict[str, Any]) -> None:
    """Add each record's ratios to the first one that ran, which is `none` where that fits."""
    first = next((record for record in records.values() if not record["not_run"]), None)
    for record in records.values():
        if first is None or record["not_run"]:
            continue
        figures = {"flops": "total_flops", "held": "held_bytes", "peak": "peak_bytes"}
        ratios = {name: record[key] / first[key] for name, key in figures.items() if key in record and first.get(key)}
        if "step_time_ms" in record and "step_time_ms" in first:
            ratios["step_time"] = _median(record) / _median(first)
        record["ratios"] = ratios


def _is_bitwise(record: dict[str, Any]) -> bool:
    """Whether a contender promises the loss of `none` to the bit: compilers, tiles and a chunked head do not."""
    plan = record["plan"]
    if plan is None:
        return record["group"] != "compiled"
    read = Plan.from_json(json.dumps(plan))
    return read.head is HeadMode.PLAIN and all(layer.tiles is None for stack in read.stacks for layer in stack.layers)


def _median(record: dict[str, Any]) -> float:
    return float(record["step_time_ms"]["median"]) if "step_time_ms" in record else float("inf")


def _operations(record: dict[str, Any]) -> float:
    return float(record["total_flops"])
