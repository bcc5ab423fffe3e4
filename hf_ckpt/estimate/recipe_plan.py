"""A recipe's fastest plan for a budget."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_ckpt.errors import BudgetError, RecipeError, UnsupportedError
from hf_ckpt.estimate.estimate import (
    Row,
    capacity_of_subject,
    device_as_json,
    exactness_as_json,
    facts_as_json,
    fixed_rows,
    judged,
    memory_as_json,
    own_budget,
    verdict_as_json,
)
from hf_ckpt.estimate.launch_config import Launch
from hf_ckpt.estimate.predict import Predictor, devices_for, usual_device_with
from hf_ckpt.estimate.step_of_recipe import Subject, subject_of
from hf_ckpt.planner.search import Planned
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.devices import NO_DEVICE, Device, find_device, this_device
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import Budget, format_bytes


@dataclass(frozen=True)
class PlannedRecipe:
    """The plan of a recipe for a budget."""

    predictor: Predictor
    capacity: Capacity
    planned: Planned
    row: Row  # Of the plan.
    fixed: tuple[Row, ...]  # Of fixed modes that were simulated too.
    evaluation: StepMemory | None = None  # What a batch of its evaluation needs; None where it does not evaluate.

    @property
    def subject(self) -> Subject:
        """What was planned for."""
        return self.predictor.subject

    @property
    def device(self) -> Device:
        """The one whose speed was taken."""
        return self.predictor.device

    @property
    def rows(self) -> tuple[Row, ...]:
        """All that were simulated."""
        return (*self.fixed, self.row)

    def steps(self) -> dict[str, StepMemory]:
        """Return the simulated steps by name."""
        return {row.name: row.memory for row in self.rows if row.memory is not None}


def device_for(recipe: Recipe, name: str | None, budget: Budget | None) -> tuple[Device, str]:
    """Return the device to plan for, and in words why, where no name was given.

    `name`: as the user wrote it; None takes this machine's GPU, or, where there is none and the budget is an amount, a
    card that has as much. `budget`: as the user wrote it for the command or in the recipe, if at all.
    """
    if name is not None:
        return find_device(name), ""
    own = this_device()
    if own.is_cuda:
        return own, "this machine's GPU, as no --device was given"
    if recipe.training.get("use_cpu"):
        return devices_for(recipe, ())[0], "the recipe trains on the CPU, and no --device was given"
    if budget is None or budget.num_bytes is None:
        raise RecipeError(NO_DEVICE)
    device = usual_device_with(budget.num_bytes)
    which = "smallest usual GPU with" if budget.num_bytes <= device.memory_bytes else "largest usual GPU, for"
    return device, f"the {which} {budget}, as there is no GPU here and no --device was given"


def plan_recipe(
    subject: Subject, device: Device, budget: Budget | None, say: Callable[[str], None], *, with_fixed: bool = False
) -> PlannedRecipe:
    """Return the fastest plan that fits.

    `device`: whose speed is taken, and whose memory where the budget is none or a fraction. `budget`: what the step may
    use; None takes the recipe's, or the whole device.
    """
    if budget is not None:
        subject = replace(subject, command_options={**subject.command_options, "memory_budget": budget.key})
    predictor = Predictor(subject, device)
    capacity = predictor.capacity(device, budget or own_budget(subject))
    say("Simulating and planning ...")
    found = predictor.planned(capacity, say, compare=True)
    fixed = tuple(fixed_rows(predictor, [device], say)) if with_fixed else ()
    row = replace(judged(predictor, AUTO, found.plan, [device], decides=True), memory=found.memory)
    return PlannedRecipe(predictor, capacity, found, row, fixed, predictor.evaluation(found.plan))


def plan_as_json(found: PlannedRecipe, assumed: str) -> dict[str, Any]:
    """Return a plan and what it needs as JSON types. `assumed`: why this device, where none was named."""
    plan, memory, exactness = found.planned.plan, found.planned.memory, found.planned.exactness
    return {
        "recipe": found.subject.title,
        "device": found.device.name,
        "device_was_assumed": assumed,
        "card": device_as_json(
            found.device.running(found.subject.attention),
            found.predictor.capacity(found.device),
            found.subject.computes_in,
        ),
        "budget_bytes": found.capacity.num_bytes,
        "verdict": verdict_as_json(found.predictor, found.device, found.row, found.evaluation),
        **facts_as_json(found.subject),
        **memory_as_json(memory),
        "exactness": None if exactness is None else exactness_as_json(exactness),
        "plan": json.loads(plan.to_json()),
        "plan_in_words": plan.summary(),
    }


def with_auto_plan(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return a recipe with the plan that policy `auto` chooses in place of the policy, and what was done, in words.

    A recipe with another policy is returned as it is. Planned for are the processes that were launched, on this
    machine's GPU or, where there is none, on the smallest usual card for which there is a plan. Where no step can be
    simulated the recipe's `fallback` is the plan, as in training.
    """
    checkpointing = recipe.checkpointing
    if checkpointing is None or not recipe.is_auto:
        return recipe, []
    launch = Launch(num_processes=int(os.environ.get("WORLD_SIZE", "1")))
    try:
        chosen, note = _plan_for_first_of(devices_for(recipe, ()), subject_of(recipe, launch))
    except UnsupportedError as error:
        if checkpointing.fallback is None:
            raise
        chosen, note = checkpointing.fallback, f"the fallback, {checkpointing.fallback}, as no plan is made. {error}"
    return replace(recipe, checkpointing=checkpointing.with_plan(chosen)), [f"policy auto: {note}"]


def _plan_for_first_of(devices: Sequence[Device], subject: Subject) -> tuple[Plan, str]:
    """Return the plan for the first device that has one, and for what it was made. BudgetError: of the last one."""
    first, *larger = devices
    predictor = Predictor(subject, first)
    capacity = capacity_of_subject(predictor, first)
    try:
        plan = predictor.planned(capacity).plan
    except BudgetError:
        if not larger:
            raise
        return _plan_for_first_of(larger, subject)
    return plan, f"the plan for {format_bytes(capacity.num_bytes)} of {first.title}"
