"""A recipe with policy `auto`, looked at without running: the plan for its budget stands in for the policy."""

from __future__ import annotations

import pytest

from hf_ckpt.errors import BudgetError, RecipeError
from hf_ckpt.estimate.plan import with_auto_plan
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recipe.recipe import Recipe, load_recipe
from hf_ckpt.verify.launch import with_engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

TINY = "recipes/tiny_llama_lora.yaml"


def recipe_with(*overrides: str) -> Recipe:
    return load_recipe(TINY, overrides)


def test_plan_for_the_budget_takes_the_place_of_the_policy() -> None:
    recipe = recipe_with("checkpointing.policy=auto", "checkpointing.memory_budget=70MiB")
    planned, notes = with_auto_plan(recipe)
    assert planned.checkpointing is not None
    plan = planned.checkpointing["policy"]
    assert isinstance(plan, Plan)
    assert len({layer.mode for stack in plan.stacks for layer in stack.layers}) > 1
    assert "memory_budget" not in planned.checkpointing
    assert notes[0].startswith("policy auto: the plan for 70.0 MiB of ")


def test_plan_is_for_the_processes_that_were_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = with_engine(recipe_with("checkpointing.memory_budget=70MiB"), "fsdp2")
    with pytest.raises(RecipeError, match="how many there are is not said"):
        with_auto_plan(recipe)
    monkeypatch.setenv("WORLD_SIZE", "2")
    planned, _ = with_auto_plan(recipe)
    assert planned.checkpointing is not None
    assert isinstance(planned.checkpointing["policy"], Plan)


def test_other_policies_stay_as_they_are() -> None:
    recipe = load_recipe("recipes/tiny_llama_base.yaml")
    assert with_auto_plan(recipe) == (recipe, [])


def test_budget_that_nothing_fits_is_told() -> None:
    # What would fit is searched for among smaller steps: of this one there are few, and each is soon simulated.
    small = ["data.max_length=64", "training.per_device_train_batch_size=1", "lora.target_modules=[q_proj, down_proj]"]
    with pytest.raises(BudgetError, match=r"No plan fits memory_budget=1.0 MiB"):
        with_auto_plan(recipe_with("checkpointing.policy=auto", "checkpointing.memory_budget=1MiB", *small))
