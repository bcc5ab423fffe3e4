"""The longest row against the memory of the card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pages import labels
from benchmarks.pages.drawing import figure_of, plain, save
from benchmarks.pages.labels import Label
from benchmarks.pages.results import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (11.0, 7.0)
_FONT = 14.0
_COLOURS = ("#0072B2", "#CC79A7", "#555555", "#E69F00", "#D55E00")
_MARKERS = ("o", "^", "s", "D", "v")


def data_of(result: Json) -> Json:
    """Return what is drawn of the result of `longctx_predict`, as JSON types."""
    budgets = result["budgets"]
    published = result["published"]
    predicted = (
        ("hf_ckpt, auto", "hf_ckpt"),
        ("transformers, full, offload", "transformers_offload"),
        ("transformers, full", "transformers"),
    )
    given = (("Unsloth (published)", "unsloth"), ("transformers + FA2 (published)", "transformers_fa2"))
    curves: list[dict[str, Any]] = [
        {"title": title, "is_published": False, "points": [[row["budget_gib"], row[name]["length"]] for row in budgets]}
        for title, name in predicted
    ]
    curves[1:1] = [
        {
            "title": title,
            "is_published": True,
            "points": [[row["budget_gib"], published[name][str(row["budget_gib"])]] for row in budgets],
        }
        for title, name in given
    ]
    return {
        "title": "Longest row of a QLoRA step of Llama 3.1 8B: predicted (solid) and published (dashed)",
        "curves": [curve | {"points": [point for point in curve["points"] if point[1]]} for curve in curves],
    }


def draw(data: Json, path: Path) -> None:
    """Draw what `data_of` returned."""
    figure = figure_of(_SIZE, data["title"], _FONT + 1)
    panel = figure.subplots()
    plain(panel, "memory for the step (GiB)", "tokens of the longest row", _FONT)
    for curve, colour, marker in zip(data["curves"], _COLOURS, _MARKERS, strict=True):
        x, y = zip(*curve["points"], strict=True)
        style = "--" if curve["is_published"] else "-"
        panel.plot(x, y, color=colour, marker=marker, markersize=9, linewidth=2.5, linestyle=style, zorder=3)
    _scale(panel, data["curves"])
    free = [tuple(point) for curve in data["curves"] for point in curve["points"]]
    named = [Label(curve["title"], tuple(curve["points"][len(curve["points"]) // 2])) for curve in data["curves"]]
    labels.write(figure, panel, named, free, list(_along(data["curves"])), _FONT)
    save(figure, path, data)


def _scale(panel: Axes, curves: Sequence[Json]) -> None:
    sizes = sorted({point[0] for curve in curves for point in curve["points"]})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
    panel.minorticks_off()
    ticks = [1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000]
    panel.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    panel.set_ylim(800, 1_200_000)
    panel.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)


def _along(curves: Sequence[Json], pieces: int = 30) -> Iterator[tuple[float, float]]:
    """Yield points along the lines, close together on their scale of powers."""
    for curve in curves:
        for (x, y), (to_x, to_y) in zip(curve["points"], curve["points"][1:], strict=False):
            yield from ((x * (to_x / x) ** (k / pieces), y * (to_y / y) ** (k / pieces)) for k in range(pieces + 1))
