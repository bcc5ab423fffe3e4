"""What would fit, in the words of who asked: overrides of a recipe, options of a command, keyword arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_ckpt import load_recipe
from hf_ckpt.estimate.predict import written
from hf_ckpt.estimate.step_of_recipe import Subject
from hf_ckpt.simulation.step import Step
from tests import small_recipes

AUTO = {"policy": "auto", "memory_budget": "1GiB"}
EVERY_2 = {"policy": "full", "every_n_layers": 2, "skip_frozen": True}
BATCH = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "max_length": 192}


def text(folder: Path, checkpointing: dict[str, Any], options: dict[str, Any], **command_options: str) -> str:
    """What is written for a recipe with this policy, whose lines were checked to be readable."""
    path = small_recipes.write(folder, checkpointing=checkpointing, data={"max_length": 16})
    step = Step(batch_size=1, seq_length=64, is_packed=True)
    subject = Subject(
        title="", model=None, step=step, stacks=(), recipe=load_recipe(path), command_options=command_options
    )
    found = written(subject, options)
    load_recipe(path, [word for word in found.split() if "=" in word])
    return found


@pytest.mark.parametrize(
    ("checkpointing", "options", "expected"),
    [
        (AUTO, {"memory_budget": "2.5GiB"}, "checkpointing.memory_budget=2.5GiB"),
        (AUTO, {"exact": "prefer"}, "checkpointing.exact=prefer"),
        (AUTO, {"head": "chunked", "offload": "cpu"}, "checkpointing.head=chunked checkpointing.offload=cpu"),
        (
            AUTO,
            BATCH,
            "training.per_device_train_batch_size=1 training.gradient_accumulation_steps=8 data.max_length=192",
        ),
        (AUTO, {"optim": "adamw_8bit"}, "training.optim=adamw_8bit"),
        # Four examples of 16 tokens are packed into a row.
        (AUTO, {"row_length": 32}, "data.max_length=8"),
        # What only policy auto reads comes with it, and what it cannot stand beside it goes.
        (
            EVERY_2,
            {"head": "chunked"},
            "checkpointing.policy=auto checkpointing.every_n_layers=null checkpointing.skip_frozen=false "
            "checkpointing.head=chunked",
        ),
        (EVERY_2, {"max_length": 8}, "data.max_length=8"),
    ],
)
def test_overrides_can_be_copied(
    tmp_path: Path, checkpointing: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    assert text(tmp_path, checkpointing, options) == expected


def test_what_was_given_as_an_option_of_the_command_is_written_as_one(tmp_path: Path) -> None:
    given = {"memory_budget": "--memory-budget", "exact": "--exact"}
    assert text(tmp_path, EVERY_2, {"memory_budget": "2GiB"}, **given) == "--memory-budget 2GiB"
    assert text(tmp_path, EVERY_2, {"exact": "prefer"}, **given) == "--exact prefer"


def test_model_without_a_recipe_is_asked_about_with_fields_of_a_step() -> None:
    subject = Subject(title="", model=None, step=Step(batch_size=2, seq_length=64), stacks=())
    assert written(subject, {**BATCH, "memory_budget": "2GiB"}) == (
        'batch_size=1, gradient_accumulation_steps=8, seq_length=192, memory_budget="2GiB"'
    )
