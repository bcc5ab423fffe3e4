"""Peaks over row lengths and micro-batches, without checkpointing and under the recipe's plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hf_ckpt.estimate.estimate import RECIPE, Fit, Say, fit_of
from hf_ckpt.estimate.limits import with_length, with_rows
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.tables import columns
from hf_ckpt.policy.plan import Plan
from hf_ckpt.units import format_bytes

_MARKS = {Fit.YES: "", Fit.PERHAPS: " ?", Fit.NO: " x"}
_SHORTER, _LONGER, _MOST_ROWS = 2, 2, 4


@dataclass(frozen=True)
class Grid:
    """Peaks of one plan.

    Args:
        name: of the plan.
        lengths: tokens of a row.
        rows: of a micro-batch.
        peaks: bytes by (length, rows).
    """

    name: str
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    peaks: dict[tuple[int, int], int]


def grids(predictor: Predictor, say: Say) -> list[Grid]:
    """Simulate the recipe at lengths and micro-batches around its own.

    Args:
        predictor: of the recipe's subject.
        say: is told what goes on.
    """
    subject = predictor.subject
    lengths = _lengths(subject.step.seq_length, subject.longest)
    rows = _powers(subject.step.batch_size)
    plans: list[tuple[str, Plan | None]] = [("none", None)]
    plans += [(RECIPE, subject.plan)] if subject.plan is not None else []
    return [_grid(predictor, name, plan, lengths, rows, say) for name, plan in plans]


def table(found: Sequence[Grid], predictor: Predictor) -> str:
    """Return grids as text; what does not fit on the device is marked."""
    parts = []
    for grid in found:
        header = ("tokens", *(f"{rows} row{'s' if rows > 1 else ''}" for rows in grid.rows))
        body = [(f"{length:,}", *_cells(grid, length, predictor)) for length in grid.lengths]
        parts.append(f"{_TITLES[grid.name]}\n" + "\n".join(columns([header, *body], numeric=range(len(header)))))
    marks = f"x: does not fit on {predictor.device.name}; ?: may fit, with nothing to spare"
    return "\n\n".join([*parts, marks])


def as_json(found: Sequence[Grid]) -> list[dict[str, Any]]:
    """Return grids as JSON types."""
    return [
        {
            "plan": grid.name,
            "peaks": [
                {"seq_length": length, "batch_size": rows, "peak_bytes": peak}
                for (length, rows), peak in grid.peaks.items()
            ],
        }
        for grid in found
    ]


_TITLES = {"none": "Peak without checkpointing", RECIPE: "Peak under the recipe's plan"}


def _grid(
    predictor: Predictor, name: str, plan: Plan | None, lengths: Sequence[int], rows: Sequence[int], say: Say
) -> Grid:
    peaks = {}
    for length in lengths:
        for number in rows:
            say(f"Simulating {name}: {number} x {length:,} tokens ...")
            step = with_rows(with_length(predictor.subject.step, length), number)
            peaks[length, number] = predictor.memory(plan, step).peak_bytes
    return Grid(name, tuple(lengths), tuple(rows), peaks)


def _cells(grid: Grid, length: int, predictor: Predictor) -> Iterator[str]:
    for rows in grid.rows:
        peak = grid.peaks[length, rows]
        yield f"{format_bytes(peak)}{_MARKS[fit_of(peak, predictor.device)]}"


def _lengths(own: int, longest: int | None) -> list[int]:
    """Return the recipe's length, halves and doubles of it, up to what the model has positions for."""
    around = {max(1, own >> power) for power in range(_SHORTER + 1)} | {own << power for power in range(_LONGER + 1)}
    return sorted(length for length in around if longest is None or length <= max(longest, own))


def _powers(own: int) -> list[int]:
    return sorted({1 << power for power in range(_MOST_ROWS) if 1 << power <= max(_MOST_ROWS, own)} | {own})
