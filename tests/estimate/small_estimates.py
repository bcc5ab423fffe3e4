"""Estimates of a small recipe, and of steps written down by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_ckpt import load_recipe
from hf_ckpt.estimate import json_documents, tables
from hf_ckpt.estimate.estimate import RECIPE, Estimate, Row
from hf_ckpt.estimate.step_of_recipe import Subject, subject_of
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.simulation.devices import Device, find_device
from hf_ckpt.simulation.reserve import reserve
from tests import small_recipes, steps_by_hand

CARD = find_device("rtx4090")


def small_subject(folder: Path, *overrides: str, **sections: Any) -> Subject:
    return subject_of(load_recipe(small_recipes.write(folder, **sections), overrides))


def card(free_bytes: int) -> Device:
    """A card that has so much beside the most of its reserve."""
    # 5 % of it are taken for fragmentation.
    fixed = sum(item.high_bytes for item in reserve(CARD).items if item.name != "fragmentation")
    return replace(CARD, name="small", memory_bytes=math.ceil((free_bytes + fixed) / 0.95) + 1)


def silent(text: str) -> None:
    """Say nothing."""


def table(found: Estimate, **options: bool) -> str:
    """What is printed of an estimate: no line is wider than 80 columns, but for that of a long path."""
    text = tables.estimate_table(json.loads(json.dumps(json_documents.estimate_as_json(found))), **options)
    assert max(len(line) for line in text.splitlines() if ".yaml" not in line) <= 80, text
    return text


def by_hand(*devices: Device) -> Estimate:
    subject = Subject(
        title="recipe.yaml", model=None, step=None, stacks=(), facts=(("model", "LlamaForCausalLM"), ("batch", "1 row"))
    )
    rows = (
        Row(RECIPE, steps_by_hand.step(0.1, 0.9, seconds=3.0)),
        Row("none", steps_by_hand.step(6.0, seconds=2.0)),
        Row("ffn", None, 'Rule {mode: ffn} asks for "ffn".'),
        *(Row(AUTO, steps_by_hand.step(1.0, seconds=2.5), device=device) for device in devices),
    )
    return Estimate(subject, devices, rows, RECIPE)
