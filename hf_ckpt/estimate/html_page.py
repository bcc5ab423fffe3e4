"""An estimate as one page that can be sent on: HTML, inline SVG, a few lines of script, and nothing from elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_ckpt.estimate.plots import frontier, frontier_svg
from hf_ckpt.estimate.tables import FIT_WORDS, format_seconds, only_by, versions
from hf_ckpt.html_svg import element, escape, html_table
from hf_ckpt.planner.advice import slower_by
from hf_ckpt.planner.chain import Chain
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.units import format_bytes


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
        picture = frontier_svg(frontier(self.chain), self.steps, self.device, self._said)
        hint = "Point at a mark. The line is what the planner chooses as the budget changes."
        said = element("p", escape(hint), id="said", aria_live="polite")
        yield _headed("Time against memory", element("div", picture, class_="wide"), said, self._rows())
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
        plain = self.steps.get("none", memory)
        if plain is not memory:
            shown["peak without a plan"] = format_bytes(plain.peak_bytes)
        shown["a step takes"] = format_seconds(memory.time.total)
        if plain is not memory and plain.time.total:
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
        lines = [element("tr", *(element("th", name, scope="col") for name in ("plan", "peak", "step", "fits")))]
        for number, (name, step) in enumerate(self.steps.items()):
            cells = (
                name,
                format_bytes(step.peak_bytes),
                format_seconds(step.time.total),
                self.fits[name] + only_by(self.fits[name]),
            )
            lines.append(element("tr", *(element("td", escape(cell)) for cell in cells), data_row=number))
        return element("div", element("table", *lines), class_="wide rows")


def _headed(title: str, *parts: str) -> str:
    return element("section", element("h2", escape(title)), *parts)
