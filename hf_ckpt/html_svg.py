"""HTML and SVG as text, for notebooks and for the page of an estimate. Text follows the page: it is dark where that is.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision can tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape as escape
from itertools import chain
from typing import TYPE_CHECKING

from hf_ckpt.units import format_bytes

if TYPE_CHECKING:
    from hf_ckpt.policy.plan import Plan

MODE_COLOURS: Mapping[str, str] = {
    "none": "#999999",
    "full": "#D55E00",
    "attention": "#E69F00",
    "ffn": "#CC79A7",
    "selective": "#56B4E9",
    "selective_attention": "#0072B2",
}
"""Of layers, where a plan is drawn, by the value of a `Mode`."""
Edges = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""The lower and the upper edge of each area, in bytes, by name."""
_CELL, _HIGH = 18, 16
_AMOUNT = re.compile(r"[\d,.]+( [KMGT]?i?B)?")


def element(tag: str, *children: str, **attributes: object) -> str:
    """Return an element; children are markup already. Attributes: `class_` is `class`, `font_size` is `font-size`."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items()
    )
    return f"<{tag}{given}>{''.join(children)}</{tag}>"


def notebook(*parts: str) -> str:
    """Return what a notebook shows."""
    return element("div", *parts, style="font-family:system-ui,sans-serif;font-size:13px")


def html_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return rows of text as a table; amounts are aligned to the right."""

    def cell(text: str) -> str:
        is_amount = _AMOUNT.fullmatch(text) is not None
        return element("td", escape(text), **({"style": "text-align:right;white-space:nowrap"} if is_amount else {}))

    lines = [element("tr", *(element("th", escape(name), scope="col") for name in header))] if header else []
    return element("table", *lines, *(element("tr", *map(cell, row)) for row in rows))


def svg(width: float, height: float, *children: str, label: str) -> str:
    """Return a picture that is never wider than its place. `label`: what those hear who cannot see it."""
    return element(
        "svg",
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
        style=f"max-width:{width:g}px;width:100%;height:auto",
    )


def legend(colours: Mapping[str, str]) -> str:
    """Return names, each behind its colour."""
    swatch = "display:inline-block;width:.8em;height:.8em;margin-right:.35em;background:"
    names = (
        element(
            "span", element("span", style=swatch + colour), escape(name), style="white-space:nowrap;margin-right:1em"
        )
        for name, colour in colours.items()
    )
    return element("p", *names)


def plan_html(plan: Plan, grouped: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """Return a plan as a notebook shows it: its stacks as strips with a cell for each layer, and as tables.

    `grouped`: by the path of a stack, (layers, what they do) of equal neighbours.
    """
    shown = [element("p", escape(plan.describe()))]
    for stack in plan.stacks:
        cells = (
            element(
                "rect",
                element("title", escape(f"{number}: {layer.describe()}")),
                x=number * _CELL,
                y=0,
                width=_CELL - 1,
                height=_HIGH,
                fill=MODE_COLOURS[layer.mode],
            )
            for number, layer in enumerate(stack.layers)
        )
        num_layers = len(stack.layers)
        shown.append(svg(max(1, num_layers) * _CELL, _HIGH, *cells, label=f"{stack.path}: {num_layers} layers"))
        shown.append(html_table(grouped[stack.path], header=(stack.path, "what it does")))
    modes = {layer.mode for stack in plan.stacks for layer in stack.layers}
    shown.append(legend({mode: colour for mode, colour in MODE_COLOURS.items() if mode in modes}))
    return notebook(*shown)


def areas(moments: Sequence[float], edges: Edges, colours: Mapping[str, str], *, label: str, over: str) -> str:
    """Return bytes over time, one area for each name, with the peak written above.

    `moments`: of each entry, from 0 on. `over`: written below.
    """
    width, height, left, low = 640.0, 240.0, 4.0, 20.0
    peak = max(chain.from_iterable(above for _, above in edges.values()), default=0) or 1
    end = moments[-1] or 1

    def at(moment: float, level: float) -> tuple[float, float]:
        return left + moment / end * (width - 2 * left), height - low - level / peak * (height - 2 * low)

    said = f"peak {format_bytes(peak)}"
    drawn = list(polygons(moments, edges, colours, at))
    drawn.append(element("text", said, x=left, y=14, fill="currentColor", font_size=13))
    drawn.append(element("text", escape(over), x=left, y=height - 4, fill="currentColor", font_size=13))
    return svg(width, height, *drawn, label=f"{label}: {said}")


def polygons(
    moments: Sequence[float],
    edges: Edges,
    colours: Mapping[str, str],
    at: Callable[[float, float], tuple[float, float]],
) -> Iterator[str]:
    """Yield the areas between edges; `at`: where a moment and a level lie in the picture."""
    for name, (below, above) in edges.items():
        upper, lower = ([at(*point) for point in zip(moments, edge, strict=True)] for edge in (above, below))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in chain(upper, reversed(lower)))
        yield element("polygon", element("title", escape(name)), points=path, fill=colours[name])
