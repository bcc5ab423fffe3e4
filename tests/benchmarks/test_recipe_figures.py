"""Figures of the shipped recipes are those that the code predicts: what documents quote.

The recipe that documents quote is simulated here, without a plan and with mode full; `make figures-check` simulates all
recipes. Headers are held by tests/docs/test_recipe_headers.py. Which plan the planner chooses is not looked for again:
a choice that it would make otherwise today is not noticed here.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import recipe_figures
from benchmarks.recipe_figures import ESTIMATE, ESTIMATED, HELD, RECIPES, inputs_of, moved, shipped
from benchmarks.recipe_headers import on_hardware
from hf_ckpt.estimate.tables import versions

QUOTED: dict[str, Any] = json.loads(ESTIMATE.read_text(encoding="utf-8"))


@pytest.mark.skipif(
    recipe_figures.of_versions(QUOTED) != recipe_figures.of_versions({"versions": versions()}),
    reason="the figures are those of other versions",
)
def test_what_documents_quote_is_predicted_now() -> None:
    predictor = on_hardware(RECIPES / f"{ESTIMATED}.yaml")
    rows = list(recipe_figures.rows_of_estimate(QUOTED, predictor))
    assert [name for name, _, _ in rows] == list(HELD)
    assert [moved(said, now) for _, said, now in rows] == [[], []], (
        "The code moves it. Where that is meant: make figures"
    )


def test_a_figure_that_moved_is_told() -> None:
    recorded = {"peak_bytes": 100, "seconds": 1.0, "num_flops": 7}
    assert moved(recorded, {**recorded, "seconds": 1.0 + 1e-12}) == []
    assert moved(recorded, {**recorded, "peak_bytes": 612, "seconds": 1.001}) == [
        "peak_bytes was 100, is 612",
        "seconds was 1.0, is 1.001",
    ]
    assert moved({}, {"peak_bytes": 1}) == ["peak_bytes was None, is 1"]


def test_inputs_of_a_recipe_are_what_it_says_and_not_its_comments(tmp_path: Any) -> None:
    path = tmp_path / "recipe.yaml"
    found = []
    for text in ("a: 1\n", "# more\na: 1\n", "a: 2\n"):
        path.write_text(text)
        found.append(inputs_of(path))
    assert found[0] == found[1] != found[2]
    assert len({inputs_of(path) for path in shipped()}) == len(shipped())
