"""Pictures of predicted steps: memory over the step, peak against step time, memory against the number of checkpoints.

Needs matplotlib, which the extra `plot` brings. Figures are made directly, without pyplot and its global state.
Colours are those of Okabe and Ito (2008), which people with any kind of colour vision can tell apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ckpt.simulation.step_memory import COLOURS, Category, StepMemory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

_DARK = (Category.GATHERED, Category.REFERENCE, Category.OTHER, Category.OPTIMIZER, Category.WORKSPACES)
"""Those that are written on in white."""

Line = Sequence[tuple[float, float]]
"""Points of a line in a panel."""

_LINE, _MARK, _SECOND, _LIMIT = "#0072B2", "#D55E00", "#009E73", "#000000"
_DPI = 100
_COLUMNS = 3
_PANEL = (4.6, 3.4)
_SINGLE = (9.0, 6.2)
_FONT = 14


@dataclass(frozen=True)
class Curve:
    """A line or a row of marks."""

    label: str
    """Written next to it."""
    points: Sequence[tuple[float, float]]
    """(x, bytes); x in the unit of the picture."""


@dataclass(frozen=True)
class _Unit:
    """A unit that suits the numbers of a picture."""

    name: str
    size: float

    def format(self, value: float, position: float | None = None) -> str:
        """Return the text of a tick."""
        return f"{value / self.size:g}"


def draw_steps(steps: Mapping[str, StepMemory], path: Path, *, title: str, limit_bytes: int | None = None) -> None:
    """Draw memory over the step into a PNG, stacked by category, with one panel for each step.

    `steps` are by the name of their plan. `limit_bytes` is what the device has, drawn where it lies in the picture.
    """
    num_columns = min(_COLUMNS, len(steps))
    num_rows = math.ceil(len(steps) / num_columns)
    figure = _figure((_PANEL[0] * num_columns + 0.6, _PANEL[1] * num_rows + 1.5), title)
    axes = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    unit = _unit_of(max(step.peak_bytes for step in steps.values()))
    longest = max(step.timeline.stacked()[0][-1] for step in steps.values())
    clock = _clock_of(longest)
    top = max(step.peak_bytes for step in steps.values()) / unit.size
    for (name, step), panel in zip(steps.items(), axes.flat, strict=False):
        # The panels share their axes, so that a slower plan is seen to be slower.
        panel.set_xlim(0, longest)
        panel.set_ylim(0, top * 1.06)
        _draw_step(panel, name, step, unit)
        panel.set_xlabel(f"predicted time ({clock.name})" if len(step.timeline.seconds) else "events")
        if len(step.timeline.seconds):
            panel.xaxis.set_major_formatter(clock.format)
    for unused in list(axes.flat)[len(steps) :]:
        unused.remove()
    for row in axes:
        row[0].set_ylabel(f"memory ({unit.name})")
    _legend(figure, {category for step in steps.values() for category in step.timeline.bytes_by_category})
    for step, panel in zip(steps.values(), axes.flat, strict=False):
        _name_areas(panel, step, unit, _draw_limit(panel, limit_bytes, unit))
    _save(figure, path)


def draw_frontier(
    points: Mapping[str, StepMemory], curve: Curve, path: Path, *, title: str, limit_bytes: int | None = None
) -> None:
    """Draw the peak against the step time: each fixed mode of `points` as a mark, and the planner's choices as a line.

    The curve's points are (seconds, bytes), one for each budget. `limit_bytes` is as in `draw_steps`.
    """
    figure = _figure(_SINGLE, title)
    panel = figure.subplots()
    unit = _unit_of(max(step.peak_bytes for step in points.values()))
    clock = _clock_of(max(step.time.total for step in points.values()))
    chosen = [(seconds, peak / unit.size) for seconds, peak in sorted(curve.points)]
    if chosen:
        times, peaks = zip(*chosen, strict=True)
        # Between two choices the slower one is the best that fits.
        panel.step(times, peaks, where="post", color=_LINE, linewidth=2.5, marker=".", markersize=9)
    marks = list(_marks(points, unit))
    panel.scatter([x for _, x, _ in marks], [y for _, _, y in marks], color=_MARK, s=70, zorder=3)
    panel.set_xlabel(f"predicted step time ({clock.name})")
    panel.set_ylabel(f"predicted peak ({unit.name})")
    panel.xaxis.set_major_formatter(clock.format)
    _pad(panel)
    limit = _draw_limit(panel, limit_bytes, unit, at_left=True)
    labels = [*marks]
    if chosen:
        labels.append((curve.label, *_farthest(panel, chosen, marks)))
    ends = [] if limit_bytes is None or not limit else [(x, limit_bytes / unit.size) for x in panel.get_xlim()]
    _label(panel, labels, [list(stairs(chosen)), ends], limit)
    _save(figure, path)


def stairs(curve: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the points of a curve and its corners: between two choices the slower one is the best that fits."""
    for (seconds, peak), (slower, _) in pairwise(curve):
        yield seconds, peak
        yield slower, peak
    yield from curve[-1:]


