"""What a simulated step says of itself."""

from __future__ import annotations

import re

import pytest

from hf_ckpt.simulation.step_memory import Category, Phase, Place, StepMemory, Timeline
from tests.markups import Markup

TIMELINE = Timeline(
    (Place(Phase.FORWARD), Place(Phase.BACKWARD), Place(Phase.OPTIMIZER)), {Category.PARAMETERS: (10, 30, 20)}
)
MEMORY = StepMemory("cpu", None, 1, 30, Place(Phase.BACKWARD), {Category.PARAMETERS: 30}, TIMELINE)


def test_the_peak_of_a_phase_is_told_for_its_name_too() -> None:
    expected = {Phase.FORWARD: 10, Phase.BACKWARD: 30, Phase.RECOMPUTATION: 0, Phase.OPTIMIZER: 20}
    assert {phase: MEMORY.peak_of(phase) for phase in Phase} == expected
    assert {phase: MEMORY.peak_of(str(phase)) for phase in Phase} == expected


def test_a_name_of_no_phase_is_refused() -> None:
    names = "forward, backward, recomputation, optimizer"
    message = f'No phase is called "optimiser". Phases are {names}. Did you mean "optimizer"?'
    with pytest.raises(ValueError, match=re.escape(message)):
        MEMORY.peak_of("optimiser")


def test_a_notebook_shows_what_fills_the_peak_and_memory_over_the_step() -> None:
    shown = Markup(MEMORY._repr_html_())
    assert (shown.wrong, shown.leads_to()) == ([], [])
    assert "Peak 30 B on cpu, in the backward." in shown.text
    assert "parameters 30 B" in shown.text
    (area,) = [given for name, given in shown.elements if name == "polygon"]
    # The second of three events is the highest: the top of the picture, in its middle.
    assert area["points"] is not None
    assert area["points"].split()[1] == "320.0,20.0"


def test_moments_that_are_drawn_keep_every_peak() -> None:
    totals = [index % 97 for index in range(20_000)]
    totals[12_345] = 1_000
    places = (Place(Phase.FORWARD),) * len(totals)
    timeline = Timeline(places, {Category.SAVED: tuple(totals)}, tuple(float(index) for index in range(len(totals))))
    moments, edges = timeline.stacked()
    assert dict(zip(moments, edges[Category.SAVED][1], strict=True))[12_345.0] == 1_000
    assert len(moments) <= 501
    assert moments == sorted(moments)
