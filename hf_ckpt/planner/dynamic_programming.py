"""The fastest choice of modes for a budget: exact, for a whole chain of layers, for every budget at once.

Three steps: `BlockCosts` (in `peak_formulas`) turns the chain into blocks, `fronts_of` finds all ways worth having from
each layer on, `TieBreak` picks, of the plans that are fastest and then smallest, the one that reads best.

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

Note [Casts]. What autocast has cast takes room until the forward ends, and no longer: forward and backward see
different sums, and two sums have far more Pareto-optimal ways than one. So an amount is allowed for casts throughout
the forward, several amounts are tried, with those that choices turn out to have, and the best choice that fits counts.
A choice is only missed where a faster one with more casts than were allowed hides it, or where casts of later layers
would count in the forward of a layer that has the peak. Without casts there is one amount, and the choice is exact.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from hf_ckpt.errors import BudgetError
from hf_ckpt.planner import peak_formulas
from hf_ckpt.planner.chain import FULL, Chain, rank
from hf_ckpt.planner.peak_formulas import (
    Block,
    BlockCosts,
    Choice,
    Numbers,
    SegmentCosts,
    entries_from,
    predict,
)
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.units import format_bytes

_ALLOWANCES = 8
"""Parts of the most that casts can be, each of which is tried."""
_NEXT_BEST = 2
"""Choices that are tried with each."""


class _ParetoChoices:
    """All choices worth having, if casts take `cast_bytes` while the forward goes on. See Note [Casts].

    Attributes:
        peaks: of these choices, ascending, in bytes.
    """

    def __init__(self, chain: Chain, cast_bytes: int) -> None:
        self._chain = chain
        self._base = peak_formulas.base_bytes(chain)
        self._blocks = BlockCosts(chain, cast_bytes)
        self._fronts = fronts_of(self._blocks)
        # Peaks below the fixed one are no different from it, and the last of them is the fastest.
        peaks = np.maximum(self._fronts[0].num_bytes + self._base, chain.fixed_peak_bytes)
        is_last = np.append(peaks[1:] != peaks[:-1], True)
        self.peaks: Numbers = peaks[is_last]
        self._ticks: Numbers = self._fronts[0].ticks[is_last]

    def least_seconds(self, budget_bytes: int) -> float:
        """Return what no choice within the budget is faster than; infinite where none is within it."""
        place = int(np.searchsorted(self.peaks, budget_bytes, side="right")) - 1
        if place < 0:
            return math.inf
        # Times of layers are rounded to a tick.
        ticks = int(self._ticks[place]) - self._blocks.num_layers - 1
        return self._chain.other_seconds + ticks / self._blocks.num_ticks

    def choices(self, budget_bytes: int) -> Iterator[Choice]:
        """Yield the choices within a budget, the fastest and largest first."""
        for place in reversed(range(int(np.searchsorted(self.peaks, budget_bytes, side="right")))):
            blocks = TieBreak(self._blocks, self._fronts, int(self.peaks[place]) - self._base).best_blocks()
            yield predict(self._chain, entries_from(self._chain, blocks))


class ChainPlanner:
    """Finds the best choice for a chain, for one budget after the other."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._by_cast_bytes: dict[int, _ParetoChoices] = {}

    def choose(self, budget_bytes: int) -> Choice:
        """Return the fastest choice whose peak is within the budget.

        Of equally fast ones, the one with the smallest peak; of those, the one that reads best (see `TieBreak`).

        Raises:
            BudgetError: no choice is within the budget.
        """
        fitting = [choice for choice in self._found(budget_bytes) if choice.peak_bytes <= budget_bytes]
        if fitting:
            return min(fitting, key=lambda choice: (choice.seconds, choice.peak_bytes))
        smallest = self.smallest_peak
        if smallest.peak_bytes <= budget_bytes:
            return smallest
        raise BudgetError(
            f"No plan fits memory_budget={format_bytes(budget_bytes)}. Lowest predicted peak is "
            f"{format_bytes(smallest.peak_bytes)}, in the {smallest.where()}. Raise the budget, or shorten the "
            "sequence."
        )

    def may_fit(self, budget_bytes: float) -> bool:
        """Whether a choice may be within the budget: where casts take nothing, one is. Far quicker than to choose."""
        return bool(self._with(0).peaks[0] <= budget_bytes)

    def least_seconds(self, budget_bytes: int) -> float:
        """Return what no choice within the budget is faster than. Far quicker than to choose, and no choice itself."""
        return self._with(0).least_seconds(budget_bytes)

    @cached_property
    def smallest_peak(self) -> Choice:
        """The choice with the smallest peak, the fastest of those."""
        found = []
        allowances = self._allowances()
        for allowed in allowances:
            exact = self._with(allowed)
            choice = next(exact.choices(int(exact.peaks[0])))
            if choice.cast_bytes > allowed and choice.cast_bytes not in allowances:
                insort(allowances, choice.cast_bytes)
            found.append(choice)
        return min(found, key=lambda choice: (choice.peak_bytes, choice.seconds))

    def frontier(self, num_points: int | None = None) -> tuple[Choice, ...]:
        """Return the staircase of time against peak: for each budget, the last choice that is within it is the best.

        With `num_points`, so many at most, evenly over the peaks, the ends among them.
        """
        peaks = self.peaks
        if num_points is not None and len(peaks) > num_points:
            # The first peak at or above each of evenly spaced budgets: points crowd where the staircase is fine.
            budgets = np.linspace(peaks[0], peaks[-1], num_points)
            peaks = tuple(peaks[place] for place in sorted(set(np.searchsorted(peaks, budgets).tolist())))
        points: list[Choice] = []
        for choice in sorted(map(self.choose, peaks), key=lambda choice: (choice.peak_bytes, choice.seconds)):
            if not points or choice.seconds < points[-1].seconds:
                points.append(choice)
        return tuple(points)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """In bytes, of all choices worth having: no other one has less of peak and of time. Ascending.

        With casts, those between the smallest and the fastest that there would be without.
        """
        if len(self._allowances()) == 1:
            return self.peaks_without_casts
        smallest = self.smallest_peak.peak_bytes
        return (smallest, *(peak for peak in self.peaks_without_casts if peak > smallest))

    @cached_property
    def peaks_without_casts(self) -> tuple[int, ...]:
        """As if casts took nothing: those from the smallest of `peaks` on are the same. Far quicker."""
        return tuple(self._with(0).peaks.tolist())

    def _found(self, budget_bytes: int) -> Iterator[Choice]:
        """Yield choices for a budget, with more and more allowed for casts, until one is within it."""
        allowances = self._allowances()
        for allowed in allowances:
            found: list[Choice] = []
            for choice in islice(self._with(allowed).choices(budget_bytes), _NEXT_BEST):
                found.append(choice)
                if choice.peak_bytes <= budget_bytes:
                    break
            yield from found
            # With more for casts nothing is faster than the fastest here, and nothing fits where nothing does here.
            if not found or found[0].peak_bytes <= budget_bytes:
                return
            # More than was allowed, or else it would be within the budget.
            if found[0].cast_bytes not in allowances:
                insort(allowances, found[0].cast_bytes)

    def _allowances(self) -> list[int]:
        most = peak_formulas.most_casts(self.chain)[-1]
        return sorted({most * part // _ALLOWANCES for part in range(_ALLOWANCES + 1)})

    def _with(self, cast_bytes: int) -> _ParetoChoices:
        if cast_bytes not in self._by_cast_bytes:
            self._by_cast_bytes[cast_bytes] = _ParetoChoices(self.chain, cast_bytes)
        return self._by_cast_bytes[cast_bytes]


# --- All ways worth having. See Note [Demand]. ---

NO_TICKS = np.iinfo(np.int64).max // 4
"""More time than there is."""

_ROW = 64
"""Ways that one array operation covers."""


class Front(NamedTuple):
    """Pareto-optimal pairs: `num_bytes` ascends, `ticks` descends, both strictly."""

    num_bytes: Numbers
    ticks: Numbers

    def best(self, limits: Numbers | int) -> Numbers:
        """Return the least time within each limit in bytes, `NO_TICKS` where nothing is."""
        found = self.num_bytes.searchsorted(limits, side="right") - 1
        return np.where(found < 0, NO_TICKS, self.ticks[found])


_EMPTY = Front(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def front_of(num_bytes: Numbers, ticks: Numbers) -> Front:
    """Return the pairs that no other one equals or beats in both."""
    if len(ticks) < 2:
        return Front(num_bytes, ticks)
    # By bytes alone: they come in ascending runs, which a stable sort merges.
    order = num_bytes.argsort(kind="stable")
    num_bytes, ticks = num_bytes[order], ticks[order]
    is_better = np.ones(len(ticks), dtype=bool)
    is_better[1:] = ticks[1:] < np.minimum.accumulate(ticks)[:-1]
    num_bytes, ticks = num_bytes[is_better], ticks[is_better]
    # Of those that need as much the last is the fastest.
    is_last = np.ones(len(ticks), dtype=bool)
    is_last[:-1] = num_bytes[1:] != num_bytes[:-1]
    return Front(num_bytes[is_last], ticks[is_last])


def _merged(parts: Sequence[tuple[Numbers, Numbers]]) -> Front:
    """Return the front of pairs that come in several parts, of bytes and of ticks."""
    if not parts:
        return _EMPTY
    return front_of(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))


def fronts_of(blocks: BlockCosts) -> list[Front]:
    """Return, by position, demand and time of the ways to go on from there; the last entry is the end. Exact."""
    fronts = [Front(np.array([blocks.head]), np.array([0]))]
    ends = [_SegmentEnds(segments) for segments in blocks.segments]
    for position in reversed(range(blocks.num_layers)):
        front = _after_singles(blocks, position, fronts[-1])
        for end in ends:
            num_bytes, ticks = end.ways_from(position, front)
            if len(ticks):
                front = _merged([front, (num_bytes, ticks)])
        for end in ends:
            end.add(position + 1, fronts[-1])
        fronts.append(front)
    return fronts[::-1]


def _after_singles(blocks: BlockCosts, position: int, after: Front) -> Front:
    return _merged(
        [
            _worth_having(single.need, single.kept + after.num_bytes, after.ticks + single.ticks)
            for single in blocks.singles[position].values()
        ]
    )


def _worth_having(need: int, num_bytes: Numbers, ticks: Numbers) -> tuple[Numbers, Numbers]:
    """Return the demands of a front behind a block; of those that the block's own need covers, the fastest."""
    start = max(0, int(np.searchsorted(num_bytes, need, side="right")) - 1)
    return np.maximum(need, num_bytes[start:]), ticks[start:]


class _SegmentEnds:
    """The fronts that a segment of one kind may end at, in rows: most rows are skipped without a look at each way."""

    def __init__(self, segments: SegmentCosts) -> None:
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
        need = segments.needs[start][stops]
        kept, ticks = segments.kept(start, stops), segments.ticks(start, stops)
        # The corner of a row: less than its least demand and time no way in it can have.
        corner = np.maximum(need, kept + self._num_bytes[:, 0])
        rows = np.flatnonzero(ticks + self._ticks[:, -1] < front.best(corner))
        num_bytes = np.maximum(need[rows, None], kept[rows, None] + self._num_bytes[rows]).ravel()
        all_ticks = (ticks[rows, None] + self._ticks[rows]).ravel()
        is_better = all_ticks < front.best(num_bytes)
        return num_bytes[is_better], all_ticks[is_better]


# --- Of equally good plans, the one that reads best. ---

Label = LayerPlan | bool
"""What counts as one option: that of a single layer, or whether segments are nested."""


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
class _Way:
    """A way to a position: bytes it keeps, its cost, and the label of its last block where only one will do."""

    stop: int
    kept: int
    cost: int
    label: Label | None


class TieBreak:
    """Finds, of all plans that are fastest and need least memory, the one that reads best.

    That is the one with the fewest changes of option along each stack; of those, the one that keeps the least bytes on
    the way; of those, seen from the last layer, the one whose options come first in `rank`, so that recomputation lies
    in the first layers, with segments as long as the one behind. Layers in plain segments count as one option, in
    nested ones as another. Goes through the chain once more, along the optimal plans only.

    Args:
        blocks: the blocks of the chain.
        fronts: what `fronts_of` returns for them.
        limit: the most that a plan may demand, in bytes.
    """

    def __init__(self, blocks: BlockCosts, fronts: list[Front], limit: int) -> None:
        self._blocks = blocks
        self._fronts = fronts
        self._limit = limit
        self._ticks = int(fronts[0].best(limit))
        # A tick is more than all changes there can be.
        self._scale = blocks.num_layers + 1
        options = {option for singles in blocks.singles for option in singles}
        self._labels: list[Label] = [*sorted(options, key=rank), False, True]
        start = Front(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
        self._before = [_Before({}, start, dict.fromkeys(self._labels, start))]

    def best_blocks(self) -> list[Block]:
        """Return the blocks of the plan that reads best."""
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
        starts, kept, needs, costs = self._blocks_to(label, stop)
        befores = [self._before[start].continued[label] for start in starts]
        if not befores:
            return _EMPTY
        block = np.repeat(np.arange(len(starts)), [len(before.ticks) for before in befores])
        kept_before = np.concatenate([before.num_bytes for before in befores])
        cost = np.concatenate([before.ticks for before in befores]) + costs[block]
        num_bytes = kept_before + kept[block]
        # Those from which an optimal plan goes on.
        after = self._fronts[stop].best(self._limit - num_bytes)
        is_optimal = (kept_before + needs[block] <= self._limit) & (cost // self._scale + after <= self._ticks)
        return front_of(num_bytes[is_optimal], cost[is_optimal])

    def _blocks_to(self, label: Label, stop: int) -> tuple[range, Numbers, Numbers, Numbers]:
        """Return the starts of the blocks that end at a position, and the bytes kept, need and cost of each."""
        if isinstance(label, bool):
            segments = self._blocks.segments[label]
            starts = range(segments.first[stop - 1], stop - 1)
            at = np.arange(starts.start, starts.stop)
            return starts, segments.kept(at, stop), segments.needs[at, stop], segments.ticks(at, stop) * self._scale
        single = self._blocks.singles[stop - 1].get(label)
        if single is None:
            return range(0), _EMPTY.num_bytes, _EMPTY.num_bytes, _EMPTY.num_bytes
        figures = np.array([[single.kept], [single.need], [single.ticks * self._scale]])
        return range(stop - 1, stop), figures[0], figures[1], figures[2]

    def _read_back(self) -> list[Block]:
        at_end = self._before[-1].any
        way = _Way(self._blocks.num_layers, int(at_end.num_bytes[-1]), int(at_end.ticks[-1]), None)
        blocks: list[Block] = []
        while way.stop:
            block, way = next(self._last_blocks(way, blocks[-1] if blocks else None))
            blocks.append(block)
        return blocks[::-1]

    def _last_blocks(self, way: _Way, behind: Block | None) -> Iterator[tuple[Block, _Way]]:
        """Yield the blocks that a way may end with, the preferred one first, each with the way before it."""
        ending = self._before[way.stop].ending
        num_behind = 0 if behind is None else behind.stop - behind.start
        for label in self._labels if way.label is None else [way.label]:
            if label not in ending or not _has(ending[label], way.kept, way.cost):
                continue
            starts, *figures = self._blocks_to(label, way.stop)
            option, nested = (FULL, label) if isinstance(label, bool) else (label, False)
            found = zip(starts, *(each.tolist() for each in figures), strict=True)
            for start, kept, need, cost in sorted(found, key=lambda row: (way.stop - row[0] != num_behind, row[0])):
                before = way.kept - kept
                if before + need <= self._limit:
                    way_before = self._way_before(start, label, before, way.cost - cost)
                    if way_before is not None:
                        yield Block(start, way.stop, option, nested), way_before

    def _way_before(self, stop: int, label: Label, kept: int, cost: int) -> _Way | None:
        """Return the way before a block, if there is one that kept and cost so much, a change to the block counted."""
        before = self._before[stop]
        if stop == 0 or self._blocks.is_first[stop]:
            return _Way(stop, kept, cost, None) if _has(before.any, kept, cost) else None
        if label in before.ending and _has(before.ending[label], kept, cost):
            return _Way(stop, kept, cost, label)
        return _Way(stop, kept, cost - 1, None) if _has(before.any, kept, cost - 1) else None


def _has(front: Front, kept: int, cost: int) -> bool:
    place = int(np.searchsorted(front.num_bytes, kept))
    return place < len(front.ticks) and int(front.num_bytes[place]) == kept and int(front.ticks[place]) == cost
