"""Labels of crowded points: each is put where it covers no point, no line and no other label."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from benchmarks.pages.drawing import DPI, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAR = (5, 12, 22, 34, 48, 64, 82, 102, 124, 148, 174, 202, 232)
"""Pixels between a mark and its label."""
_ANGLES = 24
_ROUNDS = 4
_LED = 15.0
"""Pixels from which on a line leads from the mark to its label."""
_COVERS_LABEL, _COVERS_MARK, _COVERS_LINE, _CROSSES, _OUTSIDE = 4000.0, 900.0, 60.0, 1200.0, 1e6
_DOUBTFUL = 60.0
"""Price of another mark nearer to the label than its own."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Label:
    """A text and its point in the units of the panel."""

    text: str
    at: Point


@dataclass(frozen=True)
class _Box:
    x0: float
    y0: float
    x1: float
    y1: float

    def covers(self, other: _Box) -> bool:
        return self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1

    def holds(self, point: Point) -> bool:
        return self.x0 <= point[0] <= self.x1 and self.y0 <= point[1] <= self.y1

    @property
    def middle(self) -> Point:
        return (self.x0 + self.x1) / 2, (self.y0 + self.y1) / 2

    def gap(self, point: Point) -> float:
        return math.dist(point, self.nearest(point))

    def nearest(self, point: Point) -> Point:
        return min(max(point[0], self.x0), self.x1), min(max(point[1], self.y0), self.y1)


@dataclass(frozen=True)
class _Ground:
    """What labels are put on, in pixels: the panel's frame, the marks with their radius, and points along lines."""

    frame: _Box
    marks: Sequence[_Box]
    radius: float
    drawn: npt.NDArray[np.float64]

    def price(self, point: Point, box: _Box) -> float:
        """What a place costs whatever the other labels do."""
        frame = self.frame
        total = box.gap(point)
        total += _OUTSIDE * (box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
        total += _COVERS_MARK * sum(box.covers(mark) for mark in self.marks)
        if self.is_led(point, box):
            way = [spot for spot in _way(point, box.nearest(point)) if math.dist(spot, point) > self.radius]
            total += _CROSSES * sum(
                any(mark.holds(spot) for spot in way) for mark in self.marks if mark.middle != point
            )
        else:
            total += _DOUBTFUL * sum(
                box.gap(mark.middle) < box.gap(point) + 2 for mark in self.marks if mark.middle != point
            )
        inside = (self.drawn > (box.x0, box.y0)) & (self.drawn < (box.x1, box.y1))
        return total + _COVERS_LINE * int(inside.all(axis=1).sum())

    def places(self, point: Point, size: Point) -> list[tuple[float, _Box]]:
        """Return the places of a label with their prices, the cheapest first."""
        boxes = _boxes_around(point, size, self.radius)
        return sorted(((self.price(point, box), box) for box in boxes), key=lambda priced: priced[0])

    def is_led(self, point: Point, box: _Box) -> bool:
        """Whether a line leads from the mark to the label."""
        return box.gap(point) > self.radius + _LED


def together(labels: Iterable[Label], panel: Axes, near: float = 5.0) -> list[Label]:
    """Return the labels with those of marks that lie on one another as one, one line each.

    Args:
        labels: to join.
        panel: with its final limits.
        near: pixels within which marks are one.
    """
    joined: list[tuple[Point, list[Label]]] = []
    for label in labels:
        here = _pixels(panel, label.at)
        for there, group in joined:
            if math.dist(here, there) < near:
                group.append(label)
                break
        else:
            joined.append((here, [label]))
    return [Label("\n".join(label.text for label in group), group[0].at) for _, group in joined]


def write(
    figure: Figure,
    panel: Axes,
    labels: Sequence[Label],
    kept_free: Iterable[Point],
    lines: Iterable[Point],
    font: float,
    radius: float = 8.0,
) -> None:
    """Write labels next to their points.

    Args:
        figure: of the panel; its layout stays as it is from here on.
        panel: with its final limits.
        labels: to write.
        kept_free: marks that no label may cover.
        lines: points along drawn lines, close together; covered only where there is no other room.
        font: size.
        radius: of a mark, in pixels.
    """
    figure.canvas.draw()
    figure.set_layout_engine("none")
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]  # of the Agg canvas
    extent = panel.get_window_extent(renderer)
    ground = _Ground(
        _Box(extent.x0, extent.y0, extent.x1, extent.y1),
        [_around(_pixels(panel, point), radius) for point in kept_free],
        radius,
        np.array([_pixels(panel, point) for point in lines]).reshape(-1, 2),
    )
    points = [_pixels(panel, label.at) for label in labels]
    sizes = [_size(panel, label.text, font, renderer) for label in labels]
    boxes = _arranged(points, sizes, ground)
    for label, point, box in zip(labels, points, boxes, strict=True):
        _annotate(panel, label, point, box, font, is_led=ground.is_led(point, box))


