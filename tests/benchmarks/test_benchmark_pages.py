"""docs/benchmarks.md and its pictures are what the results say; small results by hand show the rules of the page."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import case_tables, frontier, over_step
from benchmarks.pages.drawing import digest_in, digest_of
from benchmarks.pages.page import ORDER, page
from benchmarks.pages.pictures import pictures
from benchmarks.pages.results import CPU, CUDA, PREDICTED, Results, read_all
from benchmarks.pages.write import PAGE, write

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
GIB, MIB = 2**30, 2**20
CASE = "llama2_7b_lora_2048"
ENVIRONMENT = {
    "command": "python -m benchmarks.side_by_side.run",
    "versions": {"torch": "2.13.0"},
    "hardware": {"cpu": "a CPU", "num_threads": 1},
}

MODEL = {
    "config": {"num_hidden_layers": 8, "hidden_size": 2048},
    "method": "lora",
    "batch": 4,
    "tokens": 1024,
    "attention": "sdpa",
    "dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def committed() -> Results:
    return read_all(RESULTS, ORDER)


def test_page_is_what_the_results_say(committed: Results) -> None:
    assert (DOCS / PAGE).read_text(encoding="utf-8") == page(committed), "Run: python scripts/benchmark_pages.py"


def test_tables_are_what_the_results_say(committed: Results) -> None:
    wanted = case_tables.tables(committed)
    there = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "data").glob("benchmarks-*.csv")}
    assert there == wanted, "Run: python scripts/benchmark_pages.py"


def test_page_begins_with_the_finding_and_stays_short(committed: Results) -> None:
    text = page(committed)
    first = text.partition("# Benchmarks\n\n")[2].partition("\n\n")[0]
    assert first.startswith("In the same memory, a step under `auto` takes 0.79 times as long")
    assert "5 of 7 cases are not yet measured on a GPU." in first
    assert len(re.findall(r"[A-Za-z][\w'-]*", re.sub(r"<!--.*?-->|\]\([^)]*\)", "", text))) <= 1200


def test_every_figure_in_short_has_its_versions_and_its_result(committed: Results) -> None:
    rows = rows_of(
        page(committed).partition("## In short")[2].partition("## The cases")[0].partition("-->\n")[2].strip()
    )
    assert all("torch 2." in row[2] and ".json)" in row[1] for row in rows)
    assert len(rows) == 8


def test_no_picture_is_stale_missing_or_left_over(committed: Results) -> None:
    wanted = {picture.name: digest_of(picture.data) for picture in pictures(committed)}
    there = [*(DOCS / "images").glob("benchmarks-*.png"), *(DOCS / "images").glob("readme-*.png")]
    assert {path.name: digest_in(path) for path in there} == wanted, "Run: python scripts/benchmark_pages.py"


# --- Small results by hand. ---


def record(
    title: str, group: str, peak: int, milliseconds: float, *, is_predicted: bool, **more: Any
) -> dict[str, Any]:
    figures: dict[str, Any] = {"peak_bytes": peak, "timeline": [[0.0, peak // 2], [0.5, peak]]}
    if is_predicted:
        figures = {"predicted": figures | {"step_time_ms": milliseconds, "host_bytes": more.pop("host_bytes", 0)}}
    else:
        figures |= {"step_time_ms": {"median": milliseconds}, "ratios": {"flops": milliseconds / 100, "peak": 0.5}}
    return {"title": title, "group": group, "not_run": None} | figures | more


def result(unit: int, *, is_predicted: bool) -> dict[str, Any]:
    def of(title: str, group: str, peak: int, milliseconds: float, **more: Any) -> dict[str, Any]:
        return record(title, group, peak * unit, milliseconds, is_predicted=is_predicted, **more)

    return {
        "environment": ENVIRONMENT,
        "title": "A model",
        "device": "h100",
        "model": MODEL,
        "contenders": {
            "none": of("none", "none", 40, 100),
            "transformers_full": of("transformers, full", "today", 20, 140),
            "trl_offload": {"title": "trl, offload", "group": "elsewhere", "not_run": "no `trl` | here"},
            "full": of("full", "ours", 20, 140),
            "segments": of("segments", "ours", 24, 141),
            "auto_1": of("auto, 20", "auto", 20, 112, budget_bytes=20 * unit),
            "auto_2": of("auto, 40", "auto", 40, 103, budget_bytes=40 * unit),
        },
        "budgets": [
            budget(40 * unit, "none", "auto_2", "none", 1.03, "none", 1.03),
            budget(20 * unit, "just below segments", "auto_1", "full", 0.8, None, None),
        ],
    }


def budget(
    num_bytes: int, set_by: str, auto: str, fixed: str, over: float, today: str | None, gain: float | None
) -> Any:
    of_both = {"budget_bytes": num_bytes, "set_by": set_by, "auto": auto}
    return of_both | {"best_fixed": fixed, "ratio_to_fixed": over, "best_today": today, "ratio_to_today": gain}


def written(folder: Path, **results: dict[str, Any]) -> Results:
    names = {PREDICTED: f"predicted_{CASE}", CPU: f"side_by_side_{CASE}_cpu", CUDA: f"side_by_side_{CASE}_cuda"}
    for kind, content in results.items():
        # A further file of the same kind has a suffix: cpu__trl.
        name, _, suffix = kind.partition("__")
        path = folder / f"{names[name]}{'_' + suffix if suffix else ''}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
    return read_all(folder, ORDER)


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def read(rows: str) -> list[dict[str, str]]:
    return list(csv.DictReader(rows.splitlines()))


def test_without_a_gpu_each_case_says_so(tmp_path: Path) -> None:
    results = written(tmp_path, predicted=result(GIB, is_predicted=True))
    rows = list(case_tables.contenders(results.runs[CASE][PREDICTED]))
    assert {row["run"] for row in rows} == {"predicted for an H100"}
    assert (rows[1]["contender"], rows[1]["peak_bytes"], rows[1]["step_time_ms"]) == (
        "transformers, full",
        20 * GIB,
        140,
    )
    assert (rows[2]["contender"], rows[2]["peak_bytes"]) == ("trl, offload", None)
    text = page(results)
    assert "not yet measured on a GPU: `make bench-gpu CASE=llama2_7b_lora_2048`" in text
    assert "1 of 1 cases are not yet measured on a GPU." in text
    (run,) = read(case_tables.tables(results)[case_tables.RUNS])
    assert run["step"] == "A step: 8 layers of width 2,048, 4 x 1,024 tokens, LoRA, sdpa attention, bfloat16 weights."
    assert run["command"] == ENVIRONMENT["command"]


def test_predicted_and_measured_stand_in_rows_of_their_own(tmp_path: Path) -> None:
    measured = result(GIB, is_predicted=False)
    measured["contenders"]["full"] = {"title": "full", "group": "ours", "not_run": "out of memory"}
    measured["contenders"]["transformers_full"] |= {"peak_bytes": 21 * GIB, "step_time_ms": {"median": 155.0}}
    del measured["contenders"]["segments"]
    results = written(tmp_path, predicted=result(GIB, is_predicted=True), cuda=measured)
    rows = read(case_tables.tables(results)[case_tables.CONTENDERS])
    found = {(row["run"].split()[0].strip(","), row["contender"]): row for row in rows}
    assert len(found) == len(rows)
    sizes = {key: (row["peak_bytes"], row["step_time_ms"]) for key, row in found.items()}
    assert sizes["predicted", "transformers, full"] == (str(20 * GIB), "140")
    assert sizes["measured", "transformers, full"] == (str(21 * GIB), "155.0")
    assert (sizes["measured", "full"], found["measured", "full"]["could_not_run"]) == (("", ""), "out of memory")
    assert ("measured", "segments") not in found
    assert "not yet measured on a GPU" not in page(results)


def test_budgets_rise_and_say_where_nothing_else_fits(tmp_path: Path) -> None:
    run = written(tmp_path, predicted=result(GIB, is_predicted=True)).runs[CASE][PREDICTED]
    names = (
        "budget_bytes",
        "set_by",
        "best_fixed",
        "auto_over_best_fixed",
        "best_of_trainer",
        "auto_over_best_of_trainer",
    )
    assert [[row[name] for name in names] for row in case_tables.budgets(run)] == [
        [20 * GIB, "just below segments", "full", 0.8, "none fits", None],
        [40 * GIB, "none", "none", 1.03, "none", 1.03],
    ]


def test_on_the_cpu_budgets_are_compared_by_operations_first(tmp_path: Path) -> None:
    measured = result(MIB, is_predicted=False)
    measured["budgets_by_flops"] = [budget(20 * MIB, "full", "auto_1", "full", 0.9, "transformers_full", 0.9)]
    measured["budgets"] = [budget(20 * MIB, "full", "auto_1", "full", 0.7, "transformers_full", 0.6)]
    run = written(tmp_path, cpu=measured).runs[CASE][CPU]
    by_operations, by_time = case_tables.budgets(run)
    assert (by_operations["by"], by_operations["auto_over_best_of_trainer"]) == ("operations", 0.9)
    assert (by_time["by"], by_time["auto_over_best_fixed"], by_time["auto_over_best_of_trainer"]) == ("time", 0.7, 0.6)


def test_who_could_not_run_is_named_with_the_reason(tmp_path: Path) -> None:
    results = written(tmp_path, cpu=result(MIB, is_predicted=False))
    rows = read(case_tables.tables(results)[case_tables.CONTENDERS])
    refused = [row for row in rows if row["could_not_run"]]
    assert [(row["run"], row["contender"], row["could_not_run"]) for row in refused] == [
        ("measured, small twin on a CPU", "trl, offload", "no `trl` | here")
    ]


def test_a_file_of_its_own_environment_fills_in_what_could_not_run(tmp_path: Path) -> None:
    other = result(MIB, is_predicted=False)
    other["contenders"] = {
        "none": record("none", "none", 99 * MIB, 100, is_predicted=False),
        "trl_offload": record("trl, offload", "elsewhere", 9 * MIB, 100, is_predicted=False),
    }
    run = written(tmp_path, cpu=result(MIB, is_predicted=False), cpu__trl=other).runs[CASE][CPU]
    assert run.names == (f"side_by_side_{CASE}_cpu.json", f"side_by_side_{CASE}_cpu_trl.json")
    assert (run.rows["none"].peak_bytes, run.rows["trl_offload"].peak_bytes) == (40 * MIB, 9 * MIB)


def test_what_did_not_help_has_a_row(tmp_path: Path) -> None:
    predicted = result(GIB, is_predicted=True)
    # Less time and memory on the device, but it has moved some to the host.
    figures = {"peak_bytes": 10 * GIB, "step_time_ms": 130.0, "host_bytes": GIB}
    predicted["contenders"]["full_offload"] = {"title": "full + offload", "group": "ours", "predicted": figures}
    run = written(tmp_path, predicted=predicted).runs[CASE][PREDICTED]
    found = [(row["what"], row["beaten_by"], row["in"]) for row in case_tables.no_help(run)]
    assert found == [
        ("segments", "transformers, full", "memory and time"),
        ("auto", "none", "time, in the memory of none"),
    ]


def test_titles_of_pictures_say_predicted_or_measured_and_on_what(tmp_path: Path) -> None:
    results = written(tmp_path, predicted=result(GIB, is_predicted=True), cpu=result(MIB, is_predicted=False))
    drawn = {picture.name: picture.data for picture in pictures(results)}
    assert {name: data["title"] for name, data in drawn.items()} == {
        "benchmarks-llama2-7b-lora-2048-predicted.png": "A model: predicted for an H100",
        "benchmarks-llama2-7b-lora-2048-cpu.png": "A model: measured, small twin on a CPU",
        "benchmarks-memory-predicted.png": "Memory over one step. A model: predicted for an H100",
        "benchmarks-memory-cpu.png": "Memory over one step. A model: measured, small twin on a CPU",
        "readme-frontier.png": "A model: predicted for an H100",
    }
    predicted = drawn["benchmarks-llama2-7b-lora-2048-predicted.png"]
    assert (predicted["across"], predicted["up"]) == ("predicted step time (s)", "predicted peak (GiB)")
    assert drawn["benchmarks-llama2-7b-lora-2048-cpu.png"]["up"] == "measured peak (MiB)"


def test_memory_over_the_step_has_the_modes_that_there_are(tmp_path: Path) -> None:
    results = written(tmp_path, predicted=result(GIB, is_predicted=True), cpu=result(MIB, is_predicted=False))
    predicted, measured = (over_step.data_of(results.runs[CASE][kind]) for kind in (PREDICTED, CPU))
    assert predicted
    assert measured
    assert [panel["title"] for panel in predicted["panels"]] == ["none", "full"]
    assert predicted["panels"][0]["points"] == [[0.0, 20.0], [0.5, 40.0]]
    assert (predicted["across"], measured["across"]) == ("predicted time (s)", "events of the step (share)")


def test_curve_of_auto_goes_down_in_steps() -> None:
    points = [{"group": "auto", "x": x, "y": y} for x, y in ((3.0, 10.0), (1.0, 30.0), (2.0, 20.0), (2.5, 20.0))]
    corners = frontier.curve_of([*points, {"group": "ours", "x": 0.0, "y": 0.0}])
    assert corners == [(1.0, 30.0), (2.0, 30.0), (2.0, 20.0), (3.0, 20.0), (3.0, 10.0)]


def test_a_picture_carries_the_digest_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    measured = result(MIB, is_predicted=False)
    measured["contenders"] = {
        name: measured["contenders"][name] for name in ("none", "trl_offload", "segments", "auto_1")
    }
    for contender in measured["contenders"].values():
        contender.pop("timeline", None)
    results = written(tmp_path / "results", cpu=measured)
    (picture,) = pictures(results)
    image = tmp_path / "docs" / "images" / picture.name
    tables = [tmp_path / "docs" / "data" / name for name in case_tables.tables(results)]
    assert write(tmp_path / "results", tmp_path / "docs") == [image, *tables, tmp_path / "docs" / PAGE]
    assert digest_in(image) == digest_of(picture.data)
    # What is up to date is left alone, and what nothing draws any more goes.
    left_over = image.with_name("benchmarks-of-another-case-cpu.png")
    left_over.write_bytes(image.read_bytes())
    assert write(tmp_path / "results", tmp_path / "docs") == [*tables, tmp_path / "docs" / PAGE]
    assert not left_over.exists()


def test_without_results_the_page_stands(tmp_path: Path) -> None:
    assert "## Run it" in page(read_all(tmp_path))
