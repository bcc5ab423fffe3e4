"""What all pictures share: the figure, the colours of the groups, and the file with the digest of its data.

Colours are those of Okabe and Ito (2008), which people with any kind of colour vision can tell apart; each group has a
shape of its own as well.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB, MIB = 2**30, 2**20
DPI = 100
GREY = "#555555"
_DIGEST = "Data digest"
_NUM_COLOURS = 256
_PNG_HEADER = 8


@dataclass(frozen=True)
class Look:
    """How a group is drawn and what the legend says."""

    colour: str
    marker: str
    words: str


LOOKS: Mapping[str, Look] = {
    "none": Look("#000000", "X", "no checkpointing"),
    "today": Look("#D55E00", "s", "what Trainer has today"),
    "elsewhere": Look("#CC79A7", "^", "other trainers and libraries"),
    "compiled": Look("#009E73", "D", "under torch.compile"),
    "ours": Look("#56B4E9", "o", "hf_ckpt, fixed policies"),
    "auto": Look("#0072B2", "o", "hf_ckpt, auto, for some budgets"),
}
"""By group of contenders, in the order of the legend."""


def figure_of(size: tuple[float, float], title: str, font: float = 14) -> Figure:
    """Return a figure without pyplot and its global state.

    Args:
        size: in inches.
        title: above it, from the left.
        font: size of the title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=font, x=0.015, ha="left")
    return figure


def plain(panel: Axes, across: str, up: str, font: float) -> None:
    """Give a panel its names, a light grid and no box around it."""
    panel.set_xlabel(across, fontsize=font)
    panel.set_ylabel(up, fontsize=font)
    panel.tick_params(labelsize=font - 1)
    panel.grid(alpha=0.35)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def save(figure: Figure, path: Path, data: Any) -> None:
    """Write a PNG that carries the digest of the data that it shows."""
    from PIL import Image, PngImagePlugin

    canvas: Any = figure.canvas
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    notes = PngImagePlugin.PngInfo()
    notes.add_text(_DIGEST, digest_of(data))
    # A palette makes the file a third as large, and nobody sees it.
    image.quantize(_NUM_COLOURS, dither=Image.Dither.NONE).save(path, pnginfo=notes, optimize=True)


def digest_of(data: Any) -> str:
    """Return the digest of JSON data, whatever the order of its keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_in(path: Path) -> str | None:
    """Return the digest that a PNG carries, or None if it carries none."""
    content = path.read_bytes()
    at = _PNG_HEADER
    while at < len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        key, _, text = content[at + 8 : at + 8 + length].partition(b"\0")
        if kind == b"tEXt" and key.decode("latin-1") == _DIGEST:
            return text.decode("latin-1")
        # Length, kind and check sum are four bytes each.
        at += length + 12
    return None
