"""The side-by-side harness: cases and their twins, budgets, comparisons, and one small case measured whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

from benchmarks.side_by_side import suite
from benchmarks.side_by_side.budgets import Budget, budgets_of, compare, verdict
from benchmarks.side_by_side.cases import CASES, Case, build
from benchmarks.side_by_side.contender import GROUPS, Contender, NotHereError
from benchmarks.side_by_side.contenders import CONTENDERS, chosen
from benchmarks.side_by_side.measure import Effort, measure

TINY = Case(
    name="tiny",
    title="a tiny Llama",
    config=CASES["llama2_7b_lora_2048"].config
    | {"hidden_size": 64, "intermediate_size": 160, "head_dim": 16, "vocab_size": 96}
    | {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4},
    method="lora",
    batch=1,
    tokens=24,
    scale=1,
    dtype="float32",
    autocast=None,
    rank=2,
)
FIGURES = {
    "num_flops",
    "total_flops",
    "held_bytes",
    "peak_bytes",
    "host_bytes",
    "by_category",
    "timeline",
    "step_time_ms",
    "forward_ms",
    "backward_ms",
    "optimizer_ms",
    "recomputation_ms",
    "loss",
    "grad_norm",
    "ratios",
}


def refuse(model: Any) -> Any:
    raise NotHereError("no accelerator here")


# --- Cases. ---


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_twin_keeps_the_proportions_of_its_case(case: Case) -> None:
    twin = case.twin()
    assert twin.config["num_attention_heads"] == case.config["num_attention_heads"]
    assert twin.config["num_hidden_layers"] == 8
    # Scores of attention, inner width and logits beside the hidden states, as far as whole numbers go.
    for one in ("intermediate_size", "vocab_size"):
        share = case.config[one] / case.config["hidden_size"]
        assert twin.config[one] / twin.config["hidden_size"] == pytest.approx(share, rel=0.01)
    assert twin.tokens / twin.config["hidden_size"] == case.tokens / case.config["hidden_size"]
    assert (twin.is_small, twin.dtype, twin.autocast) == (True, "float32", None)


def test_model_of_a_case_has_the_size_of_its_name() -> None:
    num_parameters = {
        name: sum(map(_numel, build(CASES[name], "meta").parameters())) for name in ("qwen3_06b_full_2048",)
    }
    assert num_parameters == {"qwen3_06b_full_2048": 596_049_920}


def _numel(parameter: Any) -> int:
    return int(parameter.numel())


# --- Contenders. ---


def test_names_of_contenders_are_those_that_they_are_registered_by() -> None:
    assert [contender.name for contender in CONTENDERS.values()] == list(CONTENDERS)
    assert {contender.group for contender in CONTENDERS.values()} == set(GROUPS) - {"auto"}


def test_contenders_are_chosen_by_name_and_by_group_beside_none() -> None:
    assert [one.name for one in chosen(["full", "ffn"])] == ["none", "full", "ffn"]
    assert {one.group for one in chosen(["compiled"])} == {"none", "compiled"}
    assert len(chosen([])) == len(CONTENDERS)


def test_unknown_contender_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"Unknown contender 'ful'\. Contenders are none, .*groups of them are compiled"
    ):
        chosen(["ful"])


# --- Budgets. ---


def record(group: str, peak: int, time: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"group": group, "peak_bytes": peak, "not_run": None, "time": time} | more


def test_budgets_are_peaks_and_lie_just_below_those_of_today() -> None:
    records = {
        "none": record("none", 1000),
        "half": record("today", 500),
        "all": record("today", 300),
        "ours": record("ours", 700),
        "same": record("ours", 502),
        "near": record("ours", 491),
        "compiled": record("compiled", 100),
        "missing": {"group": "ours", "not_run": "no"},
    }
    assert budgets_of(records, 9) == [
        Budget(300, "all", is_today=True),
        Budget(490, "just below half", is_today=True),
        Budget(500, "half", is_today=True),
        Budget(700, "ours"),
        Budget(980, "just below none", is_today=True),
        Budget(1000, "none", is_today=True),
    ]
    assert Budget(700, "ours") not in budgets_of(records, 5)


def test_a_plan_is_compared_with_the_fastest_that_fits_its_budget() -> None:
    records = {
        "none": record("none", 1000, 1.0),
        "today": record("today", 300, 1.5),
        "ours": record("ours", 300, 1.4),
        "auto_1": record("auto", 290, 1.3, budget_bytes=300, set_by="today"),
        "auto_2": record("auto", 1020, 1.0, budget_bytes=1000, set_by="none"),
        "auto_3": record("auto", 90, 2.0, budget_bytes=100, set_by="x"),
    }
    rows = compare(records, lambda found: found["time"])
    assert [(row["best_fixed"], row["best_today"]) for row in rows] == [
        ("ours", "today"),
        ("none", "none"),
        (None, None),
    ]
    assert rows[0]["ratio_to_fixed"] == pytest.approx(1.3 / 1.4)
    judged = verdict(rows)
    assert judged["num_over_budget"] == 1
    assert judged["worst_ratio_to_fixed"] == 1.0
    assert judged["best_gain_over_today"] == pytest.approx(1 - 1.3 / 1.5)
    assert judged["num_where_nothing_of_today_fits"] == 1


# --- A case. ---


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    contenders = (
        *chosen(["full", "attention"]),
        Contender(name="elsewhere", title="elsewhere", group="elsewhere", enter=refuse),
    )
    measured = measure(TINY, "cpu", contenders, Effort(num_rounds=1, num_steps=1, num_budgets=1))
    return dict(json.loads(json.dumps(measured)))


def test_records_have_all_figures_and_say_what_was_in_force(result: dict[str, Any]) -> None:
    records = result["contenders"]
    assert set(records["full"]) >= FIGURES
    assert records["none"]["plan"] is None
    assert records["full"]["plan"]["stacks"]
    assert records["elsewhere"]["not_run"] == "no accelerator here"
    assert result["effort"]["num_rounds"] == 1


def test_contenders_have_the_same_loss_and_gradients(result: dict[str, Any]) -> None:
    records = [one for one in result["contenders"].values() if not one["not_run"]]
    assert len({(one["loss"], one["grad_norm"]) for one in records}) == 1


def test_counts_follow_from_what_is_recomputed(result: dict[str, Any]) -> None:
    none, full, attention = (result["contenders"][name] for name in ("none", "full", "attention"))
    assert none["num_flops"]["recomputation"] == 0
    for phase in ("forward", "backward"):
        assert full["num_flops"][phase] == none["num_flops"][phase]
    # Early stop leaves out the last product of each layer, at least.
    assert 0 < full["num_flops"]["recomputation"] < none["num_flops"]["forward"]
    assert full["held_bytes"] < attention["held_bytes"] < none["held_bytes"]
    assert full["ratios"]["flops"] == full["total_flops"] / none["total_flops"]


def test_the_planned_contender_keeps_its_budget(result: dict[str, Any]) -> None:
    autos = [one for one in result["contenders"].values() if one["group"] == "auto"]
    assert len(autos) == len(result["budgets"]) == len(result["budgets_by_flops"]) >= 1
    assert result["verdict_by_flops"]["num_over_budget"] == 0
    for auto in autos:
        assert auto["predicted"]["peak_bytes"] <= auto["budget_bytes"]


# --- Suites. ---


def test_suite_of_the_gpu_goes_on_where_it_stopped(tmp_path: Path) -> None:
    slices = list(suite.gpu_slices(("llama2_7b_lora_2048",)))
    assert [one.result for one in slices] == [
        "side_by_side_llama2_7b_lora_2048_cuda.json",
        "side_by_side_llama2_7b_lora_2048_cuda_compiled.json",
    ]
    (tmp_path / slices[0].result).touch()
    assert suite.left(slices, tmp_path) == slices[1:]


def test_suite_of_the_cpu_writes_every_result_that_documents_show_as_counted() -> None:
    names = {one.result for one in suite.cpu_slices()}
    assert {"claims_cpu.json", "modes_llama_38m.json", "collectives_llama_tiny.json"} < names
    assert all((suite.RESULTS / name).is_file() for name in names)
