"""Chains of layers for the planner, and every way to cover one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, Cost
from hf_ckpt.planner.peak_formulas import Block, entries_from
from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.policy.policy import Mode

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


def only(layer: ChainLayer, *options: LayerPlan) -> ChainLayer:
    return replace(layer, costs={option: layer.costs[option] for option in options}, can_join=False)


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
