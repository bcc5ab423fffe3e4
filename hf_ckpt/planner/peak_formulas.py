"""Peak and time of a choice of options for the layers of a chain, and its plan. Nothing here chooses.

The formulas stand here twice: moment by moment for one choice (`predict`), and as array operations over all blocks that
a chain can be cut into (`BlockCosts`), which the planner chooses from. A test holds the two together.

Note [Moments of a step]. Bytes are relative to what is allocated just before the block's forward; a block is one
layer, or the layers of a segment. `kept` is the sum over the blocks before it.

- forward of a block: base + kept + the casts of the blocks before + the block's forward bytes;
- head: base + kept and casts of all + head bytes; base + kept of all + the bytes of the head's backward;
- backward of a block: base + kept + the block's backward bytes + the gradients that are there by then. Those are the
  head's and the later layers' in the first of the micro-batches. They stay, so every later micro-batch starts with all
  of them and adds none: with more than one micro-batch all gradients count in base, at every moment. The first
  micro-batch needs no more than the others then, and does not count. A layer's backward bytes hold its own
  gradients as they come; in a later micro-batch those are let go once they are added to what is there;
- any other time, the optimizer's above all: the chain's fixed peak.

Note [Segments]. A segment of layers i to j keeps the input of layer i. `I` is the bytes of a layer's input, `n` and `f`
are a layer's costs under `NONE` and `FULL`, `own` is what a layer under `FULL` keeps beyond its input, such as further
inputs: a segment keeps that for each layer.

- kept: I, and own of all its layers; casts: f.cast of all its layers;
- forward of layer l: f.forward, with I (the input of l, which will not be kept), own and f.cast of the layers before,
  if l > i;
- replay of layer l < j, which happens before any backward of the segment: what layers i to l - 1 hold, the gradient of
  the segment's output (I) and own of the layers after l, with
  - plain: n.kept + own for each layer before, n.forward + own for layer l;
  - nested: I + own for each layer before, f.forward for layer l;
- backward of layer l: the same for the layers before, the gradients of the layers after, with
  - plain: n.backward + own, and for layer j at least f.backward, which has the end of the replay in it;
  - nested: f.backward;
- seconds: `whole` is one forward of a layer.
  - plain: n + whole for each layer but the last, f for layer j;
  - nested: f + whole for each layer but the last, f for layer j, whose replay stops at once.

A nested segment with snapshots is replayed for one layer after the other, each time from the last input that is there
(`revolve.replays`). A layer before holds I only if its input is there, and own until its backward; of the gradients
there are those of the layers behind the one whose turn it is; and each replay of a layer takes `whole`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer, Cost
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.policy.revolve import replays, reruns


class Moment(StrEnum):
    """The part of a step that a peak can lie in."""

    FORWARD = "forward"
    HEAD = "logits and loss"
    BACKWARD = "backward"
    FIXED = "optimizer"
    """Or another moment that no choice changes."""


@dataclass(frozen=True, slots=True)
class Block:
    """One layer, or the layers of one segment: from position `start` of the chain to before `stop`."""

    start: int
    stop: int
    option: LayerPlan
    """Of its layers; `FULL` for a segment."""
    nested: bool = False
    """Whether the layers of a segment are checkpointed again."""
    snapshots: int | None = None
    """Of a nested segment; None for any number."""

    @property
    def is_segment(self) -> bool:
        """Whether several layers share one saved input."""
        return self.stop - self.start > 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One entry per layer of a chain, with peak and time of the step under them."""

    entries: tuple[LayerPlan, ...]
    """In the order of the chain."""
    peak_bytes: int
    seconds: float
    cast_bytes: int
    """Of the casts that are there at the end of the forward."""
    moment: Moment
    """The part of the step that has the peak."""
    layer_idx: int | None = None
    """The layer that has the peak, counted in its stack; None outside the layers."""
    host_bytes: int = 0
    """What waits on the host at the end of the forward."""

    def where(self) -> str:
        """Return where the peak lies, such as `backward of layer 3`."""
        return str(self.moment) if self.layer_idx is None else f"{self.moment} of layer {self.layer_idx}"


