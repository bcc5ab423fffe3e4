"""Functions that reward completions: found by the names that trl's command gives them, or refused in one line."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from hf_ckpt import RecipeError, load_recipe
from hf_ckpt.cli.main import main
from hf_ckpt.loading.trainer import reward_functions
from tests import small_recipes

trl = pytest.importorskip("trl", minversion="1.16")

OWN = """
def is_short(completions, **more):
    return [-float(len(each)) for each in completions]

NUMBER = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with modules of a user's."""
    (tmp_path / "rewards_of_a_user.py").write_text(OWN)
    (tmp_path / "rewards_with_a_fault.py").write_text("import of_nobody\n")
    return tmp_path


@pytest.mark.parametrize("name", ["rewards_of_a_user:is_short", "rewards_of_a_user.is_short"])
def test_function_is_found_beside_the_recipe(folder: Path, name: str) -> None:
    before = list(sys.path)
    (found,) = reward_functions([name], folder)
    assert found(["ab"]) == [-2.0]
    assert sys.path == before


def test_names_of_trl_are_those_of_its_command(tmp_path: Path) -> None:
    from trl.rewards import think_format_reward

    found = reward_functions(
        ["think_format_reward", "trl.rewards.think_format_reward", "get_soft_overlong_punishment", "org/model"],
        tmp_path,
    )
    assert found[:2] == [think_format_reward] * 2
    assert found[2](prompts=[], completions=[], completion_ids=[[0] * 1024, [0] * 1280]) == [0.0, -1.0]
    assert found[3] == "org/model"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "think_format_rewrd",
            'trl has no such function. Did you mean "think_format_reward"? It has accuracy_reward, ',
        ),
        ("rewards_of_a_user:is_shrt", 'module rewards_of_a_user has no function is_shrt. Did you mean "is_short"?'),
        ("rewards_of_a_user:NUMBER", "module rewards_of_a_user has no function NUMBER."),
        ("rewards_of_nobody:x", "module rewards_of_nobody cannot be imported (ModuleNotFoundError: No module named"),
        ("rewards_with_a_fault:x", "module rewards_with_a_fault cannot be imported (ModuleNotFoundError: No module na"),
        (":x", "module  cannot be imported (ValueError: Empty module name)."),
    ],
)
def test_what_is_not_found_is_refused(folder: Path, name: str, says: str) -> None:
    with pytest.raises(RecipeError) as refused:
        reward_functions([name], folder)
    assert f'reward_funcs: "{name}": {says}' in str(refused.value)
    assert "\n" not in str(refused.value)


def test_accuracy_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("trl.import_utils"), "is_math_verify_available", lambda: False)
    with pytest.raises(RecipeError, match=r"needs math_verify, which is not installed\. Run: pip install math-verify"):
        reward_functions(["accuracy_reward"], tmp_path)


def test_command_ends_with_2_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_recipes.of_trainer(tmp_path, "grpo")
    assert main(["finetune", str(path), "reward_funcs=[rewards_of_nobody:x]"]) == 2
    assert "rewards_of_nobody cannot be imported" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_names_stay_in_what_the_recipe_resolves_to(tmp_path: Path) -> None:
    path = small_recipes.of_trainer(tmp_path, "grpo")
    again = tmp_path / "again.yaml"
    again.write_text(load_recipe(path).to_yaml())
    assert load_recipe(again).reward_funcs == ("tests.small_recipes:has_wanted",)
