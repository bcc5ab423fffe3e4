"""benchmarks/side_by_side/compare.py: what counts as reproduced, and what the comparison says."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner
from benchmarks.side_by_side.compare import RESULTS, Judged, compare

ENVIRONMENT = {
    "commit": "a",
    "is_dirty": False,
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    "hardware": {"cpu": "one", "num_cpus": 2},
}


def record(**changes: Any) -> dict[str, Any]:
    return {
        "title": "ours, full",
        "group": "ours",
        "plan": {"format": 2, "stacks": [{"layers": ["full", "full"]}]},
        "not_run": None,
        "num_flops": {"forward": 1000, "backward": 2000},
        "peak_bytes": 5000,
        "timeline": [[0.0, 100], [0.5, 5000]],
        "step_time_ms": {"median": 10.0, "quartiles": [9.0, 10.0, 11.0]},
        "forward_ms": 3.0,
        "loss": 4.25,
        "predicted": {"peak_bytes": 4900, "step_time_ms": 12.0},
        "ratios": {"flops": 1.25, "step_time": 1.31},
        **changes,
    }


def side_by_side() -> dict[str, Any]:
    row = {"budget_bytes": 5000, "auto": "auto_1", "peak_bytes": 4990, "best_fixed": "full", "ratio_to_fixed": 0.9}
    verdict = {"num_budgets": 1, "worst_ratio_to_fixed": 0.9, "best_at_bytes": 5000}
    return {
        "environment": ENVIRONMENT,
        "case": "llama",
        "device": "cpu",
        "effort": {"num_rounds": 3, "num_steps": 2},
        "contenders": {"full": record(), "unsloth": record(group="elsewhere")},
        "budgets": [row],
        "verdict": verdict,
        "budgets_by_flops": [dict(row)],
        "verdict_by_flops": dict(verdict),
    }


def differences(changed: dict[str, Any], name: str = "side_by_side_llama_cpu.json") -> list[str]:
    return [finding.describe() for finding in compare(name, side_by_side(), changed).differences]


def change(*steps: Any, to: Any) -> dict[str, Any]:
    """A result in which one value is another one."""
    result = copy.deepcopy(side_by_side())
    place: Any = result
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = to
    return result


FULL = ("contenders", "full")


@pytest.mark.parametrize(
    ("steps", "value", "said"),
    [
        # Counts are equal or not.
        ((*FULL, "peak_bytes"), 5001, "contenders.full.peak_bytes: 5,000 committed, 5,001 anew (+0.02%)"),
        ((*FULL, "num_flops", "backward"), 1999, "contenders.full.num_flops.backward: 2,000 committed, 1,999 anew"),
        ((*FULL, "timeline", 1, 1), 5100, "contenders.full.timeline[1][1]: 5,000 committed, 5,100 anew (+2.00%)"),
        ((*FULL, "timeline"), [[0.0, 100]], "contenders.full.timeline.length: 2 committed, 1 anew"),
        # Everything else within 2 %.
        ((*FULL, "loss"), 4.4, "contenders.full.loss: 4.25 committed, 4.4 anew (+3.53%)"),
        ((*FULL, "ratios", "flops"), 1.2, "contenders.full.ratios.flops: 1.25 committed, 1.2 anew (-4.00%)"),
        ((*FULL, "predicted", "peak_bytes"), 5000, "contenders.full.predicted.peak_bytes: 4,900 committed, 5,000 anew"),
        ((*FULL, "predicted", "step_time_ms"), 13.0, "contenders.full.predicted.step_time_ms: 12 committed, 13 anew"),
        # Words, flags and keys.
        ((*FULL, "plan", "stacks", 0, "layers", 1), "none", 'plan.stacks[0].layers[1]: "full" committed, "none" anew'),
        ((*FULL, "is_new"), True, "contenders.full.is_new: nothing committed, true anew"),
        (("device",), None, 'device: "cpu" committed, null anew'),
        (("contenders",), {"unsloth": record(group="elsewhere")}, "contenders.full: {...} committed, nothing anew"),
        (
            ("budgets_by_flops", 0, "best_fixed"),
            "none",
            'budgets_by_flops[0].best_fixed: "full" committed, "none" anew',
        ),
        (("budgets", 0, "peak_bytes"), 1, "budgets[0].peak_bytes: 4,990 committed, 1 anew"),
        ((*FULL, "not_run"), "out of memory", 'contenders.full.not_run: null committed, "out of memory" anew'),
    ],
)
def test_what_differs(steps: tuple[Any, ...], value: Any, said: str) -> None:
    (found,) = differences(change(*steps, to=value))
    assert said in found


@pytest.mark.parametrize(
    ("steps", "value"),
    [
        ((*FULL, "loss"), 4.3),
        ((*FULL, "predicted", "peak_bytes"), 4901),
        ((*FULL, "predicted", "step_time_ms"), 12.2),
        # Measured times, and what follows from them.
        ((*FULL, "step_time_ms"), {"median": 99.0, "quartiles": [1.0, 2.0, 3.0]}),
        ((*FULL, "forward_ms"), 99.0),
        ((*FULL, "ratios", "step_time"), 9.0),
        (("budgets", 0, "best_fixed"), "none"),
        (("budgets", 0, "ratio_to_fixed"), 1.5),
        (("verdict", "worst_ratio_to_fixed"), 1.5),
        # Where and how it ran.
        (("environment", "commit"), "b"),
        (("effort", "num_rounds"), 1),
        (("contenders", "unsloth", "not_run"), "unsloth is not installed"),
    ],
)
def test_what_is_reproduced(steps: tuple[Any, ...], value: Any) -> None:
    assert differences(change(*steps, to=value)) == []


def test_loss_is_not_judged_after_another_number_of_steps() -> None:
    changed = change("effort", "num_rounds", to=1)
    changed["contenders"]["full"]["loss"] = 5.0
    comparison = compare("side_by_side_llama_cpu.json", side_by_side(), changed)
    assert comparison.differences == []
    assert comparison.notes == [
        "another number of steps: the loss and the gradient norm after the last one are not judged"
    ]


def test_run_that_timed_nothing_is_held_against_one_that_did() -> None:
    changed = side_by_side()
    for key in ("budgets", "verdict"):
        del changed[key]
    for name in ("step_time_ms", "forward_ms"):
        del changed["contenders"]["full"][name]
    assert differences(changed) == []


def test_other_surroundings_are_said() -> None:
    changed = change(
        "environment",
        to={"is_dirty": True, "versions": {"torch": "2.12.0"}, "hardware": {"cpu": "another", "num_cpus": 2}},
    )
    assert compare("a.json", side_by_side(), changed).notes == [
        'versions: torch was "2.13.0", is "2.12.0"',
        'versions: transformers was "5.23.0", is null',
        'hardware: cpu was "one", is "another"',
        "the new result was made with changes that are in no commit",
    ]


def test_contenders_that_ran_in_one_run_only_are_said() -> None:
    without = change("contenders", "unsloth", to={"group": "elsewhere", "not_run": "not installed"})
    name = "side_by_side_llama_cpu.json"
    assert compare(name, side_by_side(), without).notes == ["contenders.unsloth did not run anew: not installed"]
    assert compare(name, without, side_by_side()).notes == [
        "contenders.unsloth runs anew, and did not in the committed result: not installed"
    ]
    neither = compare(name, without, without)
    assert neither.notes == []
    assert [finding for finding in neither.findings if "unsloth" in finding.steps] == []


@pytest.mark.parametrize(
    ("name", "result", "key", "judged"),
    [
        ("modes.json", {"sdpa": {"full": {"flops": 10}}}, "flops", Judged.EQUAL),
        ("modes.json", {"sdpa": {"full": {"held_ratio": 0.5}}}, "held_ratio", Judged.CLOSE),
        ("collectives.json", {"fsdp2": {"ffn_forwards": [1, 2]}}, "ffn_forwards", Judged.EQUAL),
        ("overhead.json", {"device": "cpu", "step_time_ratio_median": 1.0}, "step_time_ratio_median", Judged.SHOWN),
        ("side_by_side.json", {"device": "cuda", "peak_bytes": 10}, "peak_bytes", Judged.CLOSE),
        ("resident.json", {"full": {"measured_bytes": 10}}, "measured_bytes", Judged.CLOSE),
        # Predictions, known by their file's name or by the name of a card.
        ("predicted_llama.json", {"peak_bytes": 10}, "peak_bytes", Judged.CLOSE),
        ("budgets.json", {"device": "rtx4090", "rows": [{"seconds": 1.0}]}, "seconds", Judged.CLOSE),
        ("estimate.json", {"report": {"device": "rtx4090", "tokens": 10}}, "tokens", Judged.CLOSE),
        ("budgets.json", {"device": "rtx4090", "seconds_to_simulate": 1.0}, "seconds_to_simulate", Judged.SHOWN),
        ("simulation_cost.json", {"7b": {"predicted_peak_gib": 1.0}}, "predicted_peak_gib", Judged.CLOSE),
    ],
)
def test_how_each_kind_of_result_is_judged(name: str, result: dict[str, Any], key: str, judged: Judged) -> None:
    findings = compare(name, result, copy.deepcopy(result)).findings
    assert {finding.judged for finding in findings if key in finding.steps} == {judged}


def test_zero_and_no_number_are_close_to_themselves_only() -> None:
    pairs = [(0.0, 0.0), (float("nan"), float("nan")), (0.0, 1e-9), (1.0, float("nan")), (True, 1)]
    found = [compare("a.json", {"x": left}, {"x": right}).findings[0].is_same for left, right in pairs]
    assert found == [True, True, False, False, False]


# --- The command. ---


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., list[str]]:
    """Writes results of both folders, and returns the words of the command."""

    def write(committed: dict[str, Any], anew: dict[str, Any]) -> list[str]:
        for folder, results in (("committed", committed), ("anew", anew)):
            (tmp_path / folder).mkdir()
            for name, result in results.items():
                text = result if isinstance(result, str) else json.dumps(result)
                (tmp_path / folder / name).write_text(text, encoding="utf-8")
        return [str(tmp_path / "anew"), "--committed", str(tmp_path / "committed")]

    return write


def command(words: list[str]) -> int:
    return runner.main("benchmarks.side_by_side.compare", words)


def test_command_says_one_line_for_a_reproduced_file(
    folders: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = folders({"a.json": {"x": 1}, "b.json": {"x": 1}}, {"a.json": {"x": 1}, "c.json": {"x": 1}})
    assert command(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a.json: reproduced (1 equal, 0 within 2%, 0 not judged)",
        "c.json: nothing is committed under this name",
        "1 of 1 reproduced; 2 results are committed",
    ]


def test_command_lists_differences_and_time_ratios(
    folders: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    committed = {"peak_bytes": 1000, "ratios": {"step_time": 1.25, "peak": 0.5}}
    words = folders(
        {"a.json": committed}, {"a.json": {"peak_bytes": 1100, "ratios": {"step_time": 1.5, "peak": 0.505}}}
    )
    assert command(words) == 1
    assert capsys.readouterr().out.splitlines()[2] == (
        "  not judged: ratios of times (1): 1.20 to 1.20 of the committed ones, median 1.20; --times lists them"
    )
    assert command([*words, "--times"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a.json: 1 differ (0 equal, 1 within 2%, 1 not judged)",
        "  differs: peak_bytes: 1,000 committed, 1,100 anew (+10.00%)",
        "  not judged: ratios.step_time: 1.25 committed, 1.5 anew (+20.00%)",
        "0 of 1 reproduced; 1 results are committed",
    ]


@pytest.mark.parametrize(
    ("committed", "anew", "said"),
    [
        ({"a.json": {}}, {"b.json": {}}, "(b.json) has the name of one in"),
        ({"a.json": {}}, {}, "(there is none) has the name of one in"),
        ({"a.json": {}}, {"a.json": "{"}, "a.json cannot be read as JSON: Expecting property name"),
        ({"a.json": {}}, {"a.json": "[]"}, "a.json holds no JSON object"),
    ],
)
def test_nothing_to_compare_is_one_error(
    folders: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
    committed: dict[str, Any],
    anew: dict[str, Any],
    said: str,
) -> None:
    assert command(folders(committed, anew)) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert said in errors[0]


def test_folder_that_is_not_there_or_the_committed_one_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([str(tmp_path / "nowhere")]) == 2
    assert f"error: ANEW is {tmp_path / 'nowhere'}, which is no folder." in capsys.readouterr().err
    assert command([str(RESULTS)]) == 2
    assert "ANEW and --committed are the same folder" in capsys.readouterr().err


def test_committed_results_are_equal_to_themselves() -> None:
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        comparison = compare(path.name, result, result)
        assert comparison.differences == []
        assert any(finding.judged is not Judged.SHOWN for finding in comparison.findings)
