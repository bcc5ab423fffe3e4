"""A recipe with policy `auto`, looked at without running: the plan for its budget stands in for the policy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hf_ckpt.errors import BudgetError, RecipeError, UnsupportedError
from hf_ckpt.estimate import recipe_plan
from hf_ckpt.estimate.recipe_plan import with_auto_plan
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recipe.recipe import Recipe, load_recipe
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.verify.processes import with_engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

TINY = "recipes/tiny_llama_lora.yaml"
# What would fit is searched for among smaller steps: of this one there are few, and each is soon simulated.
SMALL = ["data.max_length=64", "training.per_device_train_batch_size=1", "lora.target_modules=[q_proj, down_proj]"]
CARDS = {"small card": 1, "larger card": 70, "largest card": 80}


def recipe_with(*overrides: str) -> Recipe:
    return load_recipe(TINY, overrides)


def test_plan_for_the_budget_takes_the_place_of_the_policy() -> None:
    recipe = recipe_with("checkpointing.policy=auto", "checkpointing.memory_budget=70MiB")
    planned, notes = with_auto_plan(recipe)
    assert planned.checkpointing is not None
    chosen = planned.checkpointing["policy"]
    assert isinstance(chosen, Plan)
    assert len({layer.mode for stack in chosen.stacks for layer in stack.layers}) > 1
    assert "memory_budget" not in planned.checkpointing
    assert notes[0].startswith("policy auto: the plan for 70.0 MiB of ")


@pytest.mark.sweep
def test_plan_is_for_the_processes_that_were_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = with_engine(recipe_with("checkpointing.memory_budget=70MiB"), "fsdp2")
    with pytest.raises(RecipeError, match="how many there are is not said"):
        with_auto_plan(recipe)
    monkeypatch.setenv("WORLD_SIZE", "2")
    planned, _ = with_auto_plan(recipe)
    assert planned.checkpointing is not None
    assert isinstance(planned.checkpointing["policy"], Plan)


def test_without_a_gpu_it_is_for_the_smallest_card_that_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(predictor: recipe_plan.Predictor, capacity: Capacity) -> SimpleNamespace:
        if capacity.num_bytes < 70 << 20:
            raise BudgetError("It is too small.")
        return SimpleNamespace(plan=predictor.subject.resolve("full"))

    monkeypatch.setattr(recipe_plan.Predictor, "planned", planned)
    cards = [replace(find_device("rtx4090"), title=title, memory_bytes=gib << 30) for title, gib in CARDS.items()]
    monkeypatch.setattr(recipe_plan, "devices_for", lambda *_: tuple(cards))
    monkeypatch.setattr(recipe_plan, "capacity_of_subject", lambda _, device: Capacity(device.memory_bytes >> 10))
    _, notes = with_auto_plan(recipe_with("checkpointing.memory_budget=null"))
    assert notes == ["policy auto: the plan for 70.0 MiB of larger card"]


def test_where_nothing_can_be_planned_it_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedError("It decides by a value.")

    monkeypatch.setattr(recipe_plan.Predictor, "planned", refuse)
    with pytest.raises(UnsupportedError, match="by a value"):
        with_auto_plan(recipe_with())
    planned, notes = with_auto_plan(recipe_with("checkpointing.fallback=ffn"))
    assert planned.checkpointing is not None
    assert planned.checkpointing.policy == "ffn"
    assert "fallback" not in planned.checkpointing
    assert notes == ["policy auto: the fallback, ffn, as no plan is made. It decides by a value."]


def test_other_policies_stay_as_they_are() -> None:
    recipe = load_recipe("recipes/tiny_llama_base.yaml")
    assert with_auto_plan(recipe) == (recipe, [])


@pytest.mark.sweep
def test_budget_that_nothing_fits_is_told() -> None:
    with pytest.raises(BudgetError, match=r"No plan fits memory_budget=1.0 MiB"):
        with_auto_plan(recipe_with("checkpointing.policy=auto", "checkpointing.memory_budget=1MiB", *SMALL))
