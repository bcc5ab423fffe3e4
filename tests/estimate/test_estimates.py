"""Estimates of recipes: which row says what, what fits, which plan, how long a row may be."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import Plan, PolicyError, RecipeError, load_recipe
from hf_ckpt.cli.inspection import ledger, outside
from hf_ckpt.errors import BudgetError
from hf_ckpt.estimate import api, documents, limits, predict, tables
from hf_ckpt.estimate.estimate import (
    FIXED,
    QUICK,
    RECIPE,
    Estimate,
    Fit,
    Row,
    budget_of,
    estimate,
    fit_of,
    growing,
    num_rows,
    planned_on,
)
from hf_ckpt.estimate.predict import Predictor, Reserved, devices_for
from hf_ckpt.estimate.subject import Subject, subject_of
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.policy import AUTO, Mode
from hf_ckpt.simulation.devices import CPU, Device, context, find_device, reserve
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, StepMemory
from tests import small_recipes, steps_by_hand
from tests.steps_by_hand import GIB, MIB

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]

CARD = find_device("rtx4090")


def small_subject(folder: Path, *overrides: str, **sections: Any) -> Subject:
    return subject_of(load_recipe(small_recipes.write(folder, **sections), overrides))


def card(free_bytes: int) -> Device:
    """A card that has so much beside the most of its reserve."""
    # 5 % of it are taken for fragmentation.
    fixed = sum(item.high_bytes for item in reserve(CARD).items if item.name != "fragmentation")
    return replace(CARD, name="small", memory_bytes=math.ceil((free_bytes + fixed) / 0.95) + 1)


def silent(text: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Estimate:
    """An estimate of a small recipe."""
    return estimate(small_subject(tmp_path_factory.mktemp("recipe")), [CARD], silent)


def table(found: Estimate, **options: bool) -> str:
    """What is printed of an estimate: no line is wider than 80 columns, but for that of a long path."""
    text = tables.table(json.loads(json.dumps(documents.as_json(found))), **options)
    assert max(len(line) for line in text.splitlines() if ".yaml" not in line) <= 80, text
    return text


# --- Rows. ---


def test_every_mode_has_a_row_between_the_recipes_and_the_planners(found: Estimate) -> None:
    assert [row.name for row in found.rows] == [RECIPE, *FIXED, AUTO]
    assert {"none", "full", "attention", "ffn", "every-2", "segments", "segments, nested"} <= set(FIXED)
    assert {"selective", "selective_attention", "full, offload", "full, offload, tiles, head"} <= set(FIXED)
    assert not any(row.refusal for row in found.rows)


def test_rows_are_the_steps_of_their_plans(found: Estimate) -> None:
    steps = found.steps()
    assert steps["full"].peak_bytes < steps["none"].peak_bytes
    assert steps["full"].time.recomputation > steps["none"].time.recomputation == 0
    assert steps[RECIPE].plan == found.subject.plan
    plan = steps["every-2"].plan
    assert plan is not None
    assert [str(layer.mode) for layer in plan.stacks[0].layers] == ["full", "none", "full", "none"]


def test_where_everything_fits_nothing_is_recomputed(found: Estimate) -> None:
    steps = found.steps()
    assert steps[AUTO].time.total == pytest.approx(steps["none"].time.total)


def test_mode_that_the_model_has_no_part_for_is_refused_in_its_row(tmp_path: Path) -> None:
    subject = small_subject(tmp_path, checkpointing={"policy": "auto"})
    layers = tuple(replace(layer, attention=()) for layer in subject.stacks[0].layers)
    subject = replace(subject, stacks=(replace(subject.stacks[0], layers=layers),))
    found = estimate(subject, [CARD], silent, ["attention"])
    rows = {row.name: row for row in found.rows}
    assert rows["attention"].memory is None
    assert 'asks for "attention", but no attention was found' in rows["attention"].refusal
    # Policy `auto` has no plan before the planner makes it, which decides and comes first.
    assert (list(rows), found.decides, found.fits) == ([AUTO, "attention"], AUTO, True)
    assert table(found).splitlines()[-1].startswith("The planner's choice fits on rtx4090: ")


def test_estimate_grows_from_the_verdict_row_by_row(found: Estimate) -> None:
    steps = list(growing(found.subject, [CARD], silent, QUICK))
    assert [[row.name for row in step.rows] for step in steps] == [
        [RECIPE],
        [RECIPE, "none"],
        [RECIPE, "none", "full"],
        [RECIPE, "none", "full", AUTO],
    ]
    assert num_rows(found.subject, [CARD], QUICK) == 4
    assert num_rows(found.subject, [CARD]) == len(found.rows)
    # All that is said of the recipe is there from the first row on.
    first, last = (documents.as_json(step) for step in (steps[0], steps[-1]))
    assert first["verdicts"] == last["verdicts"]
    assert tables.opening(first) == tables.opening(last)


@pytest.mark.parametrize(
    ("fits", "expected"),
    [(0, Fit.YES), (-1, Fit.PERHAPS), (reserve(CARD).low_bytes - reserve(CARD).high_bytes - 1, Fit.NO)],
)
def test_step_fits_beside_the_reserve(fits: int, expected: Fit) -> None:
    peak = CARD.memory_bytes - reserve(CARD).high_bytes - fits
    assert fit_of(peak, CARD) is expected


@pytest.mark.parametrize(
    ("peak", "held", "expected"),
    [
        (20.0, 22.9, Fit.YES),
        (20.0, 22.91, Fit.PERHAPS),
        (20.0, 40.0, Fit.PERHAPS),
        (23.31, 23.4, Fit.NO),
        # A batch of evaluation may need more than torch reserves for a step.
        (23.0, 10.0, Fit.PERHAPS),
    ],
)
def test_what_torch_reserves_has_to_fit_beside_the_context(peak: float, held: float, expected: Fit) -> None:
    device = replace(CARD, memory_bytes=int(23.6 * steps_by_hand.GIB) + 1)
    reserved = Reserved(int(held * steps_by_hand.GIB))
    assert fit_of(int(peak * steps_by_hand.GIB), device, reserved) is expected


def test_buffers_between_several_processes_have_to_fit_too() -> None:
    device = find_device("a100-80gb")
    held = device.memory_bytes - 2 * steps_by_hand.GIB
    assert fit_of(held, device, Reserved(held)) is Fit.YES
    assert fit_of(held, device, Reserved(held, num_processes=8)) is Fit.PERHAPS


def test_what_expandable_segments_bring_is_said_where_torch_reserves_too_much() -> None:
    memory = replace(steps_by_hand.step(), peak_bytes=20 * steps_by_hand.GIB)
    row = Row(RECIPE, memory, reserved=Reserved(23 * steps_by_hand.GIB, expandable_bytes=21 * steps_by_hand.GIB))
    text = " ".join(table(replace(by_hand(CARD), rows=(row,))).split())
    assert "rtx4090 perhaps peak 20.0 GiB nvidia-smi 23.3 to 23.7 GiB of 23.6 GiB" in text
    assert (
        "On rtx4090 torch reserves 23.0 GiB for a peak of 20.0 GiB; run with "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it reserves 21.0 GiB." in text
    )


def test_recipes_own_plan_decides(found: Estimate) -> None:
    # What torch reserves for such small steps is the same for all.
    found = replace(found, rows=tuple(replace(row, reserved=None) for row in found.rows))
    steps = found.steps()
    assert found.fits
    between = card((steps["full"].peak_bytes + steps[RECIPE].peak_bytes) // 2)
    assert not replace(found, devices=(between,)).fits
    assert replace(found, devices=(between,), decides="full").fits


def test_evaluation_has_to_fit_too(found: Estimate) -> None:
    assert found.evaluation is None
    large = replace(found, evaluation=replace(found.steps()["none"], peak_bytes=CARD.memory_bytes))
    assert not large.fits
    assert "A batch of its evaluation needs 23.6 GiB" in table(large)
    assert "  rtx4090  does not  peak 23.6 GiB  nvidia-smi 23.9 to 24.3 GiB  of 23.6 GiB" in table(large).splitlines()
    assert "  The peak is that of a batch of its evaluation." in table(large).splitlines()
    assert table(large).splitlines()[-1] == "The recipe's plan does not fit on rtx4090: 23.6 GiB of 23.6 GiB."


def test_batch_of_the_recipes_evaluation_is_simulated(tmp_path: Path) -> None:
    training = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    subject = small_subject(tmp_path, training=training)
    memory = Predictor(subject, CARD).evaluation()
    assert memory is not None
    assert memory.tokens == 4 * 64


def test_one_device_of_several_is_enough(found: Estimate) -> None:
    assert replace(found, devices=(card(0), CARD)).fits


# --- Words. ---


def by_hand(*devices: Device) -> Estimate:
    subject = Subject(
        title="recipe.yaml", model=None, step=None, stacks=(), facts=(("model", "LlamaForCausalLM"), ("batch", "1 row"))
    )
    rows = (
        Row(RECIPE, steps_by_hand.step(0.1, 0.9, seconds=3.0)),
        Row("none", steps_by_hand.step(6.0, seconds=2.0)),
        Row("ffn", None, 'Rule {mode: ffn} asks for "ffn".'),
        *(Row(AUTO, steps_by_hand.step(1.0, seconds=2.5), device=device) for device in devices),
    )
    return Estimate(subject, devices, rows, RECIPE)


def test_table_has_a_verdict_above_the_rows_and_in_the_last_line() -> None:
    lines = table(by_hand(CARD)).splitlines()
    assert lines[:10] == [
        "hf-ckpt estimate recipe.yaml",
        "",
        "The recipe (no plan):",
        "  rtx4090  fits  peak 5.3 GiB  reserve 0.5 to 1.9 GiB  of 23.6 GiB",
        "",
        "  model   LlamaForCausalLM",
        "  batch   1 row",
        "  device  GeForce RTX 4090, 23.6 GiB, of which 0.5 to 1.9 GiB are left for",
        "          context, workspaces, fragmentation",
        "",
    ]
    assert lines[10:15] == [
        "  plan                             peak     step       host  fits",
        "  recipe                        5.3 GiB      3 s             yes",
        "  none                         28.5 GiB      2 s             no, 5.4 GiB over",
        "  ffn                                 -                      no",
        "  auto                          8.5 GiB    2.5 s             yes",
    ]
    assert 'ffn: Rule {mode: ffn} asks for "ffn".' in lines
    assert lines[-1] == "The recipe (no plan) fits on rtx4090: 5.3 GiB of 23.6 GiB."


def test_verbose_table_says_what_fills_memory_and_when() -> None:
    lines = table(by_hand(CARD), is_verbose=True).splitlines()
    at = lines.index("  none                         28.5 GiB      2 s             no, 5.4 GiB over")
    assert lines[at + 1 : at + 3] == [
        "      saved activations 24.0 GiB, parameters 4.0 GiB, logits and loss 512.0 MiB;",
        "      forward, _log_softmax",
    ]


def test_table_of_several_devices_has_a_column_for_each() -> None:
    cards = [find_device(name) for name in ("rtx4090", "a6000", "a100-80gb")]
    lines = table(by_hand(*cards)).splitlines()
    assert lines[3:6] == [
        "  rtx4090    fits  peak 5.3 GiB  reserve 0.5 to 1.9 GiB  of 23.6 GiB",
        "  a6000      fits  peak 5.3 GiB  reserve 0.8 to 3.1 GiB  of 47.4 GiB",
        "  a100-80gb  fits  peak 5.3 GiB  reserve 1.1 to 5.8 GiB  of 79.1 GiB",
    ]
    header = next(line for line in lines if line.startswith("  plan"))
    assert header.split() == ["plan", "peak", "step", "host", "rtx4090", "a6000", "a100-80gb"]
    none = next(line for line in lines if line.startswith("  none"))
    assert none.split() == ["none", "28.5", "GiB", "2", "s", "no", "yes", "yes"]
    assert [line.split("  ")[1] for line in lines if line.startswith("  auto")] == [
        f"auto, {card.name}" for card in cards
    ]
    # Only the first device's times are known.
    assert [" s " in line for line in lines if line.startswith("  auto")] == [True, False, False]
    assert "Steps are timed for rtx4090." in lines
    assert lines[-1] == "The recipe (no plan) fits on rtx4090, a6000, a100-80gb."


def test_more_devices_than_fit_beside_each_other_have_further_columns_below() -> None:
    cards = [find_device(name) for name in ("rtx4090", "a6000", "a100-80gb", "rtx4070tisuper", "t4")]
    text = table(by_hand(*cards))
    headers = [line.split()[4:] for line in text.splitlines() if line.startswith("  plan")]
    assert headers == [["rtx4090", "a6000", "a100-80gb"], ["rtx4070tisuper", "t4"]]
    assert text.count("\n  none ") == 2
    assert text.count("\n  auto, t4 ") == 1
    assert len(text.splitlines()[-1]) <= 80


def test_name_that_is_too_long_has_a_line_of_its_own() -> None:
    cards = [find_device(name) for name in ("rtx4090", "a6000", "a100-80gb")]
    found = by_hand(*cards)
    found = replace(found, rows=(*found.rows, Row("full, offload, tiles, head", steps_by_hand.step(1.0))))
    lines = table(found).splitlines()
    at = lines.index("  full, offload, tiles, head")
    assert lines[at + 1].split() == ["8.5", "GiB", "2", "s", "yes", "yes", "yes"]
    # Numbers stay below each other.
    assert lines[at + 1].index("8.5 GiB") == lines[at - 1].index("8.5 GiB")


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ((20, 20), "The recipe (no plan) fits on rtx4090, a6000."),
        ((22, 20), "The recipe (no plan) fits on a6000; perhaps on rtx4090."),
        ((24, 20), "The recipe (no plan) fits on a6000; not on rtx4090."),
        ((50, 50), "The recipe (no plan) does not fit on rtx4090, a6000."),
        ((22, 50), "The recipe (no plan) perhaps fits on rtx4090; not on a6000."),
    ],
)
def test_last_line_names_the_devices_that_it_fits_on(peaks: tuple[int, int], expected: str) -> None:
    cards = (CARD, find_device("a6000"))
    rows = [documents.verdict_as_json(card, step_of(peak), None) for card, peak in zip(cards, peaks, strict=True)]
    assert tables.verdict(documents.as_json(by_hand(*cards)) | {"verdicts": rows}) == expected


def step_of(gib: int) -> StepMemory:
    """A step with such a peak."""
    return replace(steps_by_hand.step(), peak_bytes=gib * steps_by_hand.GIB)


def test_what_the_planner_finds_no_plan_for_does_not_fit() -> None:
    advice = "checkpointing.memory_budget=22.1GiB checkpointing.offload=cpu checkpointing.tiles=auto"
    refusal = (
        "No plan fits memory_budget=21.7 GiB. Lowest predicted peak is 22.0 GiB, in the backward. With each of these "
        f"lines one fits, as simulated:\n  {advice[:31]}  # 22.0 GiB\n  {advice}  # 20.0 GiB"
    )
    found = replace(by_hand(CARD), rows=(Row(AUTO, None, refusal, CARD),), decides=AUTO)
    lines = table(found).splitlines()
    assert lines[2:6] == [
        "The planner's choice:",
        "  rtx4090  does not  no plan  reserve 0.5 to 1.9 GiB  of 23.6 GiB",
        "  No plan fits memory_budget=21.7 GiB. Lowest predicted peak is 22.0 GiB, in the",
        "  backward.",
    ]
    # A line to copy is broken at its comment.
    assert lines[-5:] == [
        "  checkpointing.memory_budget=22.  # 22.0 GiB",
        "  checkpointing.memory_budget=22.1GiB checkpointing.offload=cpu",
        "    checkpointing.tiles=auto",
        "    # 20.0 GiB",
        "The planner's choice does not fit on rtx4090.",
    ]


def test_rendering_needs_no_torch() -> None:
    code = "import sys; import hf_ckpt.estimate.tables; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_attention_that_is_assumed_has_a_line_where_there_is_a_choice() -> None:
    hopper = find_device("h100")
    words = " ".join(table(by_hand(CARD, hopper)).split())
    assert words.count(" attention h100: ") == words.count(f" attention h100: {hopper.describe_attention()} ") == 1
    assert " attention rtx4090" not in words
    devices = documents.as_json(by_hand(CARD, hopper))["devices"]
    assert [device["attention"] for device in devices] == [None, hopper.describe_attention()]


def test_host_memory_has_a_column_and_a_sentence_where_some_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_hand(CARD)
    assert "host memory" not in table(found)
    assert documents.as_json(found)["host"] == []
    rows = tuple(
        replace(row, memory=replace(row.memory, host_bytes=3 * steps_by_hand.GIB))
        if row.name == RECIPE and row.memory
        else row
        for row in found.rows
    )
    found = replace(found, rows=rows)
    lines = table(found).splitlines()
    assert " ".join(lines[11].split()).endswith("3 s 3.0 GiB yes")
    assert lines[-2] == "It needs 3.0 GiB of host memory beside rtx4090."
    # On this machine it is known what is free.
    monkeypatch.setattr(documents, "this_device", lambda: CARD)
    monkeypatch.setattr(
        documents.host_memory, "available_bytes", lambda *, trusts: None if trusts else 2 * steps_by_hand.GIB
    )
    assert table(found).splitlines()[-3:-1] == [
        "It needs 3.0 GiB of host memory; 2.0 GiB are free here: it does not fit: offload",
        "fewer layers (fraction), or to disk.",
    ]
    assert documents.as_json(found)["host"] == [
        {"device": "rtx4090", "needed_bytes": 3 * steps_by_hand.GIB, "free_bytes": 2 * steps_by_hand.GIB},
    ]
    allowed = Allowed(offload=Offload(trust_host_memory=True))
    trusted = replace(found, subject=replace(found.subject, allowed=allowed))
    assert table(trusted).splitlines()[-2] == "It needs 3.0 GiB of host memory beside rtx4090."


def test_json_has_every_figure() -> None:
    read = json.loads(tables.to_json(documents.as_json(by_hand(CARD)), ["estimate", "recipe.yaml", "data.path=a b"]))
    assert read["command"] == "hf-ckpt estimate recipe.yaml 'data.path=a b'"
    assert read["versions"].keys() >= {"python", "hf_ckpt", "torch", "transformers", "accelerate"}
    assert (read["recipe"], read["fits"], read["decides"]) == ("recipe.yaml", True, "recipe")
    assert read["devices"][0]["reserve_bytes"] == [reserve(CARD).low_bytes, reserve(CARD).high_bytes]
    own, none, ffn, _ = read["rows"]
    assert (own["fits"], none["fits"]) == ({"rtx4090": "yes"}, {"rtx4090": "no"})
    assert none["by_category"] == {
        "parameters": 4 * steps_by_hand.GIB,
        "saved activations": 24 * steps_by_hand.GIB,
        "logits and loss": GIB // 2,
    }
    assert none["peak_at"] == "forward, aten._log_softmax"
    assert (own["seconds"]["total"], own["num_flops"]) == (3.0, {"forward": 10, "backward": 20})
    assert ffn == {"name": "ffn", "refusal": 'Rule {mode: ffn} asks for "ffn".'}


def test_seconds_have_three_digits() -> None:
    assert [tables.format_seconds(value) for value in (1234.5, 12.345, 1.0, 0.01234)] == [
        *("1,234 s", "12.3 s", "1 s", "12.3 ms"),
    ]


# --- The ledger. ---


def test_ledger_names_what_each_kind_of_layer_holds() -> None:
    held = steps_by_hand.held
    tensors = [
        held(None, "model.embed_tokens", "aten.embedding.default", 2),
        *(held(idx, "mlp.gate_proj.default", "aten.mm.default", 8, why="silu of mlp.act_fn") for idx in (0, 1, 3)),
        *(held(idx, "mlp.up_proj", "aten.mm.default", 8, why="silu of mlp.act_fn") for idx in (0, 1, 3)),
        *(held(idx, "", "aten.add.Tensor", 4, part="") for idx in range(4)),
        *(held(idx, "norm", "aten.rsqrt.default", 0.01, part="") for idx in range(4)),
    ]
    memory = replace(steps_by_hand.step(), ledger=tuple(tensors))
    assert [" ".join(line.split()) for line in ledger(memory)] == [
        "layers 0 to 1, 3 of model.layers: 20.0 MiB each",
        "ffn mm 2 x 8.0 MiB bfloat16 [1, 8, 4] mlp.gate_proj, mlp.up_proj for silu of mlp.act_fn",
        "add 4.0 MiB bfloat16 [1, 8, 4] the layer",
        "smaller tensors 10.2 KiB 1 together",
        "layer 2 of model.layers: 4.0 MiB",
        "add 4.0 MiB bfloat16 [1, 8, 4] the layer",
        "smaller tensors 10.2 KiB 1 together",
    ]
    assert outside(memory) == 2 * MIB


# --- What fits. ---


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose memory is 1 MiB and 1 KiB for each token; a quarter of that where layers are recomputed."""

    def simulated(simulator: StepSimulator, plan: Plan | None) -> StepMemory:
        step = simulator.step
        held = step.batch_size * step.seq_length * 1024 // (1 if plan is None else 2 * (1 + plan.count(Mode.FULL) // 4))
        return replace(steps_by_hand.step(), peak_bytes=MIB + held)

    monkeypatch.setattr(StepSimulator, "simulate", simulated)


