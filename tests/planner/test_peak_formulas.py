"""What is predicted of a choice against a step that is played through."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, Cost
from hf_ckpt.planner.dynamic_programming import ChainPlanner
from hf_ckpt.planner.peak_formulas import (
    Block,
    BlockCosts,
    base_bytes,
    blocks_of,
    entries_from,
    joins,
    predict,
    whole_forward,
)
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.policy.revolve import replays, reruns
from tests.planner.small_chains import decoder, every_way, only, random_chain, segments_of, uniform

pytestmark = pytest.mark.slow


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
@pytest.mark.sweep(keep=1)
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
    assert num_layers > 256 or ChainPlanner(chain).smallest_peak.peak_bytes < units


def test_place_of_the_peak_is_named() -> None:
    chain = replace(decoder(4), head_bytes=0)
    assert predict(chain, uniform(chain, Mode.NONE)).where() == "backward of layer 3"
    assert predict(replace(chain, head_bytes=2**30), uniform(chain, Mode.NONE)).where() == "logits and loss"
    layer = chain.layers[2]
    hungry = replace(layer, costs={**layer.costs, NONE: replace(layer.costs[NONE], forward_bytes=2**40)})
    chain = replace(chain, layers=(*chain.layers[:2], hungry, chain.layers[3]))
    choice = predict(chain, uniform(chain, Mode.NONE))
    assert (choice.where(), choice.layer_idx) == ("forward of layer 2", 2)


def test_gradients_of_later_layers_count_in_backward_and_all_of_them_from_the_second_micro_batch_on() -> None:
    layer = {NONE: Cost(0, 0, 10, 100, 1.0)}
    chain = Chain(tuple(ChainLayer(0, idx, layer) for idx in range(3)), 1000, 0, 0, 0.0, 1, head_left_bytes=7)
    entries = uniform(chain, Mode.NONE)
    assert predict(chain, entries).peak_bytes == 1000 + 7 + 2 * 100 + 10
    assert predict(replace(chain, num_micro_batches=2), entries).peak_bytes == 1000 + 7 + 3 * 100 + 10


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
                assert predict(rest, entries_from(rest, way)).peak_bytes - base == segments.needs[start, -1]


def test_only_neighbours_of_one_stack_join() -> None:
    first, second, third = decoder(3).layers
    assert joins(first, second)
    assert not joins(first, third)
    assert not joins(first, replace(second, stack=1))
    assert not joins(first, replace(second, can_join=False))
    assert not joins(first, only(second, NONE))


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
