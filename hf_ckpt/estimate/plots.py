"""Pictures of an estimate: peak against time, memory over the step, memory against the number of checkpoints.

Each is drawn once, as SVG, for the page and for files. Files are painted by matplotlib, which the extra `plot` brings;
figures are made directly, without pyplot and its global state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from hf_ckpt.errors import HFCkptError
from hf_ckpt.estimate.estimate import RECIPE, Estimate, Say
from hf_ckpt.estimate.step_of_recipe import Subject, describe_rows
from hf_ckpt.estimate.tables import format_seconds
from hf_ckpt.html_svg import element, escape, polygons, svg
from hf_ckpt.planner.chain import FULL, NONE, Chain
from hf_ckpt.planner.dynamic_programming import ChainPlanner
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.step_memory import COLOURS, StepMemory
from hf_ckpt.units import UNITS, format_bytes

Points = Sequence[tuple[float, float]]  # (x, bytes); x are seconds, or numbers of checkpoints.

WIDTH = 720.0
_LETTER, _LINE_HEIGHT = 7.2, 16.0
_TICKS = 4
_BUDGETS = 60
_PANELS = (RECIPE, "none", "full", "selective", "segments", AUTO)
"""The rows whose memory is drawn over the step; the others are in the frontier."""
_COLUMNS = 3


@dataclass(frozen=True)
class Frame:
    """Where x and bytes lie in a picture."""

    left: float  # Edges, in the picture's own unit.
    right: float
    top: float
    bottom: float
    low: float  # What lies there.
    high: float
    ceiling: float
    floor: float = 0.0

    @classmethod
    def around(cls, points: Points, left: float, right: float, top: float, bottom: float, floor: float) -> Frame:
        """Return a frame with room around the points."""
        times = [x for x, _ in points]
        room = 0.06 * (max(times) - min(times)) or 0.1 * max(times) or 1.0
        ceiling = 1.08 * max(peak for _, peak in points)
        return cls(left, right, top, bottom, min(times) - room, max(times) + room, ceiling, floor)

    def at(self, x: float, num_bytes: float) -> tuple[float, float]:
        """Return where a point lies."""
        across = (x - self.low) / (self.high - self.low) * (self.right - self.left)
        share = (num_bytes - self.floor) / (self.ceiling - self.floor)
        return self.left + across, self.top + (1 - share) * (self.bottom - self.top)

    def axes(self, what: str, over: str, ticks: Iterable[tuple[float, str]] | None = None) -> Iterator[str]:
        """Yield levels of memory, the words of both axes, and ticks (x, text); those of seconds, if none are given."""
        unit = "GiB" if self.ceiling >= UNITS["GiB"] else "MiB"
        for level in _round_numbers(self.floor / UNITS[unit], self.ceiling / UNITS[unit]):
            _, y = self.at(self.low, level * UNITS[unit])
            yield _line((self.left, y), (self.right, y), "axis")
            yield _text(f"{level:g}", self.left - 8, y + 4, "end")
        if ticks is None:
            ticks = ((seconds, format_seconds(seconds)) for seconds in _round_numbers(self.low, self.high))
        for x, text in ticks:
            yield _text(text, self.at(x, 0)[0], self.bottom + 18, "middle")
        yield _text(f"{what}, {unit}", self.left - 64, self.top - 14)
        yield _text(over, self.right, self.bottom + 38, "end")

    def limit(self, device: Device, words: str) -> Iterator[str]:
        """Yield what a device has, where it lies in the picture."""
        if device.memory_bytes and self.floor <= device.memory_bytes <= self.ceiling:
            _, y = self.at(self.low, device.memory_bytes)
            yield _line((self.left, y), (self.right, y), "limit")
            yield _text(words, self.right, y - 6, "end")


def _round_numbers(low: float, high: float) -> Iterator[float]:
    """Yield a few round numbers between two."""
    magnitude = 10 ** math.floor(math.log10((high - low) / _TICKS))
    step = next(each * magnitude for each in (1, 2, 5, 10) if (high - low) / (each * magnitude) <= _TICKS + 1)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield round(number * step, 12)


def _text(text: str, x: float, y: float, anchor: str = "start") -> str:
    return element("text", escape(text), x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_="quiet")


def _line(begin: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    (x1, y1), (x2, y2) = begin, end
    return element("line", x1=x1, x2=x2, y1=f"{y1:.1f}", y2=f"{y2:.1f}", class_=kind)


def _curve(points: Points) -> str:
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_="stairs")


def _mark(at: tuple[float, float], said: str, kind: str, **more: object) -> str:
    """Return a mark, with what is said of it when it is pointed at."""
    x, y = (f"{each:.1f}" for each in at)
    return element("circle", element("title", escape(said)), cx=x, cy=y, r=7, class_=kind, **more)


# --- Names beside their points. ---


def _labels(
    points: Mapping[str, tuple[float, float]], lines: Iterable[Points], frame: Frame, *, all_: bool
) -> Iterator[str]:
    """Yield names beside their points where there is room, where neither a name nor a point nor a line is.

    `all_`: further away too, with a line to the point, for a picture that nobody can point at.
    """
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in points.values()]
    # Each short piece of a line is as good as a box.
    for (x, y), (to_x, to_y) in chain.from_iterable(map(pairwise, lines)):
        places = [(x + share / 8 * (to_x - x), y + share / 8 * (to_y - y)) for share in range(9)]
        for (left, top), (right, low) in pairwise(places):
            taken.append((min(left, right) - 3, min(top, low) - 3, max(left, right) + 3, max(top, low) + 3))
    for name, (x, y) in points.items():
        width = _LETTER * len(name)
        for at, low, anchor in _places(x, y, 300 if all_ else 0):
            begin = at - width * {"start": 0, "middle": 0.5, "end": 1}[anchor]
            box = (begin, low - _LINE_HEIGHT + 4, begin + width, low + 4)
            inside = box[0] > frame.left and box[2] < frame.right + 16 and box[1] > 0 and box[3] < frame.bottom
            is_free = not any(
                box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in taken
            )
            # To a name that is further away leads a line, unless it would lead over another mark.
            end = (at, low - 4) if abs(low - y) > 2 * _LINE_HEIGHT else (x, y)
            if inside and is_free and not any(_lies_on(other, (x, y), end) for other in points.values()):
                taken.append(box)
                if end != (x, y):
                    yield _line((x, y), end, "leader")
                yield element("text", escape(name), x=f"{at:.1f}", y=f"{low:.1f}", text_anchor=anchor)
                break


def _lies_on(mark: tuple[float, float], begin: tuple[float, float], end: tuple[float, float]) -> bool:
    """Whether a line that begins at a mark leads over another one."""
    length = math.dist(begin, end)
    if mark == begin or not length:
        return False
    (x, y), (to_x, to_y), (at_x, at_y) = begin, end, mark
    along, aside = to_x - x, to_y - y
    share = ((at_x - x) * along + (at_y - y) * aside) / length**2
    return 0 < share < 1 and math.dist(mark, (x + share * along, y + share * aside)) < 6


def _places(x: float, y: float, far: int) -> Iterator[tuple[float, float, str]]:
    """Yield where a name may stand beside its point, and which end of it: text that is larger grows away from it."""
    yield from ((x + 11, y + 4, "start"), (x - 11, y + 4, "end"), (x, y - 12, "middle"), (x, y + 24, "middle"))
    yield from ((x + 11, y - 8, "start"), (x - 11, y + 20, "end"))
    for away in chain.from_iterable((up, -up) for up in range(18, far, 18)):
        yield from ((x + 11, y + away, "start"), (x - 11, y + away, "end"))


# --- The frontier. ---


def frontier(chain_: Chain) -> Points:
    """Return what the planner chooses as the budget changes: the time of a step, and its peak."""
    return [(each.seconds, float(each.peak_bytes)) for each in ChainPlanner(chain_).frontier(_BUDGETS)]


def frontier_svg(
    curve: Points, steps: Mapping[str, StepMemory], device: Device, said: Callable[[str, StepMemory], str] | None = None
) -> str:
    """Return peak memory against the time of a step: steps as marks, and the planner's choices as a line.

    `said`: what is said of a step when it is pointed at; without it, every name is written.
    """
    marks = {name: (step.time.total, float(step.peak_bytes)) for name, step in steps.items()}
    height = 360.0 if said else 500.0
    # Of a page that can be pointed at memory begins at zero; where all names are written they get the room.
    least, most = (find(peak for _, peak in (*curve, *marks.values())) for find in (min, max))
    floor = 0.0 if said or least < most / 3 else least - 0.2 * (most - least)
    frame = Frame.around([*curve, *marks.values()], 64.0, WIDTH - 16, 26.0, height - 44, floor)
    drawn = [*frame.axes("peak", "a step takes")]
    drawn += frame.limit(device, f"{device.title}, {format_bytes(device.memory_bytes)}")
    # Between two choices the slower one is the best that fits.
    ordered = sorted(curve)
    stairs = [corner for (x, y), (slower, _) in pairwise(ordered) for corner in ((x, y), (slower, y))] + ordered[-1:]
    line = [frame.at(*each) for each in stairs]
    drawn.append(_curve(line))
    for seconds, peak in curve:
        words = f"the planner, for less: peak {format_bytes(peak)}, a step in {format_seconds(seconds)}"
        row = f"curve {seconds} {peak}"
        drawn.append(_mark(frame.at(seconds, peak), words, "point choice", data_row=row, data_said=words))
    for number, (name, step) in enumerate(steps.items()):
        words = said(name, step) if said else name
        drawn.append(_mark(frame.at(*marks[name]), words, "point", data_row=number, data_said=words, tabindex=0))
    names = {name: frame.at(*mark) for name, mark in marks.items()}
    if not said:
        # Equal ones share a mark, and the line has its name where it is farthest from them.
        there = {at: " = ".join(name for name, other in names.items() if other == at) for at in names.values()}
        names = {name: at for at, name in there.items()}
        if curve:
            free = max((frame.at(*each) for each in curve), key=lambda at: min(math.dist(at, other) for other in there))
            names["planner"] = free
    drawn += _labels(names, [line], frame, all_=not said)
    return svg(WIDTH, height, *drawn, label="peak memory against the time of a step")


# --- Memory over the step. ---


def steps_svg(steps: Mapping[str, StepMemory], device: Device) -> str:
    """Return memory over the step, stacked by category, with a panel for each step, all to one scale."""
    num_columns = min(_COLUMNS, len(steps))
    across, down = 330.0, 260.0
    width = max(num_columns * across, 2 * across)
    height = down * math.ceil(len(steps) / num_columns)
    drawn: list[str] = []
    stacked = {name: step.timeline.stacked() for name, step in steps.items()}
    high = max(moments[-1] for moments, _ in stacked.values())
    ceiling = 1.06 * max(step.peak_bytes for step in steps.values())
    for number, (name, step) in enumerate(steps.items()):
        row, column = divmod(number, num_columns)
        x, y = across * column, down * row
        # To one scale, so that a slower plan is seen to be slower.
        frame = Frame(x + 64, x + across - 12, y + 48, y + down - 44, 0.0, high, ceiling)
        is_timed = bool(step.timeline.seconds)
        drawn += frame.axes("memory", "predicted time" if is_timed else "events", None if is_timed else ())
        moments, edges = stacked[name]
        shown, colours = {str(each): edges[each] for each in edges}, {str(each): COLOURS[each] for each in edges}
        drawn += polygons(moments, shown, colours, frame.at)
        drawn += frame.limit(device, format_bytes(device.memory_bytes))
        title = f"{name}: {format_bytes(step.peak_bytes)}"
        drawn.append(element("text", escape(title), x=x + 64, y=y + 16, text_anchor="start"))
    used = [category for category in COLOURS if any(category in edges for _, edges in stacked.values())]
    for number, category in enumerate(used):
        row, column = divmod(number, 4)
        x, y = 64 + column * (width - 64) / 4, height + 20 * row + 12
        drawn.append(element("rect", x=x, y=y - 10, width=18, height=12, fill=COLOURS[category]))
        drawn.append(element("text", escape(category), x=x + 24, y=y, text_anchor="start"))
    return svg(width, height + 20 * math.ceil(len(used) / 4) + 4, *drawn, label="memory over the step")


# --- Memory against the number of checkpoints. ---


def checkpoints_svg(panels: Mapping[str, tuple[Points, str, Points]], optimum: float) -> str:
    """Return memory against the number of checkpoints.

    `panels`: what was simulated, the formula in words, and its curve. `optimum`: the number that theory calls best.
    """
    height, across = 420.0, 560.0
    drawn: list[str] = []
    for number, (title, (simulated, formula, curve)) in enumerate(panels.items()):
        marks, line = ([(math.log2(x), peak) for x, peak in each] for each in (simulated, curve))
        floor = 0.9 * min(peak for _, peak in (*marks, *line))
        left = across * number + 64
        frame = Frame.around([*marks, *line], left, left + across - 100, 50.0, height - 44, floor)
        ticks = ((float(power), str(2**power)) for power in range(math.ceil(frame.low), int(frame.high) + 1))
        drawn += frame.axes("peak", "checkpoints (segments, each with a saved input)", ticks)
        best = frame.at(math.log2(optimum), frame.floor), frame.at(math.log2(optimum), frame.ceiling)
        places, along = [frame.at(*each) for each in marks], [frame.at(*each) for each in line]
        drawn += [_line(*best, "best"), _curve(along), *(_mark(at, title, "point") for at in places)]
        drawn.append(element("text", escape(title), x=left, y=20, text_anchor="start"))
        # These points are where the curves are far from everything else.
        names = {f"sqrt(L) = {optimum:.3g}": frame.at(math.log2(optimum), 0.95 * frame.ceiling + 0.05 * frame.floor)}
        names |= {"simulated": min(places), formula: along[min(3, len(along) - 1)]}
        drawn += _labels(names, [best, along, *([at, at] for at in places)], frame, all_=True)
    return svg(across * len(panels), height, *drawn, label="memory against the number of checkpoints")


# --- Files. ---


def draw_all(found: Estimate, path: Path, say: Say) -> Iterator[Path]:
    """Draw three pictures and yield their files: `path`, and the same with `-frontier` and `-checkpoints`."""
    subject, device, steps, predictor = found.subject, found.devices[0], found.steps(), found.predictor
    title = title_of(subject, device)
    shown = {name: steps[name] for name in _PANELS if name in steps}
    yield paint(steps_svg(shown, device), path, title)
    costs = predictor.chain
    yield paint(frontier_svg(frontier(costs), steps, device), path.with_stem(f"{path.stem}-frontier"), title)
    say("Simulating segments of several sizes ...")
    # The stack of the language model, or the longest one.
    stack = max(subject.stacks, key=lambda stack: ("language" in stack.roles, len(stack.layers)))
    num_layers, root = len(stack.layers), math.sqrt(len(stack.layers))
    # In powers of two and with the square root, from one layer to all of them.
    sizes = {min(1 << power, num_layers) for power in range(num_layers.bit_length() + 1)} | {math.ceil(root)}
    panels: dict[str, tuple[Points, str, Points]] = {}
    for name, nested, formula in (
        ("segments", False, "k inputs + L/k layers"),
        ("nested segments", True, "k + L/k inputs"),
    ):
        simulated = []
        # A model of which not every layer can be recomputed has no such picture.
        with suppress(HFCkptError):
            for size in sorted(sizes):
                plan = subject.resolve("full", segment_size=size, nested=nested)
                simulated.append((float(math.ceil(num_layers / size)), float(predictor.memory(plan).peak_bytes)))
            panels[name] = simulated, formula, list(_needed(costs, num_layers, nested))
    if panels:
        yield paint(checkpoints_svg(panels, root), path.with_stem(f"{path.stem}-checkpoints"), title)


def _needed(costs: Chain, num_layers: int, nested: bool) -> Iterator[tuple[float, float]]:
    """Yield what k segments of L layers need: k inputs, and what is brought back at a time, with the last layer."""
    of_layer = costs.layers[len(costs.layers) // 2].costs
    each = costs.input_bytes if nested else of_layer[NONE].kept_bytes
    for number in range(1, num_layers + 1):
        kept = number * costs.input_bytes
        brought_back = (num_layers / number - 1) * each
        last = of_layer[FULL].backward_bytes
        yield float(number), costs.base_bytes + max(kept + brought_back + last, kept + costs.head_bytes)


def title_of(subject: Subject, device: Device) -> str:
    """Return what stands above a picture in a file."""
    return f"{Path(subject.title).name}, {describe_rows(subject.step)}, {device.title}"


_TITLE = 30
_FONT = 11
_NUMBERS = {"x", "y", "cx", "cy", "x1", "x2", "y1", "y2", "width", "height"}
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}
_STYLES: Mapping[str, Mapping[str, Any]] = {
    "": {"color": "#1b1f24"},
    "quiet": {"color": "#57606a"},
    "axis": {"color": "#d0d7de", "linewidth": 1},
    "limit": {"color": "#57606a", "linewidth": 1.5, "linestyle": "--"},
    "best": {"color": "#009E73", "linewidth": 2, "linestyle": "--"},
    "leader": {"color": "#57606a", "linewidth": 0.8},
    "stairs": {"color": "#0072b2", "linewidth": 2.5},
    "point": {"facecolor": "#d55e00", "edgecolor": "#ffffff", "linewidth": 1.5},
    "point choice": {"facecolor": "#0072b2", "edgecolor": "#ffffff", "linewidth": 1.5},
}
"""By class, as the page's CSS has it."""


