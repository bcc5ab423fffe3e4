"""The examples of the batch that did not fit, by their indices in the training data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.recovery.failed_run import describe_examples
from tests.training import arguments, llama, rows

UNKNOWN = "The indices of its examples are not known"
NUM_ROWS = 23


def numbered() -> list[dict[str, Tensor]]:
    """Rows that are all different."""
    found = rows(NUM_ROWS)
    for number, row in enumerate(found):
        row["input_ids"][0] = number
    return found


class Asking(TrainerCallback):
    """Runs in the place of `training_step`: notes what is said of each micro-batch, and what it really holds."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.really: list[list[int]] = []
        self.number = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.number = 0

    def watch(self, trainer: Trainer) -> None:
        run = trainer.training_step

        def asking(model: Any, inputs: dict[str, Tensor], *more: Any) -> Tensor:
            state = torch.get_rng_state()
            self.said.append(describe_examples(trainer, self.number, inputs))
            assert torch.equal(state, torch.get_rng_state())
            self.really.append(inputs["input_ids"][:, 0].tolist())
            self.number += 1
            return run(model, inputs, *more)

        trainer.training_step = asking


def asked(folder: Path, resume: str | None = None, **changes: Any) -> Asking:
    data = changes.pop("data", None) or numbered()
    asking = Asking()
    args = TrainingArguments(**arguments(folder, **changes))
    trainer = Trainer(llama(), args, train_dataset=data, callbacks=[asking])
    asking.watch(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return asking


def named(indices: list[int]) -> str:
    return f"Examples of the training data in it: {', '.join(map(str, indices))}."


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_examples_of_each_micro_batch_are_those_that_the_sampler_gave(
    accumulation: int, num_workers: int, tmp_path: Path
) -> None:
    steps = {"max_steps": 9, "gradient_accumulation_steps": accumulation, "dataloader_num_workers": num_workers}
    found = asked(tmp_path, **steps)
    assert len(found.said) > 9 or accumulation == 1
    assert found.said == [named(indices) for indices in found.really]
    # They are shuffled, and otherwise in the second epoch.
    in_order = [index for indices in found.really for index in indices]
    assert in_order[:NUM_ROWS] != sorted(in_order[:NUM_ROWS])


def test_examples_are_known_in_a_run_that_was_resumed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2}
    whole = asked(tmp_path, max_steps=8, **saving)
    resumed = asked(tmp_path, str(tmp_path / "checkpoint-4"), max_steps=8, **saving)
    assert resumed.said == [named(indices) for indices in resumed.really] == whole.said[-len(resumed.said) :]


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return iter(numbered())


def test_examples_of_a_stream_are_said_not_to_be_known(tmp_path: Path) -> None:
    assert all(text.startswith(UNKNOWN) for text in asked(tmp_path, data=Stream()).said)


def test_examples_that_change_each_time_are_said_not_to_be_known(tmp_path: Path) -> None:
    class Changing(list[dict[str, Tensor]]):
        def __getitem__(self, index: Any) -> Any:
            row = super().__getitem__(index)
            return {**row, "input_ids": torch.randint_like(row["input_ids"], 16)}

    assert all(text.startswith(UNKNOWN) for text in asked(tmp_path, data=Changing(numbered())).said)


def test_the_error_of_a_run_that_ends_names_the_examples(tmp_path: Path) -> None:
    really: list[list[int]] = []

    class Full(Trainer):
        def compute_loss(self, model: Any, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            really.append(inputs["input_ids"][:, 0].tolist())
            if len(really) >= 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().compute_loss(model, inputs, *args, **kwargs)

    callback = HFCkptCallback("full", on_oom="escalate")
    args = TrainingArguments(**arguments(tmp_path))
    with pytest.raises(OutOfMemoryError, match=re.escape("There is no leaner plan.")) as raised:
        Full(llama(), args, train_dataset=numbered(), callbacks=[callback]).train()
    assert f" {named(really[1])} There is no checkpoint" in str(raised.value)