def predict(chain: Chain, entries: Sequence[LayerPlan]) -> Choice:
    """Return the peak and the time of a step under one entry for each layer. See Note [Moments of a step]."""
    blocks = blocks_of(chain, entries)
    peak, moment, layer_idx = max(_moments(chain, blocks), key=lambda found: found[0])
    seconds = [part for block in blocks for part in _seconds(chain, block)]
    casts = sum(_casts(chain, block) for block in blocks)
    total = math.fsum([chain.other_seconds, *seconds])
    host = sum(chain.layers[block.start].costs[block.option].host_bytes for block in blocks)
    return Choice(tuple(entries), peak, total, casts, moment, layer_idx, host)


def to_plan(choice: Choice, chain: Chain, template: Plan) -> Plan:
    """Return the choice as a plan: like any plan of the same model, `template`. Layers outside the chain do nothing."""
    chosen = {(layer.stack, layer.layer_idx): entry for layer, entry in zip(chain.layers, choice.entries, strict=True)}
    stacks = tuple(
        replace(stack, layers=tuple(chosen.get((number, idx), LayerPlan()) for idx in range(len(stack.layers))))
        for number, stack in enumerate(template.stacks)
    )
    return replace(template, stacks=stacks, head=chain.head)


def entries_from(chain: Chain, blocks: Sequence[Block]) -> tuple[LayerPlan, ...]:
    """Return the entries of blocks that cover the chain, in order; a segment has its first layer's number."""
    entries: list[LayerPlan] = []
    for block in blocks:
        segment = chain.layers[block.start].layer_idx if block.is_segment else None
        entry = replace(block.option, segment=segment, nested=block.nested, snapshots=block.snapshots)
        entries += [entry] * (block.stop - block.start)
    return tuple(entries)


def blocks_of(chain: Chain, entries: Sequence[LayerPlan]) -> tuple[Block, ...]:
    """Return the blocks that entries make of a chain. A segment of one layer is that layer under `FULL`."""
    blocks: list[Block] = []
    for position, entry in enumerate(entries):
        stack = chain.layers[position].stack
        before = entries[position - 1] if position and chain.layers[position - 1].stack == stack else LayerPlan()
        if entry.segment is not None and (before.segment, before.nested) == (entry.segment, entry.nested):
            blocks[-1] = replace(blocks[-1], stop=position + 1, nested=entry.nested, snapshots=entry.snapshots)
        else:
            blocks.append(Block(position, position + 1, entry.alone))
    return tuple(blocks)


def joins(before: ChainLayer, layer: ChainLayer) -> bool:
    """Whether `layer` may share a segment with the layer that runs before it."""
    return (
        layer.can_join
        and layer.stack == before.stack
        and layer.layer_idx == before.layer_idx + 1
        and FULL in before.costs
        and FULL in layer.costs
    )


def base_bytes(chain: Chain) -> int:
    """Return what is allocated before the first layer, in the micro-batch that needs most."""
    gradients = chain.head_left_bytes + sum(map(left_bytes, chain.layers))
    return chain.base_bytes + (gradients if chain.num_micro_batches > 1 else 0)


def gradients_at(chain: Chain) -> list[int]:
    """Return the gradients that come on top of `base_bytes` once the layers from a position on are through backward."""
    if chain.num_micro_batches > 1:
        return [0] * (len(chain.layers) + 1)
    later = map(left_bytes, reversed(chain.layers))
    return list(itertools.accumulate(later, initial=chain.head_left_bytes))[::-1]


def left_bytes(layer: ChainLayer) -> int:
    """Return the bytes of a layer's gradients."""
    return max(cost.left_bytes for cost in layer.costs.values())


def own_bytes(chain: Chain, layer: ChainLayer) -> int:
    """Return what a layer under `FULL` keeps beyond its input."""
    return max(0, layer.costs[FULL].kept_bytes - chain.input_bytes) if FULL in layer.costs else 0


def whole_forward(layer: ChainLayer) -> float:
    """Return the seconds of one forward of a layer that does not stop early."""
    if layer.forward_seconds is not None:
        return layer.forward_seconds
    return max(0.0, layer.costs[FULL].seconds - layer.costs[NONE].seconds)


_Found = tuple[int, Moment, int | None]