def paint(drawing: str, path: Path, title: str) -> Path:
    """Paint a picture that was drawn here into a file, and return that."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle, Polygon, Rectangle

    root = ElementTree.fromstring(drawing)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    # One unit is one point.
    figure = Figure(figsize=((width + 16) / 72, (height + _TITLE) / 72), dpi=100)
    FigureCanvasAgg(figure)
    panel = figure.add_axes((0, 0, 1, 1), xlim=(-8, width + 8), ylim=(height, -_TITLE))
    panel.set_axis_off()
    panel.text(0, -12, title, fontsize=_FONT + 2)
    for drawn in root.iter():
        given, style = drawn.attrib, _STYLES[drawn.get("class", "")]
        number = {name: float(given[name]) for name in _NUMBERS & given.keys()}
        places = [tuple(map(float, place.split(","))) for place in drawn.get("points", "").split()]
        match drawn.tag.rpartition("}")[2]:
            case "text":
                style = {**style, "ha": _ANCHORS[given["text-anchor"]], "va": "baseline", "fontsize": _FONT}
                panel.text(number["x"], number["y"], drawn.text or "", **style)
            case "line":
                panel.plot([number["x1"], number["x2"]], [number["y1"], number["y2"]], **style)
            case "polyline" if places:
                panel.plot(*zip(*places, strict=True), **style)
            case "polygon":
                panel.add_patch(Polygon(places, facecolor=given["fill"], linewidth=0))
            case "rect":
                size = number["width"], number["height"]
                panel.add_patch(Rectangle((number["x"], number["y"]), *size, color=given["fill"]))
            case "circle":
                radius = 3.5 if "choice" in given["class"] else 5.5
                panel.add_patch(Circle((number["cx"], number["cy"]), radius, zorder=3, **style))
    figure.savefig(path)
    return path
