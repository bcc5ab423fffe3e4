"""Policy `auto` finds what else lies on the device, wherever users put it: it is counted, or refused by its name."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.simulation.step_memory import Category
from tests.training import VOCAB, arguments, changed, llama, losses, weights

LENGTH = 64


def teacher() -> nn.Module:
    return llama(hidden_size=32, num_hidden_layers=1).eval().requires_grad_(False)


KNOWN_TO_THE_MODULE = teacher()


class Asks(Trainer):
    """Comes closer to a teacher, wherever it is."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            expected = self.ask(inputs["input_ids"])
        loss = outputs.loss + (outputs.logits - expected).square().mean()
        return (loss, outputs) if return_outputs else loss

    def ask(self, ids: Tensor) -> Tensor:
        return self.teacher(input_ids=ids).logits  # type: ignore[attr-defined, no-any-return]  # set by the test


class AsksAnother(Asks):
    def ask(self, ids: Tensor) -> Tensor:
        return KNOWN_TO_THE_MODULE(input_ids=ids).logits  # type: ignore[no-any-return]  # transformers' output


class Holds:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Watches(TrainerCallback):
    def __init__(self, held: object) -> None:
        self.held = held


class Averages(TrainerCallback):
    """Keeps averaged weights, from the time it says on."""

    def __init__(self, since: str = "on_train_begin", copies: Callable[[Any], Any] = copy.deepcopy) -> None:
        self._copies = copies
        setattr(self, since, self._start)

    def _start(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.averaged = self._copies(model)


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def asking(module: nn.Module, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    expected = module(input_ids=labels).logits
    return cross_entropy(outputs.logits.flatten(0, 1), labels.flatten()) + (outputs.logits - expected).square().mean()


def closed_over() -> Callable[..., Tensor]:
    module = teacher()
    return lambda outputs, labels, num_items_in_batch=None: asking(module, outputs, labels)


def run_of(
    folder: Path, *callbacks: TrainerCallback, budget: str | None = "1GiB", kind: type[Trainer] = Trainer, **own: Any
) -> tuple[Trainer, HFCkptCallback]:
    """A run under `auto`; without a plan where there is no budget."""
    tokens = torch.randint(0, VOCAB, (16, LENGTH), generator=torch.Generator().manual_seed(0))
    callback = HFCkptCallback("auto", memory_budget=budget or "1GiB")
    run = kind(
        llama(hidden_size=64, attention_dropout=0.0),
        TrainingArguments(**arguments(folder, per_device_train_batch_size=4)),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],  # type: ignore[arg-type]  # upstream
        callbacks=[*callbacks, *([] if budget is None else [callback])],
        **own,
    )
    return run, callback


def predicted(callback: HFCkptCallback, mode: str | None = None) -> int:
    planning = callback._planning
    assert planning is not None
    return planning.predicted_bytes if mode is None else planning.simulator(planning.batch).simulate(mode).peak_bytes


HIDDEN: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "deep in containers": (lambda: {"held": {"a": [({"b": teacher()},)]}}, "Trainer.held"),
    "in an object": (lambda: {"held": Holds(teacher())}, "Trainer.held"),
    "in an object of a callback": (lambda: {"callbacks": Watches(Holds(teacher()))}, "Watches.held"),
    "in what a callback closes over": (lambda: {"callbacks": Watches(closed_over())}, "Watches.held"),
    "in what a loss closes over": (lambda: {"compute_loss_func": closed_over()}, "Trainer.compute_loss_func"),
    "in an argument of a loss": (lambda: {"compute_loss_func": partial(asking, teacher())}, "compute_loss_func"),
    "in a module that a method names": (lambda: {"kind": AsksAnother}, "AsksAnother.ask"),
    "made when training begins": (lambda: {"callbacks": Averages()}, "Averages.averaged"),
    "made when a step begins": (lambda: {"callbacks": Averages("on_step_begin")}, "Averages.averaged"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_another_model_is_found_and_refused(tmp_path: Path, name: str) -> None:
    made, where = HIDDEN[name]
    given = made()
    callbacks = [given.pop("callbacks")] if "callbacks" in given else []
    held = given.pop("held", None)
    run, _ = run_of(tmp_path, *callbacks, **given)
    if held is not None:
        run.held = held  # type: ignore[attr-defined]  # as users do
    before = weights(run.model)
    with pytest.raises(UnsupportedError, match=rf"{where} \(LlamaForCausalLM, [\d.]+ KiB\)"):
        run.train()
    assert changed(before, weights(run.model)) == []


@pytest.mark.slow
@pytest.mark.sweep
def test_teacher_of_a_loss_is_counted_and_a_budget_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(budget: str | None) -> tuple[Trainer, HFCkptCallback]:
        made, callback = run_of(tmp_path, budget=budget, kind=Asks)
        made.teacher = llama(hidden_size=96).eval().requires_grad_(False)  # type: ignore[attr-defined]  # as users do
        return made, callback

    with caplog.at_level(logging.INFO, "hf_ckpt"):
        made, callback = run("1GiB")
        plain = follow_trainer(made).peak_bytes
    assert "; teacher (LlamaForCausalLM, 711.6 KiB); Asks.compute_loss; AdamW; one process. Not counted: nothing" in (
        caplog.text
    )
    assert predicted(callback) == pytest.approx(plain, rel=0.001)
    budget = (predicted(callback, "full") + plain) // 2
    made, callback = run(f"{budget}B")
    assert follow_trainer(made).peak_bytes <= budget < 0.97 * plain
    without, _ = run(None)
    without.train()
    assert losses(made) == losses(without)
    assert changed(weights(without.model), weights(made.model)) == []


@pytest.mark.slow
def test_tensors_that_are_kept_beside_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, callback = run_of(tmp_path, Averages(copies=tensors_of))
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        followed = follow_trainer(run)
    assert followed.by_category[Category.OTHER] == sum(each.nbytes for each in tensors_of(run.model))
    assert "; Averages.averaged (tensors, 346.2 KiB); AdamW; one process. Not counted: nothing" in caplog.text
    assert predicted(callback) == pytest.approx(followed.peak_bytes, rel=0.001)


def test_tensors_that_come_after_the_first_step_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, _ = run_of(tmp_path, Averages("on_step_end", tensors_of))
    run.train()
    assert "Not counted: Averages.averaged (tensors, 346.2 KiB), which was put on the device after the plan" in (
        caplog.text
    )


class Looks(Asks):
    """Looks at one number of its loss."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(*args, **options)
        self.look(loss if isinstance(loss, Tensor) else loss[0])  # type: ignore[attr-defined]  # set by the test
        return loss


def _as_float(loss: Tensor) -> object:
    return float(loss.detach())


def _asks_for_nan(loss: Tensor) -> object:
    return "bad" if torch.isnan(loss) else "good"


def _decides(loss: Tensor) -> object:
    return loss.item() > 3


def _as_array(loss: Tensor) -> object:
    return loss.detach().numpy()


@pytest.mark.parametrize(
    ("look", "line"),
    [
        (_as_float, "(aten._local_scalar_dense.default, in line {} of test_other_models.py: return float(loss"),
        (_asks_for_nan, "(aten._local_scalar_dense.default, in line {} of test_other_models.py: return "),
        (_decides, '"it decides by a number that depends on the weights", in line {} of test_other_models.py: return'),
        (_as_array, ", in line {} of test_other_models.py: return loss.detach().numpy()"),
    ],
)
@pytest.mark.sweep(keep=2)
def test_a_loss_that_looks_at_a_number_is_the_reason_and_not_its_teacher(
    look: Callable[[Tensor], object], line: str, tmp_path: Path
) -> None:
    run, _ = run_of(tmp_path, kind=Looks)
    run.look, run.teacher = look, teacher()  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError) as raised:
        run.train()
    told = str(raised.value)
    assert told.partition("Looks.compute_loss cannot be simulated")[1]
    assert line.format(look.__code__.co_firstlineno + 1) in told
    assert (
        told.index("compute_loss")
        < told.index("The model's own loss cannot be simulated in its place")
        < told.index("Looks.teacher (LlamaForCausalLM")
    )


@pytest.mark.parametrize("look", [lambda loss: f"{loss.item():.3f}", lambda loss: loss.item() * 2, str])
def test_a_number_that_is_only_shown_is_simulated(
    look: Callable[[Tensor], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, _ = run_of(tmp_path, kind=Looks)
    run.look, run.teacher = look, teacher()  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        run.train()
    assert "Looks.compute_loss; AdamW; one process. Not counted: nothing" in caplog.text


def test_a_hook_that_looks_at_a_number_of_a_dense_model_gets_no_advice_on_experts(tmp_path: Path) -> None:
    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append(output.mean().item())

    seen: list[float] = []
    run, _ = run_of(tmp_path)
    run.model.model.layers[0].mlp.register_forward_hook(look)
    with pytest.raises(UnsupportedError) as raised:
        run.train()
    line = look.__code__.co_firstlineno + 1
    assert f"in line {line} of test_other_models.py: seen.append(output.mean().item())" in str(raised.value)
    assert "experts" not in str(raised.value)
    assert "Where a value is only noted, keep the detached tensor" in str(raised.value)


class Draws(Trainer):
    """Draws from each generator."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss * (1 + random.random() + float(np.random.rand()) + float(torch.rand(())))
        return (loss, outputs) if return_outputs else loss


def test_simulating_leaves_every_random_state_as_it_was(tmp_path: Path) -> None:
    found = []
    for budget in (None, "1GiB"):
        random.seed(0)
        np.random.seed(0)
        run, _ = run_of(tmp_path, budget=budget, kind=Draws)
        run.train()
        found.append((losses(run), random.random(), np.random.rand(), torch.rand(())))
    assert found[0] == found[1]
