"""HTML and SVG as text, for notebooks and for the page of an estimate. Text follows the page: it is dark where that is.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision can tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape as escape
from itertools import chain

from hf_ckpt.units import format_bytes

_STYLE = "font-family:system-ui,sans-serif;font-size:13px"
_CELL, _HIGH = 18, 16
_AMOUNT = re.compile(r"[\d,.]+( [KMGT]?i?B)?")


def element(tag: str, *children: str, **attributes: object) -> str:
    """Return an element; children are markup already. Attributes: `class_` is `class`, `font_size` is `font-size`."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for name, value in attributes.items()
    )
    return f"<{tag}{given}>{''.join(children)}</{tag}>"


def paragraph(text: str) -> str:
    return element("p", escape(text))


def html_table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return rows of text as a table; amounts are aligned to the right."""
    lines = [element("tr", *(element("th", escape(cell), scope="col") for cell in header))] if header else []
    lines += [element("tr", *(_cell(cell) for cell in row)) for row in rows]
    return element("table", *lines)


def _cell(text: str) -> str:
    is_amount = _AMOUNT.fullmatch(text) is not None
    return element("td", escape(text), **({"style": "text-align:right;white-space:nowrap"} if is_amount else {}))


def notebook(*parts: str) -> str:
    return element("div", *parts, style=_STYLE)


def svg(width: float, height: float, *children: str, label: str) -> str:
    """Return a picture that is never wider than its place. `label`: what those hear who cannot see it."""
    style = f"max-width:{width:g}px;width:100%;height:auto"
    return element(
        "svg",
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
        style=style,
    )


def strip(cells: Sequence[tuple[str, str]], *, label: str) -> str:
    """Return a row of cells, each a colour and what is said of it: the layers of a stack."""
    drawn = (
        element(
            "rect",
            element("title", escape(text)),
            x=number * _CELL,
            y=0,
            width=_CELL - 1,
            height=_HIGH,
            fill=colour,
        )
        for number, (colour, text) in enumerate(cells)
    )
    return svg(max(1, len(cells)) * _CELL, _HIGH, *drawn, label=label)


def legend(colours: Mapping[str, str]) -> str:
    return element(
        "p",
        *(
            element("span", _swatch(colour), escape(name), style="white-space:nowrap;margin-right:1em")
            for name, colour in colours.items()
        ),
    )


def _swatch(colour: str) -> str:
    style = f"display:inline-block;width:.8em;height:.8em;margin-right:.35em;background:{colour}"
    return element("span", style=style)


def areas(
    moments: Sequence[float],
    edges: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    colours: Mapping[str, str],
    *,
    label: str,
    over: str,
) -> str:
    """Return bytes over time, one area between two edges for each name, with the peak written above.

    `moments`: of each entry, from 0 on. `over`: written below.
    """
    width, height, left, low = 640.0, 240.0, 4.0, 20.0
    peak = max(chain.from_iterable(above for _, above in edges.values()), default=0) or 1
    end = moments[-1] or 1
    x = [left + moment / end * (width - 2 * left) for moment in moments]
    drawn = []
    for name, (below, above) in edges.items():
        lower, upper = ([height - low - level / peak * (height - 2 * low) for level in edge] for edge in (below, above))
        points = chain(zip(x, upper, strict=True), reversed(list(zip(x, lower, strict=True))))
        path = " ".join(f"{at:.1f},{level:.1f}" for at, level in points)
        drawn.append(element("polygon", element("title", escape(name)), points=path, fill=colours[name]))
    said = f"peak {format_bytes(peak)}"
    drawn.append(element("text", said, x=left, y=14, fill="currentColor", font_size=13))
    drawn.append(element("text", escape(over), x=left, y=height - 4, fill="currentColor", font_size=13))
    return svg(width, height, *drawn, label=f"{label}: {said}")
