"""`simulate`, `plan` and `max_length` from Python."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import Plan, PolicyError, RecipeError, load_recipe
from hf_ckpt.errors import BudgetError
from hf_ckpt.estimate import api, predict
from hf_ckpt.estimate.estimate import Estimate, capacity_of_subject, estimate
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.simulation.fit import Capacity, Fit, Verdict, judge
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, StepMemory
from tests import small_recipes, steps_by_hand
from tests.estimate.small_estimates import CARD, silent, small_subject
from tests.steps_by_hand import MIB

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("remembered_simulations")]


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

    def judged(self: Predictor, plan: Plan | None, capacity: Capacity, step: Step | None = None) -> Verdict:
        return judge(linear(self, plan, step).peak_bytes, 0, capacity)

    monkeypatch.setattr(predict.Predictor, "memory", linear)
    monkeypatch.setattr(predict.Predictor, "verdict", judged)
    path = small_recipes.write(tmp_path, checkpointing={"policy": "auto"})
    ask = partial(api.max_length, path, memory_budget="1MiB", device="cpu")
    assert ask(plan="auto", tiles=1, head="plain") == 128
    assert ask(plan="auto", tiles=1) == 256
    assert ask() == ask(plan="auto", tiles="auto") // 2 * 2
    assert ask(plan="auto", offload="cpu", tiles="auto") == 1024


@pytest.mark.sweep
def test_plan_is_the_fastest_that_fits(found: Estimate) -> None:
    path = found.subject.recipe
    assert path is not None
    none = api.simulate(path, plan="none", device="cpu")
    plan = api.plan(path, memory_budget=f"{none.peak_bytes - 1}B", device="cpu")
    planned = api.simulate(path, plan=plan, device="cpu")
    assert planned.peak_bytes < none.peak_bytes
    assert none.time.total < planned.time.total <= api.simulate(path, plan="full", device="cpu").time.total


def test_amount_that_a_recipe_names_holds_where_the_memory_of_the_device_is_not_known(tmp_path: Path) -> None:
    subject = small_subject(tmp_path, checkpointing={"policy": "auto", "memory_budget": "64MiB"})
    device = replace(CARD, memory_bytes=0)
    assert capacity_of_subject(Predictor(subject, device), device).num_bytes == 64 * MIB


@pytest.mark.sweep
def test_plan_fits_a_card_that_has_what_torch_reserves_the_context_and_a_margin(tmp_path: Path) -> None:
    predictor = Predictor(small_subject(tmp_path), CARD)
    needed = predictor.verdict(None, predictor.capacity(CARD)).needed_bytes
    fits, less = (replace(CARD, memory_bytes=num_bytes) for num_bytes in (needed, needed - 4 * MIB))
    planned = predictor.planned(predictor.capacity(fits))
    assert (planned.plan.does_nothing, planned.verdict.fit, planned.verdict.needed_bytes) == (True, Fit.YES, needed)
    row = estimate(predictor.subject, [fits], silent, ["none"]).rows[-1]
    assert (row.refusal, row.verdicts[fits.name].fit) == ("", Fit.YES)
    # Torch reserves 2 and 20 MiB at a time: a little less is allocated.
    assert predictor.verdict(None, predictor.capacity(less)).fit is Fit.PERHAPS


@pytest.mark.sweep
def test_where_weights_have_no_room_it_is_said_and_no_plan_is_searched_for(tmp_path: Path) -> None:
    subject = small_subject(tmp_path)
    predictor = Predictor(subject, CARD)
    weights = predictor.weights_and_gradients
    resident = sum(each.numel() * each.element_size() for each in subject.model.parameters())
    assert resident < weights < min(row.memory.peak_bytes for row in estimate(subject, [CARD], silent).rows)
    told: list[str] = []
    *_, row = estimate(subject, [replace(CARD, memory_bytes=weights - 1)], told.append, ["none"]).rows
    assert row.memory is None
    assert re.search(r"memory_budget=.*: weights and gradients alone take .* under any plan\. Use fewer", row.refusal)
    assert not any("Planning" in line for line in told)
    # With a little more the least is searched for, and said.
    *_, row = estimate(subject, [replace(CARD, memory_bytes=weights)], silent, ["none"]).rows
    assert "Lowest predicted peak is" in row.refusal


def test_where_frozen_weights_have_no_room_the_host_is_the_advice(tmp_path: Path) -> None:
    config = {**small_recipes.CONFIG, "hidden_size": 1024, "intermediate_size": 16384, "num_hidden_layers": 12}
    subject = small_subject(tmp_path, model={"config": config}, lora=small_recipes.LORA)
    predictor = Predictor(subject, CARD)
    plan = subject.resolve("full", weights="cpu")
    enough = replace(CARD, memory_bytes=predictor.verdict(plan, predictor.capacity(CARD)).needed_bytes)
    assert enough.memory_bytes < predictor.weights_and_gradients
    *_, row = estimate(subject, [enough], silent, ["none"]).rows
    line = "With this line one fits, as simulated:\n  checkpointing.weights=cpu  # "
    assert f"under any plan that leaves them there. {line}" in row.refusal
    assert row.refusal.endswith("of host memory")
    less = replace(CARD, memory_bytes=enough.memory_bytes // 2)
    *_, row = estimate(subject, [less], silent, ["none"]).rows
    assert "under any plan. Use fewer or smaller weights" in row.refusal


@pytest.mark.sweep
def test_of_an_own_budget_below_the_weights_the_least_is_searched_for(tmp_path: Path) -> None:
    subject = small_subject(tmp_path, "checkpointing.policy=auto", "checkpointing.memory_budget=10KiB")
    row, *_ = estimate(subject, [CARD], silent, ["none"]).rows
    assert row.refusal.startswith("No plan fits memory_budget=10.0 KiB. Lowest predicted peak is ")
    assert "checkpointing.memory_budget=" in row.refusal


def test_own_budget_is_never_widened(tmp_path: Path) -> None:
    predictor = Predictor(
        small_subject(tmp_path, "checkpointing.policy=auto", "checkpointing.memory_budget=1MiB"), CARD
    )
    with pytest.raises(BudgetError, match=r"No plan fits memory_budget=1\.0 MiB"):
        predictor.planned(capacity_of_subject(predictor, CARD))


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
        api.max_length(path, plan="none", memory_budget=budget, device="cpu") for budget in ("1KiB", "1.5MiB", "2MiB")
    ]
    assert lengths == [0, 256, 512]
