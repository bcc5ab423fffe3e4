"""The largest integer with which a peak fits a budget, found with few simulations. Knows neither tokens nor rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain, cycle, repeat


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest number that fits."""

    number: int
    """0 where not even the smallest one fits."""
    needed_bytes: int
    """What so many need; the smallest number, where not even that fits."""
    is_bound: bool = False
    """Whether it is the largest that was allowed, so that more memory would not raise it."""


Ahead = Callable[[int], AbstractContextManager[None]]
"""Takes the number that is asked for next if what is asked for inside turns out as it mostly does."""


def largest(
    peak: Callable[[int], int],
    budget_bytes: int,
    *,
    start: int,
    most: int,
    multiple: int = 1,
    ahead: Ahead = lambda number: nullcontext(),
) -> Limit:
    """Return the largest multiple of a number whose peak is within a budget.

    Memory grows nearly in proportion, so that the next guess lies on the line through two numbers that are known: the
    largest that fits and the smallest that does not, or, where all known ones are on one side, the two that are nearest
    to the budget. The guess after it is right next to that, which mostly is the end, and then one far from both, in the
    middle, twice or half as large, so that no growth, however odd, takes many more guesses than bisection.

    Args:
        peak: bytes for a number; does not shrink as the number grows.
        budget_bytes: that the peak may reach.
        start: the number to begin with.
        most: the largest number to try; at least `multiple`.
        multiple: only multiples of it are tried.
        ahead: entered around each question.
    """
    low, low_peak, most = 0, 0, max(1, most // multiple)
    high, high_peak = most + 1, 0
    guess = min(max(1, start // multiple), most)
    known: list[tuple[int, int]] = []
    outside, between = chain(("far", "line", "next"), repeat("far")), cycle(("line", "next", "far"))
    with ExitStack() as entered:
        likely = 0
        while high - low > 1:
            if guess != likely:
                entered.close()
                # What a run has fits; and what lies on a line mostly does not, as torch holds blocks beyond the peak.
                likely = guess - 1 if known else min(2 * guess, most)
                if low < likely < high and likely != guess:
                    entered.enter_context(ahead(likely * multiple))
            found = peak(guess * multiple)
            if fits := found <= budget_bytes:
                low, low_peak = guess, found
            else:
                high, high_peak = guess, found
            known.append((guess, found))
            is_between = bool(low) and high <= most
            way = next(between if is_between else outside)
            if way == "next":
                guess = low + 1 if fits else high - 1
            elif way == "line":
                guess = _on_line([(low, low_peak), (high, high_peak)] if is_between else known[-2:], budget_bytes)
            else:
                guess = (low + high) // 2 if is_between else 2 * low or high // 2
            guess = min(max(guess, low + 1), high - 1)
    return Limit(low * multiple, low_peak if low else high_peak, is_bound=low == most)


def _on_line(known: list[tuple[int, int]], budget_bytes: int) -> int:
    """Return the largest number that fits if the peak grows as between two numbers, each given with its own."""
    (number, peak), (other, other_peak) = known
    if peak == other_peak:
        return (number + other) // 2
    return int(number + (budget_bytes - peak) * (other - number) // (other_peak - peak))
