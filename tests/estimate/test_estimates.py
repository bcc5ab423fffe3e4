"""Estimates of recipes: which row says what, what fits, and what each kind of layer holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hf_ckpt import load_recipe
from hf_ckpt.cli.inspect_report import ledger, outside
from hf_ckpt.estimate import estimate as estimates
from hf_ckpt.estimate import tables
from hf_ckpt.estimate.estimate import (
    FIXED,
    QUICK,
    RECIPE,
    WAITING,
    CachedBlocks,
    Estimate,
    estimate,
    growing,
    judged,
    num_estimate_rows,
)
from hf_ckpt.estimate.predict import Predictor, devices_for
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.fit import Fit
from hf_ckpt.simulation.simulator import StepSimulator
from tests import small_recipes, steps_by_hand
from tests.estimate.small_estimates import CARD, by_hand, card, row_of, silent, small_subject, table
from tests.steps_by_hand import MIB

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]


def fits_somewhere(found: Estimate) -> bool:
    return bool(estimates.estimate_as_json(found)["fits"])


# --- Rows. ---


def test_every_mode_has_a_row_between_the_recipes_and_the_planners(found: Estimate) -> None:
    # Nothing of it is frozen.
    assert [row.name for row in found.rows] == [RECIPE, *(name for name in FIXED if name != WAITING), AUTO]
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
    assert (list(rows), found.decides, fits_somewhere(found)) == ([AUTO, "attention"], AUTO, True)
    assert table(found).splitlines()[-1].startswith("The planner's choice fits on rtx4090: ")


def test_estimate_grows_from_the_verdict_row_by_row(found: Estimate) -> None:
    steps = list(growing(found.subject, [CARD], silent, QUICK))
    assert [[row.name for row in step.rows] for step in steps] == [
        [RECIPE],
        [RECIPE, "none"],
        [RECIPE, "none", "full"],
        [RECIPE, "none", "full", AUTO],
    ]
    assert num_estimate_rows(found.subject, [CARD], QUICK) == 4
    assert num_estimate_rows(found.subject, [CARD]) == len(found.rows)
    # All that is said of the recipe is there from the first row on.
    first, last = (estimates.estimate_as_json(step) for step in (steps[0], steps[-1]))
    assert first["verdicts"] == last["verdicts"]
    assert tables.opening(first) == tables.opening(last)


def perhaps(peak: float, reserved: float, cached: CachedBlocks) -> str:
    """What is said of a step that torch reserves too much for, on one line."""
    memory = replace(steps_by_hand.step(), peak_bytes=int(peak * steps_by_hand.GIB))
    row = row_of(RECIPE, memory, CARD, reserved=int(reserved * steps_by_hand.GIB), cached={CARD.name: cached})
    return " ".join(table(replace(by_hand(CARD), rows=(row,))).split())


def test_what_perhaps_means_is_said_and_expandable_segments_where_they_help() -> None:
    text = perhaps(20, 23, CachedBlocks(None, 21 * steps_by_hand.GIB))
    assert "rtx4090 perhaps peak 20.0 GiB nvidia-smi 23.3 to 23.7 GiB of 23.6 GiB" in text
    assert (
        "On rtx4090 torch reserves 23.0 GiB for a peak of 20.0 GiB, and has no room for it. With "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it reserves 21.0 GiB and fits." in text
    )
    assert text.endswith("perhaps fits on rtx4090: only by giving cached blocks back.")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in perhaps(20, 23, CachedBlocks(None, None))


@pytest.mark.parametrize(
    ("retries", "when"),
    [
        (0, "in the first steps"),
        (1, "1 time in each step, which the time of a step does not count"),
        (3, "3 times in each step, which the time of a step does not count"),
    ],
)
def test_what_a_full_card_costs_is_said(retries: int, when: str) -> None:
    assert (
        "On rtx4090 torch reserves 25.0 GiB for a peak of 20.0 GiB, and has no room for it: it gives cached blocks "
        f"back, {when}." in perhaps(20, 25, CachedBlocks(retries))
    )


def test_expandable_segments_are_advised_only_where_a_step_fits_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {False: 30 * MIB, True: 25 * MIB}
    monkeypatch.setattr(StepSimulator, "reserved_bytes", lambda _, plan, *, expands=False: held[expands])
    subject = small_subject(tmp_path)
    for free, fit, expected in (
        (24 * MIB, Fit.PERHAPS, None),
        (25 * MIB, Fit.PERHAPS, 25 * MIB),
        (29 * MIB, Fit.PERHAPS, 25 * MIB),
        (30 * MIB, Fit.YES, None),
    ):
        small = card(free)
        row = judged(Predictor(subject, small), RECIPE, subject.plan, [small], decides=True)
        assert row.verdicts["small"].fit is fit
        assert [cached.expandable_bytes for cached in row.cached.values()] == [expected] * (fit is Fit.PERHAPS)


def test_recipes_own_plan_decides(found: Estimate) -> None:
    steps = found.steps()
    assert fits_somewhere(found)
    between = card((steps["full"].peak_bytes + steps[RECIPE].peak_bytes) // 2)
    # What torch reserves for such small steps is the same for all.
    rows = tuple(row_of(row.name, row.memory, between) for row in found.rows)
    assert not fits_somewhere(replace(found, rows=rows, devices=(between,)))
    assert fits_somewhere(replace(found, rows=rows, devices=(between,), decides="full"))


def test_evaluation_has_to_fit_too(found: Estimate) -> None:
    assert found.evaluation is None
    large = replace(found, evaluation=replace(found.steps()["none"], peak_bytes=CARD.memory_bytes))
    assert not fits_somewhere(large)
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
    row = row_of(RECIPE, found.steps()[RECIPE], card(0), CARD)
    assert fits_somewhere(replace(found, rows=(row,), devices=(card(0), CARD)))


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
