"""The plan that suits a budget.

The planner adds up layers. What it chooses is simulated whole, and the budget corrected until the whole fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from hf_ckpt.memory.advice import Change, nothing_fits
from hf_ckpt.memory.chain import Chain
from hf_ckpt.memory.choices import Choice, to_plan
from hf_ckpt.memory.costs import chain_of
from hf_ckpt.memory.devices import Device
from hf_ckpt.memory.fixed import fixed_choices
from hf_ckpt.memory.planner import Planner
from hf_ckpt.memory.simulate import simulate_step
from hf_ckpt.memory.step import Step
from hf_ckpt.memory.timeline import StepMemory
from hf_ckpt.patch import make_plan
from hf_ckpt.plans import Plan
from hf_ckpt.policy import Policy

_MOST_TRIES = 6
"""Of simulating a chosen plan whole."""
_CLOSE = 0.001
"""Of the budget: plans that are nearer to each other are not worth another try."""
_WRONG_BY = 0.01
"""The share by which the chain may take a plan for larger than it is."""
_SAME_TIME = 1 - 1e-6
"""Share of the time from which on another plan is no faster."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan for a budget.

    Args:
        plan: the plan.
        memory: the step under it, simulated whole.
        chain: what the planner saw.
        choice: what it chose.
    """

    plan: Plan
    memory: StepMemory
    chain: Chain
    choice: Choice


def plan_for(
    model: nn.Module,
    step: Step,
    device: Device,
    budget_bytes: int,
    *,
    chain: Chain | None = None,
    changes: Callable[[Plan], list[Change]] = lambda smallest: [],
    say: Callable[[str], None] | None = None,
    **structure: Any,
) -> Planned:
    """Return the fastest plan whose simulated step stays within a budget.

    Args:
        model: see `simulate_step`.
        step: what the Trainer runs.
        device: where.
        budget_bytes: device memory that the whole step may use.
        chain: of `chain_of` with the same arguments, where it is there already.
        changes: what else could be done where nothing fits, of the plan that needs least.
        say: is told what goes on where nothing fits.
        structure: `layers`, `attention` and `ffn` of `apply`.

    Raises:
        BudgetError: nothing fits; says by how much, where the memory is, and what would fit.
    """
    planner = Planner(chain or chain_of(model, step, device, **structure))
    template = make_plan(model, Policy.parse("none"), **structure)
    simulated = partial(_simulated, planner.chain, template, model, step, device, structure)
    found = _search(planner, budget_bytes, simulated)
    for choice in fixed_choices(planner.chain):
        # The chain may have taken one for a little too large.
        may_fit = choice.peak_bytes <= budget_bytes * (1 + _WRONG_BY)
        if may_fit and (found is None or choice.seconds < found.memory.time.total * _SAME_TIME):
            found = _faster(found, simulated(choice), budget_bytes)
    if found is not None:
        return found
    smallest = simulated(planner.smallest_peak())
    if smallest.memory.peak_bytes <= budget_bytes:
        return smallest
    raise nothing_fits(
        budget_bytes,
        smallest.memory,
        step,
        lambda other: simulate_step(model, smallest.plan, other, device, **structure).peak_bytes,
        changes(smallest.plan),
        say,
    )


def _simulated(
    chain: Chain, template: Plan, model: nn.Module, step: Step, device: Device, structure: Any, choice: Choice
) -> Planned:
    plan = to_plan(choice, chain, template)
    return Planned(plan, simulate_step(model, plan, step, device, **structure), chain, choice)


def _faster(found: Planned | None, other: Planned, budget_bytes: int) -> Planned | None:
    if other.memory.peak_bytes > budget_bytes:
        return found
    return other if found is None or other.memory.time.total < found.memory.time.total else found


def _search(planner: Planner, budget_bytes: int, simulated: Callable[[Choice], Planned]) -> Planned | None:
    """Return the fastest plan that fits: between one that does and one that does not, with fewer bytes in between."""
    best: Planned | None = None
    # Places in the planner's peaks: of a plan that fits, and of one that does not.
    fits, fails = -1, len(planner.peaks)
    place = _place_of(planner, budget_bytes)
    for _ in range(_MOST_TRIES):
        place = min(max(place, fits + 1), fails - 1)
        if place <= fits:
            break
        planned = simulated(planner.choose(planner.peaks[place]))
        wrong_by = planned.memory.peak_bytes - planned.choice.peak_bytes
        if planned.memory.peak_bytes <= budget_bytes:
            fits = place
            best = _faster(best, planned, budget_bytes)
        else:
            fails = place
        has_both = fits >= 0 and fails < len(planner.peaks)
        if has_both and planner.peaks[fails] - planner.peaks[fits] < budget_bytes * _CLOSE:
            break
        # The planner is wrong by about as much for a plan of about that size.
        place = _place_of(planner, budget_bytes - wrong_by)
    return best


def _place_of(planner: Planner, budget_bytes: int) -> int:
    """Return the place of the last of the planner's peaks that is within a budget; -1 where none is."""
    return bisect_right(planner.peaks, budget_bytes) - 1