def _marks(points: Mapping[str, StepMemory], unit: _Unit) -> Iterator[tuple[str, float, float]]:
    """Yield a label for each point; equal ones share it."""
    names: dict[tuple[float, float], list[str]] = {}
    for name, step in points.items():
        names.setdefault((step.time.total, step.peak_bytes / unit.size), []).append(name)
    for (seconds, peak), there in names.items():
        yield " = ".join(there), seconds, peak


def draw_checkpoints(pairs: Sequence[tuple[Curve, Curve]], path: Path, *, title: str, optimum: float) -> None:
    """Draw memory against the number of checkpoints, simulated and by the formula.

    Each pair makes a panel: (number of checkpoints, bytes) as simulated and by the formula. The label of the first
    names the panel, that of the second is written next to its line. `optimum` is the number that theory calls best.
    """
    figure = _figure((_SINGLE[0] * 1.4, _SINGLE[1] * 0.9), title)
    axes = figure.subplots(1, len(pairs), squeeze=False)[0]
    unit = _unit_of(max(peak for pair in pairs for curve in pair for _, peak in curve.points))
    for panel, (simulated, formula) in zip(axes, pairs, strict=True):
        for curve, style in ((formula, {"linewidth": 2.5}), (simulated, {"marker": "o", "linestyle": "none"})):
            numbers, peaks = zip(*sorted(curve.points), strict=True)
            panel.plot(
                numbers,
                [peak / unit.size for peak in peaks],
                color=_LINE if curve is formula else _MARK,
                markersize=9,
                **style,
            )
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.axvline(optimum, color=_SECOND, linewidth=2, linestyle="--")
        panel.set_xlabel("checkpoints (segments, each with a saved input)")
        panel.set_title(simulated.label, fontsize=_FONT, loc="left")
        _pad(panel, begins_at_zero=False)
        panel.set_ylabel(f"predicted peak ({unit.name})")
    for panel, (simulated, formula) in zip(axes, pairs, strict=True):
        marks = [[(number, peak / unit.size)] for number, peak in simulated.points]
        line = [(number, peak / unit.size) for number, peak in sorted(formula.points)]
        low, high = panel.get_ylim()
        labels = [
            (f"sqrt(L) = {optimum:.3g}", optimum, high - 0.05 * (high - low)),
            # The first points are where the curves are far from everything else.
            ("simulated", *min(mark[0] for mark in marks)),
            (formula.label, *line[1]),
        ]
        _label(panel, labels, [*marks, line, [(optimum, low), (optimum, high)]])
    _save(figure, path)


# --- One panel of a step. ---


def _draw_step(panel: Axes, name: str, step: StepMemory, unit: _Unit) -> None:
    x, areas = _areas(step, unit)
    for category, below, above in areas:
        panel.fill_between(x, below, above, color=COLOURS[category], linewidth=0)
    panel.set_title(f"{name}: {step.peak_bytes / unit.size:.1f} {unit.name}", fontsize=_FONT, loc="left")
    panel.tick_params(labelbottom=True)
    panel.grid(axis="y", alpha=0.4)


def _areas(step: StepMemory, unit: _Unit) -> tuple[list[float], list[tuple[Category, list[float], list[float]]]]:
    """Return the moments that are drawn, and the edges of each category there in the unit, the lowest first."""
    x, edges = step.timeline.stacked()
    in_unit = {category: [[level / unit.size for level in edge] for edge in both] for category, both in edges.items()}
    return x, [(category, below, above) for category, (below, above) in in_unit.items()]


def _name_areas(panel: Axes, step: StepMemory, unit: _Unit, taken: Sequence[Any]) -> None:
    """Write the name of a category into its area, where the area is large enough and nothing else is written."""
    renderer = _laid_out(panel)
    x, areas = _areas(step, unit)
    for category, below, above in areas:
        colour = "white" if category in _DARK else "black"
        text = panel.text(x[0], below[0], str(category), fontsize=_FONT - 1, color=colour, ha="center", va="center")
        # In the units of the panel.
        box = text.get_window_extent(renderer).transformed(panel.transData.inverted())
        rooms = _rooms(x, below, above, 1.1 * box.width)
        at, low, high = max(rooms, key=lambda room: room[2] - room[1], default=(0, 0, 0))
        text.set_position((x[at], (low + high) / 2))
        if high - low < 1.2 * box.height or text.get_window_extent(renderer).count_overlaps(taken):
            text.remove()


def _rooms(
    x: Sequence[float], below: Sequence[float], above: Sequence[float], width: float
) -> Iterator[tuple[int, float, float]]:
    """Yield moments that a text of a width can be centred on, with the edges that it has to stay between."""
    for at, centre in enumerate(x):
        first, last = bisect_left(x, centre - width / 2), bisect_right(x, centre + width / 2)
        if centre - width / 2 >= x[0] and centre + width / 2 <= x[-1]:
            yield at, max(below[first:last]), min(above[first:last])


def _legend(figure: Figure, used: set[Category]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLOURS[category], label=str(category)) for category in COLOURS if category in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=_FONT, frameon=False)


# --- Labels of points. ---


