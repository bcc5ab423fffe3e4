"""Memory over one step: a panel for each of five modes, on the same axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pages.drawing import GIB, LOOKS, MIB, figure_of, plain, save
from benchmarks.pages.results import CPU, Json, Row, Run
from benchmarks.pages.words import case_title, kind_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODES = ("none", "selective", "ffn", "full", "full_offload")
"""From the one that keeps most to the one that keeps least."""
_SIZE = (15.0, 5.2)
_FONT = 14.0


def data_of(run: Run, modes: Sequence[str] = MODES) -> Json | None:
    """Return what is drawn of a run, as JSON types; None if fewer than two of the modes have a timeline."""
    rows = [row for row in run.ran if row.name in modes and row.timeline]
    if len(rows) < 2:
        return None
    size, unit = (MIB, "MiB") if run.kind == CPU else (GIB, "GiB")
    seconds = run.is_predicted
    return {
        "title": f"Memory over one step. {case_title(run)}: {kind_words(run)}",
        "across": "predicted time (s)" if seconds else "events of the step (share)",
        "up": f"{'predicted' if run.is_predicted else 'measured'} memory ({unit})",
        "unit": unit,
        "panels": [_panel(row, size) for row in sorted(rows, key=lambda row: modes.index(row.name))],
    }


def _panel(row: Row, size: int) -> Json:
    assert row.peak_bytes is not None
    points = [[at, num_bytes / size] for at, num_bytes in row.timeline]
    return {"title": row.title, "group": row.group, "peak": row.peak_bytes / size, "points": points}


def draw(data: Json, path: Path) -> None:
    """Draw what `data_of` returned."""
    figure = figure_of(_SIZE, data["title"], _FONT + 2)
    shown = data["panels"]
    axes = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    first = shown[0]["points"]
    for panel, mode in zip(axes, shown, strict=True):
        plain(panel, data["across"], "", _FONT)
        _fill(panel, mode, first, is_first=mode is shown[0])
        panel.set_title(f"{mode['title']}\npeak {mode['peak']:.1f} {data['unit']}", fontsize=_FONT, loc="left")
    axes[0].set_ylabel(data["up"], fontsize=_FONT)
    axes[0].set_ylim(0, 1.05 * max(mode["peak"] for mode in shown))
    axes[0].set_xlim(0, max(mode["points"][-1][0] for mode in shown))
    save(figure, path, data)


def _fill(panel: Axes, mode: Json, first: Sequence[Sequence[float]], *, is_first: bool) -> None:
    colour = LOOKS[mode["group"]].colour
    x, y = zip(*mode["points"], strict=True)
    panel.fill_between(x, y, color=colour, alpha=0.55 if is_first else 0.8, linewidth=0)
    if not is_first:
        # The first mode again, so that each panel shows what it saves.
        panel.plot(*zip(*first, strict=True), color="#000000", linewidth=1.2, linestyle=":")
