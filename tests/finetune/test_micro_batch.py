"""`micro_batch: auto`: the division of a step's rows that takes the least time."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_ckpt import Plan
from hf_ckpt.cli.finetune import main
from hf_ckpt.errors import BudgetError
from hf_ckpt.finetune.micro_batch import choose_micro_batch
from tests import small_recipes

pytestmark = pytest.mark.slow


def price_of(prices: dict[int, float], asked: list[tuple[int, int]]) -> object:
    def price(rows: int, times: int) -> float:
        asked.append((rows, times))
        if rows not in prices:
            raise BudgetError(f"No plan fits {rows} rows.")
        return prices[rows]

    return price


@pytest.mark.parametrize(
    ("rows_of_step", "prices", "expected", "asked"),
    [
        (1, {1: 5.0}, 1, [(1, 1)]),
        # A larger batch pays for its recomputation up to 4 rows, no longer with 6.
        (
            12,
            {1: 5.0, 2: 4.0, 3: 3.5, 4: 3.0, 6: 3.2, 12: 3.1},
            4,
            [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)],
        ),
        # Equal ones: the smallest.
        (4, {1: 5.0, 2: 5.0, 4: 5.0}, 1, [(1, 4), (2, 2), (4, 1)]),
        # What does not fit ends the search.
        (8, {1: 5.0, 2: 4.0}, 2, [(1, 8), (2, 4), (4, 2)]),
        (7, {1: 5.0, 7: 1.0}, 7, [(1, 7), (7, 1)]),
    ],
)
def test_fastest_division_of_the_same_rows_is_chosen(
    rows_of_step: int, prices: dict[int, float], expected: int, asked: list[tuple[int, int]]
) -> None:
    seen: list[tuple[int, int]] = []
    assert choose_micro_batch(rows_of_step, price_of(prices, seen)) == expected  # type: ignore[arg-type]
    assert seen == asked


def test_single_row_that_does_not_fit_is_the_error() -> None:
    with pytest.raises(BudgetError, match="No plan fits 1 rows"):
        choose_micro_batch(4, price_of({}, []))  # type: ignore[arg-type]


def test_recipe_trains_with_the_chosen_micro_batch_and_says_the_effective_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = small_recipes.write(
        tmp_path,
        model={"config": small_recipes.CONFIG},
        checkpointing={"policy": "auto", "memory_budget": "1GiB", "micro_batch": "auto"},
        training={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1},
    )
    assert main([str(recipe)]) == 0
    printed = capsys.readouterr().out
    # On the CPU each operator takes the host as long for one row as for two.
    assert "Batch: 2 sequences x 1 micro-batch x 1 process = 2 sequences in each optimizer step" in printed
    assert "Predicted peak " in printed
    assert [
        layer.mode for layer in Plan.from_json((tmp_path / "run" / "hf_ckpt_plan.json").read_text()).stacks[0].layers
    ] == ["none", "none"]
