"""What a choice of options for the layers of a chain amounts to: its peak, where that lies, its time, and its plan.

The formulas stand here once, moment by moment; `segment_costs` has them again for all segments at a time, and a test
holds the two together. Nothing here chooses.

Note [Moments of a step]. Bytes are relative to what is allocated just before the block's forward; a block is one
layer, or the layers of a segment. `kept` is the sum over the blocks before it.

- forward of a block: base + kept + the casts of the blocks before + the block's forward bytes;
- head: base + kept and casts of all + head bytes; base + kept of all + the bytes of the head's backward;
- backward of a block: base + kept + the block's backward bytes + the gradients that are there by then. Those are the
  head's and the later layers' in the first of the micro-batches. They stay, so every later micro-batch starts with all
  of them and adds none: with more than one micro-batch all gradients count in base, at every moment. The first
  micro-batch needs no more than the others then, and need not be looked at. A layer's backward bytes hold its own
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
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hf_ckpt.planner.chain import FULL, NONE, Chain, ChainLayer
from hf_ckpt.policy.plan import LayerPlan, Plan


class Moment(StrEnum):
    """The part of a step that a peak can lie in."""

    FORWARD = "forward"
    HEAD = "logits and loss"
    BACKWARD = "backward"
    FIXED = "optimizer"
    """Or another moment that no choice changes."""


@dataclass(frozen=True, slots=True)
class Block:
    """One layer, or the layers of one segment.

    Args:
        start: position of the first layer in the chain.
        stop: position after the last layer.
        option: of its layers; `FULL` for a segment.
        nested: whether the layers of a segment are checkpointed again.
    """

    start: int
    stop: int
    option: LayerPlan
    nested: bool = False

    @property
    def is_segment(self) -> bool:
        """Whether several layers share one saved input."""
        return self.stop - self.start > 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One entry per layer of a chain, and what that amounts to.

    Args:
        entries: what each layer does, in the order of the chain.
        peak_bytes: the predicted peak of the step.
        seconds: the predicted time of the step.
        cast_bytes: of the casts that are there at the end of the forward.
        moment: the part of the step that has the peak.
        position: the layer that has the peak, counted in the chain; None outside the layers.
        layer_idx: the same layer, counted in its stack.
        host_bytes: what waits on the host at the end of the forward.
    """

    entries: tuple[LayerPlan, ...]
    peak_bytes: int
    seconds: float
    cast_bytes: int
    moment: Moment
    position: int | None = None
    layer_idx: int | None = None
    host_bytes: int = 0

    def where(self) -> str:
        """Return where the peak lies, in words, such as `backward of layer 3`."""
        return str(self.moment) if self.layer_idx is None else f"{self.moment} of layer {self.layer_idx}"


def predict(chain: Chain, entries: Sequence[LayerPlan]) -> Choice:
    """Return the peak and the time of a step under these entries. See Note [Moments of a step].

    Args:
        chain: the step.
        entries: one for each layer of the chain; the layers' costs have their options.
    """
    moments = list(_moments(chain, entries))
    peak, moment, position = max(moments, key=lambda found: found[0])
    blocks = blocks_of(chain, entries)
    seconds = [part for block in blocks for part in _seconds(chain, block)]
    casts = sum(_casts(chain, block) for block in blocks)
    layer_idx = None if position is None else chain.layers[position].layer_idx
    total = math.fsum([chain.other_seconds, *seconds])
    host = sum(chain.layers[block.start].costs[block.option].host_bytes for block in blocks)
    return Choice(tuple(entries), peak, total, casts, moment, position, layer_idx, host)


def to_plan(choice: Choice, chain: Chain, template: Plan) -> Plan:
    """Return the choice as a plan.

    Args:
        choice: the choice.
        chain: the chain that it was made for.
        template: any plan of the same model; its stacks are kept. Layers outside the chain do nothing.
    """
    chosen = {(layer.stack, layer.layer_idx): entry for layer, entry in zip(chain.layers, choice.entries, strict=True)}
    stacks = tuple(
        replace(stack, layers=tuple(chosen.get((number, idx), LayerPlan()) for idx in range(len(stack.layers))))
        for number, stack in enumerate(template.stacks)
    )
    return replace(template, stacks=stacks, head=chain.head)


def entries_of(chain: Chain, plan: Plan) -> tuple[LayerPlan, ...]:
    """Return what a plan does with each layer of a chain, for `predict`."""
    return tuple(plan.stacks[layer.stack].layers[layer.layer_idx] for layer in chain.layers)