def _moments(chain: Chain, blocks: Sequence[Block]) -> Iterator[_Found]:
    """Yield the bytes at each moment of the step, in the order of time."""
    base, gradients = base_bytes(chain), gradients_at(chain)
    kept, casts, backwards = base, 0, []
    for block in blocks:
        for relative, layer_idx in _forward(chain, block):
            yield kept + casts + relative, Moment.FORWARD, layer_idx
        backwards.append((kept, block))
        kept += _kept(chain, block)
        casts += _casts(chain, block)
    yield kept + max(casts + chain.head_bytes, chain.head_backward_bytes), Moment.HEAD, None
    for kept_before, block in reversed(backwards):
        for relative, layer_idx in _backward(chain, block, gradients):
            yield kept_before + relative, Moment.BACKWARD, layer_idx
    yield chain.fixed_peak_bytes, Moment.FIXED, None


def _kept(chain: Chain, block: Block) -> int:
    if not block.is_segment:
        return chain.layers[block.start].costs[block.option].kept_bytes
    return chain.input_bytes + sum(own_bytes(chain, layer) for layer in chain.layers[block.start : block.stop])


def _casts(chain: Chain, block: Block) -> int:
    return sum(layer.costs[block.option].cast_bytes for layer in chain.layers[block.start : block.stop])


def _forward(chain: Chain, block: Block) -> Iterator[tuple[int, int]]:
    """Yield the most that each layer of a block needs in its forward, and its `layer_idx`."""
    before = 0
    for number, layer in enumerate(chain.layers[block.start : block.stop]):
        own_input = chain.input_bytes if number else 0
        yield before + own_input + layer.costs[block.option].forward_bytes, layer.layer_idx
        before += own_bytes(chain, layer) + layer.costs[block.option].cast_bytes


