"""The contenders, simulated: what others do on the fake copy, what cannot be simulated, and the verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from benchmarks.cases import CASES, Case, build
from benchmarks.side_by_side import predicted
from benchmarks.side_by_side.budgets import Budget
from benchmarks.side_by_side.contenders import CONTENDERS
from benchmarks.side_by_side.predicted import DEVICE, is_done, judged, path_of, predict, text_of
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation.devices import Device, find_device
from hf_ckpt.simulation.op_costs import copy_seconds
from hf_ckpt.simulation.simulator import simulate_step

pytestmark = pytest.mark.sweep

LAYERS, HIDDEN, BATCH, TOKENS, RANK = 3, 64, 2, 128, 4
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 172, "num_attention_heads": 4, "num_key_value_heads": 4}
MORE = {"head_dim": 16, "vocab_size": 256, "num_hidden_layers": LAYERS}
H100 = find_device(DEVICE)


def tiny(**options: Any) -> Case:
    """Return a tiny Llama; LoRA, unless told otherwise."""
    case = CASES["llama2_7b_lora_2048"]
    return replace(case, config=case.config | SIZES | MORE, batch=BATCH, tokens=TOKENS, rank=RANK, **options)


def planned(model: nn.Module, case: Case, device: Device, budgets: list[Budget], say: object) -> list[Any]:
    """Stand in for the planner: nothing fits the smallest budget, and for all others there is the plan `none`."""
    plan = make_plan(model, Policy.parse("none"))
    memory = simulate_step(model, plan, case.step, device)
    fits = SimpleNamespace(reserved_bytes=memory.peak_bytes)
    return [(budget, SimpleNamespace(plan=plan, memory=memory, verdict=fits)) for budget in budgets[1:]]


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    names = ["none", "transformers_full", "transformers_offload", "accelerate_fsdp", "trl_offload", "compiled_full"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicted, "plans", planned)
        # Beside those of a model of this size, what plans differ in is less than what counts as another budget.
        patch.setattr("hf_ckpt.simulation.cuda.workspace_bytes", lambda device: 0)
        return predict(tiny(), [CONTENDERS[name] for name in [*names, "full"]], num_budgets=4)


# --- Others on the fake copy. ---


def test_transformers_on_the_fake_copy_takes_what_ours_takes() -> None:
    case = tiny(method="full")
    model = build(case, "meta")
    other = simulate_step(model, None, case.step, H100, changed_by=CONTENDERS["transformers_every_2"].enter)
    own = simulate_step(model, Policy.parse("full", every_n_layers=2), case.step, H100)
    assert (other.peak_bytes, other.by_category, other.num_flops) == (own.peak_bytes, own.by_category, own.num_flops)
    assert other.time == own.time


def test_transformers_makes_input_gradients_for_the_first_layer_that_adapters_do_not_need(
    result: dict[str, Any],
) -> None:
    other, own = (result["contenders"][name]["predicted"] for name in ("transformers_full", "full"))
    assert other["peak_bytes"] == own["peak_bytes"]
    assert other["num_flops"]["recomputation"] == own["num_flops"]["recomputation"]
    # Those of q, k and v: of their weights, and of the first of their adapters' two.
    of_inputs = 3 * 2 * BATCH * TOKENS * HIDDEN * (HIDDEN + RANK)
    assert other["num_flops"]["backward"] - own["num_flops"]["backward"] == of_inputs


def test_transformers_offload_is_its_full_step_with_copies_in_line(result: dict[str, Any]) -> None:
    full, sent = (result["contenders"][name] for name in ("transformers_full", "transformers_offload"))
    assert sent["how"].startswith("by arithmetic")
    input_bytes = BATCH * TOKENS * HIDDEN * 2
    assert sent["predicted"]["host_bytes"] == LAYERS * input_bytes
    assert sent["predicted"]["peak_bytes"] < full["predicted"]["peak_bytes"]
    copies = 2 * LAYERS * copy_seconds(input_bytes, H100)
    longer = sent["predicted"]["step_time_ms"] - full["predicted"]["step_time_ms"]
    assert longer == pytest.approx(1e3 * copies)


def test_what_cannot_be_simulated_says_why(result: dict[str, Any]) -> None:
    reasons = {name: record["not_run"] for name, record in result["contenders"].items() if record["not_run"]}
    assert reasons == {
        "accelerate_fsdp": "cannot be simulated: sharding makes the parameters anew, which a fake copy has no "
        "weights for",
        "trl_offload": "cannot be simulated: its own engine copies to the host on streams of a GPU, which the "
        "simulation does not follow",
        "compiled_full": "cannot be simulated: what torch.compile keeps is decided when it has made code for the "
        "device",
    }


# --- Budgets. ---


def test_plans_are_named_by_rising_budget_and_compared_with_what_fits(result: dict[str, Any]) -> None:
    records, rows = result["contenders"], result["budgets"]
    autos = [name for name, record in records.items() if record["group"] == "auto"]
    assert autos == [f"auto_{number}" for number in range(1, len(rows) + 1)] == [row["auto"] for row in rows]
    sizes = [records[name]["budget_bytes"] for name in autos]
    assert sizes == sorted(sizes) == [row["budget_bytes"] for row in rows]
    assert (rows[-1]["set_by"], rows[-1]["best_fixed"], rows[-1]["ratio_to_fixed"]) == ("none", "none", 1)
    assert result["verdict"]["num_budgets"] == len(rows)
    assert result["verdict"]["num_unplanned"] == 1
    assert [missing["set_by"] for missing in result["unplanned"]] == ["transformers_offload"]
    plan = Plan.from_json(json.dumps(records["auto_1"]["plan"]))
    assert [len(stack.layers) for stack in plan.stacks] == [LAYERS]


def test_verdict_over_small_numbers() -> None:
    def record(group: str, peak: int, time: float, **more: Any) -> dict[str, Any]:
        return {"group": group, "not_run": None, "predicted": {"peak_bytes": peak, "step_time_ms": time}} | more

    records = {
        "none": record("none", 100, 10.0),
        "transformers_full": record("today", 40, 15.0),
        "ffn": record("ours", 70, 12.0),
        "compiled_full": {"group": "compiled", "not_run": "cannot be simulated"},
        "auto_1": record("auto", 40, 14.7, budget_bytes=40, set_by="transformers_full"),
        "auto_2": record("auto", 70, 12.12, budget_bytes=70, set_by="ffn"),
        "auto_3": record("auto", 100, 10.0, budget_bytes=100, set_by="none"),
    }
    found = judged(records)
    assert [(row["best_fixed"], row["best_today"]) for row in found["budgets"]] == [
        ("transformers_full", "transformers_full"),
        ("ffn", "transformers_full"),
        ("none", "none"),
    ]
    assert [row["ratio_to_fixed"] for row in found["budgets"]] == pytest.approx([0.98, 1.01, 1.0])
    verdict = found["verdict"]
    assert (verdict["num_budgets"], verdict["num_over_budget"]) == (3, 0)
    assert (verdict["worst_ratio_to_fixed"], verdict["worst_at_bytes"]) == (pytest.approx(1.01), 70)
    assert (verdict["best_gain_over_today"], verdict["best_at_bytes"]) == (pytest.approx(1 - 12.12 / 15), 70)


# --- Files. ---


def test_timelines_are_short_and_kept_where_they_are_drawn(result: dict[str, Any]) -> None:
    records = result["contenders"]
    kept = {name for name, record in records.items() if "timeline" in record.get("predicted", {})}
    assert kept == {"none", "full"} | {name for name in records if name.startswith("auto")}
    points = records["full"]["predicted"]["timeline"]
    assert len(points) <= 200
    assert max(size for _, size in points) == records["full"]["predicted"]["peak_bytes"]


def test_a_result_of_the_same_commit_is_done(tmp_path: Path, result: dict[str, Any]) -> None:
    path = path_of(tmp_path, "tiny")
    assert path.name == "predicted_tiny.json"
    assert not is_done(path, "abc")
    text = text_of({"environment": {"commit": "abc"}} | result)
    path.write_text(text)
    assert (is_done(path, "abc"), is_done(path, "def")) == (True, False)
    assert json.loads(text)["contenders"] == json.loads(json.dumps(result["contenders"]))
    assert "\n" not in text[text.index("[0.0, ") : text.index("]", text.index("[0.0, "))]
