"""`fallback`: the mode of a run under `auto` that cannot be planned for; never of one for which nothing fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import BudgetError, PolicyError, UnsupportedError
from tests.training import arguments, changed, llama, losses, rows, weights


def trained(folder: Path, policy: str | None, *, collator: Any = None, **options: Any) -> tuple[Trainer, Any]:
    """Train two steps under a policy, or under none; `neftune` is a training argument, the others are the policy's."""
    noise = {"neftune_noise_alpha": options.pop("neftune", None)}
    callback = None if policy is None else HFCkptCallback(policy, **options)
    args = TrainingArguments(**arguments(folder, remove_unused_columns=False, **noise))
    callbacks = [] if callback is None else [callback]
    run = Trainer(llama(num_hidden_layers=2), args, collator, train_dataset=rows(), callbacks=callbacks)
    run.train()
    return run, callback


def modes(callback: HFCkptCallback) -> list[str]:
    assert callback.plan is not None
    return [str(layer.mode) for stack in callback.plan.stacks for layer in stack.layers]


def with_hidden_states(batch: list[dict[str, Any]]) -> dict[str, Any]:
    texts = torch.stack([example["input_ids"] for example in batch])
    return {"input_ids": texts, "labels": texts, "output_hidden_states": True}


REFUSED = [
    ({"neftune": 5.0}, "neftune_noise_alpha=5.0 cannot be simulated"),
    ({"collator": with_hidden_states}, "keeps tensors"),
]


@pytest.mark.parametrize(("refused", "reason"), REFUSED, ids=["before training", "at the first batch"])
def test_run_that_is_not_simulated_falls_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refused: dict[str, Any], reason: str
) -> None:
    run, callback = trained(tmp_path, "auto", memory_budget="1GiB", fallback="full", **refused)
    messages = [entry.getMessage() for entry in caplog.records]
    told = [message for message in messages if "checkpointing.fallback is in force" in message]
    assert len(told) == 1
    assert reason in told[0]
    assert modes(callback) == ["full", "full"]
    assert "ckpt/predicted_peak_gib" not in callback.report()
    plain, _ = trained(tmp_path, None, **refused)
    assert losses(run) == losses(plain)
    assert changed(weights(plain.model), weights(run.model)) == []


def test_run_that_is_simulated_is_planned_for(tmp_path: Path) -> None:
    _, callback = trained(tmp_path, "auto", memory_budget="1GiB", fallback="full")
    assert modes(callback) == ["none", "none"]


@pytest.mark.sweep
def test_nothing_fits_is_no_reason_to_fall_back(tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        trained(tmp_path, "auto", memory_budget="10KiB", fallback="full")


def test_without_a_fallback_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="neftune"):
        trained(tmp_path, "auto", memory_budget="1GiB", neftune=5.0)


@pytest.mark.parametrize(("policy", "fallback"), [("full", "full"), ("auto", "ful"), ("auto", "auto")])
def test_fallback_is_a_mode_beside_auto(policy: str, fallback: str) -> None:
    with pytest.raises(PolicyError):
        HFCkptCallback(policy, fallback=fallback)


REAL: dict[str, Any] = {}


@pytest.mark.parametrize("fallback", ["full", None])
def test_forward_that_reaches_the_real_model_falls_back(
    fallback: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def patched() -> Any:
        model = llama(num_hidden_layers=2)
        REAL["forward"] = model.model.layers[1].mlp.down_proj.forward
        model.model.layers[1].mlp.down_proj.forward = lambda hidden: REAL["forward"](hidden) * 0.5
        return model

    def train(*callbacks: HFCkptCallback) -> Trainer:
        run = Trainer(patched(), TrainingArguments(**arguments(tmp_path)), train_dataset=rows(), callbacks=[*callbacks])
        run.train()
        return run

    callback = HFCkptCallback("auto", memory_budget="1GiB", fallback=fallback)
    message = r'forward of "model.layers.1.mlp.down_proj" reaches model.layers.1.mlp.down_proj.weight of the real'
    if fallback is None:
        with pytest.raises(UnsupportedError, match=message):
            train(callback)
        return
    plain, run = train(), train(callback)
    assert modes(callback) == ["full", "full"]
    assert re.search(message, caplog.text)
    assert "fallback is in force" in caplog.text
    assert losses(run) == losses(plain)
    assert not changed(weights(plain.model), weights(run.model))