def _backward(chain: Chain, block: Block, gradients: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the most that each layer of a block needs in the block's replay and backward, and its `layer_idx`."""
    if not block.is_segment:
        layer = chain.layers[block.start]
        yield layer.costs[block.option].backward_bytes + gradients[block.stop], layer.layer_idx
        return
    layers = list(chain.layers[block.start : block.stop])
    own = [own_bytes(chain, layer) for layer in layers]
    if block.nested:
        yield from _nested_backward(chain, block, gradients, layers, own)
        return
    held = [layer.costs[NONE].kept_bytes + more for layer, more in zip(layers, own, strict=True)]
    for number, layer in enumerate(layers[:-1]):
        run = layer.costs[NONE].forward_bytes + own[number]
        around = chain.input_bytes + sum(own[number + 1 :]) + gradients[block.stop]
        yield sum(held[:number]) + run + around, layer.layer_idx
    for number, layer in reversed(list(enumerate(layers))):
        run = layer.costs[NONE].backward_bytes + own[number]
        if number == len(layers) - 1:
            run = max(run, layer.costs[FULL].backward_bytes)
        yield sum(held[:number]) + run + gradients[block.start + number + 1], layer.layer_idx


def _nested_backward(
    chain: Chain, block: Block, gradients: list[int], layers: list[ChainLayer], own: list[int]
) -> Iterator[tuple[int, int]]:
    for start, saved, turn in replays(len(layers), block.snapshots):
        # The segment's own input is always there.
        inputs = [0, *saved]
        later = gradients[block.start + turn + 1]
        for number in range(start, turn):
            before = chain.input_bytes * bisect_left(inputs, number) + sum(own[: turn + 1]) - own[number]
            run = before + chain.input_bytes + layers[number].costs[FULL].forward_bytes
            yield run + later, layers[number].layer_idx
        before = chain.input_bytes * bisect_left(inputs, turn) + sum(own[:turn])
        yield before + layers[turn].costs[FULL].backward_bytes + later, layers[turn].layer_idx


def _seconds(chain: Chain, block: Block) -> Iterator[float]:
    layers = chain.layers[block.start : block.stop]
    if block.nested:
        for layer, times in zip(layers, reruns(len(layers), block.snapshots), strict=True):
            yield layer.costs[FULL].seconds + (times - 1) * whole_forward(layer)
        return
    for layer in layers[:-1]:
        yield layer.costs[NONE].seconds
        yield whole_forward(layer)
    yield layers[-1].costs[block.option].seconds


# --- All blocks of a chain at a time. ---

Numbers = NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max // 4
"""More bytes than there are: the need of what is not a segment."""


@dataclass(frozen=True, slots=True)
class Single:
    """One layer under one option."""

    kept: int
    """Bytes held from its forward to its backward."""
    need: int
    """The most bytes that it needs at any moment, relative to what is there before its forward."""
    ticks: int
    """Time, in whole numbers: sums are exact, and ties are ties."""


class SegmentCosts:
    """All segments of a chain, plain or nested. The formulas are those of Note [Segments].

    They are summed up so that the segments that start, or end, at one layer come out of a few array operations.

    Args:
        chain: the chain.
        nested: which kind.
        num_ticks: ticks of a second.
        casts: by layer, what is allowed for the casts of the layers before it. See Note [Casts] in
            `dynamic_programming`.

    Attributes:
        needs: of each segment, indexed by its start and its stop.
    """

    def __init__(self, chain: Chain, nested: bool, num_ticks: int, casts: list[int]) -> None:
        self.nested = nested
        self.first, self.end = _runs(chain)
        own = np.array([own_bytes(chain, layer) for layer in chain.layers], dtype=np.int64)
        self._own = _sums(own)
        self._input = chain.input_bytes
        self._last_ticks, self._before_ticks = _segment_ticks(chain, nested, num_ticks)
        self._casts = np.array(casts, dtype=np.int64)
        self.needs: Numbers = self._all_needs(chain, own, np.array(gradients_at(chain), dtype=np.int64))

    def kept(self, start: int | Numbers, stop: int | Numbers) -> Numbers:
        """Return the bytes that segments keep from forward to backward."""
        return np.asarray(self._input + self._own[stop] - self._own[start], dtype=np.int64)

    def ticks(self, start: int | Numbers, stop: int | Numbers) -> Numbers:
        """Return the time of segments."""
        last = np.asarray(stop) - 1
        return np.asarray(self._before_ticks[last] - self._before_ticks[start] + self._last_ticks[last], dtype=np.int64)

    def _all_needs(self, chain: Chain, own: Numbers, gradients: Numbers) -> Numbers:
        """Return `needs`.

        A moment at layer l of a segment from i needs `held[l] - held[i]` and something that depends on l alone, or on
        l and the stop: so the largest over l is a running maximum.
        """
        num_layers = len(chain.layers)
        needs = np.full((num_layers + 1, num_layers + 1), _NEVER, dtype=np.int64)
        if not any(end - start > 1 for start, end in enumerate(self.end)):
            return needs
        forward, replay, inner, last, held = self._terms(chain, own)
        inner = inner + gradients[1:]
        last = last + gradients[1:]
        for start, end in enumerate(self.end):
            if end - start < 2:
                continue
            span, but_last, but_first = slice(start, end), slice(start, end - 1), slice(start + 1, end)
            inputs = self._input + self._own[but_first] - self._own[start]
            forwards = np.maximum(np.maximum.accumulate(inputs + forward[but_first]), forward[start])
            before = held[span] - held[start]
            replays = np.maximum.accumulate(before[:-1] + replay[but_last] - self._own[but_first])
            replays = replays + self._own[start + 2 : end + 1] + gradients[start + 2 : end + 1]
            inners = np.maximum.accumulate(before[:-1] + inner[but_last])
            lasts = before[1:] + last[but_first]
            needs[start, start + 2 : end + 1] = np.maximum.reduce([forwards, replays, inners, lasts])
        return needs

    def _terms(self, chain: Chain, own: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        """Return, by layer: its forward, replay, backward, backward as the last one; and the sums of what it holds."""
        none = [layer.costs[NONE] for layer in chain.layers]
        full = [layer.costs.get(FULL, cost) for layer, cost in zip(chain.layers, none, strict=True)]
        forward, backward = np.array([(cost.forward_bytes, cost.backward_bytes) for cost in full]).T
        if self.nested:
            return forward + self._casts, self._input + forward, backward, backward, _sums(self._input + own)
        kept, run, inner = np.array([(cost.kept_bytes, cost.forward_bytes, cost.backward_bytes) for cost in none]).T
        inner = inner + own
        replay, last = self._input + run + own, np.maximum(backward, inner)
        return forward + self._casts, replay, inner, last, _sums(kept + own)


class BlockCosts:
    """All blocks of a chain.

    Args:
        chain: the chain.
        cast_bytes: what is allowed for casts: `forward` and `head` needs hold so much of them, or as much as there can
            be by then.

    Attributes:
        singles: by layer and option, its costs; those that another one beats in all respects are left out.
        segments: plain ones, and nested ones.
        head: bytes that the head needs, relative to what is there before it.
        is_first: by layer, whether it is the first one of its stack.
    """

    def __init__(self, chain: Chain, cast_bytes: int = 0) -> None:
        num_ticks = self.num_ticks = _ticks_of_a_second(chain)
        casts = [min(cast_bytes, most) for most in most_casts(chain)]
        gradients = gradients_at(chain)
        self.num_layers = len(chain.layers)
        self.head = max(chain.head_bytes + casts[-1], chain.head_backward_bytes)
        self.singles = tuple(
            {
                option: Single(
                    cost.kept_bytes,
                    max(cost.forward_bytes + casts[position], cost.backward_bytes + gradients[position + 1]),
                    round(cost.seconds * num_ticks),
                )
                for option, cost in layer.costs.items()
                if not _is_beaten(cost, layer.costs.values())
            }
            for position, layer in enumerate(chain.layers)
        )
        self.segments = tuple(SegmentCosts(chain, nested, num_ticks, casts[:-1]) for nested in (False, True))
        self.is_first = tuple(
            position == 0 or layer.stack != chain.layers[position - 1].stack
            for position, layer in enumerate(chain.layers)
        )


def _is_beaten(cost: Cost, others: Iterable[Cost]) -> bool:
    """Whether another option is faster and needs no more of anything: then no fastest plan has this one."""
    return any(
        other.seconds < cost.seconds
        and other.kept_bytes <= cost.kept_bytes
        and other.forward_bytes <= cost.forward_bytes
        and other.backward_bytes <= cost.backward_bytes
        and other.cast_bytes <= cost.cast_bytes
        for other in others
    )


def _runs(chain: Chain) -> tuple[list[int], list[int]]:
    """Return, by layer, where the run of layers that can join begins, and the position after its end."""
    first: list[int] = []
    for position, layer in enumerate(chain.layers):
        goes_on = position > 0 and joins(chain.layers[position - 1], layer)
        first.append(first[-1] if goes_on else position)
    end = {start: position + 1 for position, start in enumerate(first)}
    return first, [end[start] for start in first]


def most_casts(chain: Chain) -> list[int]:
    """Return the most that the casts of the first 0, 1, 2, ... layers can be."""
    most = (max(cost.cast_bytes for cost in layer.costs.values()) for layer in chain.layers)
    return list(itertools.accumulate(most, initial=0))


def _segment_ticks(chain: Chain, nested: bool, num_ticks: int) -> tuple[Numbers, Numbers]:
    """Return, by layer, its time as the last of a segment, and the sums of its time as another one."""
    last, before = [], []
    for layer in chain.layers:
        none = layer.costs[NONE]
        full = layer.costs.get(FULL, none)
        whole = round(whole_forward(layer) * num_ticks) if FULL in layer.costs else 0
        last.append(round(full.seconds * num_ticks))
        before.append(round((full if nested else none).seconds * num_ticks) + whole)
    return np.array(last, dtype=np.int64), _sums(before)


def _ticks_of_a_second(chain: Chain) -> int:
    """Return 10**12, or less where sums times the number of layers would not fit in 64 bits."""
    worst = sum(
        max([*(cost.seconds for cost in layer.costs.values()), layer.forward_seconds or 0.0]) for layer in chain.layers
    )
    num_ticks = 10**12
    while num_ticks > 1 and worst * 3 * num_ticks * (len(chain.layers) + 1) > 2**61:
        num_ticks //= 10
    return num_ticks


def _sums(values: list[int] | Numbers) -> Numbers:
    """Return the sums of the first 0, 1, 2, ... values."""
    return np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))]).astype(np.int64)
