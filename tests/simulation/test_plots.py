"""Pictures of predicted steps: what they show and say. How they look is for eyes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt.simulation import plots
from hf_ckpt.simulation.plots import Curve
from hf_ckpt.simulation.step_memory import Category
from tests import steps_by_hand
from tests.steps_by_hand import GIB

pytest.importorskip("matplotlib")

STEPS = {
    "none": steps_by_hand.step(1.0, seconds=2.0),
    "full": steps_by_hand.step(0.1, 0.9, seconds=3.0),
    "ffn": steps_by_hand.step(0.5, 0.5, seconds=2.5),
    "every-2": steps_by_hand.step(0.55, 0.9, seconds=2.5),
}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, as they are saved."""
    drawn: list[Any] = []
    save = plots._save

    def keep(figure: Any, path: Path) -> None:
        drawn.append(figure)
        save(figure, path)

    monkeypatch.setattr(plots, "_save", keep)
    return drawn


def texts(figure: Any) -> set[str]:
    """What is written in a figure, but for the numbers of its axes."""
    import matplotlib.text

    found = (text.get_text() for text in figure.findobj(matplotlib.text.Text))
    return {text for text in found if text and not text.replace(".", "").isdigit()}


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def test_every_category_has_a_colour_of_its_own() -> None:
    assert set(plots.COLOURS) == set(Category)
    assert len(set(plots.COLOURS.values())) == len(Category)


@pytest.mark.sweep
def test_step_has_a_panel_for_each_plan_with_its_peak(figures: list[Any], tmp_path: Path) -> None:
    plots.draw_steps(STEPS, tmp_path / "steps.png", title="a recipe", limit_bytes=6 * GIB)
    (figure,) = figures
    assert [panel.get_title(loc="left") for panel in figure.axes] == [
        "none: 8.5 GiB",
        "full: 5.3 GiB",
        "ffn: 6.5 GiB",
        "every-2: 7.1 GiB",
    ]
    assert {panel.get_xlabel() for panel in figure.axes} == {"predicted time (s)"}
    assert {"a recipe", "memory (GiB)", "parameters", "saved activations", "recomputation", "6.0 GiB"} <= texts(figure)
    assert len({panel.get_ylim() for panel in figure.axes}) == 1
    assert size_of(tmp_path / "steps.png") == (1440, 830)


def test_step_without_predicted_time_is_drawn_over_its_events(figures: list[Any], tmp_path: Path) -> None:
    from dataclasses import replace

    step = replace(STEPS["none"], timeline=replace(STEPS["none"].timeline, seconds=()))
    plots.draw_steps({"none": step}, tmp_path / "steps.png", title="")
    assert figures[0].axes[0].get_xlabel() == "events"


def test_frontier_names_every_mode_and_the_planner(figures: list[Any], tmp_path: Path) -> None:
    curve = Curve("planner", [(2.0, 8.5 * GIB), (2.2, 7.0 * GIB), (3.0, 5.2 * GIB)])
    plots.draw_frontier(STEPS, curve, tmp_path / "frontier.png", title="a recipe", limit_bytes=6 * GIB)
    (panel,) = figures[0].axes
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("predicted step time (s)", "predicted peak (GiB)")
    assert texts(figures[0]) >= {*STEPS, "planner", "6.0 GiB"}
    (line,) = (line for line in panel.lines if len(line.get_xdata()) == 3)
    assert list(line.get_ydata()) == [8.5, 7.0, 5.2]
    (marks,) = panel.collections
    assert len(marks.get_offsets()) == 4


def test_labels_of_a_frontier_do_not_cover_each_other(figures: list[Any], tmp_path: Path) -> None:
    # Of the same peak, so that all want the same place.
    near = {f"mode {number}": steps_by_hand.step(1.0, seconds=2.0 + number / 1000) for number in range(12)}
    plots.draw_frontier(near, Curve("planner", []), tmp_path / "frontier.png", title="")
    figure = figures[0]
    boxes = [
        text.get_window_extent(figure.canvas.get_renderer())
        for text in figure.axes[0].texts
        if text.get_text().startswith("mode")
    ]
    assert len(boxes) == 12
    assert not any(box.overlaps(other) for box in boxes for other in boxes if box is not other)


