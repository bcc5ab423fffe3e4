"""The planner against brute force, and what a choice amounts to against a step that is played through."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hf_ckpt.errors import BudgetError, PolicyError
from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, Cost
from hf_ckpt.planner.pareto import ChainPlanner, choose, frontier, smallest_peak
from hf_ckpt.planner.peak_formulas import (
    Block,
    BlockCosts,
    Choice,
    Moment,
    base_bytes,
    blocks_of,
    entries_from,
    joins,
    predict,
    to_plan,
    whole_forward,
)
from hf_ckpt.planner.search import binomial_choices, fixed_choices
from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.policy.revolve import replays, reruns

pytestmark = pytest.mark.slow

ATTENTION, FFN = LayerPlan(Mode.ATTENTION), LayerPlan(Mode.FFN)
MODES = (Mode.NONE, Mode.FULL, Mode.ATTENTION, Mode.FFN)
MIB = 2**20


def cost(rng: random.Random, most: int, seconds: int) -> Cost:
    """A random cost in whole numbers, so small that ties are common."""
    kept = rng.randint(0, most)
    return Cost(kept, kept + rng.randint(0, 3), kept + rng.randint(0, 5), 0, float(seconds))


def random_chain(seed: int) -> Chain:
    """Up to five layers that all differ, in one or two stacks, some without some modes, some that cannot join."""
    rng = random.Random(seed)
    num_layers, split = rng.randint(1, 5), rng.randint(1, 5)
    input_bytes = rng.randint(1, 2)
    layers = []
    for position in range(num_layers):
        grown = rng.randint(0, 2)
        none = cost(rng, 9, rng.randint(1, 3))
        costs = {NONE: none}
        if rng.random() < 0.9:
            full = cost(rng, 0, int(none.seconds) + rng.randint(0, 2))
            kept = input_bytes + rng.choice([0, 0, 1])
            forward, backward = kept + rng.choice([0, 1, 15]), kept + rng.randint(0, 14)
            costs[FULL] = replace(full, kept_bytes=kept, forward_bytes=forward, backward_bytes=backward)
        for mode in (Mode.ATTENTION, Mode.FFN):
            if rng.random() < 0.4:
                costs[LayerPlan(mode)] = cost(rng, 6, int(none.seconds) + rng.randint(0, 1))
        costs = {option: replace(found, left_bytes=grown) for option, found in costs.items()}
        stack, layer_idx = (0, position) if position < split else (1, position - split)
        whole = rng.choice([None, float(rng.randint(0, 2))])
        layers.append(ChainLayer(stack, layer_idx, costs, rng.random() < 0.8, whole))
    return Chain(
        tuple(layers),
        base_bytes=rng.randint(0, 5),
        head_bytes=rng.randint(0, 9),
        fixed_peak_bytes=rng.choice([0, 15]),
        other_seconds=0.5,
        input_bytes=input_bytes,
        num_micro_batches=rng.choice([1, 1, 2]),
        head_left_bytes=rng.choice([0, 2]),
    )


def every_way(chain: Chain, start: int = 0) -> Iterator[tuple[Block, ...]]:
    """Every cover of the chain by single layers and segments."""
    if start == len(chain.layers):
        yield ()
        return
    firsts = [Block(start, start + 1, option) for option in chain.layers[start].costs]
    for stop in range(start + 2, len(chain.layers) + 1):
        inside = chain.layers[start:stop]
        if any(FULL not in layer.costs for layer in inside) or any(not layer.can_join for layer in inside[1:]):
            break
        if len({layer.stack for layer in inside}) > 1:
            break
        firsts += [Block(start, stop, FULL, nested) for nested in (False, True)]
    for first in firsts:
        for rest in every_way(chain, first.stop):
            yield (first, *rest)


def num_changes(chain: Chain, blocks: tuple[Block, ...]) -> int:
    kinds = [(chain.layers[b.start].stack, b.option, b.is_segment, b.nested) for b in blocks]
    return sum(one != other and one[0] == other[0] for one, other in itertools.pairwise(kinds))


def uniform(chain: Chain, mode: Mode, every: int = 1) -> tuple[LayerPlan, ...]:
    return tuple(LayerPlan(mode if layer.layer_idx % every == 0 else Mode.NONE) for layer in chain.layers)


def segments_of(chain: Chain, size: int, nested: bool) -> tuple[LayerPlan, ...]:
    num_layers = len(chain.layers)
    starts = range(0, num_layers, size)
    return entries_from(chain, [Block(at, min(at + size, num_layers), FULL, nested) for at in starts])


def decoder(num_layers: int, spread: float = 0.0, seed: int = 0, *, is_fine: bool = False) -> Chain:
    """A decoder with the proportions of a 7B model; with `spread`, layers differ by so much.

    With `is_fine`, there are steps between full and none, and offload, in all but the last layer.
    """
    rng = random.Random(seed)
    unit = 16 * MIB

    def about(value: float) -> float:
        return value * (1 + spread * rng.uniform(-1, 1))

    layers = []
    for layer_idx in range(num_layers):
        forward, none = about(10e-3), about(30e-3)

        def made(kept: float, most: float, back: float, seconds: float) -> Cost:
            return Cost(int(about(kept) * unit), int(about(most) * unit), int(about(back) * unit), MIB, seconds)

        full = made(1, 8, 29, none + 0.9 * forward)
        costs = {
            NONE: made(25, 26, 28, none),
            FULL: replace(full, kept_bytes=unit),
            ATTENTION: made(18, 26, 28, none + about(3e-3)),
            FFN: made(10, 26, 29, none + about(6e-3)),
        }
        if is_fine:
            costs[LayerPlan(Mode.SELECTIVE)] = made(15, 26, 29, none + about(1e-3))
            costs[LayerPlan(Mode.SELECTIVE_ATTENTION)] = made(2, 8, 29, none + about(8e-3))
            for num, (kept, seconds) in enumerate([(3, 7e-3), (5, 5e-3), (8, 3.4e-3), (10, 2.6e-3), (12, 1.8e-3)]):
                save = tuple(f"name{number}" for number in range(num + 1))
                costs[LayerPlan(Mode.SELECTIVE, save=save)] = made(kept, 20, 29, none + about(seconds))
            if layer_idx < num_layers - 1:
                for option, seconds in ((FULL, 1.2e-3), (LayerPlan(Mode.SELECTIVE_ATTENTION), 2e-3)):
                    costs[replace(option, offload=Offload())] = replace(
                        costs[option], kept_bytes=0, seconds=costs[option].seconds + about(seconds), host_bytes=2 * unit
                    )
            costs[replace(FULL, tiles="auto")] = replace(made(1, 8, 9, full.seconds + 2e-3), kept_bytes=unit)
        layers.append(ChainLayer(0, layer_idx, costs, forward_seconds=forward))
    return Chain(tuple(layers), 10 * 2**30, 60 * unit, 10 * 2**30, 0.1, unit)


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
            rank = (best.seconds, best.peak_bytes, num_changes(chain, blocks_of(chain, best.entries)))
            assert rank == min(rank for rank in ranks if rank[1] <= budget), (seed, budget)
        with pytest.raises(BudgetError):
            planner.choose(smallest - 1)


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
    assert [(point.peak_bytes, point.seconds) for point in frontier(chain)] == stairs


def without(layer: ChainLayer, option: LayerPlan) -> ChainLayer:
    return replace(layer, costs={found: cost for found, cost in layer.costs.items() if found != option})


class Toy:
    """Layers of known sizes, run tensor by tensor: what `predict` says of their chain must be what happens.

    A layer saves some bytes, needs some more while it runs forward or backward, and makes gradients. Checkpointed, it
    keeps a further input of its own.
    """

    def __init__(self, seed: int, num_layers: int, num_micro_batches: int) -> None:
        rng = random.Random(seed)
        self.size = 4
        self.layers = [[rng.randint(0, most) for most in (30, 9, 5, 3)] for _ in range(num_layers)]
        self.head, self.head_gradients = rng.randint(8, 60), rng.randint(0, 8)
        self.num_micro_batches = num_micro_batches
        self.alive: dict[tuple[str, int], int] = {}
        self.peak = 0

    def chain(self) -> Chain:
        layers, size = [], self.size
        for idx, (saved, extra, gradients, own) in enumerate(self.layers):
            forward, backward = saved + extra + size, saved + extra + 2 * size + gradients
            none = Cost(saved + size, forward, backward, gradients, 3.0)
            full = Cost(size + own, forward + own, backward + own, gradients, 4.0)
            layers.append(ChainLayer(0, idx, {NONE: none, FULL: full}))
        return Chain(tuple(layers), size, self.head, 0, 0.0, size, self.num_micro_batches, self.head_gradients)

    def make(self, name: str, idx: int, num_bytes: int) -> None:
        assert (name, idx) not in self.alive
        self.alive[name, idx] = num_bytes
        self.peak = max(self.peak, sum(self.alive.values()))

    def drop(self, *tensors: tuple[str, int]) -> None:
        for tensor in tensors:
            del self.alive[tensor]

    def forward(self, idx: int, keeps: bool) -> None:
        saved, extra, _, _ = self.layers[idx]
        self.make("saved", idx, saved)
        self.make("extra", idx, extra)
        self.make("input", idx + 1, self.size)
        self.drop(("extra", idx), *([] if keeps else [("saved", idx)]))

    def backward(self, idx: int) -> None:
        _, extra, gradients, _ = self.layers[idx]
        self.make("extra", idx, extra)
        self.make("gradient of input", idx, self.size)
        is_first = ("gradients", idx) not in self.alive
        self.make("gradients" if is_first else "added gradients", idx, gradients)
        self.drop(("extra", idx), ("saved", idx), ("gradient of input", idx + 1), ("input", idx))
        if not is_first:
            self.drop(("added gradients", idx))

    def block_forward(self, block: Block) -> None:
        for idx in range(block.start, block.stop):
            if block.option == FULL:
                self.make("own", idx, self.layers[idx][3])
            self.forward(idx, keeps=block.option == NONE)
            if idx > block.start:
                self.drop(("input", idx))

    def block_backward_with_snapshots(self, block: Block) -> None:
        """Run the block again for each layer from the last input that is there."""
        for start, saved, turn in replays(block.stop - block.start, block.snapshots):
            first, last = block.start + start, block.start + turn
            for idx in range(first, last):
                self.forward(idx, keeps=False)
                if idx > first and idx - block.start not in saved:
                    self.drop(("input", idx))
            self.forward(last, keeps=True)
            self.drop(("input", last + 1))
            self.backward(last)
            self.drop(("own", last))

    def block_backward(self, block: Block) -> None:
        if block.snapshots is not None:
            self.block_backward_with_snapshots(block)
            return
        last = block.stop - 1
        for idx in range(block.start, last):
            self.forward(idx, keeps=not block.nested)
        for idx in range(last, block.start - 1, -1):
            if block.option == FULL and (block.nested or idx == last):
                self.forward(idx, keeps=True)
                self.drop(("input", idx + 1))
            self.backward(idx)
            if block.option == FULL:
                self.drop(("own", idx))

    def run(self, entries: tuple[LayerPlan, ...]) -> int:
        """Run a step and return its peak."""
        blocks, end = blocks_of(self.chain(), entries), len(self.layers)
        for number in range(self.num_micro_batches):
            self.make("input", 0, self.size)
            for block in blocks:
                self.block_forward(block)
            self.make("head", 0, self.head)
            self.drop(("head", 0), ("input", end))
            if not number:
                self.make("gradients", end, self.head_gradients)
            self.make("gradient of input", end, self.size)
            for block in reversed(blocks):
                self.block_backward(block)
            self.drop(("gradient of input", 0))
        return self.peak


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_prediction_is_what_happens_when_the_step_is_played_through(num_micro_batches: int) -> None:
    for seed in range(40):
        chain = Toy(seed, 5, num_micro_batches).chain()
        for way in every_way(chain):
            entries = entries_from(chain, way)
            assert Toy(seed, 5, num_micro_batches).run(entries) == predict(chain, entries).peak_bytes, (seed, way)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(("num_layers", "snapshots"), [(2, 0), (5, 0), (5, 1), (7, 1), (9, 2), (9, 7)])
def test_prediction_of_a_binomial_schedule_is_what_happens(
    num_layers: int, snapshots: int, num_micro_batches: int
) -> None:
    for seed in range(10):
        chain = Toy(seed, num_layers + 1, num_micro_batches).chain()
        row = Block(0, num_layers, FULL, nested=True, snapshots=snapshots)
        entries = entries_from(chain, [row, Block(num_layers, num_layers + 1, FULL)])
        found = predict(chain, entries)
        assert Toy(seed, num_layers + 1, num_micro_batches).run(entries) == found.peak_bytes, seed
        full = predict(chain, [FULL] * (num_layers + 1))
        again = sum(
            (times - 1) * whole_forward(layer)
            for times, layer in zip(reruns(num_layers, snapshots), chain.layers, strict=False)
        )
        assert found.seconds == pytest.approx(full.seconds + again)


@pytest.mark.parametrize(("num_layers", "units"), [(16, 8), (64, 16), (144, 24), (256, 32), (1024, 64)])
def test_nested_segments_of_sqrt_layers_need_twice_the_root_in_layer_inputs(num_layers: int, units: int) -> None:
    # Chen et al. 2016, section 4.3: every tensor is a layer's output of one unit, and layers keep nothing else.
    unit = Cost(1, 1, 1, 0, 1.0)
    layers = tuple(ChainLayer(0, idx, {NONE: unit, FULL: replace(unit, seconds=2.0)}) for idx in range(1024))
    chain = Chain(layers[:num_layers], 1, 0, 0, 0.0, 1)
    size = math.isqrt(num_layers)
    choice = predict(chain, segments_of(chain, size, nested=True))
    assert choice.peak_bytes == units == 2 * size
    assert choice.seconds == 3 * num_layers - size
    # Segments that get shorter towards the end do better than equal ones.
    assert num_layers > 256 or smallest_peak(chain).peak_bytes < units


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
    assert choose(chain, 2**60).entries == uniform(chain, Mode.NONE)


def test_equal_layers_are_recomputed_first_to_last() -> None:
    chain = decoder(8)
    chain = replace(chain, layers=tuple(only(layer, NONE, FULL) for layer in chain.layers))
    budget = predict(chain, [LayerPlan(Mode.FULL)] * 3 + [LayerPlan()] * 5).peak_bytes
    assert choose(chain, budget).entries == (LayerPlan(Mode.FULL),) * 3 + (LayerPlan(),) * 5
    # A few bytes more, for which there is no use, change nothing.
    assert choose(chain, budget + 1000) == choose(chain, budget)


def only(layer: ChainLayer, *options: LayerPlan) -> ChainLayer:
    return replace(layer, costs={option: layer.costs[option] for option in options}, can_join=False)


def test_equally_fast_modes_are_not_mixed() -> None:
    # Both parts cost the same; whichever frees enough is used throughout, not one here and one there.
    none, part = Cost(10, 10, 10, 0, 1.0), Cost(5, 10, 10, 0, 2.0)
    costs = {NONE: none, ATTENTION: part, FFN: part}
    chain = Chain(tuple(ChainLayer(0, idx, costs) for idx in range(6)), 0, 0, 0, 0.0, 1)
    chosen = [str(entry.mode) for entry in choose(chain, 50).entries]
    assert chosen == ["attention", "attention", "none", "none", "none", "none"]


def test_peak_below_that_of_the_optimizer_is_of_no_use() -> None:
    chain = replace(decoder(8), fixed_peak_bytes=12 * 2**30)
    planner = ChainPlanner(chain)
    assert planner.peaks[0] == 12 * 2**30
    smallest = planner.smallest_peak()
    assert (smallest.moment, smallest.position, smallest.where()) == (Moment.FIXED, None, "optimizer")
    assert predict(chain, smallest.entries).seconds < smallest_peak(replace(chain, fixed_peak_bytes=0)).seconds


def test_place_of_the_peak_is_named() -> None:
    chain = replace(decoder(4), head_bytes=0)
    assert predict(chain, uniform(chain, Mode.NONE)).where() == "backward of layer 3"
    assert predict(replace(chain, head_bytes=2**30), uniform(chain, Mode.NONE)).where() == "logits and loss"
    layer = chain.layers[2]
    hungry = replace(layer, costs={**layer.costs, NONE: replace(layer.costs[NONE], forward_bytes=2**40)})
    chain = replace(chain, layers=(*chain.layers[:2], hungry, chain.layers[3]))
    choice = predict(chain, uniform(chain, Mode.NONE))
    assert (choice.where(), choice.position, choice.layer_idx) == ("forward of layer 2", 2, 2)


def test_gradients_of_later_layers_count_in_backward_and_all_of_them_from_the_second_micro_batch_on() -> None:
    layer = {NONE: Cost(0, 0, 10, 100, 1.0)}
    chain = Chain(tuple(ChainLayer(0, idx, layer) for idx in range(3)), 1000, 0, 0, 0.0, 1, head_left_bytes=7)
    entries = uniform(chain, Mode.NONE)
    assert predict(chain, entries).peak_bytes == 1000 + 7 + 2 * 100 + 10
    assert predict(replace(chain, num_micro_batches=2), entries).peak_bytes == 1000 + 7 + 3 * 100 + 10


def test_nothing_fits_is_an_error_with_the_smallest_peak() -> None:
    chain = decoder(8)
    with pytest.raises(BudgetError) as caught:
        choose(chain, 10 * 2**30)
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
        for block in blocks_of(chain, choose(chain, budget).entries):
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
    assert all(planner.choose(point.budget_bytes) == point.choice for point in points)
    assert len(planner.frontier()) == len(planner.peaks)


def test_equal_chains_get_equal_choices() -> None:
    first, second = (ChainPlanner(decoder(20, 0.2, seed=4)) for _ in range(2))
    budget = (first.peaks[0] + first.peaks[-1]) // 2
    chosen: list[Choice] = [first.choose(budget), second.choose(budget), first.choose(budget)]
    assert chosen[0] == chosen[1] == chosen[2]


@pytest.mark.parametrize("is_fine", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.3])
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
    sizes = [block.stop - block.start for block in blocks_of(chain, choose(chain, 11).entries)]
    # And not 2, 3, 2, 2, which is as good.
    assert sizes == [3, 2, 2, 2]


def test_needs_of_all_segments_at_a_time_are_those_of_each() -> None:
    for seed in range(200):
        chain = replace(random_chain(seed), fixed_peak_bytes=0, head_bytes=-(10**6))
        blocks = BlockCosts(chain)
        for start in range(len(chain.layers)):
            rest = replace(chain, layers=chain.layers[start:])
            ways = [way for way in every_way(rest) if len(way) == 1 and way[0].is_segment]
            for way in ways:
                segments = blocks.segments[way[0].nested]
                base = base_bytes(rest)
                assert predict(rest, entries_from(rest, way)).peak_bytes - base == segments.needs_from(start)[-1]
                assert segments.needs_to(len(chain.layers))[start] == segments.needs_from(start)[-1]


def test_only_neighbours_of_one_stack_join() -> None:
    first, second, third = decoder(3).layers
    assert joins(first, second)
    assert not joins(first, third)
    assert not joins(first, replace(second, stack=1))
    assert not joins(first, replace(second, can_join=False))
    assert not joins(first, only(second, NONE))


def with_casts(chain: Chain, seed: int) -> Chain:
    """The chain with weights that autocast casts: kept for backward by what is kept, let go after forward otherwise."""
    rng = random.Random(seed)
    size = rng.choice([0.3, 3, 6]) * 16 * MIB
    parts = {NONE: 0.0, ATTENTION: size / 3, FFN: size * 2 / 3, FULL: size}

    def cast(option: LayerPlan, found: Cost) -> Cost:
        return replace(
            found,
            cast_bytes=int(parts[option]),
            kept_bytes=found.kept_bytes + int(size - parts[option]),
            forward_bytes=found.forward_bytes + int(size),
            backward_bytes=found.backward_bytes + int(size),
        )

    layers = (
        replace(layer, costs={option: cast(option, found) for option, found in layer.costs.items()})
        for layer in chain.layers
    )
    return replace(chain, layers=tuple(layers), head_bytes=rng.choice([5, 20, 60]) * 16 * MIB, fixed_peak_bytes=0)


def test_casts_count_in_forward_and_are_gone_in_backward() -> None:
    none = Cost(10, 12, 20, 0, 1.0)
    full = Cost(1, 7, 20, 0, 2.0, cast_bytes=5)
    layers = tuple(ChainLayer(0, idx, {NONE: none, FULL: full}) for idx in range(4))
    chain = Chain(layers, 100, 1, 0, 0.0, 1)
    assert predict(chain, uniform(chain, Mode.FULL)).peak_bytes == 100 + 3 * (1 + 5) + 7
    assert predict(chain, uniform(chain, Mode.FULL)).cast_bytes == 20
    segments = predict(chain, segments_of(chain, 2, nested=True))
    # The last layer's forward: an input kept by the first segment, casts of three layers, the layer's input.
    assert (segments.peak_bytes, segments.where()) == (100 + 1 + 15 + 1 + 7, "forward of layer 3")
    late = replace(chain, head_bytes=9, head_backward_bytes=31)
    assert predict(late, uniform(chain, Mode.FULL)).peak_bytes == 100 + 4 + 31
    assert predict(late, uniform(chain, Mode.FULL)).where() == "logits and loss"


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
            num_asked += 1
            # Sums of equal times differ in their last bit.
            num_slower += best.seconds > fastest + 1e-12
        assert planner.smallest_peak().peak_bytes == min(choice.peak_bytes for choice in found)
        assert planner.peaks[0] == planner.smallest_peak().peak_bytes
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
