"""The picture of the README: what a Trainer user has today against auto, large."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pages import labels
from benchmarks.pages.drawing import GIB, GREY, LOOKS, figure_of, plain, save
from benchmarks.pages.frontier import along, curve_of, draw_curve, draw_mark
from benchmarks.pages.labels import Label, Point
from benchmarks.pages.results import Json, Run, ratio_to
from benchmarks.pages.words import case_title, kind_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (12.0, 7.0)
_FONT = 18.0
_MARK = 230.0
_RADIUS = 14.0
_RISE = 0.05
"""Share of the axis that the measure of the gain stands above the budget."""
_GROUPS = ("none", "today", "auto")


def data_of(run: Run) -> Json:
    """Return what is drawn of a run, as JSON types."""
    points = [
        {
            "title": row.title,
            "group": row.group,
            "x": row.step_time_ms / 1000,
            "y": row.peak_bytes / GIB,
            "is_on_host": row.host_bytes > 0,
        }
        for row in run.ran
        if row.group in _GROUPS and row.step_time_ms is not None and row.peak_bytes is not None
    ]
    word = "predicted" if run.is_predicted else "measured"
    return {
        "title": f"{case_title(run)}: {kind_words(run)}",
        "across": f"{word} time of a step (s)",
        "up": f"{word} peak memory (GiB)",
        "points": points,
        "gain": _gain(run),
    }


def _gain(run: Run) -> Json | None:
    """Return where auto gains most over what a Trainer user has, in the same memory."""
    known = [(gained, at) for at, budget in enumerate(run.budgets) if (gained := ratio_to(budget, "today")) is not None]
    if not known:
        return None
    gained, at = min(known)
    best = run.budgets[at]
    auto, today = run.rows[best["auto"]], run.rows[best["best_today"]]
    return {
        "ratio": gained,
        "budget": best["budget_bytes"] / GIB,
        "start": [(today.step_time_ms or 0) / 1000, (today.peak_bytes or 0) / GIB],
        "end": [(auto.step_time_ms or 0) / 1000, (auto.peak_bytes or 0) / GIB],
    }


def draw(data: Json, path: Path) -> None:
    """Draw what `data_of` returned."""
    figure = figure_of(_SIZE, data["title"], _FONT + 1)
    panel = figure.subplots()
    plain(panel, data["across"], data["up"], _FONT)
    curve = curve_of(data["points"])
    if curve:
        draw_curve(panel, curve, 4.5)
    for point in data["points"]:
        draw_mark(panel, point, _MARK)
    panel.margins(0.14, 0.14)
    panel.autoscale_view()
    figure.canvas.draw()
    named = [Label(point["title"], (point["x"], point["y"])) for point in data["points"] if point["group"] != "auto"]
    free = [(point["x"], point["y"]) for point in data["points"]]
    lines = list(along(curve))
    if data["gain"]:
        gain, level = data["gain"], _free_level(panel, data)
        lines += _draw_gain(panel, gain, level)
        middle = (gain["start"][0] + gain["end"][0]) / 2
        named.append(Label(f"{1 - gain['ratio']:.0%} less time within {gain['budget']:.1f} GiB", (middle, level)))
    if curve:
        named.append(Label("hf_ckpt, auto", _lonely(panel, curve, data["points"])))
    labels.write(figure, panel, labels.together(named, panel), free, lines, _FONT - 1, _RADIUS)
    _paint(panel)
    save(figure, path, data)


def _draw_gain(panel: Axes, gain: Json, level: float) -> Iterator[Point]:
    """Draw the time saved as a measure above the two marks at a level, and yield the points along it."""
    (x, y), (to_x, to_y) = gain["start"], gain["end"]
    arrow = {"arrowstyle": "-|>", "linewidth": 2.5, "color": GREY, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 24}
    panel.annotate("", (to_x, level), (x, level), arrowprops=arrow, zorder=2)
    sides = [[(x, y), (x, level)], [(to_x, to_y), (to_x, level)]]
    for side in sides:
        panel.plot(*zip(*side, strict=True), color=GREY, linewidth=1.5, linestyle=":", zorder=1)
    for line in (*sides, [(x, level), (to_x, level)]):
        yield from along(line)


def _free_level(panel: Axes, data: Json) -> float:
    """Return the lowest memory above the budget of the gain at which no mark is in the way."""
    low, high = panel.get_ylim()
    gain: Json = data["gain"]
    start, end = gain["start"], gain["end"]
    between = [point["y"] for point in data["points"] if end[0] < point["x"] < start[0]]
    step = _RISE * (high - low)
    levels = [max(float(gain["budget"]), float(start[1])) + step * number for number in range(1, 20)]
    return next((level for level in levels if all(abs(level - y) > 1.1 * step for y in between)), levels[0])


def _lonely(panel: Axes, curve: Sequence[Point], points: Sequence[Json]) -> Point:
    """Return the corner of the curve that is farthest from what has a label of its own."""
    others = [panel.transData.transform((point["x"], point["y"])) for point in points if point["group"] != "auto"]
    return max(curve, key=lambda corner: min(math.dist(panel.transData.transform(corner), other) for other in others))


def _paint(panel: Any) -> None:
    """Give the words for auto its colour."""
    for text in panel.texts:
        if text.get_text().startswith("hf_ckpt"):
            text.set_color(LOOKS["auto"].colour)
