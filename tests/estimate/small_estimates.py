"""Estimates of a small recipe, and of steps written down by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_ckpt import load_recipe
from hf_ckpt.estimate import estimate as estimates
from hf_ckpt.estimate import tables
from hf_ckpt.estimate.estimate import RECIPE, Estimate, Row
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, subject_of
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.simulation.devices import Device, find_device
from hf_ckpt.simulation.fit import capacity_of, judge
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import StepMemory
from tests import small_recipes, steps_by_hand

CARD = find_device("rtx4090")


def small_subject(folder: Path, *overrides: str, **sections: Any) -> Subject:
    return subject_of(load_recipe(small_recipes.write(folder, **sections), overrides))


def card(free_bytes: int) -> Device:
    """A card on which torch may reserve so much for a step that fits."""
    return replace(CARD, name="small", memory_bytes=capacity_of(CARD).needed_bytes(free_bytes))


def row_of(name: str, memory: StepMemory | None, *devices: Device, reserved: int = 0, **further: Any) -> Row:
    """A row with a verdict for each device; a step reserves what it allocates, or more."""
    needed = (
        {} if memory is None else {each.name: judge(memory.peak_bytes, reserved, capacity_of(each)) for each in devices}
    )
    return Row(name, memory, verdicts=needed, **further)


def silent(text: str) -> None:
    """Say nothing."""


def table(found: Estimate, **options: bool) -> str:
    """What is printed of an estimate: no line is wider than 80 columns, but for that of a long path."""
    text = tables.estimate_table(json.loads(json.dumps(estimates.estimate_as_json(found))), **options)
    assert max(len(line) for line in text.splitlines() if ".yaml" not in line) <= 80, text
    return text


def by_hand(*devices: Device) -> Estimate:
    facts = (("model", "LlamaForCausalLM"), ("batch", "1 row"))
    subject = Subject(title="recipe.yaml", model=None, step=Step(), stacks=(), facts=facts)
    rows = (
        row_of(RECIPE, steps_by_hand.step(0.1, 0.9, seconds=3.0), *devices),
        row_of("none", steps_by_hand.step(6.0, seconds=2.0), *devices),
        Row("ffn", None, 'Rule {mode: ffn} asks for "ffn".'),
        *(row_of(AUTO, steps_by_hand.step(1.0, seconds=2.5), device, device=device) for device in devices),
    )
    return Estimate(Predictor(subject, devices[0]), devices, rows, RECIPE)
