"""Policy `auto` and `exact`: bitwise plans first, others where they are needed or asked for, and what that costs.

The costs of layers are made up, so that nothing is simulated: which plan is taken is the same question for any costs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import BudgetError, PolicyError
from hf_ckpt.planner import search
from hf_ckpt.planner.advice import CHUNKED_HEAD, TILES, Exactness, inexact_parts
from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, Cost
from hf_ckpt.planner.layer_costs import offloaded
from hf_ckpt.planner.peak_formulas import predict
from hf_ckpt.planner.search import Planned, StepPlanner
from hf_ckpt.policy.allowances import Allowed, allowed_by, allowed_in
from hf_ckpt.policy.options import EmbeddingPlace, HeadMode, Offload, Weights
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.fit import Capacity
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, Place, StepMemory, StepTime, Timeline

MIB, LAYERS = 2**20, 4
TILED = replace(FULL, tiles="auto")
STEP, CARD = Step(batch_size=1, seq_length=64), find_device("rtx4090")
TEMPLATE = Plan("Made", (StackPlan("layers", (NONE,) * LAYERS),))


def cost(kept: int, backward: int, seconds: float) -> Cost:
    """A cost in MiB."""
    return Cost(kept * MIB, (kept + 1) * MIB, backward * MIB, 0, seconds)


def made(*, tiles: bool = False, head: HeadMode = HeadMode.PLAIN) -> Chain:
    """Four layers of 10 MiB and 1 s; 1 MiB and 1.3 s recomputed, half of what that takes in tiles; a head of 20 MiB."""
    costs = {NONE: cost(10, 12, 1.0), FULL: cost(1, 12, 1.3)} | ({TILED: cost(1, 5, 1.5)} if tiles else {})
    layers = tuple(ChainLayer(0, idx, costs, can_join=False) for idx in range(LAYERS))
    is_plain = head is HeadMode.PLAIN
    return Chain(layers, 5 * MIB, (20 if is_plain else 2) * MIB, 0, 0.0 if is_plain else 0.1, MIB, head=head)


@pytest.fixture(autouse=True)
def _costs_for_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulated(simulator: StepSimulator, asked: Plan | None) -> StepMemory:
        plan = asked or TEMPLATE
        chain = offloaded(made(tiles=True, head=plan.head), CARD, Offload(fraction=1.0))
        choice = predict(chain, [plan.stacks[layer.stack].layers[layer.layer_idx] for layer in chain.layers])
        time, place = StepTime(forward=choice.seconds), Place(Phase.BACKWARD)
        sizes = {Category.SAVED: choice.peak_bytes}
        return StepMemory(
            "",
            plan,
            simulator.step.tokens,
            choice.peak_bytes,
            place,
            sizes,
            Timeline((), {}),
            time=time,
            tensor_peak_bytes=choice.peak_bytes,
        )

    def tiled(chain: Chain, simulator: StepSimulator, allowed: Allowed) -> Chain:
        return chain if allowed.tiles is False else made(tiles=True, head=chain.head)

    def chunked(chain: Chain, *given: object) -> Chain:
        return made(tiles=TILED in chain.layers[0].costs, head=HeadMode.CHUNKED)

    monkeypatch.setattr(StepSimulator, "_simulated", lambda *asked: (simulated(*asked), 0))
    monkeypatch.setattr(StepSimulator, "reserved_bytes", lambda simulator, plan: simulator.memory(plan).peak_bytes)
    monkeypatch.setattr(search, "with_tiles", tiled)
    monkeypatch.setattr(search, "with_chunked_head", chunked)
    monkeypatch.setattr(StepSimulator, "plan_of", lambda simulator, policy: TEMPLATE)
    monkeypatch.setattr(StepSimulator, "waiting_bytes", lambda simulator: [])
    monkeypatch.setattr(StepSimulator, "table_bytes", 0)


def plan_within(mib: int, **allowed: Any) -> Planned:
    return StepPlanner(StepSimulator(nn.Module(), STEP, CARD), allowed=Allowed(**allowed), chain=made()).plan_for(
        Capacity(mib * MIB), compare=True
    )


# The plan that keeps everything needs 65 MiB and 4 s; all layers recomputed, 29 MiB and 5.2 s; with the head in chunks,
# 20 MiB and 5.3 s, or 5 s with the last layer kept; with tiles as well, 13 MiB and 6.1 s.


@pytest.mark.parametrize(
    ("mib", "allowed", "inexact"),
    [
        (66, {}, ()),
        (30, {}, ()),
        (30, {"exact": True}, ()),
        (30, {"exact": False}, (CHUNKED_HEAD,)),
        (22, {}, (CHUNKED_HEAD,)),
        (15, {}, (TILES, CHUNKED_HEAD)),
        # What was asked for goes first.
        (30, {"head": True}, (CHUNKED_HEAD,)),
        (30, {"exact": True, "head": True}, (CHUNKED_HEAD,)),
        (15, {"exact": True, "head": True, "tiles": True}, (TILES, CHUNKED_HEAD)),
        (30, {"exact": False, "head": False, "tiles": False}, ()),
    ],
)
def test_bitwise_plans_come_first_unless_something_else_is_asked_for(
    mib: int, allowed: dict[str, Any], inexact: tuple[str, ...]
) -> None:
    found = plan_within(mib, **allowed)
    assert inexact_parts(found.plan) == inexact
    assert found.memory.peak_bytes <= mib * MIB


COSTS = (
    "same gradients, bit for bit; 30 % slower than without checkpointing. "
    "With exact: false 18 % slower, within 1e-6 in float32"
)


@pytest.mark.parametrize(
    ("mib", "allowed", "said"),
    [
        (66, {}, "same gradients, bit for bit; 0 % slower than without checkpointing"),
        (30, {}, COSTS),
        (30, {"exact": True}, COSTS),
        (
            30,
            {"exact": False},
            "gradients within 1e-6 in float32 (chunked head); 18 % slower than without checkpointing",
        ),
        (30, {"head": False, "tiles": False}, "same gradients, bit for bit; 30 % slower than without checkpointing"),
        (
            22,
            {},
            "gradients within 1e-6 in float32 (chunked head); 25 % slower than without checkpointing; "
            "no plan with the same bits fits",
        ),
        # Tiles around dropout are another step, and what was asked for is no last resort.
        (
            15,
            {"head": True, "tiles": True},
            "not the same gradients, as dropout may draw other masks (tiles and chunked head); "
            "52 % slower than without checkpointing",
        ),
    ],
)
def test_plan_says_what_bitwise_costs(mib: int, allowed: dict[str, Any], said: str) -> None:
    exactness = plan_within(mib, **allowed).exactness
    assert exactness is not None
    assert exactness.describe() == said


def test_difference_that_cannot_be_seen_is_not_told() -> None:
    said = Exactness((), 1.2049, 1.2001).describe()
    assert said == "same gradients, bit for bit; 20 % slower than without checkpointing"


def test_nothing_is_compared_where_nobody_asks() -> None:
    assert (
        StepPlanner(StepSimulator(nn.Module(), STEP, CARD), chain=made()).plan_for(Capacity(30 * MIB)).exactness is None
    )


def test_exact_is_refused_with_what_would_fit() -> None:
    with pytest.raises(BudgetError) as error:
        plan_within(22, exact=True)
    message = str(error.value)
    assert message.startswith(
        "No bitwise plan fits memory_budget=22.0 MiB with exact: true. Lowest predicted peak is 29.0 MiB, in the "
    )
    assert '\n  memory_budget="29.0MiB"' in message
    assert '\n  exact="prefer"' in message
    assert plan_within(29, exact=True).memory.peak_bytes == 29 * MIB


@pytest.mark.parametrize(
    ("allowed", "least"),
    [
        ({}, 13),
        ({"exact": False}, 13),
        ({"exact": True}, 29),
        ({"tiles": False}, 20),
        ({"head": False}, 29),
        ({"head": False, "tiles": False}, 29),
    ],
)
def test_lowest_peak_is_that_of_everything_allowed_and_has_a_plan(allowed: dict[str, Any], least: int) -> None:
    with pytest.raises(BudgetError, match=rf"Lowest predicted peak is {least}\.0 MiB"):
        plan_within(1, **allowed)
    assert plan_within(least, **allowed).memory.peak_bytes == least * MIB


def test_lines_name_what_was_forbidden_and_would_fit() -> None:
    with pytest.raises(BudgetError) as error:
        plan_within(22, head=False)
    assert '\n  head="chunked"' in str(error.value)
    assert "exact" not in str(error.value)


# --- Reading. ---


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Allowed()),
        ({"exact": "prefer"}, Allowed(exact="prefer")),
        ({"exact": True, "head": "chunked"}, Allowed(exact=True, head=True)),
        ({"exact": False, "head": "plain", "tiles": 1}, Allowed(exact=False, head=False, tiles=False)),
    ],
)
def test_options_are_read(options: dict[str, Any], expected: Allowed) -> None:
    assert allowed_by(options) == expected


@pytest.mark.parametrize("value", ["always", 1, 0, "true"])
def test_wrong_words_are_refused(value: object) -> None:
    with pytest.raises(PolicyError, match=r'exact is .*\. Use "prefer" \(a plan that changes no bit, if one fits\)'):
        HFCkptCallback("auto", memory_budget="1GiB", exact=value)  # type: ignore[arg-type]


def test_exact_belongs_to_auto() -> None:
    with pytest.raises(PolicyError, match='exact is True, but only policy "auto" plans for a budget'):
        HFCkptCallback("full", exact=True)


def test_plan_of_the_users_grants_what_it_holds() -> None:
    entries = (replace(FULL, offload=Offload()), LayerPlan(Mode.FULL, tiles=4))
    assert allowed_in(Plan("Made", (StackPlan("layers", entries),), HeadMode.CHUNKED)) == Allowed(
        offload=Offload(), tiles=True, head=True
    )
    assert allowed_in(TEMPLATE) == Allowed()
    waiting = Plan("Made", (StackPlan("layers", (LayerPlan(weights=Weights()),)),))
    assert allowed_in(waiting) == Allowed(weights=Weights(), embedding=EmbeddingPlace.DEVICE)
    moved = replace(TEMPLATE, embedding=EmbeddingPlace.CPU)
    assert allowed_in(moved) == Allowed(embedding=EmbeddingPlace.CPU)
