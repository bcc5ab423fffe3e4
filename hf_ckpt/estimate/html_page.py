"""An estimate as one page that can be sent on: HTML, inline SVG, a few lines of script, and nothing from elsewhere."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hf_ckpt.estimate.plot_files import frontier
from hf_ckpt.estimate.tables import FIT_WORDS, format_seconds, only_by, versions
from hf_ckpt.html_svg import element, escape, html_table, svg
from hf_ckpt.planner.advice import slower_by
from hf_ckpt.planner.chain import Chain
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.plots import stairs
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import UNITS, format_bytes

_WIDTH, _HEIGHT = 720.0, 360.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 16.0, 26.0, 44.0
_TICKS = 4
_LETTER, _LINE_HEIGHT = 7.2, 16.0


@dataclass(frozen=True)
class Page:
    """What a page shows, of one device."""

    title: str  # What was asked about.
    verdict: str  # The answer, in one line.
    device: Device
    facts: Sequence[tuple[str, str]]  # What was taken for what.
    steps: Mapping[str, StepMemory]  # Those of the rows, by name.
    decides: str  # The name of the row that the verdict is about.
    chain: Chain  # The step as the planner saw it.
    ledger: Iterable[str]  # What layers hold from forward to backward, as text.
    words: Sequence[str]  # Of the command.
    fits: Mapping[str, str]  # Whether rows fit; see `Fit`.

    def write(self, path: Path) -> None:
        """Write the page to a file."""
        path.write_text(self.html(), encoding="utf-8")

    def html(self) -> str:
        """Return the page."""
        style, script = (
            Path(__file__).with_name(f"html_page.{end}").read_text(encoding="utf-8") for end in ("css", "js")
        )
        # Whatever a browser would load, this forbids.
        rule = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
        head = [
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{rule}">',
            element("title", escape(f"{self.title}: {self.verdict}")),
            f"<style>\n{style}</style>",
        ]
        body = element("body", *self._parts(), f"<script>\n{script}</script>")
        return "\n".join(["<!doctype html>", '<html lang="en">', "<head>", *head, "</head>", body, "</html>", ""])

    def _parts(self) -> Iterator[str]:
        memory = self.steps[self.decides]
        yield element("h1", escape(self.title))
        answer, mark, advice = self.verdict.partition(". ")
        yield element("p", escape(f"{answer}{mark}".rstrip()), class_="verdict")
        yield element("p", escape(advice))
        yield self._figures(memory)
        yield _headed("Time against memory", self._frontier(), self._rows())
        yield _headed(f"Memory over the step: {self.decides}", memory.picture())
        if memory.plan is not None:
            yield _headed("The plan", memory.plan._repr_html_())
        ledger = "\n".join(self.ledger)
        yield _headed("What layers hold from forward to backward", element("pre", escape(ledger or "nothing")))
        yield _headed("What was taken for what", element("div", html_table(self.facts), class_="wide"))
        yield _headed("The command", element("pre", escape(shlex.join(["hf-ckpt", *self.words])), class_="command"))
        used = ", ".join(f"{name} {number}" for name, number in versions().items())
        yield element("p", escape(f"Predicted; nothing was run. {used}."), class_="quiet")

    def _figures(self, memory: StepMemory) -> str:
        shown = {"peak, as predicted": format_bytes(memory.peak_bytes)}
        plain = self.steps.get("none")
        if plain is not None and plain is not memory:
            shown["peak without a plan"] = format_bytes(plain.peak_bytes)
        shown["a step takes"] = format_seconds(memory.time.total)
        if plain is not None and plain is not memory and plain.time.total:
            shown["than without a plan"] = slower_by(memory.time.total / plain.time.total)
        shown[self.device.title] = format_bytes(self.device.memory_bytes)
        boxes = (
            element("div", element("b", escape(text)), element("span", escape(name))) for name, text in shown.items()
        )
        return element("div", *boxes, class_="figures")

    def _said(self, name: str, step: StepMemory) -> str:
        peak, seconds = format_bytes(step.peak_bytes), format_seconds(step.time.total)
        return f"{name}: peak {peak}, a step in {seconds}; it {FIT_WORDS[self.fits[name]]}{only_by(self.fits[name])}"

    def _rows(self) -> str:
        header = element("tr", *(element("th", name, scope="col") for name in ("plan", "peak", "step", "fits")))
        lines = [header]
        for number, (name, step) in enumerate(self.steps.items()):
            cells = (
                name,
                format_bytes(step.peak_bytes),
                format_seconds(step.time.total),
                self.fits[name] + only_by(self.fits[name]),
            )
            lines.append(element("tr", *(element("td", escape(cell)) for cell in cells), data_row=number))
        return element("div", element("table", *lines), class_="wide rows")

    def _frontier(self) -> str:
        curve = frontier(self.chain)
        marks = [(step.time.total, float(step.peak_bytes)) for step in self.steps.values()]
        scale = _Scale.of([*curve, *marks])
        drawn = [*scale.axes(), *scale.limit(self.device)]
        line = [scale.at(*point) for point in stairs(sorted(curve))]
        drawn.append(element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in line), class_="stairs"))
        for seconds, peak in curve:
            said = f"the planner, for less: peak {format_bytes(peak)}, a step in {format_seconds(seconds)}"
            drawn.append(_point(scale.at(seconds, peak), said, f"curve {seconds} {peak}", is_choice=True))
        for number, (name, step) in enumerate(self.steps.items()):
            at = scale.at(step.time.total, step.peak_bytes)
            drawn.append(_point(at, self._said(name, step), str(number)))
        drawn += _labels({name: scale.at(s.time.total, s.peak_bytes) for name, s in self.steps.items()}, line)
        picture = svg(_WIDTH, _HEIGHT, *drawn, label="peak memory against the time of a step")
        hint = "Point at a mark. The line is what the planner chooses as the budget changes."
        return element("div", picture, class_="wide") + element("p", escape(hint), id="said", aria_live="polite")


@dataclass(frozen=True)
class _Scale:
    """Seconds and bytes to places in the picture; bytes begin at zero."""

    low: float
    high: float
    top: float

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> _Scale:
        times = [seconds for seconds, _ in points]
        room = 0.06 * (max(times) - min(times)) or 0.1 * max(times) or 1.0
        return cls(min(times) - room, max(times) + room, 1.08 * max(peak for _, peak in points))

    def at(self, seconds: float, peak: float) -> tuple[float, float]:
        x = _LEFT + (seconds - self.low) / (self.high - self.low) * (_WIDTH - _LEFT - _RIGHT)
        return x, _TOP + (1 - peak / self.top) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> Iterator[str]:
        unit = "GiB" if self.top >= UNITS["GiB"] else "MiB"
        for level in _round_numbers(0, self.top / UNITS[unit]):
            _, y = self.at(self.low, level * UNITS[unit])
            yield element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="axis")
            yield _text(f"{level:g}", _LEFT - 8, y + 4, anchor="end")
        for seconds in _round_numbers(self.low, self.high):
            yield _text(format_seconds(seconds), self.at(seconds, 0)[0], _HEIGHT - _BOTTOM + 18, anchor="middle")
        yield _text(f"peak, {unit}", 0, 12)
        yield _text("a step takes", _WIDTH - _RIGHT, _HEIGHT - 6, anchor="end")

    def limit(self, device: Device) -> Iterator[str]:
        """Yield what the device has, where it lies in the picture."""
        if device.memory_bytes and device.memory_bytes <= self.top:
            x, y = self.at(self.low, device.memory_bytes)
            yield element("line", x1=x, x2=_WIDTH - _RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="limit")
            yield _text(f"{device.title}, {format_bytes(device.memory_bytes)}", _WIDTH - _RIGHT, y - 6, anchor="end")


def _round_numbers(low: float, high: float) -> Iterator[float]:
    """Yield a few round numbers between two."""
    magnitude = 10 ** math.floor(math.log10((high - low) / _TICKS))
    step = next(each * magnitude for each in (1, 2, 5, 10) if (high - low) / (each * magnitude) <= _TICKS + 1)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield round(number * step, 12)


def _headed(title: str, *parts: str) -> str:
    return element("section", element("h2", escape(title)), *parts)


def _text(text: str, x: float, y: float, anchor: str = "start") -> str:
    return element("text", escape(text), x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, class_="quiet")


def _point(at: tuple[float, float], said: str, row: str, *, is_choice: bool = False) -> str:
    x, y = (f"{each:.1f}" for each in at)
    given = {"class_": "point choice" if is_choice else "point", "data_row": row, "data_said": said}
    reached = {} if is_choice else {"tabindex": 0}
    return element("circle", element("title", escape(said)), cx=x, cy=y, r=7, **given, **reached)


def _labels(points: Mapping[str, tuple[float, float]], line: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Yield names beside their points where there is room; the others are said when they are pointed at."""
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in points.values()]
    # The line is one of stairs: each stretch of it is as good as a box.
    for (x, y), (to_x, to_y) in pairwise(line):
        taken.append((min(x, to_x) - 3, min(y, to_y) - 3, max(x, to_x) + 3, max(y, to_y) + 3))
    for name, (x, y) in points.items():
        width = _LETTER * len(name)
        for at, low, anchor in _places(x, y):
            left = at - width * {"start": 0, "middle": 0.5, "end": 1}[anchor]
            box = (left, low - _LINE_HEIGHT + 4, left + width, low + 4)
            inside = box[0] > _LEFT and box[2] < _WIDTH and box[1] > 0 and box[3] < _HEIGHT - _BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                yield element("text", escape(name), x=f"{at:.1f}", y=f"{low:.1f}", text_anchor=anchor)
                break


def _places(x: float, y: float) -> Iterator[tuple[float, float, str]]:
    """Yield where a name may stand beside its point, and which end of it: text that is larger grows away from it."""
    yield from ((x + 11, y + 4, "start"), (x - 11, y + 4, "end"), (x, y - 12, "middle"), (x, y + 24, "middle"))
    yield from ((x + 11, y - 8, "start"), (x - 11, y + 20, "end"))


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
