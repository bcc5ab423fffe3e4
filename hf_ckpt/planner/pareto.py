"""The fastest choice of modes for a budget: exact, for a whole chain of layers, for every budget at once.

Three steps, one file each. `segment_costs` turns the chain into blocks, `frontier` finds all ways worth having from
each layer on, `tie_breaks` picks, of the plans that are fastest and then smallest, the one that reads best.

Note [Casts]. What autocast has cast takes room until the forward ends, and no longer: forward and backward see
different sums, and two sums have far more Pareto-optimal ways than one. So an amount is allowed for casts throughout
the forward, several amounts are tried, with those that choices turn out to have, and the best choice that fits counts.
A choice is only missed where a faster one with more casts than were allowed hides it, or where casts of later layers
would count in the forward of a layer that has the peak. Without casts there is one amount, and the choice is exact.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from hf_ckpt.errors import BudgetError
from hf_ckpt.planner import peak_formulas
from hf_ckpt.planner.chain import Chain
from hf_ckpt.planner.frontier import fronts_of
from hf_ckpt.planner.peak_formulas import Choice, entries_from, predict
from hf_ckpt.planner.segment_costs import Blocks, Numbers
from hf_ckpt.planner.tie_breaks import TieBreak
from hf_ckpt.units import format_bytes

_ALLOWANCES = 8
"""Parts of the most that casts can be, each of which is tried."""
_NEXT_BEST = 2
"""Choices that are looked at with each."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One step of the staircase of time against peak.

    Args:
        budget_bytes: the least budget that this choice is the best one for.
        peak_bytes: its predicted peak.
        seconds: its predicted time.
        choice: the choice.
    """

    budget_bytes: int
    peak_bytes: int
    seconds: float
    choice: Choice


class _Exact:
    """All choices worth having, if casts take so much while the forward goes on.

    Args:
        chain: the training step.
        cast_bytes: what is allowed for casts.

    Attributes:
        peaks: of these choices, ascending, in bytes.
    """

    def __init__(self, chain: Chain, cast_bytes: int) -> None:
        self._chain = chain
        self._base = peak_formulas.base_bytes(chain)
        self._blocks = Blocks(chain, cast_bytes)
        self._fronts = fronts_of(self._blocks)
        # Peaks below the fixed one are no different from it, and the last of them is the fastest.
        peaks = np.maximum(self._fronts[0].num_bytes + self._base, chain.fixed_peak_bytes)
        self.peaks: Numbers = peaks[np.append(peaks[1:] != peaks[:-1], True)]

    def choices(self, budget_bytes: int) -> Iterator[Choice]:
        """Yield the choices within a budget, the fastest and largest first."""
        for place in reversed(range(int(np.searchsorted(self.peaks, budget_bytes, side="right")))):
            blocks = TieBreak(self._blocks, self._fronts, int(self.peaks[place]) - self._base).best_blocks()
            yield predict(self._chain, entries_from(self._chain, blocks))


class Planner:
    """Finds the best choice for a chain, for as many budgets as are asked for. See Note [Casts].

    Args:
        chain: the training step.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._allowing: dict[int, _Exact] = {}

    def choose(self, budget_bytes: int) -> Choice:
        """Return the fastest choice whose peak is within the budget.

        Of equally fast ones, the one with the smallest peak; of those, the one that reads best (see `tie_breaks`).

        Args:
            budget_bytes: device memory that the whole step may use.

        Raises:
            BudgetError: no choice is within the budget.
        """
        fitting = [choice for choice in self._found(budget_bytes) if choice.peak_bytes <= budget_bytes]
        if fitting:
            return min(fitting, key=lambda choice: (choice.seconds, choice.peak_bytes))
        smallest = self.smallest_peak()
        if smallest.peak_bytes <= budget_bytes:
            return smallest
        raise BudgetError(
            f"No plan fits memory_budget={format_bytes(budget_bytes)}. Lowest predicted peak is "
            f"{format_bytes(smallest.peak_bytes)}, in the {smallest.where()}. Raise the budget, or shorten the "
            "sequence."
        )

    def smallest_peak(self) -> Choice:
        """Return the choice with the smallest peak, the fastest of those."""
        found = []
        allowances = self._allowances()
        for allowed in allowances:
            exact = self._with(allowed)
            choice = next(exact.choices(int(exact.peaks[0])))
            if choice.cast_bytes > allowed and choice.cast_bytes not in allowances:
                insort(allowances, choice.cast_bytes)
            found.append(choice)
        return min(found, key=lambda choice: (choice.peak_bytes, choice.seconds))

    def frontier(self, num_points: int | None = None) -> tuple[FrontierPoint, ...]:
        """Return the staircase of time against peak: for each budget, the last point that is within it is the best.

        Args:
            num_points: so many points at most, evenly over the peaks, the ends among them; all of them if left out.
        """
        peaks = self.peaks
        if num_points is not None and len(peaks) > num_points:
            # The first peak at or above each of evenly spaced budgets: points crowd where the staircase is fine.
            budgets = np.linspace(peaks[0], peaks[-1], num_points)
            peaks = tuple(peaks[place] for place in sorted(set(np.searchsorted(peaks, budgets).tolist())))
        points: list[FrontierPoint] = []
        for choice in sorted(map(self.choose, peaks), key=lambda choice: (choice.peak_bytes, choice.seconds)):
            if not points or choice.seconds < points[-1].seconds:
                points.append(FrontierPoint(choice.peak_bytes, choice.peak_bytes, choice.seconds, choice))
        return tuple(points)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """In bytes, of all choices worth having: no other one has less of peak and of time. Ascending.

        With casts, those between the smallest and the fastest that there would be without.
        """
        peaks = self._with(0).peaks.tolist()
        if not self._has_casts:
            return tuple(peaks)
        smallest = self.smallest_peak().peak_bytes
        return (smallest, *(peak for peak in peaks if peak > smallest))

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
        most = sum(max(cost.cast_bytes for cost in layer.costs.values()) for layer in self.chain.layers)
        return sorted({most * part // _ALLOWANCES for part in range(_ALLOWANCES + 1)})

    def _with(self, cast_bytes: int) -> _Exact:
        if cast_bytes not in self._allowing:
            self._allowing[cast_bytes] = _Exact(self.chain, cast_bytes)
        return self._allowing[cast_bytes]

    @property
    def _has_casts(self) -> bool:
        return any(cost.cast_bytes for layer in self.chain.layers for cost in layer.costs.values())


def choose(chain: Chain, budget_bytes: int) -> Choice:
    """Return the fastest choice within a budget; for several budgets of one chain make a `Planner`.

    Raises:
        BudgetError: no choice is within the budget.
    """
    return Planner(chain).choose(budget_bytes)


def smallest_peak(chain: Chain) -> Choice:
    """Return the choice with the smallest peak, the fastest of those."""
    return Planner(chain).smallest_peak()


def frontier(chain: Chain, num_points: int | None = None) -> tuple[FrontierPoint, ...]:
    """Return the staircase of time against peak. See `Planner.frontier`."""
    return Planner(chain).frontier(num_points)
