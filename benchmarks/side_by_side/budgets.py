"""Budgets, the plans that the planner makes for them, and how they compare with what fits the same budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import nn

from benchmarks.cases import Case
from hf_ckpt.errors import BudgetError
from hf_ckpt.measure.calibrate import calibrate
from hf_ckpt.planner.search import Planned, StepPlanner
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.options import Offload
from hf_ckpt.simulation.devices import CPU, Device
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.simulator import StepSimulator

GRANTED = Allowed(offload=Offload(), exact=False)
"""Host memory too: contenders that take some are compared, and a user of theirs has granted it."""
_CLOSE = 0.01
"""Peaks that are nearer to each other set one budget, and a step fits a budget that it exceeds by less: a budget that
is a prediction for a setting must not leave that setting out for a rounded block."""
_FAR = 1.3
_FIXED = ("none", "today", "elsewhere", "ours")
_TODAY = ("none", "today")

# What `calibrate` found on one core of a Xeon server. Fixed, so that the same plans are made on every machine.
ONE_CORE = replace(
    CPU,
    name="cpu-1-core",
    title="one core of a Xeon server",
    matmul_flops=dict.fromkeys(CPU.matmul_flops, 97e9),
    memory_bandwidth=8.2e9,
    host_link=8.2e9,
    source="measured once, with torch 2.13",
    matmul_efficiency=1.0,
    bandwidth_efficiency=1.0,
    link_efficiency=1.0,
    launch_seconds=17e-6,
    backward_launch_seconds=9.5e-6,
)


@dataclass(frozen=True)
class Budget:
    """A budget.

    Args:
        num_bytes: of the whole step.
        set_by: the contender whose peak it is, or lies just above it.
        is_today: whether that is one of today.
    """

    num_bytes: int
    set_by: str
    is_today: bool = False


def device_for(place: str) -> Device:
    """Return the device to plan for: one core of a CPU by the table, a GPU as a short calibration finds it.

    Args:
        place: `cpu` or `cuda`.
    """
    return calibrate() if place == "cuda" else ONE_CORE


def budgets_of(records: Mapping[str, dict[str, Any]], most: int, *, between: bool = False) -> list[Budget]:
    """Return budgets that tell contenders apart, from the smallest on.

    They are what fixed contenders take (`taken`): between two of them the same contenders fit, so that each stands for
    all budgets up to the next one. And they lie just below what a user can set today takes: there the next best setting
    is the farthest off.

    Args:
        records: of contenders that ran.
        most: how many to return at least if there are so many; those of the contenders of today stay.
        between: whether to add one in the middle of two that lie far apart.
    """
    ran = dict(_that_ran(records, _FIXED))
    today = [Budget(taken(one), name, True) for name, one in ran.items() if one["group"] in _TODAY]
    # Below the smallest of what fits today, nothing of it is there to compare with.
    smallest = min((budget.num_bytes for budget in today), default=0)
    below = [Budget(int((1 - 2 * _CLOSE) * one.num_bytes), f"just below {one.set_by}", True) for one in today]
    others = [Budget(taken(one), name) for name, one in ran.items() if one["group"] not in _TODAY]
    found = dict[int, Budget]()
    for budget in (*today, *(one for one in below if one.num_bytes > smallest), *others):
        # Those that are nearer to each other than this are one; today's come first.
        if not any(abs(budget.num_bytes - other) <= _CLOSE * budget.num_bytes for other in found):
            found[budget.num_bytes] = budget
    budgets = sorted(found.values(), key=lambda budget: budget.num_bytes)
    while len(budgets) > most and (others := [index for index, one in enumerate(budgets) if not one.is_today]):
        budgets.pop(min(others, key=lambda index: _gap(budgets, index)))
    return sorted([*budgets, *(_between(budgets) if between else ())], key=lambda budget: budget.num_bytes)


def _between(budgets: list[Budget]) -> Iterator[Budget]:
    for below, above in pairwise(budgets):
        if above.num_bytes > _FAR * below.num_bytes:
            yield Budget((below.num_bytes + above.num_bytes) // 2, "between two of the others")


def _gap(budgets: list[Budget], index: int) -> float:
    """Return how far apart the neighbours of a budget are, as a ratio."""
    below, above = budgets[max(0, index - 1)], budgets[min(index + 1, len(budgets) - 1)]
    return above.num_bytes / below.num_bytes


def plans(
    model: nn.Module, case: Case, device: Device, budgets: Iterable[Budget], say: Callable[[str], None]
) -> list[tuple[Budget, Planned]]:
    """Return the planner's choice for each budget that anything fits.

    Args:
        model: of the case.
        case: its step.
        device: to plan for.
        budgets: rising.
        say: is called with what is planned.
    """
    planner = StepPlanner(StepSimulator(model, case.step, device), allowed=GRANTED)
    found = []
    for budget in budgets:
        try:
            # What torch reserves, without what the device holds besides.
            found.append((budget, planner.plan_for(Capacity(budget.num_bytes))))
        except BudgetError as error:
            say(f"{budget.num_bytes / 2**20:,.1f} MiB ({budget.set_by}): {str(error).partition('. ')[0]}")
            continue
        peak = found[-1][1].memory.peak_bytes
        say(f"{budget.num_bytes / 2**20:,.1f} MiB ({budget.set_by}): planned, {peak / 2**20:,.1f} MiB predicted")
    return found


def compare(records: Mapping[str, dict[str, Any]], time_of: Callable[[dict[str, Any]], float]) -> list[dict[str, Any]]:
    """Return for each planned record how it compares with the fastest fixed contenders that fit its budget.

    Args:
        records: by name; those of the planner have `budget_bytes` and `set_by`.
        time_of: what of a record is compared, such as the median step time.
    """
    rows = []
    for name, record in _that_ran(records, ("auto",)):
        budget = record["budget_bytes"]
        row = {"budget_bytes": budget, "set_by": record["set_by"], "auto": name, "taken_bytes": taken(record)}
        for key, groups in (("fixed", _FIXED), ("today", _TODAY)):
            fits = {
                other: found for other, found in _that_ran(records, groups) if taken(found) <= budget * (1 + _CLOSE)
            }
            best = min(fits, key=lambda other: time_of(fits[other]), default=None)
            row[f"best_{key}"] = best
            row[f"ratio_to_{key}"] = None if best is None else time_of(record) / time_of(fits[best])
        rows.append(row)
    return rows


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst ratio to the best fixed contender over all budgets, and the best gain over those of today.

    Args:
        rows: of `compare`.
    """
    worst = max((row for row in rows if row["ratio_to_fixed"]), key=lambda row: row["ratio_to_fixed"], default=None)
    best = min((row for row in rows if row["ratio_to_today"]), key=lambda row: row["ratio_to_today"], default=None)
    return {
        "num_budgets": len(rows),
        "num_over_budget": sum(row["taken_bytes"] > row["budget_bytes"] * (1 + _CLOSE) for row in rows),
        "worst_ratio_to_fixed": worst and worst["ratio_to_fixed"],
        "worst_at_bytes": worst and worst["budget_bytes"],
        "best_ratio_to_today": best and best["ratio_to_today"],
        "best_gain_over_today": best and 1 - best["ratio_to_today"],
        "best_at_bytes": best and best["budget_bytes"],
        "num_where_nothing_of_today_fits": sum(row["best_today"] is None for row in rows),
    }


def taken(record: Mapping[str, Any]) -> int:
    """Return the bytes that a contender takes of its device: on a GPU what torch reserves, as the planner has it.

    Args:
        record: of a contender that ran.
    """
    num_bytes: int = record.get("peak_reserved_bytes", record["peak_bytes"])
    return num_bytes


def _that_ran(records: Mapping[str, dict[str, Any]], groups: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, record) for name, record in records.items() if record["group"] in groups and not record["not_run"]]
