"""A recipe's fastest plan for a budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hf_ckpt.errors import HFCkptError, RecipeError
from hf_ckpt.estimate.estimate import FIXED, budget_of
from hf_ckpt.estimate.predict import Predictor, devices_for, usual_device_with
from hf_ckpt.estimate.subject import Subject, subject_of
from hf_ckpt.estimate.tables import columns, exactness_as_json, facts, facts_of, format_seconds, memory_as_json
from hf_ckpt.planner.advice import Exactness
from hf_ckpt.planner.chain import Chain
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.devices import Device, find_device, this_device
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import Budget, format_bytes


@dataclass(frozen=True)
class PlannedRecipe:
    """The plan of a recipe for a budget."""

    subject: Subject
    device: Device  # Whose speed was taken.
    budget_bytes: int
    plan: Plan
    memory: StepMemory  # What the step needs under it, simulated whole.
    exactness: Exactness | None  # Whether it is bitwise, and the time that takes.
    chain: Chain  # The step as the planner saw it.
    fixed: dict[str, StepMemory]  # What it needs under fixed modes that were simulated too.

    def steps(self) -> dict[str, StepMemory]:
        """Return the simulated steps by name."""
        return {**self.fixed, AUTO: self.memory}


def device_for(recipe: Recipe, name: str | None, budget: Budget | None) -> Device:
    """Return the device to plan for.

    `name`: as the user wrote it; None takes this machine's GPU, or, where there is none and the budget is an amount, a
    card that has as much. `budget`: as the user wrote it, if at all.
    """
    if name is not None:
        return find_device(name)
    own = this_device()
    if own.is_cuda or recipe.training.get("use_cpu"):
        return own if own.is_cuda else devices_for(recipe, ())[0]
    if budget is None or budget.num_bytes is None:
        raise RecipeError(
            "There is no GPU here, and neither device nor amount was given. Add --device rtx4090, or an amount: "
            "--memory-budget 22GiB."
        )
    return usual_device_with(budget.num_bytes)


def plan_recipe(
    subject: Subject, device: Device, budget: Budget | None, say: Callable[[str], None], *, with_fixed: bool = False
) -> PlannedRecipe:
    """Return the fastest plan that fits.

    `device`: whose speed is taken, and whose memory where the budget is none or a fraction. `budget`: what the step may
    use; None takes the recipe's, or the device's memory less its reserve.
    """
    if budget is not None:
        subject = replace(subject, command_options={**subject.command_options, "memory_budget": budget.key})
    predictor = Predictor(subject, device)
    num_bytes = (
        budget_of(subject, device)
        if budget is None
        else budget.bytes_on(device.memory_bytes or None, device=device.title)
    )
    say("Simulating and planning ...")
    found = predictor.planned(num_bytes, say, compare=True)
    fixed = _fixed(predictor, say) if with_fixed else {}
    return PlannedRecipe(subject, device, num_bytes, found.plan, found.memory, found.exactness, found.chain, fixed)


def _fixed(predictor: Predictor, say: Callable[[str], None]) -> dict[str, StepMemory]:
    found = {}
    for name, options in FIXED.items():
        try:
            plan = predictor.subject.resolve(**options)
        except HFCkptError:
            # The model has no such part.
            continue
        say(f"Simulating {name} ...")
        found[name] = predictor.memory(plan)
    return found


def text(found: PlannedRecipe) -> str:
    """Return a plan and what it needs as text, equal layers on one line."""
    memory, device = found.memory, found.device
    rows = [
        *found.subject.facts,
        *facts_of(device),
        ("budget", format_bytes(found.budget_bytes)),
    ]
    time = memory.time
    parts = [(name, getattr(time, name)) for name in ("forward", "backward", "recomputation", "optimizer", "copies")]
    spent = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds)
    sizes = [(str(category), format_bytes(size)) for category, size in memory.by_category.items()]
    return "\n".join(
        [
            f"hf-ckpt plan {found.subject.title}",
            *facts(rows),
            "",
            found.plan.summary(),
            "",
            f"Peak {format_bytes(memory.peak_bytes)}, in the {memory.peak_at.describe()}",
            *columns(sizes, numeric=(1,)),
            *([f"Host memory {format_bytes(memory.host_bytes)}"] if memory.host_bytes else []),
            f"Step {format_seconds(time.total)}: {spent}",
            *([f"Exactness: {found.exactness.describe()}"] if found.exactness is not None else []),
        ]
    )


def as_json(found: PlannedRecipe) -> dict[str, Any]:
    """Return a plan and what it needs as JSON types."""
    return {
        "recipe": found.subject.title,
        "device": found.device.name,
        "budget_bytes": found.budget_bytes,
        "facts": [{"name": name, "text": text} for name, text in found.subject.facts],
        **memory_as_json(found.memory),
        "exactness": None if found.exactness is None else exactness_as_json(found.exactness),
        "plan": json.loads(found.plan.to_json()),
    }


def with_auto_plan(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return a recipe with the plan that policy `auto` chooses in place of the policy, and what was done, in words.

    A recipe with another policy is returned as it is.
    """
    if recipe.checkpointing is None or not recipe.is_auto:
        return recipe, []
    subject, device = subject_of(recipe), devices_for(recipe, ())[0]
    budget = budget_of(subject, device)
    plan = Predictor(subject, device).planned(budget).plan
    note = f"policy auto: the plan for {format_bytes(budget)} of {device.title}"
    return replace(recipe, checkpointing=recipe.checkpointing.with_plan(plan)), [note]
