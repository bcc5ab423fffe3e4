"""The frontier: peak memory against what a step costs, every contender as a labelled point, auto as steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pages import labels
from benchmarks.pages.drawing import GIB, LOOKS, MIB, figure_of, plain, save
from benchmarks.pages.labels import Label, Point
from benchmarks.pages.results import CPU, CUDA, Json, Row, Run
from benchmarks.pages.words import case_title, kind_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (13.0, 8.2)
_FONT = 12.5
_MARK = 85.0
_SIZES: Mapping[str, float] = {
    "elsewhere": 1.9,
    "today": 1.5,
    "none": 1.3,
    "ours": 0.9,
    "auto": 0.5,
    "compiled": 0.35,
}
"""Of marks, the largest drawn first: where several lie on one point all are seen."""
_FARTHEST = 2.2
"""Points that cost more than this many times the cheapest one are written into the corner instead."""


def data_of(run: Run) -> Json | None:
    """Return what is drawn of a run, as JSON types; None if it has nothing to show."""
    size, unit = (MIB, "MiB") if run.kind == CPU else (GIB, "GiB")
    points = [point for row in run.ran if (point := _point(run, row, size)) is not None]
    if len(points) < 2:
        return None
    cheapest = min(point["x"] for point in points)
    near = [point for point in points if point["x"] <= _FARTHEST * cheapest]
    return {
        "title": f"{case_title(run)}: {kind_words(run)}",
        "across": _across(run),
        "up": f"{'predicted' if run.is_predicted else 'measured'} peak ({unit})",
        "points": near,
        "left_out": [point for point in points if point not in near],
    }


def _across(run: Run) -> str:
    if run.kind == CPU:
        return "operations of a step, in units of those without checkpointing (counted)"
    return f"{'predicted' if run.is_predicted else 'measured'} step time (s)"


def _point(run: Run, row: Row, size: int) -> Json | None:
    # Times of another run do not compare with those of this one.
    if run.kind == CUDA and row.source != run.names[0]:
        return None
    # On a CPU time says little about a GPU; operations are counted exactly.
    x = row.ratios.get("flops") if run.kind == CPU else row.step_time_ms and row.step_time_ms / 1000
    if x is None or row.peak_bytes is None:
        return None
    return {
        "title": row.title,
        "group": row.group,
        "x": x,
        "y": row.peak_bytes / size,
        "is_on_host": row.host_bytes > 0,
    }


def draw(data: Json, path: Path) -> None:
    """Draw what `data_of` returned."""
    figure = figure_of(_SIZE, data["title"], _FONT + 3)
    panel = figure.subplots()
    plain(panel, data["across"], data["up"], _FONT + 1)
    curve = curve_of(data["points"])
    if curve:
        draw_curve(panel, curve)
    for point in data["points"]:
        draw_mark(panel, point, _MARK)
    panel.margins(0.16, 0.12)
    panel.autoscale_view()
    _legend(figure, data)
    figure.canvas.draw()
    named = [Label(point["title"], (point["x"], point["y"])) for point in data["points"] if point["group"] != "auto"]
    free = [(point["x"], point["y"]) for point in data["points"]]
    labels.write(figure, panel, labels.together(named, panel), free, list(along(curve)), _FONT)
    save(figure, path, data)


def curve_of(points: Sequence[Json]) -> list[Point]:
    """Return the corners of the steps of auto: between two plans, the slower one is the best that fits."""
    best: list[Point] = []
    for x, y in sorted((point["x"], point["y"]) for point in points if point["group"] == "auto"):
        # A later plan that needs as much memory is no step.
        if not best or y < best[-1][1]:
            best.append((x, y))
    corners = [corner for (_, y), (x, lower) in pairwise(best) for corner in ((x, y), (x, lower))]
    return [*best[:1], *corners]


def draw_curve(panel: Axes, curve: Sequence[Point], width: float = 2.5) -> None:
    """Draw the steps of auto."""
    panel.plot(*zip(*curve, strict=True), color=LOOKS["auto"].colour, linewidth=width, zorder=2)


def draw_mark(panel: Axes, point: Json, size: float) -> None:
    """Draw the mark of one contender: open where some of its memory waits on the host."""
    look = LOOKS[point["group"]]
    panel.scatter(
        [point["x"]],
        [point["y"]],
        s=size * _SIZES[point["group"]],
        marker=look.marker,
        facecolor="white" if point["is_on_host"] else look.colour,
        edgecolor=look.colour,
        linewidth=1.8,
        zorder=4 - _SIZES[point["group"]] / 2,
    )


def along(curve: Sequence[Point], pieces: int = 25) -> Iterator[Point]:
    """Yield points along a line, close together."""
    for (x, y), (to_x, to_y) in pairwise(curve):
        yield from ((x + (to_x - x) * k / pieces, y + (to_y - y) * k / pieces) for k in range(pieces + 1))


def _legend(figure: Any, data: Json) -> None:
    from matplotlib.lines import Line2D

    groups = {point["group"] for point in data["points"]}
    entries = [
        Line2D(
            [],
            [],
            color=look.colour,
            marker=look.marker,
            linestyle="-" if group == "auto" else "none",
            label=look.words,
        )
        for group, look in LOOKS.items()
        if group in groups
    ]
    if any(point["is_on_host"] for point in data["points"]):
        entries.append(
            Line2D(
                [],
                [],
                color="#555555",
                marker="o",
                markerfacecolor="white",
                linestyle="none",
                label="open: partly on the host",
            )
        )
    figure.legend(handles=entries, loc="outside lower center", ncols=4, fontsize=_FONT, frameon=False)
    if data["left_out"]:
        figure.text(0.99, 0.925, _far_away(data), ha="right", va="top", fontsize=_FONT - 1, color="#555555")


def _far_away(data: Json) -> str:
    lines = [f"{point['title']}: {point['x']:.2f}, {point['y']:.1f}" for point in data["left_out"]]
    return "\n".join([f"beyond the right edge ({data['across'].split(',')[0]}; {data['up']}):", *lines])