@pytest.mark.usefixtures("linear")
def test_longest_row_fits_and_the_next_one_does_not(tmp_path: Path) -> None:
    subject = replace(small_subject(tmp_path), longest=4096)
    # Of two rows.
    limit = limits.longest_row(Predictor(subject, CARD), None, MIB + 2 * 1024 * 703)
    assert (limit.number, limit.peak_bytes, limit.is_bound) == (640, MIB + 2 * 1024 * 640, False)


@pytest.mark.usefixtures("linear")
def test_row_is_no_longer_than_the_model_has_positions(tmp_path: Path) -> None:
    subject = small_subject(tmp_path, "model.config.max_position_embeddings=256")
    limit = limits.longest_row(Predictor(subject, CARD), None, CARD.memory_bytes)
    assert (limit.number, limit.is_bound) == (256, True)
    found = limits.fitting_sizes(subject, [CARD], is_length=True, say=silent)
    text = tables.sizes_table(limits.sizes_as_json(found))
    assert " 256 tokens* " in text
    assert text.endswith("\n*: all that the model has positions for")


@pytest.mark.usefixtures("linear")
def test_largest_batch_is_found_for_each_plan(tmp_path: Path) -> None:
    device = card(MIB + 64 * 1024 * 40)
    found = limits.fitting_sizes(small_subject(tmp_path), [device], is_length=False, say=silent)
    assert {row.plan: row.limit.number for row in found.rows} == {RECIPE: 80, "none": 40, "full": 160}
    lines = tables.sizes_table(limits.sizes_as_json(found)).splitlines()
    assert [line.split()[:4] for line in lines[-3:]] == [
        ["small", "recipe", "80", "rows"],
        ["small", "none", "40", "rows"],
        ["small", "full", "160", "rows"],
    ]
    assert limits.sizes_as_json(found)["rows"][0]["number"] == 80


