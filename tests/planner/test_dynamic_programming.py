"""The planner against brute force: no other choice that fits is faster."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from hf_ckpt.errors import BudgetError, PolicyError
from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, Cost
from hf_ckpt.planner.dynamic_programming import ChainPlanner
from hf_ckpt.planner.peak_formulas import Block, Choice, Moment, blocks_of, entries_from, predict, to_plan
from hf_ckpt.planner.search import binomial_choices, fixed_choices
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import Mode
from tests.planner.small_chains import (
    ATTENTION,
    FFN,
    MODES,
    decoder,
    every_way,
    num_changes,
    only,
    random_chain,
    segments_of,
    uniform,
    with_casts,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first_seed", range(0, 400, 50))
def test_every_budget_gives_what_brute_force_finds(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        chain = random_chain(seed)
        ways = list(every_way(chain))
        found = [predict(chain, entries_from(chain, way)) for way in ways]
        ranks = [
            (choice.seconds, choice.peak_bytes, num_changes(chain, way))
            for choice, way in zip(found, ways, strict=True)
        ]
        smallest = min(choice.peak_bytes for choice in found)
        planner = ChainPlanner(chain)
        assert planner.peaks[0] == smallest
        for budget in range(smallest, max(choice.peak_bytes for choice in found) + 1):
            best = planner.choose(budget)
            assert planner.least_seconds(budget) == pytest.approx(best.seconds, abs=1e-9)
            assert planner.least_seconds(budget) <= best.seconds
            rank = (best.seconds, best.peak_bytes, num_changes(chain, blocks_of(chain, best.entries)))
            assert rank == min(rank for rank in ranks if rank[1] <= budget), (seed, budget)
        with pytest.raises(BudgetError):
            planner.choose(smallest - 1)
        assert math.isinf(planner.least_seconds(smallest - 1))


@pytest.mark.parametrize("seed", range(100, 103))
def test_layers_that_all_differ_and_every_budget(seed: int) -> None:
    chain = replace(decoder(6, spread=0.4, seed=seed), fixed_peak_bytes=0)
    chain = replace(chain, layers=tuple(without(layer, ATTENTION) for layer in chain.layers))
    found = sorted(
        {
            (choice.peak_bytes, choice.seconds)
            for choice in (predict(chain, entries_from(chain, way)) for way in every_way(chain))
        }
    )
    fastest = itertools.accumulate((seconds for _, seconds in found), min)
    stairs = [
        (peak, seconds)
        for (peak, seconds), before in zip(found, [math.inf, *fastest], strict=False)
        if seconds < before
    ]
    assert [(point.peak_bytes, point.seconds) for point in ChainPlanner(chain).frontier()] == stairs


def without(layer: ChainLayer, option: LayerPlan) -> ChainLayer:
    return replace(layer, costs={found: cost for found, cost in layer.costs.items() if found != option})


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_choice_is_never_slower_than_a_fixed_policy_that_fits(spread: float) -> None:
    chain = decoder(24, spread)
    fixed = [uniform(chain, mode, every) for mode in MODES for every in (1, 2, 3, 4, 6)]
    fixed += [segments_of(chain, size, nested) for size in (2, 4, 5, 12, 24) for nested in (False, True)]
    found = [predict(chain, entries) for entries in fixed]
    planner = ChainPlanner(chain)
    low, high = planner.peaks[0], predict(chain, uniform(chain, Mode.NONE)).peak_bytes
    assert high >= planner.peaks[-1]
    strictly_faster = 0
    budgets = range(low, high, (high - low) // 40)
    for budget in budgets:
        best = planner.choose(budget)
        assert best.peak_bytes <= budget
        fastest = min((choice.seconds for choice in found if choice.peak_bytes <= budget), default=math.inf)
        assert best.seconds <= fastest
        strictly_faster += best.seconds < fastest
    assert strictly_faster > len(budgets) / 2


def test_without_a_limit_nothing_is_recomputed() -> None:
    chain = decoder(8)
    assert ChainPlanner(chain).choose(2**60).entries == uniform(chain, Mode.NONE)


def test_equal_layers_are_recomputed_first_to_last() -> None:
    chain = decoder(8)
    chain = replace(chain, layers=tuple(only(layer, NONE, FULL) for layer in chain.layers))
    budget = predict(chain, [LayerPlan(Mode.FULL)] * 3 + [LayerPlan()] * 5).peak_bytes
    assert ChainPlanner(chain).choose(budget).entries == (LayerPlan(Mode.FULL),) * 3 + (LayerPlan(),) * 5
    # A few bytes more, for which there is no use, change nothing.
    assert ChainPlanner(chain).choose(budget + 1000) == ChainPlanner(chain).choose(budget)


def test_equally_fast_modes_are_not_mixed() -> None:
    # Both parts cost the same; whichever frees enough is used throughout, not one here and one there.
    none, part = Cost(10, 10, 10, 0, 1.0), Cost(5, 10, 10, 0, 2.0)
    costs = {NONE: none, ATTENTION: part, FFN: part}
    chain = Chain(tuple(ChainLayer(0, idx, costs) for idx in range(6)), 0, 0, 0, 0.0, 1)
    chosen = [str(entry.mode) for entry in ChainPlanner(chain).choose(50).entries]
    assert chosen == ["attention", "attention", "none", "none", "none", "none"]


def test_peak_below_that_of_the_optimizer_is_of_no_use() -> None:
    chain = replace(decoder(8), fixed_peak_bytes=12 * 2**30)
    planner = ChainPlanner(chain)
    assert planner.peaks[0] == 12 * 2**30
    smallest = planner.smallest_peak
    assert (smallest.moment, smallest.layer_idx, smallest.where()) == (Moment.FIXED, None, "optimizer")
    assert (
        predict(chain, smallest.entries).seconds
        < ChainPlanner(replace(chain, fixed_peak_bytes=0)).smallest_peak.seconds
    )


def test_nothing_fits_is_an_error_with_the_smallest_peak() -> None:
    chain = decoder(8)
    with pytest.raises(BudgetError) as caught:
        ChainPlanner(chain).choose(10 * 2**30)
    assert str(caught.value) == (
        "No plan fits memory_budget=10.0 GiB. Lowest predicted peak is 11.0 GiB, in the logits and loss. Raise the "
        "budget, or shorten the sequence."
    )
    assert isinstance(caught.value, PolicyError)


def test_segments_stay_in_their_stack_and_where_layers_can_join() -> None:
    chain = decoder(12)
    layers = [replace(layer, stack=int(idx >= 6), layer_idx=idx % 6) for idx, layer in enumerate(chain.layers)]
    layers[3] = replace(layers[3], can_join=False)
    layers[8] = only(layers[8], NONE)
    chain = replace(chain, layers=tuple(layers), head_bytes=0)
    for budget in ChainPlanner(chain).peaks:
        for block in blocks_of(chain, ChainPlanner(chain).choose(budget).entries):
            inside = range(block.start + 1, block.stop)
            assert not {3, 6, 8, 9} & set(inside)


def test_plan_has_the_layers_of_the_chain_and_leaves_others_alone() -> None:
    chain = decoder(6)
    chain = replace(
        chain, layers=tuple(replace(layer, stack=1, layer_idx=2 + layer.layer_idx) for layer in chain.layers)
    )
    entries = entries_from(chain, [Block(0, 3, FULL, True), Block(3, 5, FULL), Block(5, 6, FFN)])
    template = Plan("Model", (StackPlan("a", (LayerPlan(Mode.FULL),)), StackPlan("b", (LayerPlan(Mode.FULL),) * 8)))
    plan = to_plan(predict(chain, entries), chain, template)
    assert plan == Plan(
        "Model",
        (
            StackPlan("a", (LayerPlan(),)),
            StackPlan(
                "b",
                (LayerPlan(),) * 2
                + (LayerPlan(Mode.FULL, 2, True),) * 3
                + (LayerPlan(Mode.FULL, 5),) * 2
                + (LayerPlan(Mode.FFN),),
            ),
        ),
    )
    assert tuple(plan.stacks[layer.stack].layers[layer.layer_idx] for layer in chain.layers) == entries
    assert Plan.from_json(plan.to_json()) == plan


def test_frontier_has_the_ends_and_so_many_points_at_most() -> None:
    chain = decoder(16)
    planner = ChainPlanner(chain)
    points = planner.frontier(10)
    assert 5 <= len(points) <= 10
    assert [points[0].peak_bytes, points[-1].peak_bytes] == [planner.peaks[0], planner.peaks[-1]]
    assert [point.seconds for point in points] == sorted((point.seconds for point in points), reverse=True)
    assert all(planner.choose(point.peak_bytes) == point for point in points)
    assert len(planner.frontier()) == len(planner.peaks)


def test_equal_chains_get_equal_choices() -> None:
    first, second = (ChainPlanner(decoder(20, 0.2, seed=4)) for _ in range(2))
    budget = (first.peaks[0] + first.peaks[-1]) // 2
    chosen: list[Choice] = [first.choose(budget), second.choose(budget), first.choose(budget)]
    assert chosen[0] == chosen[1] == chosen[2]


@pytest.mark.parametrize("is_fine", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.3])
@pytest.mark.sweep(keep=1)
def test_the_frontier_of_126_layers_stays_small(spread: float, is_fine: bool) -> None:
    # The planner's time goes with the number of plans that it keeps, which is the same on every machine.
    planner = ChainPlanner(decoder(126, spread, is_fine=is_fine))
    assert len(planner.peaks) < 60_000
    for share in (0.0, 0.2, 0.5, 0.8, 1.0):
        budget = int(planner.peaks[0] + share * (planner.peaks[-1] - planner.peaks[0]))
        assert planner.peaks[0] <= planner.choose(budget).peak_bytes <= budget


def test_segments_are_as_long_as_the_next_one_where_that_is_as_good() -> None:
    costs = {NONE: Cost(3, 3, 3, 0, 3.0), FULL: Cost(1, 1, 3, 0, 4.0)}
    chain = Chain(tuple(ChainLayer(0, idx, costs) for idx in range(9)), 1, 6, 0, 0.0, 1)
    sizes = [block.stop - block.start for block in blocks_of(chain, ChainPlanner(chain).choose(11).entries)]
    # And not 2, 3, 2, 2, which is as good.
    assert sizes == [3, 2, 2, 2]


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_with_casts_choices_fit_and_are_hardly_ever_slower_than_the_best(spread: float) -> None:
    num_slower = num_asked = 0
    for seed in range(4):
        chain = with_casts(decoder(4, spread, seed), seed)
        found = [predict(chain, entries_from(chain, way)) for way in every_way(chain)]
        planner = ChainPlanner(chain)
        for budget in sorted({choice.peak_bytes for choice in found})[::6]:
            best = planner.choose(budget)
            assert best.peak_bytes <= budget
            fastest = min(choice.seconds for choice in found if choice.peak_bytes <= budget)
            assert best.seconds < fastest * 1.005
            assert planner.least_seconds(budget) <= fastest
            num_asked += 1
            # Sums of equal times differ in their last bit.
            num_slower += best.seconds > fastest + 1e-12
        assert planner.smallest_peak.peak_bytes == min(choice.peak_bytes for choice in found)
        assert planner.peaks[0] == planner.smallest_peak.peak_bytes
        assert planner.choose(planner.peaks[0]).peak_bytes == planner.peaks[0]
        seconds = [point.seconds for point in planner.frontier(8)]
        assert seconds == sorted(set(seconds), reverse=True)
    assert num_asked > 40
    assert num_slower <= num_asked // 50


@pytest.mark.parametrize("has_casts", [False, True])
def test_fixed_choices_are_none_faster_than_the_planners(has_casts: bool) -> None:
    chain = decoder(12)
    if has_casts:
        chain = with_casts(chain, 3)
    planner, fixed = ChainPlanner(chain), fixed_choices(chain)
    assert [choice.seconds for choice in fixed] == sorted(choice.seconds for choice in fixed)
    assert all(planner.choose(choice.peak_bytes).seconds <= choice.seconds for choice in fixed)


def test_a_binomial_schedule_is_a_choice_where_inputs_are_most_of_the_peak() -> None:
    unit = Cost(1, 1, 1, 0, 1.0)
    layers = tuple(ChainLayer(0, idx, {NONE: unit, FULL: replace(unit, seconds=2.0)}) for idx in range(80))
    chain = replace(decoder(2), layers=layers, input_bytes=1, base_bytes=0, head_bytes=0, fixed_peak_bytes=0)
    found = binomial_choices(chain)
    nested = predict(chain, segments_of(chain, 9, nested=True))
    assert min(choice.peak_bytes for choice in found) < nested.peak_bytes / 2
    # Of 80 layers 13 inputs are enough where two levels need 18.
    assert any(choice.peak_bytes < nested.peak_bytes and choice.seconds <= nested.seconds for choice in found)
    peaks = [choice.peak_bytes for choice in found]
    assert peaks == sorted(peaks, reverse=True)
    assert [choice.seconds for choice in found] == sorted(choice.seconds for choice in found)
    # Beside the rest of the step inputs are nothing.
    assert binomial_choices(replace(chain, base_bytes=10_000)) == ()


def test_fixed_choices_are_the_policies_that_a_user_would_write() -> None:
    chain = decoder(4)
    chain = replace(chain, layers=(*chain.layers[:3], without(chain.layers[3], FFN)))
    found = {tuple(entry.describe() for entry in choice.entries) for choice in fixed_choices(chain)}
    assert ("ffn", "ffn", "ffn", "none") in found
    assert ("full", "none", "full", "none") in found
    assert ("attention", "none", "none", "attention") in found
    numbers = {tuple((entry.segment, entry.nested) for entry in choice.entries) for choice in fixed_choices(chain)}
    assert ((0, False), (0, False), (2, False), (2, False)) in numbers
    assert ((0, True), (0, True), (2, True), (2, True)) in numbers
    apart = replace(chain, layers=(only(chain.layers[0], NONE, FULL), *chain.layers[1:]))
    assert all(entry.segment is None for choice in fixed_choices(apart) for entry in choice.entries)
