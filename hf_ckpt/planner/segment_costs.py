"""The blocks of a chain in whole numbers: what each keeps, needs and takes, all segments at a time.

Same formulas as in `choices` (Note [Segments] there), summed up so that the segments that start, or end, at one layer
come out of a few array operations. Time is counted in ticks, so that sums are exact and ties are ties.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_ckpt.planner import peak_formulas
from hf_ckpt.planner.chain import FULL, NONE, Chain, Cost, rank
from hf_ckpt.policy.plan import LayerPlan

Numbers = NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max // 4
"""More bytes than there are: the need of what is not a segment."""


@dataclass(frozen=True, slots=True)
class Single:
    """One layer under one option.

    Args:
        option: the option.
        kept: bytes held from its forward to its backward.
        need: the most it needs at any moment, relative to what is there before its forward.
        ticks: time.
    """

    option: LayerPlan
    kept: int
    need: int
    ticks: int


class Segments:
    """All segments of a chain, plain or nested.

    Args:
        chain: the chain.
        nested: which kind.
        num_ticks: ticks of a second.
        casts: by layer, what is allowed for the casts of the layers before it.
    """

    def __init__(self, chain: Chain, nested: bool, num_ticks: int, casts: list[int]) -> None:
        self.nested = nested
        self.first, self.end = _runs(chain)
        own = [peak_formulas.own_bytes(chain, layer) for layer in chain.layers]
        self._own = _sums(own)
        self._input = chain.input_bytes
        self._last_ticks, self._before_ticks = _segment_ticks(chain, nested, num_ticks)
        self._casts = np.array(casts, dtype=np.int64)
        self._needs = self._all_needs(chain, own, np.array(peak_formulas.gradients_at(chain), dtype=np.int64))

    def needs_from(self, start: int) -> Numbers:
        """Return the need of the segments that start at a layer; indexed by their stop."""
        return np.asarray(self._needs[start], dtype=np.int64)

    def needs_to(self, stop: int) -> Numbers:
        """Return the need of the segments that stop before a position; indexed by their start."""
        return np.asarray(self._needs[:, stop], dtype=np.int64)

    def kept(self, start: int | Numbers, stop: int | Numbers) -> Numbers:
        """Return the bytes that segments hold from forward to backward."""
        return np.asarray(self._input + self._own[stop] - self._own[start], dtype=np.int64)

    def ticks(self, start: int | Numbers, stop: int | Numbers) -> Numbers:
        """Return the time of segments."""
        last = np.asarray(stop) - 1
        return np.asarray(self._before_ticks[last] - self._before_ticks[start] + self._last_ticks[last], dtype=np.int64)

    def _all_needs(self, chain: Chain, own: list[int], gradients: Numbers) -> Numbers:
        """Return the needs by start and stop.

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

    def _terms(self, chain: Chain, own: list[int]) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
        """Return, by layer: its forward, replay, backward, backward as the last one; and the sums of what it holds."""
        forward, replay, inner, last, held = [], [], [], [], []
        for layer, more in zip(chain.layers, own, strict=True):
            none = layer.costs[NONE]
            full = layer.costs.get(FULL, none)
            forward.append(full.forward_bytes)
            if self.nested:
                replay.append(chain.input_bytes + full.forward_bytes)
                inner.append(full.backward_bytes)
                last.append(full.backward_bytes)
                held.append(chain.input_bytes + more)
            else:
                replay.append(chain.input_bytes + none.forward_bytes + more)
                inner.append(none.backward_bytes + more)
                last.append(max(full.backward_bytes, none.backward_bytes + more))
                held.append(none.kept_bytes + more)
        lists = [np.array(values, dtype=np.int64) for values in (forward, replay, inner, last)]
        return lists[0] + self._casts, lists[1], lists[2], lists[3], _sums(held)


class Blocks:
    """All blocks of a chain.

    Args:
        chain: the chain.
        cast_bytes: what is allowed for casts: `forward` and `head` needs hold so much of them, or as much as there can
            be by then.

    Attributes:
        num_layers: layers of the chain.
        singles: by layer, its options; those that another one beats in all respects are left out.
        segments: plain ones, and nested ones.
        head: bytes that the head needs, relative to what is there before it.
        is_first: by layer, whether it is the first one of its stack.
    """

    def __init__(self, chain: Chain, cast_bytes: int = 0) -> None:
        num_ticks = _ticks_of_a_second(chain)
        casts = [min(cast_bytes, most) for most in _most_casts(chain)]
        gradients = peak_formulas.gradients_at(chain)
        self.num_layers = len(chain.layers)
        self.head = max(chain.head_bytes + casts[-1], chain.head_backward_bytes)
        self.singles = tuple(
            tuple(
                Single(
                    option,
                    cost.kept_bytes,
                    max(cost.forward_bytes + casts[position], cost.backward_bytes + gradients[position + 1]),
                    _ticks(cost.seconds, num_ticks),
                )
                for option, cost in sorted(layer.costs.items(), key=lambda item: rank(item[0]))
                if not _is_beaten(cost, layer.costs.values())
            )
            for position, layer in enumerate(chain.layers)
        )
        self.segments = tuple(Segments(chain, nested, num_ticks, casts[:-1]) for nested in (False, True))
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
        goes_on = position > 0 and peak_formulas.joins(chain.layers[position - 1], layer)
        first.append(first[-1] if goes_on else position)
    end = {start: position + 1 for position, start in enumerate(first)}
    return first, [end[start] for start in first]


def _most_casts(chain: Chain) -> list[int]:
    """Return the most that the casts of the first 0, 1, 2, ... layers can be."""
    most = (max(cost.cast_bytes for cost in layer.costs.values()) for layer in chain.layers)
    return list(itertools.accumulate(most, initial=0))


def _segment_ticks(chain: Chain, nested: bool, num_ticks: int) -> tuple[Numbers, Numbers]:
    """Return, by layer, its time as the last of a segment, and the sums of its time as another one."""
    last, before = [], []
    for layer in chain.layers:
        none = layer.costs[NONE]
        full = layer.costs.get(FULL, none)
        whole = _ticks(peak_formulas.whole_forward(layer), num_ticks) if FULL in layer.costs else 0
        last.append(_ticks(full.seconds, num_ticks))
        before.append(_ticks((full if nested else none).seconds, num_ticks) + whole)
    return np.array(last, dtype=np.int64), _sums(before)


def _ticks_of_a_second(chain: Chain) -> int:
    """Return 10**12, or less where sums times the number of layers would not fit in 64 bits."""
    worst = sum(max(part for part in _parts(chain, position)) for position in range(len(chain.layers)))
    num_ticks = 10**12
    while num_ticks > 1 and worst * 3 * num_ticks * (len(chain.layers) + 1) > 2**61:
        num_ticks //= 10
    return num_ticks


def _parts(chain: Chain, position: int) -> Iterator[float]:
    layer = chain.layers[position]
    yield from (cost.seconds for cost in layer.costs.values())
    yield layer.forward_seconds or 0.0


def _ticks(seconds: float, num_ticks: int) -> int:
    return round(seconds * num_ticks)


def _sums(values: list[int]) -> Numbers:
    """Return the sums of the first 0, 1, 2, ... values."""
    return np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))]).astype(np.int64)