def test_equal_plans_share_a_mark_and_its_label(figures: list[Any], tmp_path: Path) -> None:
    steps = {"recipe": STEPS["full"], "none": STEPS["none"], "full": STEPS["full"]}
    plots.draw_frontier(steps, Curve("planner", []), tmp_path / "frontier.png", title="")
    assert texts(figures[0]) >= {"recipe = full", "none"}


def test_no_label_of_a_frontier_lies_on_its_line(figures: list[Any], tmp_path: Path) -> None:
    curve = Curve("planner", [(2.0, 8.5 * GIB), (2.2, 7.0 * GIB), (3.0, 5.2 * GIB)])
    plots.draw_frontier(STEPS, curve, tmp_path / "frontier.png", title="")
    (panel,) = figures[0].axes
    renderer = figures[0].canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in panel.texts if text.arrow_patch is None]
    (line,) = (line for line in panel.lines if len(line.get_xdata()) == 3)
    assert boxes
    assert not any(line.get_transform().transform_path(line.get_path()).intersects_bbox(box, False) for box in boxes)


def test_small_steps_are_drawn_in_small_units(figures: list[Any], tmp_path: Path) -> None:
    small = {"none": steps_by_hand.step(2**-10, states_gib=2**-8, seconds=0.002)}
    plots.draw_steps(small, tmp_path / "steps.png", title="")
    plots.draw_frontier(small, Curve("planner", []), tmp_path / "frontier.png", title="")
    steps, frontier = (figure.axes[0] for figure in figures)
    assert (steps.get_ylabel(), steps.get_xlabel()) == ("memory (MiB)", "predicted time (ms)")
    assert steps.get_title(loc="left") == "none: 520.0 MiB"
    assert (frontier.get_ylabel(), frontier.get_xlabel()) == ("predicted peak (MiB)", "predicted step time (ms)")
    assert plots._clock_of(0.002).format(0.0015) == "1.5"


@pytest.mark.sweep
def test_names_of_areas_stay_inside_of_them(figures: list[Any], tmp_path: Path) -> None:
    plots.draw_steps(STEPS, tmp_path / "steps.png", title="", limit_bytes=2 * GIB)
    renderer = figures[0].canvas.get_renderer()
    for panel in figures[0].axes:
        boxes = [text.get_window_extent(renderer) for text in panel.texts]
        assert len(boxes) > 1
        assert not any(box.overlaps(other) for box in boxes for other in boxes if box is not other)


def test_checkpoints_have_a_panel_for_each_kind_with_the_optimum(figures: list[Any], tmp_path: Path) -> None:
    numbers = (1, 2, 4, 8, 16)
    simulated = Curve("nested segments", [(number, (number + 16 / number) * GIB) for number in numbers])
    formula = Curve("k + L/k", [(number, (number + 16 / number) * GIB) for number in range(1, 17)])
    plots.draw_checkpoints(
        [(simulated, formula), (simulated, formula)], tmp_path / "c.png", title="", optimum=math.sqrt(16)
    )
    panels = figures[0].axes
    assert [panel.get_title(loc="left") for panel in panels] == ["nested segments"] * 2
    assert {panel.get_ylabel() for panel in panels} == {"predicted peak (GiB)"}
    assert texts(figures[0]) >= {"simulated", "k + L/k", "sqrt(L) = 4"}
    assert [set(line.get_xdata()) for line in panels[0].lines][-1] == {4.0}


def test_drawing_leaves_matplotlib_as_it_is(tmp_path: Path) -> None:
    import sys

    plots.draw_steps({"none": STEPS["none"]}, tmp_path / "steps.png", title="")
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()
