"""Peak against time: for every layer of a chain, all the ways to go on from it that are worth having.

Note [Demand]. Take the layers from a position on, with a choice for each. How much memory they ask for depends on the
layers before in one way only: by the bytes that those keep, which come on top at every moment. So the rest of the
chain has a demand, the peak less what is kept before it, and

    demand = max(need of the first block, bytes it keeps + demand of the blocks after it)

grows with the demand of the blocks after it. Of two ways to go on, one with no less demand and no less time is
therefore never needed, whatever comes before: the Pareto-optimal ways from each position are enough to find the best
plan for every budget, and the ways from position 0 are the exact staircase of time against peak. There are few of
them, some thousand for a hundred layers that all differ, because a block's own need covers many demands behind it.

Herrmann et al. 2019, "Optimal checkpointing for heterogeneous chains" (arXiv 1911.13214), solve chains that are
recomputed to any depth by dynamic programming over memory in slots of a fixed size; demands need no slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_ckpt.planner.segment_costs import Blocks, Numbers, Segments

NO_TICKS = np.iinfo(np.int64).max // 4
"""More time than there is."""

_ROW = 64
"""Ways that are looked at together."""


@dataclass(frozen=True, slots=True)
class Front:
    """Pareto-optimal pairs: `num_bytes` ascends, `ticks` descends, both strictly."""

    num_bytes: Numbers
    ticks: Numbers

    def best(self, limits: Numbers | int) -> Numbers:
        """Return the least time within each limit in bytes, `NO_TICKS` where nothing is."""
        found = np.searchsorted(self.num_bytes, limits, side="right") - 1
        return np.where(found < 0, NO_TICKS, self.ticks[found])


def front_of(num_bytes: Numbers, ticks: Numbers) -> Front:
    """Return the pairs that no other one equals or beats in both."""
    order = np.lexsort((ticks, num_bytes))
    num_bytes, ticks = num_bytes[order], ticks[order]
    is_better = np.ones(len(ticks), dtype=bool)
    is_better[1:] = ticks[1:] < np.minimum.accumulate(ticks)[:-1]
    return Front(num_bytes[is_better], ticks[is_better])


def fronts_of(blocks: Blocks) -> list[Front]:
    """Return, by position, demand and time of the ways to go on from there; the last entry is the end. Exact."""
    fronts = [Front(np.array([blocks.head]), np.array([0]))]
    ends = [_Ends(segments) for segments in blocks.segments]
    for position in reversed(range(blocks.num_layers)):
        front = _after_singles(blocks, position, fronts[-1])
        for end in ends:
            num_bytes, ticks = end.ways_from(position, front)
            if len(ticks):
                front = front_of(np.concatenate([front.num_bytes, num_bytes]), np.concatenate([front.ticks, ticks]))
        for end in ends:
            end.add(position + 1, fronts[-1])
        fronts.append(front)
    return fronts[::-1]


def _after_singles(blocks: Blocks, position: int, after: Front) -> Front:
    pairs = [
        _worth_having(single.need, single.kept + after.num_bytes, after.ticks + single.ticks)
        for single in blocks.singles[position]
    ]
    return front_of(np.concatenate([pair[0] for pair in pairs]), np.concatenate([pair[1] for pair in pairs]))


def _worth_having(need: int, num_bytes: Numbers, ticks: Numbers) -> tuple[Numbers, Numbers]:
    """Return the demands of a front behind a block; of those that the block's own need covers, the fastest."""
    start = max(0, int(np.searchsorted(num_bytes, need, side="right")) - 1)
    return np.maximum(need, num_bytes[start:]), ticks[start:]


class _Ends:
    """The fronts that a segment may end at, in rows, so that most are passed over without a look at each way.

    Args:
        segments: one kind of segments.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._stops = np.zeros(0, dtype=np.int64)
        self._num_bytes = np.zeros((0, _ROW), dtype=np.int64)
        self._ticks = np.zeros((0, _ROW), dtype=np.int64)

    def add(self, stop: int, front: Front) -> None:
        """Let segments end before `stop`, with `front` after it. Goes from the last layer to the first."""
        num_rows = -(-len(front.ticks) // _ROW)
        pad = (0, num_rows * _ROW - len(front.ticks))
        self._stops = np.concatenate([self._stops, np.full(num_rows, stop)])
        self._num_bytes = np.concatenate([self._num_bytes, np.pad(front.num_bytes, pad, "edge").reshape(-1, _ROW)])
        self._ticks = np.concatenate([self._ticks, np.pad(front.ticks, pad, "edge").reshape(-1, _ROW)])

    def ways_from(self, start: int, front: Front) -> tuple[Numbers, Numbers]:
        """Return demand and time of the ways with a segment from `start` that improve on `front`, and some more."""
        stops, segments = self._stops, self._segments
        need = segments.needs_from(start)[stops]
        kept, ticks = segments.kept(start, stops), segments.ticks(start, stops)
        # The corner of a row: less than its least demand and time no way in it can have.
        corner = np.maximum(need, kept + self._num_bytes[:, 0])
        rows = np.flatnonzero(ticks + self._ticks[:, -1] < front.best(corner))
        num_bytes = np.maximum(need[rows, None], kept[rows, None] + self._num_bytes[rows]).ravel()
        all_ticks = (ticks[rows, None] + self._ticks[rows]).ravel()
        is_better = all_ticks < front.best(num_bytes)
        return num_bytes[is_better], all_ticks[is_better]
