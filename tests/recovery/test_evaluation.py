"""Batches of evaluation that do not fit run in halves, and give what the whole gives, up to rounding."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import EvalPrediction, LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import OutOfMemoryError
from tests.training import VOCAB, During, arguments, llama, rows, trainer


def limit_rows(model: nn.Module, most: int) -> None:
    """Let evaluation run out of memory, at the end of its forward, with more rows than so many."""

    def check(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not module.training and kwargs["input_ids"].shape[0] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_hook(check, with_kwargs=True)


def uneven() -> list[dict[str, Tensor]]:
    """Rows of which ever fewer labels count, and of the last none."""
    found = []
    for number, row in enumerate(rows(8)):
        labels = row["labels"].clone()
        labels[: number + 1] = -100
        found.append({"input_ids": row["input_ids"], "labels": labels})
    return found


def classified() -> list[dict[str, Any]]:
    return [{"input_ids": row["input_ids"], "labels": number % 2} for number, row in enumerate(rows(8))]


def evaluated(
    model: nn.Module, data: list[Any], folder: Path, *, most: int = 8, **changes: Any
) -> tuple[float, list[Any], HFCkptCallback]:
    """Evaluate in one batch, before the one step of a run, and perhaps after it."""
    limit_rows(model, most)
    seen: list[Any] = []

    def keep(prediction: EvalPrediction) -> dict[str, float]:
        seen.extend([prediction.predictions, prediction.label_ids])
        return {}

    settings = {
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_delay": 0,
        "per_device_eval_batch_size": 8,
        **changes,
    }
    callback = HFCkptCallback("none", on_oom="escalate")
    args = TrainingArguments(**arguments(folder, **settings))
    run = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=None if settings.get("prediction_loss_only") else keep,
        callbacks=[callback],
    )
    run.train()
    loss = next(entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry)
    assert "prediction_step" not in vars(run)
    return loss, seen[:2], callback


def classifier() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForSequenceClassification(LlamaConfig(**sizes, vocab_size=VOCAB, pad_token_id=0))


CASES = [pytest.param(llama, uneven, id="language model"), pytest.param(classifier, classified, id="classifier")]


@pytest.mark.parametrize(("make", "data"), CASES)
@pytest.mark.parametrize("most", [5, 1])
def test_a_batch_in_parts_gives_loss_and_predictions_of_the_whole(
    make: Any, data: Any, most: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loss, seen, none = evaluated(make(), data(), tmp_path)
    in_parts, seen_in_parts, callback = evaluated(make(), data(), tmp_path, most=most)
    # Products of other shapes add in another order.
    assert in_parts == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(seen_in_parts[0], seen[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(seen_in_parts[1], seen[1])
    assert none.report()["ckpt/oom_recovered"] == 0
    assert callback.report()["ckpt/oom_recovered"] >= 1
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sum(line.startswith("Out of memory in the evaluation of input_ids (8, 8)") for line in lines) == 1


def test_a_batch_that_runs_again_draws_the_same_numbers(tmp_path: Path) -> None:
    def drawn(fails: bool) -> tuple[list[float], float]:
        model = llama(num_hidden_layers=1)
        numbers: list[float] = []
        left = [1] * fails

        def draw(module: nn.Module, args: Any, output: Any) -> None:
            if not module.training:
                numbers.append(torch.rand(()).item())
                if left and left.pop():
                    numbers.pop()
                    raise torch.OutOfMemoryError("CUDA out of memory.")

        model.register_forward_hook(draw)
        torch.manual_seed(0)
        _, _, callback = evaluated(model, uneven(), tmp_path, per_device_eval_batch_size=4)
        assert callback.report()["ckpt/oom_recovered"] == fails
        return numbers, torch.rand(()).item()

    assert drawn(True) == drawn(False)


def test_an_evaluation_that_somebody_lets_fail_does_not_end_the_recovery(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        if not module.training:
            raise ValueError("on purpose")

    model.register_forward_hook(fail)
    seen: list[bool] = []

    def look(_: nn.Module) -> None:
        with pytest.raises(ValueError, match="on purpose"):
            run.evaluate()
        seen.extend(name in vars(run) for name in ("training_step", "prediction_step"))

    callbacks = [HFCkptCallback("none", on_oom="escalate"), During("on_step_end", look, step=1)]
    run = trainer(model, tmp_path, *callbacks)
    run.train()
    assert seen == [True, True]
    assert "prediction_step" not in vars(run)


def test_a_row_that_does_not_fit_ends_the_run_with_its_shape(tmp_path: Path) -> None:
    message = r"evaluation of input_ids \(1, 8\), labels \(1, 8\)\. .* It is one sequence\. Evaluate shorter sequences"
    with pytest.raises(OutOfMemoryError, match=message):
        evaluated(llama(), uneven(), tmp_path, most=0)


def test_a_model_that_returns_more_than_rows_is_not_put_together(tmp_path: Path) -> None:
    model = llama()

    def add(module: nn.Module, args: Any, output: Any) -> Any:
        output["extra"] = torch.zeros(())
        return output

    model.register_forward_hook(add)
    with pytest.raises(
        OutOfMemoryError, match="In parts it would fit, but the model returns a value for the whole batch"
    ):
        evaluated(model, uneven(), tmp_path, most=4)
