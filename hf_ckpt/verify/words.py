"""Small phrases of verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHOWN = 3


def listed(values: Iterable[object]) -> str:
    """Return the first few values, and how many there are beyond."""
    shown = [str(value) for value in values]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + more


def numbered(indices: Sequence[int]) -> str:
    """Return "layer 3", "layers 0 to 3" or "layers 0, 2, 4 and 3 more"."""
    if len(indices) == 1:
        return f"layer {indices[0]}"
    is_range = list(indices) == list(range(indices[0], indices[-1] + 1))
    return f"layers {indices[0]} to {indices[-1]}" if is_range else f"layers {listed(indices)}"


def counted(number: int, noun: str) -> str:
    """Return "1 gradient" or "3 gradients"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
