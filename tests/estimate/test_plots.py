"""Pictures of predicted steps: what they show and say. How they look is for eyes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hf_ckpt.estimate import plots
from hf_ckpt.simulation.devices import find_device
from hf_ckpt.simulation.step_memory import COLOURS, Category, StepMemory
from tests import steps_by_hand
from tests.steps_by_hand import GIB

STEPS = {
    "none": steps_by_hand.step(1.0, seconds=2.0),
    "full": steps_by_hand.step(0.1, 0.9, seconds=3.0),
    "ffn": steps_by_hand.step(0.5, 0.5, seconds=2.5),
    "every-2": steps_by_hand.step(0.55, 0.9, seconds=2.5),
}
CARD = replace(find_device("rtx4090"), memory_bytes=6 * GIB)
CURVE = [(2.0, 8.5 * GIB), (2.2, 7.0 * GIB), (3.0, 5.2 * GIB)]
# Of the same peak, so that all want the same place.
NEAR = {f"mode {number}": steps_by_hand.step(1.0, seconds=2.0 + number / 1000) for number in range(12)}

Box = tuple[float, float, float, float]


def elements(drawing: str, tag: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(drawing).iter() if each.tag.rpartition("}")[2] == tag]


def texts(drawing: str) -> set[str]:
    """What is written in a picture, but for the numbers of its axes."""
    found = (text.text or "" for text in elements(drawing, "text"))
    return {text for text in found if text and not text.replace(".", "").isdigit()}


def boxes(drawing: str, names: set[str]) -> Iterator[Box]:
    """Where names are written, as wide as the widest letters make them."""
    for text in elements(drawing, "text"):
        if (name := text.text or "") in names:
            x, y, width = float(text.attrib["x"]), float(text.attrib["y"]), 7.0 * len(name)
            begin = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]]
            yield begin, y - 10, begin + width, y + 2


def overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def size_of(path: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20]), int.from_bytes(header[20:24])


def said(name: str, step: StepMemory) -> str:
    return f"{name} needs {step.peak_bytes}"


def test_every_category_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(Category)
    assert len(set(COLOURS.values())) == len(Category)


@pytest.mark.sweep
def test_step_has_a_panel_for_each_plan_with_its_peak() -> None:
    drawing = plots.steps_svg(STEPS, CARD)
    assert texts(drawing) >= {"none: 8.5 GiB", "full: 5.3 GiB", "ffn: 6.5 GiB", "every-2: 7.1 GiB"}
    assert texts(drawing) >= {"predicted time", "memory, GiB", "6.0 GiB"}
    # All to one scale: a slower plan ends further right, and one that needs less stays lower.
    panels = [corners_of(polygon) for polygon in elements(drawing, "polygon") if polygon[0].text == "saved activations"]
    ends = [max(x for x, _ in panel) - 330 * (number % 3) for number, panel in enumerate(panels)]
    tops = [min(y for _, y in panel) for panel in panels]
    assert ends[0] < ends[2] == pytest.approx(ends[3], abs=0.11)
    assert ends[2] < ends[1]
    assert tops[0] < tops[2] < tops[1]


def corners_of(line: ElementTree.Element) -> list[tuple[float, float]]:
    """The corners of a line or of an area."""
    return [(float(x), float(y)) for x, y in (corner.split(",") for corner in line.attrib["points"].split())]


def test_categories_are_named_beside_their_colours() -> None:
    drawing = plots.steps_svg(STEPS, CARD)
    names = {polygon[0].text: polygon.attrib["fill"] for polygon in elements(drawing, "polygon")}
    assert names == {
        str(category): COLOURS[category] for category in steps_by_hand.step(1.0, 1.0).timeline.bytes_by_category
    }
    swatches = [each.attrib["fill"] for each in elements(drawing, "rect")]
    assert swatches == [colour for category, colour in COLOURS.items() if str(category) in names]
    assert texts(drawing) >= set(names)


def test_step_without_predicted_time_is_drawn_over_its_events() -> None:
    step = replace(STEPS["none"], timeline=replace(STEPS["none"].timeline, seconds=()))
    found = texts(plots.steps_svg({"none": step}, CARD))
    assert "events" in found
    assert "predicted time" not in found


def test_frontier_names_every_mode_and_the_planner() -> None:
    drawing = plots.frontier_svg(CURVE, STEPS, CARD)
    assert texts(drawing) >= {*STEPS, "planner", "GeForce RTX 4090, 6.0 GiB", "a step takes", "peak, GiB"}
    kinds = [mark.attrib["class"] for mark in elements(drawing, "circle")]
    assert (kinds.count("point choice"), kinds.count("point")) == (3, 4)
    (line,) = elements(drawing, "polyline")
    # Each choice and the corner before it.
    assert len(line.attrib["points"].split()) == 5


def test_labels_of_a_frontier_do_not_cover_each_other() -> None:
    drawing = plots.frontier_svg([], NEAR, CARD)
    found = list(boxes(drawing, set(NEAR)))
    assert len(found) == 12
    assert not any(overlap(one, other) for at, one in enumerate(found) for other in found[:at])


def test_a_page_leaves_out_names_without_room_and_a_file_leads_to_them() -> None:
    crowded = {f"{name} of many": step for name, step in NEAR.items()}
    page, file = plots.frontier_svg([], crowded, CARD, said), plots.frontier_svg([], crowded, CARD)
    assert 1 < len(list(boxes(page, set(crowded)))) < len(list(boxes(file, set(crowded)))) == 12
    assert [mark.attrib["data-said"] for mark in elements(page, "circle")] == [said(*each) for each in crowded.items()]
    leaders = [line for line in elements(file, "line") if line.attrib["class"] == "leader"]
    marks = {(mark.attrib["cx"], mark.attrib["cy"]) for mark in elements(file, "circle")}
    assert leaders
    assert {(f"{float(line.attrib['x1']):.1f}", line.attrib["y1"]) for line in leaders} <= marks


def test_equal_plans_share_a_mark_and_its_label() -> None:
    steps = {"recipe": STEPS["full"], "none": STEPS["none"], "full": STEPS["full"]}
    assert texts(plots.frontier_svg([], steps, CARD)) >= {"recipe = full", "none"}


def test_no_label_of_a_frontier_lies_on_its_line() -> None:
    drawing = plots.frontier_svg(CURVE, STEPS, CARD)
    found = list(boxes(drawing, {*STEPS, "planner"}))
    (line,) = elements(drawing, "polyline")
    corners = corners_of(line)
    stretches = [(min(x, to_x), min(y, to_y), max(x, to_x), max(y, to_y)) for (x, y), (to_x, to_y) in pairwise(corners)]
    assert len(found) == 5
    assert not any(overlap(box, stretch) for box in found for stretch in stretches)


def test_small_steps_are_drawn_in_small_units() -> None:
    small = {"none": steps_by_hand.step(2**-10, states_gib=2**-8, seconds=0.002)}
    assert texts(plots.steps_svg(small, CARD)) >= {"memory, MiB", "none: 520.0 MiB", "1 ms"}
    assert texts(plots.frontier_svg([], small, CARD)) >= {"peak, MiB", "2 ms"}


def test_checkpoints_have_a_panel_for_each_kind_with_the_optimum() -> None:
    curve = [(float(number), (number + 16 / number) * GIB) for number in range(1, 17)]
    simulated = [curve[number - 1] for number in (1, 2, 4, 8, 16)]
    panels = dict.fromkeys(("segments", "nested segments"), (simulated, "k + L/k", curve))
    drawing = plots.checkpoints_svg(panels, 4.0)
    assert texts(drawing) >= {"segments", "nested segments", "simulated", "k + L/k", "sqrt(L) = 4", "peak, GiB"}
    marks = elements(drawing, "circle")
    best = [line for line in elements(drawing, "line") if line.attrib["class"] == "best"]
    assert (len(marks), len(best), len(elements(drawing, "polyline"))) == (10, 2, 2)
    # The lowest of them is there.
    lowest = [max(marks[at : at + 5], key=lambda mark: float(mark.attrib["cy"])) for at in (0, 5)]
    assert [float(mark.attrib["cx"]) for mark in lowest] == pytest.approx(
        [float(b.attrib["x1"]) for b in best], abs=0.1
    )


def drawings() -> Mapping[str, str]:
    curve = [(float(number), (number + 16 / number) * GIB) for number in range(1, 17)]
    return {
        "steps": plots.steps_svg(STEPS, CARD),
        "frontier": plots.frontier_svg(CURVE, STEPS, CARD),
        "checkpoints": plots.checkpoints_svg({"segments": (curve, "k + L/k", curve)}, 4.0),
    }


def test_a_file_shows_what_is_drawn_and_leaves_matplotlib_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sizes = {
        name: size_of(plots.paint(drawing, tmp_path / f"{name}.png", name)) for name, drawing in drawings().items()
    }
    assert sizes == {"steps": (1397, 797), "frontier": (1022, 736), "checkpoints": (800, 625)}
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_a_file_has_the_colours_of_all_that_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    pixels = {
        tuple(map(round, 255 * pixel[:3]))
        for row in imread(plots.paint(drawings()["steps"], tmp_path / "s.png", ""))
        for pixel in row
    }
    wanted = {COLOURS[category] for category in steps_by_hand.step(1.0, 1.0).timeline.bytes_by_category}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in wanted} <= pixels
