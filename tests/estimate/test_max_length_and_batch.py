"""The longest row and the largest batch that fit, and a grid of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_ckpt.estimate import max_length_and_batch, tables
from hf_ckpt.estimate.estimate import RECIPE
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.simulator import StepSimulator
from tests.estimate.small_estimates import CARD, card, silent, small_subject
from tests.steps_by_hand import MIB

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]


@pytest.mark.usefixtures("linear")
def test_longest_row_fits_and_the_next_one_does_not(tmp_path: Path) -> None:
    subject = replace(small_subject(tmp_path), longest=4096)
    # Of two rows.
    limit = max_length_and_batch.largest_fitting(
        Predictor(subject, CARD), None, Capacity(MIB + 2 * 1024 * 703), is_length=True
    )
    assert (limit.number, limit.needed_bytes, limit.is_bound) == (640, MIB + 2 * 1024 * 640, False)


@pytest.mark.usefixtures("linear")
def test_row_is_no_longer_than_the_model_has_positions(tmp_path: Path) -> None:
    subject = small_subject(tmp_path, "model.config.max_position_embeddings=256")
    limit = max_length_and_batch.largest_fitting(
        Predictor(subject, CARD), None, Capacity(CARD.memory_bytes), is_length=True
    )
    assert (limit.number, limit.is_bound) == (256, True)
    found = max_length_and_batch.fitting_sizes(subject, [CARD], is_length=True, say=silent)
    text = tables.sizes_table(found)
    assert " 256 tokens* " in text
    assert text.endswith("\n*: all that the model has positions for")


@pytest.mark.usefixtures("linear")
def test_largest_batch_is_found_for_each_plan(tmp_path: Path) -> None:
    device = card(MIB + 64 * 1024 * 40)
    found = max_length_and_batch.fitting_sizes(small_subject(tmp_path), [device], is_length=False, say=silent)
    assert {row["plan"]: row["number"] for row in found["rows"]} == {RECIPE: 80, "none": 40, "full": 160}
    lines = tables.sizes_table(found).splitlines()
    assert [line.split()[:4] for line in lines[-3:]] == [
        ["small", "recipe", "80", "rows"],
        ["small", "none", "40", "rows"],
        ["small", "full", "160", "rows"],
    ]
    assert found["rows"][0]["number"] == 80


@pytest.mark.usefixtures("linear")
def test_largest_batch_under_auto_is_that_of_what_needs_least(tmp_path: Path) -> None:
    subject = small_subject(tmp_path, "checkpointing={policy: auto, exact: true}")
    found = max_length_and_batch.fitting_sizes(subject, [card(MIB + 64 * 1024 * 40)], is_length=False, say=silent)
    assert {row["plan"]: row["number"] for row in found["rows"]} == {AUTO: 160, "none": 40, "full": 160}


@pytest.mark.usefixtures("linear")
def test_where_nothing_fits_it_is_said(tmp_path: Path) -> None:
    found = max_length_and_batch.fitting_sizes(small_subject(tmp_path), [card(1024)], is_length=True, say=silent)
    assert {row["number"] for row in found["rows"]} == {0}
    assert "none" in tables.sizes_table(found).splitlines()[-1].split()


@pytest.mark.usefixtures("linear")
def test_grid_has_a_peak_for_each_length_and_micro_batch(tmp_path: Path) -> None:
    predictor = Predictor(replace(small_subject(tmp_path), longest=128), card(MIB + 128 * 1024))
    document = max_length_and_batch.grids(predictor, silent)
    none, own = (
        {(peak["seq_length"], peak["batch_size"]): peak["peak_bytes"] for peak in grid["peaks"]}
        for grid in document["grids"]
    )
    assert list(none) == list(own) == [(length, rows) for length in (16, 32, 64, 128) for rows in (1, 2, 4)]
    assert (none[64, 2], own[64, 2]) == (MIB + 128 * 1024, MIB + 64 * 1024)
    assert tables.grid_table(document).splitlines() == [
        "Peak without checkpointing",
        "  tokens  batch 1    batch 2    batch 4",
        "      16  1.0 MiB    1.0 MiB    1.1 MiB",
        "      32  1.0 MiB    1.1 MiB    1.1 MiB",
        "      64  1.1 MiB    1.1 MiB  1.2 MiB ?",
        "     128  1.1 MiB  1.2 MiB ?  1.5 MiB ?",
        "",
        "Peak under the recipe's plan",
        "  tokens  batch 1  batch 2    batch 4",
        "      16  1.0 MiB  1.0 MiB    1.0 MiB",
        "      32  1.0 MiB  1.0 MiB    1.1 MiB",
        "      64  1.0 MiB  1.1 MiB    1.1 MiB",
        "     128  1.1 MiB  1.1 MiB  1.2 MiB ?",
        "",
        "x: does not fit on small; ?: perhaps, only by giving cached blocks back",
    ]
    assert document["grids"][0]["peaks"][0] == {
        "seq_length": 16,
        "batch_size": 1,
        "peak_bytes": MIB + 16 * 1024,
        "fits": "yes",
    }


@pytest.mark.usefixtures("linear")
def test_what_was_simulated_once_is_not_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = small_subject(tmp_path)
    predictor = Predictor(subject, CARD)
    first = predictor.memory(subject.resolve("full"))
    monkeypatch.delattr(StepSimulator, "_simulated")
    again = predictor.memory(subject.resolve([{"layers": "0:4", "mode": "full"}]))
    assert again.peak_bytes == first.peak_bytes
