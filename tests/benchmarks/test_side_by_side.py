"""The side-by-side harness: cases and their twins, budgets, comparisons, and one small case measured whole."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

from benchmarks.cases import CASES, Case, build
from benchmarks.journal import Entry, FileJournal, OutOfTimeError, ReadJournal
from benchmarks.runner import RESULTS
from benchmarks.side_by_side import measure, ours, suite
from benchmarks.side_by_side.budgets import Budget, budgets_of, compare, verdict
from benchmarks.side_by_side.contender import GROUPS, Contender, NotHereError
from benchmarks.side_by_side.contenders import CONTENDERS, chosen
from benchmarks.side_by_side.measure import Bench, Effort, assemble, collect
from benchmarks.side_by_side.step import TrainingStep
from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.regions.selective import kept_outputs

pytestmark = pytest.mark.sweep

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


EFFORT = Effort(num_rounds=1, num_steps=1, num_budgets=1)


def fixed() -> tuple[Contender, ...]:
    elsewhere = Contender(name="elsewhere", title="elsewhere", group="elsewhere", enter=refuse)
    return (*chosen(["full", "attention"]), elsewhere)


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    journal = FileJournal()
    collect(journal, TINY, "cpu", fixed(), EFFORT)
    return dict(json.loads(json.dumps(journal.entries)))


@pytest.fixture(scope="module")
def result(entries: dict[str, Entry]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(assemble(ReadJournal(entries), TINY, "cpu", fixed(), EFFORT))))


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


# --- Entries. ---


def failing(name: str, error: Callable[[], Exception], step: int) -> Contender:
    """Return a contender whose model fails in one of its steps, and then stays as it was made."""

    @contextmanager
    def enter(model: nn.Module) -> Iterator[nn.Module]:
        num_calls = 0

        def fail(*args: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == step:
                raise error()

        hook = model.register_forward_pre_hook(fail)
        yield model
        # Not where a step has broken off, which may leave anything behind.
        hook.remove()

    return Contender(name=name, title=name, group="elsewhere", enter=enter)


def test_entries_are_one_for_each_first_look_and_turn(entries: dict[str, Entry]) -> None:
    autos = [f"auto_{number}" for number in range(1, len(entries["plans"]["autos"]) + 1)]
    looks = [f"first_look/{name}" for name in ("none", "full", "attention", "elsewhere")]
    turns = [f"round_1/{name}" for name in ("none", "full", "attention", *autos)]
    assert list(entries) == [*looks, "plans", *(f"first_look/{name}" for name in autos), *turns]


def test_what_is_there_is_not_made_again(entries: dict[str, Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(measure, "build")
    # What is not there is a KeyError, and a model that is built a NameError.
    collect(ReadJournal(entries), TINY, "cpu", fixed(), EFFORT)


def test_entries_that_are_missing_are_the_only_ones_that_are_made(entries: dict[str, Entry]) -> None:
    journal = FileJournal()
    journal.entries = {key: entry for key, entry in entries.items() if key != "round_1/full"}
    collect(journal, TINY, "cpu", fixed(), EFFORT)
    assert journal.entries.keys() == entries.keys()
    assert {key for key in entries if journal.entries[key] != entries[key]} == {"round_1/full"}
    assert journal.entries["round_1/full"]["loss"] == entries["round_1/full"]["loss"]


def test_contender_that_fails_is_the_only_one_that_is_lost() -> None:
    contenders = (
        *chosen(["none"]),
        failing("broken", lambda: RuntimeError("no kernel for this"), step=1),
        failing("large", lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), step=2),
        *chosen(["full"])[1:],
    )
    journal, effort = FileJournal(), Effort(num_rounds=2, num_budgets=0)
    collect(journal, TINY, "cpu", contenders, effort)
    result = assemble(ReadJournal(journal.entries), TINY, "cpu", contenders, effort)
    records = result["contenders"]
    assert {name: record["not_run"] for name, record in records.items()} == {
        "none": None,
        "broken": "RuntimeError: no kernel for this",
        "large": "CUDA out of memory. Tried to allocate 2.00 GiB",
        "full": None,
    }
    assert result["effort"]["num_rounds"] == 2
    assert records["full"]["loss"] == records["none"]["loss"]
    assert records["full"]["grad_norm"] == records["none"]["grad_norm"]


def test_contender_that_fails_in_a_round_keeps_its_reason_and_is_left_out_of_later_ones() -> None:
    contenders = (*chosen(["none"]), failing("late", lambda: RuntimeError("a stream was lost"), step=4))
    journal, effort = FileJournal(), Effort(num_rounds=2, num_warmup=4, num_budgets=0)
    collect(journal, TINY, "cpu", contenders, effort)
    assert "round_1/late" in journal.entries
    assert "round_2/late" not in journal.entries
    record = assemble(journal, TINY, "cpu", contenders, effort)["contenders"]["late"]
    assert record["not_run"] == "round 1: RuntimeError: a stream was lost"
    assert record["peak_bytes"] > 0


def test_what_time_did_not_suffice_for_is_not_measured_yet() -> None:
    journal = FileJournal(deadline=0.0)
    with pytest.raises(OutOfTimeError):
        collect(journal, TINY, "cpu", fixed(), EFFORT)
    records = assemble(journal, TINY, "cpu", fixed(), EFFORT)["contenders"]
    assert {record["not_run"] for record in records.values()} == {"not measured yet"}


def test_plans_that_are_ready_are_not_made(entries: dict[str, Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(measure, "plans")
    ready = entries["plans"]["autos"][0]
    journal = FileJournal()
    journal.entry(measure.PLANS, lambda: {"autos": [ready]})
    collect(journal, TINY, "cpu", chosen(["none"]), EFFORT)
    assert list(journal.entries) == ["plans", "first_look/none", "first_look/auto_1", "round_1/none", "round_1/auto_1"]
    found = assemble(journal, TINY, "cpu", chosen(["none"]), EFFORT)
    assert found["contenders"]["auto_1"]["budget_bytes"] == ready["budget_bytes"]
    assert found["contenders"]["auto_1"]["predicted"] == ready["predicted"]
    assert [row["auto"] for row in found["budgets"]] == ["auto_1"]


def test_state_of_the_optimizer_is_made_without_a_step_of_the_model() -> None:
    bench = Bench(TINY, "cpu")
    model = build(TINY, "cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.register_forward_pre_hook(lambda *args: pytest.fail("the model was called"))
    step: TrainingStep = bench._started(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert set(step.optimizer.state) == set(trainable)
    assert all({"exp_avg", "exp_avg_sq"} <= state.keys() for state in step.optimizer.state.values())
    assert all(parameter.grad is None for parameter in trainable)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_is_gone_before_the_next_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref[nn.Module]] = []

    def watched(*given: Any) -> nn.Module:
        gc.collect()
        assert [model() for model in built] == [None] * len(built)
        model = build(*given)
        built.append(weakref.ref(model))
        return model

    @contextmanager
    def enter(model: nn.Module) -> Iterator[nn.Module]:
        yield model

    monkeypatch.setattr(measure, "build", watched)
    other = Contender(name="other", title="other", group="elsewhere", enter=enter, is_reversible=False)
    collect(FileJournal(), TINY, "cpu", (*chosen(["none"]), other), Effort(num_rounds=2, num_budgets=0))
    # There and back: none, other; none, other; other, none.
    assert len(built) == 6


def test_contenders_that_offload_or_compile_warm_up_longer() -> None:
    num_warmup = {name: contender.num_warmup for name, contender in CONTENDERS.items()}
    assert {name for name, number in num_warmup.items() if number == 3} == {
        "full_offload",
        "transformers_offload",
        "trl_offload",
        "trl_offload_all",
        "unsloth_offload",
        "axolotl_offload",
    }
    assert {name for name, number in num_warmup.items() if number == 2} == {
        name for name, contender in CONTENDERS.items() if contender.group == "compiled"
    } | {"selective", "selective_attention"}


@pytest.mark.parametrize("name", ["selective", "selective_attention"])
def test_selective_modes_are_timed_behind_the_steps_that_look_at_whole_tensors(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    looked: list[bool] = []
    original = kept_outputs.bit_sums

    def sums(tensors: Any, *, is_whole: bool, **options: Any) -> Any:
        looked.append(is_whole)
        return original(tensors, is_whole=is_whole, **options)

    monkeypatch.setattr(kept_outputs, "bit_sums", sums)
    bench, contender = Bench(TINY, "cpu"), CONTENDERS[name]
    counts = []
    with bench.entered(contender) as (step, called):
        for _ in range(contender.num_warmup + 1):
            looked.clear()
            step.run(called)
            counts.append(any(looked))
    assert all(counts[:-1])
    assert looked
    assert not counts[-1]


def test_plans_of_the_planner_warm_up_as_their_modes_need() -> None:
    def plan(*modes: str) -> Plan:
        return Plan("Llama", (StackPlan("layers", tuple(LayerPlan(Mode(mode)) for mode in modes)),))

    assert [ours.warmup_of(plan("none", mode)) for mode in ("full", "selective", "selective_attention")] == [1, 2, 2]
    offloads = LayerPlan(Mode.SELECTIVE, offload=Offload())
    assert ours.warmup_of(Plan("Llama", (StackPlan("layers", (offloads,)),))) == 3


# --- The suite. ---


def test_the_suite_writes_every_result_that_documents_show_as_counted() -> None:
    names = {one.result for one in suite.slices_of()}
    assert {"claims_cpu.json", "modes_llama_38m.json", "collectives_llama_tiny.json"} < names
    assert all((RESULTS / name).is_file() for name in names)


def timed(num_warmup: int, seconds: float) -> Entry:
    """A turn of one timed step on a device."""
    phases = {"forward": [seconds], "backward": [seconds], "optimizer": [seconds]}
    return {"seconds": phases, "num_warmup": num_warmup, "loss": 2.0, "grad_norm": 1.0, "peak_bytes": 2**30}


def test_what_was_timed_too_early_is_said_and_not_compared() -> None:
    contenders = chosen(["full", "selective"])
    entries = {f"first_look/{name}": {"plan": None} | timed(1, 0.1) for name in ("none", "full", "selective")}
    record = assemble(ReadJournal(entries), TINY, "cuda", contenders, Effort(num_rounds=0))["contenders"]
    assert record["full"]["step_time_ms"]["median"] == pytest.approx(300)
    assert "step_time_ms" not in record["selective"]
    assert record["selective"]["times_left_out"]["step_time_ms"]["median"] == pytest.approx(300)
    assert record["selective"]["peak_bytes"] == 2**30
    entries["first_look/selective"]["num_warmup"] = 2
    record = assemble(ReadJournal(entries), TINY, "cuda", contenders, Effort(num_rounds=0))["contenders"]
    assert record["selective"]["step_time_ms"]["median"] == pytest.approx(300)
