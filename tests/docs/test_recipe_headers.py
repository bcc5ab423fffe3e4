"""Headers of shipped recipes: what each is predicted to need stands there, written by benchmarks/recipe_figures.py."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.recipe_headers import FITTED, Needs, needs_of, with_cards, with_needs, written_needs
from hf_ckpt import RecipeError, load_recipe
from hf_ckpt.recipe.shipped import header
from hf_ckpt.simulation.devices import CPU, find_device
from tests.small_recipes import can_be_loaded

RECIPES = Path(__file__).parents[2] / "recipes"
SHIPPED = sorted(RECIPES.glob("*.yaml"))
NEEDS = re.compile(
    r"predicted peak (?P<peak>[\d.]+) (?P<unit>GiB|MiB)(?: and [\d.]+ [GM]iB of host memory)?; "
    r"sequences of up to (?P<longest>[\d,]+) tokens"
    r"(?: fit \((?:[\w -]+, |a GPU with )[\d.]+ GiB, [\d.]+ [GM]iB of it left free\))?"
    r"(, all that the model has positions for)?\."
)
HEADER = """\
# Purpose:  one line,
#           and another one.
# Hardware: one GPU with 24 GB.
# Launch:   accelerate launch scripts/finetune.py recipes/small.yaml
"""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_header_says_what_the_recipe_needs(path: Path) -> None:
    written = written_needs(path.read_text(encoding="utf-8"))
    assert written is not None
    found = NEEDS.fullmatch(written)
    assert found is not None, written
    assert float(found["peak"]) > 0
    assert found["longest"] != "0"


@pytest.mark.parametrize("stem", ["tiny_llama_base", "tiny_llama_dpo_lora", "tiny_llama_lora"])
@pytest.mark.sweep(keep=1)
def test_header_is_what_is_predicted_now(stem: str) -> None:
    path = RECIPES / f"{stem}.yaml"
    if not can_be_loaded(path):
        pytest.skip("trl is not installed")
    assert written_needs(path.read_text(encoding="utf-8")) == needs_of(path).describe()


def test_line_is_written_below_the_hardware_and_in_place_of_an_earlier_one() -> None:
    needs = Needs(find_device("rtx4090"), 18 * 2**30, 3712, is_bound=False)
    text = with_needs(HEADER, needs)
    assert text.splitlines() == [
        "# Purpose:  one line,",
        "#           and another one.",
        "# Hardware: one GPU with 24 GB.",
        "# Memory:   predicted peak 18.0 GiB; sequences of up to 3,712 tokens fit "
        "(GeForce RTX 4090, 23.6 GiB, 958.5 MiB of it",
        "#           left free).",
        "# Launch:   accelerate launch scripts/finetune.py recipes/small.yaml",
    ]
    assert written_needs(text) == needs.describe()
    other = replace(needs, longest=4096, is_bound=True)
    assert with_needs(text, other) == with_needs(HEADER, other)
    assert with_needs(with_needs(text, other), needs) == text


def test_cards_are_written_below_the_needs_and_taken_away_again() -> None:
    needs = with_needs(HEADER, Needs(find_device("rtx4090"), 18 * 2**30, 3712, is_bound=False))
    text = with_cards(needs, ["16 GB (rtx4080): no plan fits", "24 GB (rtx4090): layers: 32 none; 20 GiB, 1 s a step"])
    assert text.splitlines()[5:8] == [
        "# Cards:    16 GB (rtx4080): no plan fits",
        "#           24 GB (rtx4090): layers: 32 none; 20 GiB, 1 s a step",
        "# Launch:   accelerate launch scripts/finetune.py recipes/small.yaml",
    ]
    assert with_cards(text, []) == needs


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_header_of_a_recipe_for_any_card_says_what_each_runs(path: Path) -> None:
    recipe = load_recipe(path) if can_be_loaded(path) else None
    said = header(path.read_text(encoding="utf-8"))
    is_for_any = recipe is not None and recipe.is_auto and recipe.checkpointing.budget is None
    assert ("Cards" in said) == is_for_any
    assert [f"{size} GB ({name})" in said.get("Cards", "") for size, name in FITTED.items()] == [is_for_any] * 4


def test_host_memory_is_told_where_some_is_needed() -> None:
    needs = Needs(find_device("rtx4090"), 18 * 2**30, 131072, is_bound=True, host_bytes=15 * 2**30)
    assert needs.describe().startswith(
        "predicted peak 18.0 GiB and 15.0 GiB of host memory; sequences of up to 131,072 "
    )
    assert NEEDS.fullmatch(needs.describe())


def test_recipe_for_the_cpu_names_no_card() -> None:
    assert Needs(CPU, 75 * 2**20, 512, is_bound=True).describe() == (
        "predicted peak 75.0 MiB; sequences of up to 512 tokens, all that the model has positions for."
    )


def test_hardware_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(HEADER.replace("24 GB", "20 GB"))
    with pytest.raises(
        RecipeError, match=r"names no known size of GPUs. Write .*known are 6, 16, 24, 40, 48, 80 GB and CPU"
    ):
        needs_of(path)