def _farthest(
    panel: Axes, points: Sequence[tuple[float, float]], marks: Sequence[tuple[str, float, float]]
) -> tuple[float, float]:
    """Return the point of a curve that is farthest from all marks, in the picture."""
    shown = panel.transData.transform
    others = [shown((x, y)) for _, x, y in marks]
    return max(points, key=lambda point: min((math.dist(shown(point), other) for other in others), default=0.0))


def _label(
    panel: Axes,
    labels: Sequence[tuple[str, float, float]],
    lines: Iterable[Line],
    written: Sequence[Any] = (),
) -> None:
    """Write each label next to its point, where neither a label nor a point nor a line is; or not at all.

    `written`: the boxes of what is written already.
    """
    renderer = _laid_out(panel)
    taken: list[Any] = [*written, *(_around(panel, x, y) for _, x, y in labels)]
    taken += [_around(panel, x, y, 2) for line in lines for x, y in _along(panel, line)]
    for text, x, y in labels:
        _place(renderer, panel, text, (x, y), taken)


def _along(panel: Axes, line: Line) -> Iterator[tuple[float, float]]:
    """Yield points of a line, so near to each other that no text stands between them."""
    yield from line
    for ends in pairwise(line):
        (left, low), (right, high) = panel.transData.transform(ends)
        number = int(max(abs(right - left), abs(high - low)) / 4)
        steps = [step / number for step in range(1, number)]
        between = [(left + share * (right - left), low + share * (high - low)) for share in steps]
        if between:
            yield from panel.transData.inverted().transform(between)


def _place(renderer: Any, panel: Axes, text: str, point: tuple[float, float], taken: list[Any]) -> None:
    frame = panel.get_window_extent(renderer)
    from matplotlib.text import Text

    for (right, up), (horizontal, vertical) in _sides():
        label = panel.annotate(
            text,
            point,
            xytext=(right, up),
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            fontsize=_FONT,
            arrowprops={"arrowstyle": "-", "color": "#666666"} if abs(up) > 12 else None,
        )
        label.update_positions(renderer)
        # Of the text alone, without the line to its point.
        box = Text.get_window_extent(label, renderer)
        is_inside = box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1
        if is_inside and not box.count_overlaps(taken):
            taken.append(box)
            return
        label.remove()


def _sides() -> Iterator[tuple[tuple[float, float], tuple[str, str]]]:
    """Yield where a label may stand: right, left, above and below its point, then further away."""
    for far in range(0, 300, 18):
        for up in (far, -far):
            yield (9, up), ("left", "center")
            yield (-9, up), ("right", "center")
        yield (0, 12 + far), ("center", "bottom")
        yield (0, -12 - far), ("center", "top")


def _around(panel: Axes, x: float, y: float, pixels: int = 5) -> Any:
    from matplotlib.transforms import Bbox

    across, up = panel.transData.transform((x, y))
    return Bbox.from_extents(across - pixels, up - pixels, across + pixels, up + pixels)


# --- Figures. ---


def _figure(size: tuple[float, float], title: str) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=_FONT + 1, x=0.02, ha="left")
    return figure


def _laid_out(panel: Axes) -> Any:
    """Lay a panel's figure out, and return the renderer that its texts are measured with."""
    canvas: Any = panel.figure.canvas
    canvas.draw()
    return canvas.get_renderer()


def _draw_limit(panel: Axes, limit_bytes: int | None, unit: _Unit, *, at_left: bool = False) -> list[Any]:
    """Draw what the device has, where that lies in the picture; return the boxes of what is written."""
    low, high = panel.get_ylim()
    if limit_bytes is None or not low < limit_bytes / unit.size < high:
        return []
    panel.axhline(limit_bytes / unit.size, color=_LIMIT, linewidth=1.5, linestyle=":")
    left, right = panel.get_xlim()
    label = panel.annotate(
        f"{limit_bytes / unit.size:.1f} {unit.name}",
        (left if at_left else right, limit_bytes / unit.size),
        xytext=(4 if at_left else -4, 3),
        textcoords="offset points",
        ha="left" if at_left else "right",
        fontsize=_FONT - 2,
    )
    return [label.get_window_extent(_laid_out(panel))]


def _pad(panel: Axes, *, begins_at_zero: bool = True) -> None:
    """Leave room for labels, and begin the memory axis at zero where that costs little."""
    panel.margins(0.15, 0.15)
    panel.autoscale_view()
    low, high = panel.get_ylim()
    panel.set_ylim(0 if begins_at_zero and low < high / 3 else low, high)
    panel.grid(alpha=0.4)


def _save(figure: Figure, path: Path) -> None:
    for panel in figure.axes:
        panel.tick_params(labelsize=_FONT - 1)
        panel.xaxis.label.set_fontsize(_FONT)
        panel.yaxis.label.set_fontsize(_FONT)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.savefig(path)


def _unit_of(num_bytes: float) -> _Unit:
    """Return the largest unit of which there is one at least."""
    return next((_Unit(*unit) for unit in _UNITS if num_bytes >= unit[1]), _Unit(*_UNITS[-1]))


def _clock_of(seconds: float) -> _Unit:
    return _Unit("s", 1.0) if seconds >= 1 else _Unit("ms", 1e-3)
