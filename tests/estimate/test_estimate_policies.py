"""Recipes that name a plan's file or policy `auto`: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import hf_ckpt
from hf_ckpt import HFCkptCallback, Plan, RecipeError, load_recipe
from hf_ckpt.estimate.step_of_recipe import subject_of
from hf_ckpt.policy.plan import LayerPlan, StackPlan
from hf_ckpt.policy.policy import Mode
from tests import small_recipes

pytestmark = pytest.mark.usefixtures("remembered_simulations")

PLAN = Plan(
    "LlamaForCausalLM",
    (StackPlan("model.layers", (LayerPlan(Mode.FULL), LayerPlan(Mode.FFN), LayerPlan(), LayerPlan(Mode.FULL))),),
)


def write(folder: Path, text: str = "") -> Path:
    """A recipe whose policy is the plan in the file beside it."""
    (folder / "plan.json").write_text(text or PLAN.to_json())
    return small_recipes.write(folder, checkpointing={"policy": "plan.json"})


def test_plan_is_named_from_the_recipes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe = load_recipe(path)
    assert recipe.checkpointing == {"policy": str(tmp_path / "plan.json")}
    assert subject_of(recipe).plan == PLAN


def test_plan_on_the_command_line_is_named_from_where_that_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "plan.json").write_text(PLAN.to_json())
    monkeypatch.chdir(tmp_path / "here")
    recipe = load_recipe(small_recipes.write(tmp_path), ["checkpointing.policy=plan.json"])
    assert recipe.checkpointing is not None
    assert recipe.checkpointing["policy"] == str(tmp_path / "here" / "plan.json")


def test_resolved_recipe_loads_as_an_equal_one(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    (tmp_path / "other").mkdir()
    resolved = tmp_path / "other" / "resolved.yaml"
    resolved.write_text(recipe.to_yaml())
    assert load_recipe(resolved).checkpointing == recipe.checkpointing


def test_callback_and_apply_take_the_same_file(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    assert recipe.checkpointing is not None
    HFCkptCallback(**recipe.checkpointing)
    model = subject_of(recipe).model
    with hf_ckpt.apply(model, recipe.checkpointing["policy"]) as applied:
        assert applied.plan == PLAN


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "This is not a plan"), ('{"format": 99}', "The plan has format 99, this version reads up to 2")],
)
def test_file_that_holds_no_plan_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe(write(tmp_path, text))
    assert message in str(raised.value)
    assert "small.yaml:" in str(raised.value)


def test_plan_that_is_not_there_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(RecipeError, match=r"no plan can be read there: .*Write one: hf-ckpt plan"):
        load_recipe(path)


def test_options_beside_a_plan_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(RecipeError, match="every_n_layers was given with a plan"):
        load_recipe(path, ["checkpointing.every_n_layers=2"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpointing.memory_budget=22"], "memory_budget is 22, without a unit"),
        (["checkpointing.memory_budget=22GX"], 'unknown unit "GX"'),
        (["checkpointing.every_n_layers=2"], "given with policy: auto, which chooses for each layer"),
        (["checkpointing.max_length=0"], "expected a number of at least 1"),
        (["checkpointing.policy=full", "checkpointing.memory_budget=22GiB"], "belongs to policy: auto"),
    ],
)
def test_what_does_not_suit_auto_is_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    path = small_recipes.write(tmp_path, checkpointing={"policy": "auto"})
    with pytest.raises(RecipeError) as raised:
        load_recipe(path, overrides)
    assert message in str(raised.value)


@pytest.mark.parametrize("budget", ["22GiB", "0.9", "512 MiB"])
def test_auto_takes_a_budget(budget: str, tmp_path: Path) -> None:
    path = small_recipes.write(tmp_path, checkpointing={"policy": "auto"})
    recipe = load_recipe(path, [f"checkpointing.memory_budget={budget}"])
    assert recipe.checkpointing is not None
    assert str(recipe.checkpointing["memory_budget"]) == budget
    assert subject_of(recipe).plan is None
