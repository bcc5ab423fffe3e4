"""A recipe with policy `auto` as it would run: with the plan that was made for its budget."""

from __future__ import annotations

from dataclasses import replace

from hf_ckpt.estimate.estimate import budget_of
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.subject import subject_of
from hf_ckpt.estimate.where import devices_for
from hf_ckpt.policy.allowances import ALLOWANCES
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.schema import OF_AUTO
from hf_ckpt.units import format_bytes


def with_auto_plan(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return a recipe with the plan that policy `auto` chooses in place of the policy, and what was done, in words.

    A recipe with another policy is returned as it is.

    Args:
        recipe: as written: its own lengths, batch and engine.

    Raises:
        BudgetError: no plan fits; RecipeError: the recipe cannot be simulated.
    """
    checkpointing = recipe.checkpointing or {}
    if checkpointing.get("policy") != AUTO:
        return recipe, []
    subject, device = subject_of(recipe), devices_for(recipe, ())[0]
    budget = budget_of(subject, device)
    plan = Predictor(subject, device).planned(budget).plan
    others = {key: value for key, value in checkpointing.items() if key not in (*OF_AUTO, *ALLOWANCES)}
    note = f"policy auto: the plan for {format_bytes(budget)} of {device.title}"
    return replace(recipe, checkpointing={**others, "policy": plan}), [note]
