"""The largest number that fits: of tokens in a row, of rows in a micro-batch. Found with few simulations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

OnTry = Callable[[int, int], None]
"""Gets each number that was tried, and its peak in bytes."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest number that fits."""

    number: int
    """0 where not even the smallest one fits."""
    peak_bytes: int
    """The peak with so many; of the smallest number, where not even that fits."""
    is_bound: bool = False
    """Whether it is the largest that was allowed, so that more memory would not raise it."""


def largest(
    peak: Callable[[int], int],
    budget_bytes: int,
    *,
    start: int,
    most: int,
    multiple: int = 1,
    on_try: OnTry | None = None,
) -> Limit:
    """Return the largest multiple of a number whose peak is within a budget.

    Memory grows nearly in proportion, so that the next guess lies on the line between the largest number that is known
    to fit and the smallest that is known not to; then right next to it, which mostly is the end; then in the middle of
    the two, so that no growth, however odd, takes many more guesses than bisection.

    Args:
        peak: bytes for a number; does not shrink as the number grows.
        budget_bytes: that the peak may reach.
        start: the number to begin with.
        most: the largest number to try; at least `multiple`.
        multiple: only multiples of it are tried.
        on_try: see `OnTry`.
    """
    low, low_peak, most = 0, 0, max(1, most // multiple)
    high, high_peak = most + 1, 0
    guess = min(max(1, start // multiple), most)
    ways = cycle(("line", "next", "middle"))
    while high - low > 1:
        found = peak(guess * multiple)
        if on_try is not None:
            on_try(guess * multiple, found)
        fits = found <= budget_bytes
        if fits:
            low, low_peak = guess, found
        else:
            high, high_peak = guess, found
        if high > most:
            guess = min(2 * low, most)
        elif not low:
            guess = max(1, high // 2)
        else:
            share = (budget_bytes - low_peak) / (high_peak - low_peak)
            guesses = {"line": low + int(share * (high - low)), "next": low + 1 if fits else high - 1}
            guess = min(max(guesses.get(next(ways), (low + high) // 2), low + 1), high - 1)
    return Limit(low * multiple, low_peak if low else high_peak, is_bound=low == most)