def _arranged(points: Sequence[Point], sizes: Sequence[Point], ground: _Ground) -> list[_Box]:
    """Return a place for each label: the most crowded first, and all of them several times over."""
    places = [ground.places(point, size) for point, size in zip(points, sizes, strict=True)]
    chosen: dict[int, _Box] = {}
    crowded = sorted(range(len(points)), key=lambda index: -_crowd(points[index], points))
    for index in crowded * _ROUNDS:
        others = [(box, points[other]) for other, box in chosen.items() if other != index]
        chosen[index] = _best(points[index], places[index], others, ground)
    return [chosen[index] for index in range(len(points))]


def _best(
    point: Point, places: Sequence[tuple[float, _Box]], others: Sequence[tuple[_Box, Point]], ground: _Ground
) -> _Box:
    least, best = math.inf, places[0][1]
    for price, box in places:
        if price >= least:
            break
        total = price + _COVERS_LABEL * sum(box.covers(other) for other, _ in others)
        if total < least and ground.is_led(point, box):
            total += _CROSSES * sum(_is_crossed(point, box.nearest(point), other, at) for other, at in others)
        if total < least:
            least, best = total, box
    return best


def _is_crossed(point: Point, end: Point, other: _Box, at: Point) -> bool:
    """Whether the line to a label runs over another label or its line."""
    return any(other.holds(spot) for spot in _way(point, end)) or _cross(point, end, at, other.nearest(at))


def _way(point: Point, end: Point) -> list[Point]:
    """Return points along the line from a mark to its label."""
    return [(point[0] + (end[0] - point[0]) * k / 16, point[1] + (end[1] - point[1]) * k / 16) for k in range(2, 17)]


def _cross(a: Point, b: Point, c: Point, d: Point) -> bool:
    def side(p: Point, q: Point, r: Point) -> bool:
        return (q[0] - p[0]) * (r[1] - p[1]) > (q[1] - p[1]) * (r[0] - p[0])

    return side(a, b, c) != side(a, b, d) and side(c, d, a) != side(c, d, b)


def _boxes_around(point: Point, size: Point, radius: float) -> Iterator[_Box]:
    """Yield boxes around a mark, near ones first, each with the side towards the mark nearest to it."""
    width, height = size
    for far in _FAR:
        for step in range(_ANGLES):
            right, up = math.cos(2 * math.pi * step / _ANGLES), math.sin(2 * math.pi * step / _ANGLES)
            x = point[0] + (radius + far) * right + (right - 1) * width / 2
            y = point[1] + (radius + far) * up + (up - 1) * height / 2
            yield _Box(x, y, x + width, y + height)


def _annotate(panel: Axes, label: Label, point: Point, box: _Box, font: float, *, is_led: bool) -> None:
    (x, y), end = box.middle, box.nearest(point)
    # The line begins where the label is nearest to its mark.
    beginning = (end[0] - box.x0) / (box.x1 - box.x0), (end[1] - box.y0) / (box.y1 - box.y0)
    leader = {"arrowstyle": "-", "color": GREY, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 4, "relpos": beginning}
    panel.annotate(
        label.text,
        label.at,
        xytext=((x - point[0]) * 72 / DPI, (y - point[1]) * 72 / DPI),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=font,
        linespacing=1.05,
        zorder=6,
        arrowprops=leader if is_led else None,
    )


def _size(panel: Axes, text: str, font: float, renderer: Any) -> Point:
    written = panel.annotate(text, (0, 0), xycoords="axes fraction", fontsize=font, linespacing=1.05)
    box = written.get_window_extent(renderer)
    written.remove()
    return box.width + 4, box.height + 2


def _crowd(point: Point, points: Sequence[Point]) -> float:
    return sum(1 / (20 + math.dist(point, other)) for other in points)


def _pixels(panel: Axes, point: Point) -> Point:
    x, y = panel.transData.transform(point)
    return float(x), float(y)


def _around(point: Point, radius: float) -> _Box:
    return _Box(point[0] - radius, point[1] - radius, point[0] + radius, point[1] + radius)
