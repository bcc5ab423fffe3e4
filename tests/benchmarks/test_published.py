"""Published measurements: the points are whole, some are predicted anew, and the page shows the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.published import page
from benchmarks.published.emulations import EMULATIONS
from benchmarks.published.measure import module_record, step_record
from benchmarks.published.models import MODELS
from benchmarks.published.modules import MODULES
from benchmarks.published.points import module_points, sources, step_points
from benchmarks.published.summary import answers, summaries

RESULT = json.loads(page.RESULT.read_text(encoding="utf-8"))
STEPS, KERNELS = {point.name: point for point in step_points()}, {point.name: point for point in module_points()}


def test_every_point_is_whole_and_named_once() -> None:
    assert len(STEPS) == len(list(step_points()))
    assert len(KERNELS) == len(list(module_points()))
    for step in STEPS.values():
        assert step.source in sources()
        assert step.model in MODELS
        assert set(step.emulations) <= EMULATIONS.keys()
        # What ran has all figures, what ran out of memory has none but nvidia-smi's.
        assert (step.allocated_bytes is None) == (step.tokens_per_second is None)
    assert {kernel.kernel for kernel in KERNELS.values()} == MODULES.keys()


def test_result_holds_every_point_and_what_they_say_together() -> None:
    records = RESULT["points"]
    assert [record["name"] for record in records] == [*STEPS, *KERNELS]
    assert RESULT["summary"] == list(summaries(records))
    assert RESULT["answers"] == answers(records)


def test_every_point_that_is_wrong_by_more_than_a_hundredth_has_a_reason() -> None:
    wrong = {record["name"] for record in RESULT["points"] if record["ratio"] and abs(record["ratio"] - 1) > 0.01}
    explained = {name for entry in page.reasons() for name in entry["points"]}
    assert wrong <= explained <= {record["name"] for record in RESULT["points"]}


def test_page_and_picture_show_the_result() -> None:
    assert page.DOCUMENT.read_text(encoding="utf-8") == page.render(RESULT)
    picture = page.DOCUMENT.parent / "images" / page.PICTURE
    assert page.digest_in(picture) == page.digest_of(page.picture_data(RESULT))


@pytest.mark.parametrize("name", ["liger_modules:326", "liger_modules:1383", "liger_modules:1664"])
def test_module_is_predicted_to_the_byte(name: str) -> None:
    record = module_record(KERNELS[name])
    assert record["predicted_bytes"] == record["published_bytes"]


# LoRA under FSDP1: the only one with each of what its versions did differently.
@pytest.mark.slow
def test_step_is_predicted_as_in_the_result() -> None:
    record = step_record(STEPS["fms:a100_80gb:35"])
    committed = next(each for each in RESULT["points"] if each["name"] == record["name"])
    assert record["predicted_bytes"] == committed["predicted_bytes"]
    assert record["ratio"] == pytest.approx(1, abs=5e-4)


def test_picture_is_drawn(tmp_path: Path) -> None:
    page.draw(page.picture_data(RESULT), tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
