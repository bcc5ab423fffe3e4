"""What comes after the first steps and was not planned for: other inputs, and other parameters that train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.auto.batch_of_forward import with_inputs
from hf_ckpt.auto.replan import RunPlanner
from hf_ckpt.errors import BudgetError
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.trainer.batch import Batch, largest_text_batch
from tests.training import VOCAB, arguments, llama

pytestmark = pytest.mark.core

LENGTH = 24
PLAIN, MASKED, PACKED = Batch(2, 8), Batch(2, 8, is_padded=True), Batch(2, 8, is_packed=True)
WHOLE_MASK, ONE_DOCUMENT = Batch(2, 8, more=("attention_mask",)), Batch(2, 8, more=("position_ids",))


@pytest.mark.parametrize(
    ("planned", "comes", "is_held"),
    [
        (PLAIN, PLAIN, True),
        (PLAIN, MASKED, False),
        (PLAIN, PACKED, False),
        (MASKED, PLAIN, True),
        (MASKED, PACKED, False),
        (PACKED, MASKED, False),
        (PACKED, PLAIN, True),
        (WHOLE_MASK, MASKED, True),
        (ONE_DOCUMENT, PACKED, True),
        (MASKED, Batch(2, 8, is_padded=True, more=("token_type_ids",)), False),
        (Batch(4, 16), MASKED, False),
    ],
)
def test_a_plan_holds_what_comes_in_the_way_it_was_made_for(planned: Batch, comes: Batch, is_held: bool) -> None:
    assert planned.holds(comes) is is_held


@pytest.mark.parametrize("rows", [1, 2])
def test_positions_of_a_packing_collator_are_planned_for(rows: int) -> None:
    data, collator = [{"input_ids": [5] * 8}] * 4, DataCollatorWithFlattening()
    batch = largest_text_batch(data, collator, rows)
    assert batch is not None
    assert with_inputs(batch, data, collator, llama()).holds(Batch(1, 8 * rows, is_packed=True))


class Stream(IterableDataset):  # type: ignore[type-arg]  # upstream
    """Rows without end, the first two batches plain."""

    def __init__(self, later: dict[str, Callable[[Tensor], Tensor]]) -> None:
        self._later = later

    def __iter__(self) -> Iterator[dict[str, Any]]:
        ids = torch.arange(LENGTH) % VOCAB
        for number in range(8):
            more = {name: make(ids) for name, make in self._later.items()} if number >= 4 else {}
            yield {"input_ids": ids, "labels": ids, **more}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class At(TrainerCallback):
    """Does something before the third step."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        self._change = change

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            self._change(model)


def run(
    folder: Path,
    model: nn.Module,
    *callbacks: TrainerCallback,
    later: dict[str, Callable[[Tensor], Tensor]] | None = None,
    budget: str = "1GiB",
    kind: type[Trainer] = Trainer,
) -> tuple[int, RunPlanner]:
    """Train three steps, and return the peak of the last one, and what was planned."""
    args = TrainingArguments(
        **arguments(folder, max_steps=3, optim="sgd", per_device_train_batch_size=2, remove_unused_columns=False)
    )
    callback = HFCkptCallback("auto", memory_budget=budget, head="plain", tiles=1, on_oom="error", quiet=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = kind(
        model,
        args,
        collate,
        train_dataset=Stream(later or {}),
        optimizers=(optimizer, None),
        callbacks=[callback, *callbacks],
    )
    peak = follow_trainer(trainer, at_step=3).peak_bytes
    assert callback._planning is not None
    return peak, callback._planning


INPUTS: dict[str, dict[str, Callable[[Tensor], Tensor]]] = {
    "a mask": {"attention_mask": lambda ids: (torch.arange(LENGTH) > 3).long()},
    "documents": {"position_ids": lambda ids: torch.arange(LENGTH) % 8},
    "a mask and positions": {
        "attention_mask": lambda ids: (torch.arange(LENGTH) > 3).long(),
        "position_ids": lambda ids: torch.arange(LENGTH),
    },
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_that_come_later_are_planned_for(tmp_path: Path, kind: str) -> None:
    model = llama(num_hidden_layers=2, hidden_size=8, intermediate_size=8, attention_dropout=0.0)
    peak, planned = run(tmp_path, model, later=INPUTS[kind])
    assert planned.predicted_bytes == pytest.approx(peak, rel=0.01)
    assert planned.batch is not None
    assert planned.batch.is_padded == ("mask" in kind)


def frozen(**sizes: int) -> nn.Module:
    model = llama(num_hidden_layers=2, attention_dropout=0.0, **sizes)
    model.model.layers.requires_grad_(False)
    return model


def adapted() -> nn.Module:
    made = get_peft_model(
        llama(num_hidden_layers=2, attention_dropout=0.0), LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    )
    made.add_adapter("large", LoraConfig(r=64, target_modules="all-linear"))
    return made


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "layers": (frozen, lambda model: model.model.layers.requires_grad_(True)),
    "one weight of each": (
        frozen,
        lambda model: [layer.mlp.up_proj.requires_grad_(True) for layer in model.model.layers],
    ),
    "another adapter": (adapted, lambda model: model.set_adapter("large")),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_parameters_that_train_later_are_planned_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    build, change = CHANGES[kind]
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        peak, planned = run(tmp_path, build(), At(change))
    assert planned.predicted_bytes == pytest.approx(peak, rel=0.01)
    assert sum("planning anew" in line for line in caplog.messages) == 1


@pytest.mark.sweep
def test_what_then_fits_no_budget_is_said(tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 128}
    _, planned = run(tmp_path / "first", frozen(**wide))
    with pytest.raises(BudgetError, match=r"Other parameters train than the plan was made for\. No plan fits"):
        run(tmp_path, frozen(**wide), At(CHANGES["layers"][1]), budget=f"{planned.predicted_bytes * 1.01}B")


class UnderAutocast(Trainer):
    """Computes its later steps in another precision."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.state.global_step > 1):
            return super().training_step(*args, **kwargs)


def test_autocast_that_begins_later_is_planned_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        run(tmp_path, frozen(), kind=UnderAutocast)
    assert sum("planning anew" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.to(torch.float64),
    ],
)
def test_what_cannot_be_followed_is_said(tmp_path: Path, change: Callable[[Any], object]) -> None:
    with pytest.warns(UserWarning, match="the model has got other parameters, dtypes or another attention"):
        run(tmp_path, frozen(), At(change))