def entries_from(chain: Chain, blocks: Sequence[Block]) -> tuple[LayerPlan, ...]:
    """Return the entries of blocks that cover the chain, in order; a segment has its first layer's number."""
    entries: list[LayerPlan] = []
    for block in blocks:
        segment = chain.layers[block.start].layer_idx if block.is_segment else None
        entries += [replace(block.option, segment=segment, nested=block.nested)] * (block.stop - block.start)
    return tuple(entries)


def blocks_of(chain: Chain, entries: Sequence[LayerPlan]) -> tuple[Block, ...]:
    """Return the blocks that entries make of a chain. A segment of one layer is that layer under `FULL`."""
    blocks: list[Block] = []
    for position, entry in enumerate(entries):
        stack = chain.layers[position].stack
        before = entries[position - 1] if position and chain.layers[position - 1].stack == stack else LayerPlan()
        if entry.segment is not None and (before.segment, before.nested) == (entry.segment, entry.nested):
            blocks[-1] = replace(blocks[-1], stop=position + 1, nested=entry.nested)
        else:
            blocks.append(Block(position, position + 1, entry.alone))
    return tuple(blocks)


def joins(before: ChainLayer, layer: ChainLayer) -> bool:
    """Return whether `layer` may share a segment with the layer that runs before it."""
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
    gradients = [0 if chain.num_micro_batches > 1 else chain.head_left_bytes]
    for layer in reversed(chain.layers):
        gradients.append(gradients[-1] + (0 if chain.num_micro_batches > 1 else left_bytes(layer)))
    return gradients[::-1]


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


def _moments(chain: Chain, entries: Sequence[LayerPlan]) -> Iterator[_Found]:
    """Yield the bytes at each moment of the step, in the order of time."""
    base, gradients = base_bytes(chain), gradients_at(chain)
    kept, casts, backwards = base, 0, []
    for block in blocks_of(chain, entries):
        for relative, position in _forward(chain, block):
            yield kept + casts + relative, Moment.FORWARD, position
        backwards.append((kept, block))
        kept += _kept(chain, block)
        casts += _casts(chain, block)
    yield kept + max(casts + chain.head_bytes, chain.head_backward_bytes), Moment.HEAD, None
    for kept_before, block in reversed(backwards):
        for relative, position in _backward(chain, block, gradients):
            yield kept_before + relative, Moment.BACKWARD, position
    yield chain.fixed_peak_bytes, Moment.FIXED, None


def _kept(chain: Chain, block: Block) -> int:
    if not block.is_segment:
        return chain.layers[block.start].costs[block.option].kept_bytes
    return chain.input_bytes + sum(own_bytes(chain, layer) for layer in chain.layers[block.start : block.stop])


def _casts(chain: Chain, block: Block) -> int:
    return sum(layer.costs[block.option].cast_bytes for layer in chain.layers[block.start : block.stop])


def _forward(chain: Chain, block: Block) -> Iterator[tuple[int, int]]:
    """Yield the most that each layer of a block needs in its forward, and its position."""
    before = 0
    for position in range(block.start, block.stop):
        layer = chain.layers[position]
        own_input = chain.input_bytes if position > block.start else 0
        yield before + own_input + layer.costs[block.option].forward_bytes, position
        before += own_bytes(chain, layer) + layer.costs[block.option].cast_bytes


def _backward(chain: Chain, block: Block, gradients: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the most that each layer of a block needs in the block's replay and backward, and its position."""
    if not block.is_segment:
        cost = chain.layers[block.start].costs[block.option]
        yield cost.backward_bytes + gradients[block.stop], block.start
        return
    layers = list(chain.layers[block.start : block.stop])
    own = [own_bytes(chain, layer) for layer in layers]
    held = [
        chain.input_bytes + more if block.nested else layer.costs[NONE].kept_bytes + more
        for layer, more in zip(layers, own, strict=True)
    ]
    for number, layer in enumerate(layers[:-1]):
        run = layer.costs[FULL].forward_bytes
        if not block.nested:
            run = layer.costs[NONE].forward_bytes + own[number]
        around = chain.input_bytes + sum(own[number + 1 :]) + gradients[block.stop]
        yield sum(held[:number]) + run + around, block.start + number
    for number, layer in reversed(list(enumerate(layers))):
        run = layer.costs[FULL].backward_bytes
        if not block.nested:
            kept_all = layer.costs[NONE].backward_bytes + own[number]
            run = kept_all if number < len(layers) - 1 else max(run, kept_all)
        position = block.start + number
        yield sum(held[:number]) + run + gradients[position + 1], position


def _seconds(chain: Chain, block: Block) -> Iterator[float]:
    layers = chain.layers[block.start : block.stop]
    for layer in layers[:-1]:
        yield layer.costs[FULL if block.nested else NONE].seconds
        yield whole_forward(layer)
    yield layers[-1].costs[block.option].seconds
