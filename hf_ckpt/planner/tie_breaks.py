"""Of all plans that are fastest and need least memory, the one that reads best.

That is the one with the fewest changes of option along each stack; of those, the one that keeps the least bytes on the
way; of those, seen from the last layer, the one whose options come first in `rank`, so that recomputation lies in
the first layers, with segments as long as the one behind. Layers in plain segments count as one option, in nested ones
as another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hf_ckpt.planner.chain import FULL, rank
from hf_ckpt.planner.frontier import Front, front_of
from hf_ckpt.planner.peak_formulas import Block
from hf_ckpt.planner.segment_costs import Blocks, Numbers, Segments, Single
from hf_ckpt.policy.plan import LayerPlan

Label = LayerPlan | bool
"""What counts as one option: that of a single layer, or whether segments are nested."""

_EMPTY = Front(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class _Before:
    """The ways to get to a position, as pairs of bytes kept and cost (ticks and changes in one number).

    Args:
        ending: by the label of the last block.
        any: with any label.
        continued: by the label of the block that comes next, its change counted.
    """

    ending: dict[Label, Front]
    any: Front
    continued: dict[Label, Front]


@dataclass(frozen=True, slots=True)
class _State:
    """A way to a position: bytes it keeps, its cost, and the label of its last block where only one will do."""

    stop: int
    kept: int
    cost: int
    label: Label | None


class TieBreak:
    """Goes through the chain once more, along the optimal plans only.

    Args:
        blocks: the blocks of the chain.
        fronts: what `fronts_of` returns for them.
        limit: the most that a plan may demand, in bytes.
    """

    def __init__(self, blocks: Blocks, fronts: list[Front], limit: int) -> None:
        self._blocks = blocks
        self._fronts = fronts
        self._limit = limit
        self._ticks = int(fronts[0].best(limit))
        # A tick is more than all changes there can be.
        self._scale = blocks.num_layers + 1
        options = {single.option for singles in blocks.singles for single in singles}
        self._labels: list[Label] = [*sorted(options, key=rank), False, True]
        self._before: list[_Before] = []

    def best_blocks(self) -> list[Block]:
        """Return the blocks of the plan that reads best."""
        start = Front(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self._before = [_Before({}, start, {})]
        self._before[0].continued.update((label, start) for label in self._labels)
        for stop in range(1, self._blocks.num_layers + 1):
            self._before.append(self._ways_to(stop))
        return self._read_back()

    def _ways_to(self, stop: int) -> _Before:
        ending = {label: front for label in self._labels if len((front := self._ending(label, stop)).ticks)}
        anyhow = _merged(list(ending.values()))
        is_new = stop < self._blocks.num_layers and self._blocks.is_first[stop]
        changed = anyhow if is_new else Front(anyhow.num_bytes, anyhow.ticks + 1)
        continued = {
            label: _merged([changed, ending[label]]) if label in ending and not is_new else changed
            for label in self._labels
        }
        return _Before(ending, anyhow, continued)

    def _ending(self, label: Label, stop: int) -> Front:
        """Return the ways to a position whose last block has this label."""
        if isinstance(label, bool):
            return self._ending_in_segment(self._blocks.segments[label], stop)
        single = self._single(label, stop)
        before = self._before[stop - 1].continued[label]
        if single is None:
            return _EMPTY
        fits = before.num_bytes + single.need <= self._limit
        cost = before.ticks[fits] + single.ticks * self._scale
        return self._optimal(stop, before.num_bytes[fits] + single.kept, cost)

    def _ending_in_segment(self, segments: Segments, stop: int) -> Front:
        starts = range(segments.first[stop - 1], stop - 1)
        befores = [self._before[start].continued[segments.nested] for start in starts]
        if not befores:
            return _EMPTY
        kept = np.concatenate([before.num_bytes for before in befores])
        cost = np.concatenate([before.ticks for before in befores])
        begin = np.repeat(np.array(starts, dtype=np.int64), [len(before.ticks) for before in befores])
        fits = kept + segments.needs_to(stop)[begin] <= self._limit
        kept, cost, begin = kept[fits], cost[fits], begin[fits]
        return self._optimal(stop, kept + segments.kept(begin, stop), cost + segments.ticks(begin, stop) * self._scale)

    def _optimal(self, stop: int, kept: Numbers, cost: Numbers) -> Front:
        """Keep those from which an optimal plan goes on."""
        after = self._fronts[stop].best(self._limit - kept)
        is_optimal = cost // self._scale + after <= self._ticks
        return front_of(kept[is_optimal], cost[is_optimal])

    def _read_back(self) -> list[Block]:
        at_end = self._before[-1].any
        state = _State(self._blocks.num_layers, int(at_end.num_bytes[-1]), int(at_end.ticks[-1]), None)
        blocks: list[Block] = []
        while state.stop:
            block, state = next(self._last_blocks(state, blocks[-1] if blocks else None))
            blocks.append(block)
        return blocks[::-1]

    def _last_blocks(self, state: _State, behind: Block | None) -> Iterator[tuple[Block, _State]]:
        """Yield the blocks that a way may end with, the preferred one first, each with the way before it."""
        ending = self._before[state.stop].ending
        labels = self._labels if state.label is None else [state.label]
        for label in labels:
            if label not in ending or not _has(ending[label], state.kept, state.cost):
                continue
            for block, kept, need, ticks in self._blocks_to(label, state.stop, behind):
                before = state.kept - kept
                if before + need <= self._limit:
                    found = self._state_before(block.start, label, before, state.cost - ticks * self._scale)
                    if found is not None:
                        yield block, found

    def _blocks_to(self, label: Label, stop: int, behind: Block | None) -> Iterator[tuple[Block, int, int, int]]:
        """Yield the blocks that end at a position, the preferred one first, with bytes kept, need and ticks."""
        if not isinstance(label, bool):
            single = self._single(label, stop)
            if single is not None:
                yield Block(stop - 1, stop, label), single.kept, single.need, single.ticks
            return
        segments = self._blocks.segments[label]
        num_behind = 0 if behind is None else behind.stop - behind.start
        for start in sorted(range(segments.first[stop - 1], stop - 1), key=lambda at: (stop - at != num_behind, at)):
            need = int(segments.needs_to(stop)[start])
            kept, ticks = int(segments.kept(start, stop)), int(segments.ticks(start, stop))
            yield Block(start, stop, FULL, label), kept, need, ticks

    def _state_before(self, stop: int, label: Label, kept: int, cost: int) -> _State | None:
        """Return the way before a block, if there is one that kept and cost so much, a change to the block counted."""
        before = self._before[stop]
        if stop == 0 or self._blocks.is_first[stop]:
            return _State(stop, kept, cost, None) if _has(before.any, kept, cost) else None
        if label in before.ending and _has(before.ending[label], kept, cost):
            return _State(stop, kept, cost, label)
        return _State(stop, kept, cost - 1, None) if _has(before.any, kept, cost - 1) else None

    def _single(self, option: LayerPlan, stop: int) -> Single | None:
        return next((single for single in self._blocks.singles[stop - 1] if single.option == option), None)


def _merged(fronts: list[Front]) -> Front:
    if not fronts:
        return _EMPTY
    return front_of(np.concatenate([f.num_bytes for f in fronts]), np.concatenate([f.ticks for f in fronts]))


def _has(front: Front, kept: int, cost: int) -> bool:
    place = int(np.searchsorted(front.num_bytes, kept))
    return place < len(front.ticks) and int(front.num_bytes[place]) == kept and int(front.ticks[place]) == cost
