"""Policy `auto` with losses that users put in the place of the model's: they are simulated, as followed steps show."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.measure.track_real_step import follow_trainer
from tests.training import VOCAB, arguments, changed, llama, losses, weights

LENGTH = 128


class Focal(Trainer):
    """Weighs each token by how wrong it is, and logs as it goes."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")[:, 1:, None]
        outputs = model(**inputs)
        likely = outputs.logits.float()[:, :-1].log_softmax(-1).gather(-1, labels)
        loss = -((1 - likely.exp()) ** 2 * likely).mean()
        self.log({"focal": loss.item()})
        return (loss, outputs) if return_outputs else loss


class Decides(Trainer):
    """Does something else where the loss is large."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss / 2 if loss.item() > 100 else loss


def squared_logits_too(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """As models are kept from drifting: the loss, and the logits' normaliser."""
    logits = outputs.logits.float()
    each = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return each / num_items_in_batch + 1e-4 * logits.logsumexp(-1).square().mean()


CASES: dict[str, dict[str, Any]] = {
    "label smoothing": {"args": {"label_smoothing_factor": 0.1}},
    "compute_loss_func": {"compute_loss_func": squared_logits_too},
    "compute_loss": {"kind": Focal},
    "compute_loss, in lower precision over two batches": {
        "kind": Focal,
        "args": {"bf16": True, "gradient_accumulation_steps": 2},
    },
}


def run_of(
    folder: Path, budget: str | None, *, kind: type[Trainer] = Trainer, args: Any = None, **own: Any
) -> tuple[Trainer, HFCkptCallback]:
    """A run under `auto`; without a plan where there is no budget."""
    tokens = torch.randint(0, VOCAB, (16, LENGTH), generator=torch.Generator().manual_seed(0))
    callback = HFCkptCallback("auto", memory_budget=budget or "1GiB")
    run = kind(
        llama(hidden_size=64, attention_dropout=0.0),
        TrainingArguments(**arguments(folder, per_device_train_batch_size=4, **(args or {}))),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],  # type: ignore[arg-type]  # upstream
        callbacks=[] if budget is None else [callback],
        **own,
    )
    return run, callback


def predicted(callback: HFCkptCallback) -> int:
    assert callback._planning is not None
    return callback._planning.predicted_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loss_is_simulated_and_a_budget_is_kept(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        run, callback = run_of(tmp_path, "1GiB", **case)
        plain = follow_trainer(run).peak_bytes
    assert predicted(callback) == pytest.approx(plain, rel=0.01)
    (counted,) = (message for message in caplog.messages if message.startswith("Counted"))
    assert f"{type(run).__name__}.compute_loss; AdamW; one process. Not counted: nothing that is known." in counted
    assert callback._planning is not None
    least = callback._planning.simulator(callback._planning.batch).simulate("full").peak_bytes
    budget = (least + plain) // 2
    run, _ = run_of(tmp_path, f"{budget}B", **case)
    assert follow_trainer(run).peak_bytes <= budget * 1.001 < 0.97 * plain
    without, _ = run_of(tmp_path, None, **case)
    without.train()
    assert losses(run) == losses(without)
    assert changed(weights(without.model), weights(run.model)) == []


def test_what_a_loss_logs_while_it_is_simulated_reaches_no_reporter(tmp_path: Path) -> None:
    class Listens(TrainerCallback):
        heard: ClassVar[list[Any]] = []

        def on_log(self, *args: Any, logs: Any = None, **kwargs: Any) -> None:
            self.heard.extend(value for key, value in logs.items() if key == "focal")

    run, _ = run_of(tmp_path, "1GiB", kind=Focal)
    run.add_callback(Listens())
    run.train()
    assert len(Listens.heard) == run.state.max_steps
    assert all(type(each) is float for each in Listens.heard)


def test_loss_that_decides_by_its_value_is_named_and_the_models_own_is_simulated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        run_of(tmp_path, "1GiB", kind=Decides)[0].train()
    assert any("it decides by a number that depends on the weights" in message for message in caplog.messages)
    (counted,) = (message for message in caplog.messages if message.startswith("Counted"))
    assert "Not counted: what Decides.compute_loss does besides the model's own forward and loss" in counted