@pytest.mark.usefixtures("linear")
def test_largest_batch_under_auto_is_that_of_what_needs_least(tmp_path: Path) -> None:
    subject = small_subject(tmp_path, "checkpointing={policy: auto, exact: true}")
    found = limits.fitting_sizes(subject, [card(MIB + 64 * 1024 * 40)], is_length=False, say=silent)
    assert {row.plan: row.limit.number for row in found.rows} == {AUTO: 160, "none": 40, "full": 160}


@pytest.mark.usefixtures("linear")
def test_where_nothing_fits_it_is_said(tmp_path: Path) -> None:
    found = limits.fitting_sizes(small_subject(tmp_path), [card(1024)], is_length=True, say=silent)
    assert {row.limit.number for row in found.rows} == {0}
    assert "none" in tables.sizes_table(limits.sizes_as_json(found)).splitlines()[-1].split()


@pytest.mark.usefixtures("linear")
def test_grid_has_a_peak_for_each_length_and_micro_batch(tmp_path: Path) -> None:
    predictor = Predictor(replace(small_subject(tmp_path), longest=128), card(MIB + 128 * 1024))
    none, own = limits.grids(predictor, silent)
    assert (none.lengths, none.rows) == ((16, 32, 64, 128), (1, 2, 4))
    assert (none.peaks[64, 2], own.peaks[64, 2]) == (MIB + 128 * 1024, MIB + 64 * 1024)
    document = limits.grids_as_json([none, own], predictor)
    assert tables.grid_table(document).splitlines() == [
        "Peak without checkpointing",
        "  tokens    1 row     2 rows     4 rows",
        "      16  1.0 MiB    1.0 MiB    1.1 MiB",
        "      32  1.0 MiB    1.1 MiB    1.1 MiB",
        "      64  1.1 MiB    1.1 MiB  1.2 MiB ?",
        "     128  1.1 MiB  1.2 MiB ?  1.5 MiB ?",
        "",
        "Peak under the recipe's plan",
        "  tokens    1 row   2 rows     4 rows",
        "      16  1.0 MiB  1.0 MiB    1.0 MiB",
        "      32  1.0 MiB  1.0 MiB    1.1 MiB",
        "      64  1.0 MiB  1.1 MiB    1.1 MiB",
        "     128  1.1 MiB  1.1 MiB  1.2 MiB ?",
        "",
        "x: does not fit on small; ?: may fit, with nothing to spare",
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
    monkeypatch.delattr(StepSimulator, "simulate")
    again = predictor.memory(subject.resolve([{"layers": "0:4", "mode": "full"}]))
    assert again.peak_bytes == first.peak_bytes


# --- Devices. ---


def test_recipe_for_the_cpu_is_estimated_for_it(tmp_path: Path) -> None:
    recipe = load_recipe(small_recipes.write(tmp_path))
    assert devices_for(recipe, ()) == (CPU,)


def test_three_sizes_stand_in_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_ckpt.estimate import predict as devices_module

    monkeypatch.setattr(devices_module, "this_device", lambda: CPU)
    assert [device.name for device in devices_for(None, ())] == ["rtx4090", "a6000", "a100-80gb"]
    monkeypatch.setattr(devices_module, "this_device", lambda: CARD)
    assert devices_for(None, ()) == (CARD,)


def test_named_devices_go_first(tmp_path: Path) -> None:
    recipe = load_recipe(small_recipes.write(tmp_path))
    assert [device.name for device in devices_for(recipe, ["RTX 4090", "h100"])] == ["rtx4090", "h100"]


# --- From Python. ---


def test_simulate_takes_a_recipe_its_path_or_a_model(tmp_path: Path) -> None:
    path = small_recipes.write(tmp_path)
    subject = small_subject(tmp_path)
    by_path = api.simulate(path, device="rtx4090")
    assert api.simulate(load_recipe(path), device=CARD).peak_bytes == by_path.peak_bytes
    assert by_path.plan == subject.plan
    fields = {"batch_size": 2, "seq_length": 64, "is_padded": True}
    by_model = api.simulate(subject.model, plan=subject.plan, device="rtx4090", **fields)
    assert by_model.peak_bytes == by_path.peak_bytes
    assert api.simulate(subject.model, device="rtx4090", **fields).plan is None


def test_simulate_takes_fields_of_the_step(tmp_path: Path) -> None:
    path = small_recipes.write(tmp_path)
    shorter = api.simulate(path, plan="none", device="rtx4090", seq_length=32)
    assert shorter.peak_bytes < api.simulate(path, plan="none", device="rtx4090").peak_bytes
    with pytest.raises(RecipeError, match=r"A step has no such field.*'length'.*Its fields are batch_size, seq_length"):
        api.simulate(path, device="rtx4090", length=32)


def test_what_is_added_to_a_policy_is_simulated_with_it(tmp_path: Path) -> None:
    path = small_recipes.write(tmp_path)
    long = {"seq_length": 2048, "batch_size": 1, "is_padded": False}
    full = api.simulate(path, plan="full", device="rtx4090", **long)
    added: dict[str, Any] = {"offload": {"to": "cpu", "min_bytes": 0}, "tiles": "auto", "head": "chunked"}
    least = api.simulate(path, plan="full", device="rtx4090", **added, **long)
    # Those of a model of this size are most of its peak.
    workspaces = full.by_category[Category.WORKSPACES]
    assert least.peak_bytes - workspaces < 0.7 * (full.peak_bytes - workspaces)
    # The inputs of three of four layers: 2,048 tokens of 32 numbers in float32.
    assert least.host_bytes == 3 * 2048 * 32 * 4
    with pytest.raises(PolicyError, match="tiles was given without a policy that it belongs to"):
        api.simulate(path, device="rtx4090", tiles=2)
    with pytest.raises(PolicyError, match="segment_size was given where a plan is chosen for each layer"):
        api.plan(path, memory_budget="1GiB", device="rtx4090", segment_size=2)


def test_row_of_any_plan_is_longer_with_what_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(self: Predictor, plan: Plan | None, step: Step | None = None) -> StepMemory:
        """Each thing that a plan holds halves what a token needs."""
        assert plan is not None
        assert step is not None
        entry = plan.stacks[0].layers[0]
        held = (entry.offload is not None) + (entry.tiles is not None) + (plan.head == "chunked")
        return replace(steps_by_hand.step(), peak_bytes=step.seq_length * 8 * 1024 // 2**held, host_bytes=0)

    monkeypatch.setattr(predict.Predictor, "memory", linear)
    path = small_recipes.write(tmp_path, checkpointing={"policy": "auto"})
    ask = partial(api.max_length, path, memory_budget="1MiB", device="rtx4090")
    assert ask(plan="auto", tiles=1, head="plain") == 128
    assert ask(plan="auto", tiles=1) == 256
    assert ask() == ask(plan="auto", tiles="auto") // 2 * 2
    assert ask(plan="auto", offload="cpu", tiles="auto") == 1024


def test_plan_is_the_fastest_that_fits(found: Estimate) -> None:
    path, none = found.subject.recipe, found.steps()["none"]
    assert path is not None
    plan = api.plan(path, memory_budget=f"{none.peak_bytes - 1}B", device="rtx4090")
    planned = api.simulate(path, plan=plan, device="rtx4090")
    assert planned.peak_bytes < none.peak_bytes
    assert none.time.total < planned.time.total <= found.steps()["full"].time.total


def test_plan_needs_no_more_free_than_what_torch_reserves_beside_the_context(tmp_path: Path) -> None:
    predictor = Predictor(small_subject(tmp_path), CARD)
    reserved = predictor.reserved(None)
    assert reserved is not None
    # Less than the whole reserve, which grows with the card, leaves free.
    fits = replace(CARD, memory_bytes=context(CARD).high_bytes + reserved.num_bytes)
    planned, budget = planned_on(predictor, fits, silent)
    assert budget_of(predictor.subject, fits) < planned.memory.peak_bytes <= budget == reserved.num_bytes
    row = estimate(predictor.subject, [fits], silent, ["none"]).rows[-1]
    assert (row.refusal, fit_of(row.memory.peak_bytes, fits, row.reserved)) == ("", Fit.YES)
    with pytest.raises(BudgetError, match="No plan fits"):
        planned_on(predictor, replace(fits, memory_bytes=fits.memory_bytes - MIB), silent)


def test_own_budget_is_never_widened(tmp_path: Path) -> None:
    predictor = Predictor(
        small_subject(tmp_path, "checkpointing.policy=auto", "checkpointing.memory_budget=1MiB"), CARD
    )
    with pytest.raises(BudgetError, match=r"No plan fits memory_budget=1\.0 MiB"):
        planned_on(predictor, CARD, silent)


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        ("1KiB", BudgetError, "No plan fits"),
        ("22", PolicyError, 'memory_budget is "22", without a unit'),
        ("22GX", PolicyError, 'unknown unit "GX"'),
        ("-1GiB", PolicyError, "must be above 0"),
        ("100GiB", PolicyError, "GeForce RTX 4090 has 23.6 GiB"),
    ],
)
def test_budget_that_cannot_be_met_or_read_is_refused(
    budget: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as raised:
        api.plan(small_recipes.write(tmp_path), memory_budget=budget, device="rtx4090")
    assert message in str(raised.value)


def test_unknown_device_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r'Unknown device "rtx409".*Did you mean "rtx4090"'):
        api.simulate(small_recipes.write(tmp_path), device="rtx409")


@pytest.mark.usefixtures("linear")
def test_max_length_grows_with_the_budget(tmp_path: Path) -> None:
    path = small_recipes.write(tmp_path)
    lengths = [
        api.max_length(path, plan="none", memory_budget=budget, device="rtx4090")
        for budget in ("1KiB", "1.5MiB", "2MiB")
    ]
    assert lengths == [0, 256, 512]
