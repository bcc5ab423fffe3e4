"""What a loss has of its own, weights and buffers, is undone with the step, wherever it is kept and whenever made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_ckpt
from hf_ckpt import HFCkptCallback
from tests.training import arguments, llama, rows

pytestmark = pytest.mark.core


class Weighting(nn.Module):
    """Weighs a loss, and counts how often it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, loss: Tensor) -> Tensor:
        self.num_calls += 1
        return torch.exp(-self.weight) * loss + self.weight


class Fails(TrainerCallback):
    """Lets memory run out in the backward of a step, when the loss has its gradient."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self._step:
            fail_once(model)


def fail_once(model: Any) -> None:
    def fail(gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. planted")

    def place(module: nn.Module, inputs: Any, output: Tensor) -> None:
        handle.remove()
        output.register_hook(fail)

    handle = model.model.norm.register_forward_hook(place)


GLOBAL: Any = None


class ReadsGlobal(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return GLOBAL(super().compute_loss(*args, **kwargs))


class MakesLate(Trainer):
    """Makes its loss in the first step."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if not hasattr(self, "weighting"):
            self.weighting = GLOBAL
            self.optimizer.param_groups[0]["params"].append(GLOBAL.weight)
        return self.weighting(loss)


def closing_over(weighting: Weighting) -> Callable[..., Tensor]:
    def loss(output: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        return weighting(output["logits"].square().mean())

    return loss


def run(kind: str, folder: Path, *callbacks: TrainerCallback) -> tuple[Weighting, dict[str, Tensor]]:
    global GLOBAL
    model, weighting = llama(num_hidden_layers=2, attention_dropout=0.0), Weighting()
    GLOBAL = weighting
    in_optimizer = [weighting.weight] if kind in ("a global", "a closure") else []
    optimizer = torch.optim.SGD([*model.parameters(), *in_optimizer], lr=0.1)
    args = TrainingArguments(**arguments(folder, max_steps=3, max_grad_norm=0, gradient_accumulation_steps=2))
    options: dict[str, Any] = {"args": args, "train_dataset": rows(), "optimizers": (optimizer, None)}
    made: dict[str, Callable[..., Trainer]] = {
        "a global": ReadsGlobal,
        "a closure": partial(Trainer, compute_loss_func=closing_over(weighting)),
        "in nobody's optimizer": partial(Trainer, compute_loss_func=closing_over(weighting)),
        "made late": MakesLate,
    }
    callback = HFCkptCallback("attention", on_oom="escalate", quiet=True, prove="off")
    trainer = made[kind](model, callbacks=[callback, *callbacks], **options)
    trainer.train()
    assert callback.report()["ckpt/oom_recovered"] == len(callbacks)
    return weighting, {name: each.detach().clone() for name, each in model.named_parameters()}


@pytest.mark.parametrize("kind", ["a global", "a closure", "in nobody's optimizer", "made late"])
def test_a_loss_of_its_own_is_undone(kind: str, tmp_path: Path) -> None:
    weighting, expected = run(kind, tmp_path)
    found, weights = run(kind, tmp_path, Fails(1))
    assert torch.equal(found.weight, weighting.weight)
    assert torch.equal(found.num_calls, weighting.num_calls)
    assert [name for name, each in expected.items() if not torch.equal(each, weights[name])] == []
    gradients = [each.weight.grad for each in (weighting, found)]
    assert gradients[0] is gradients[1] is None or torch.equal(*gradients)  # type: ignore[arg-type]


def test_a_loss_in_the_closure_of_a_loop_is_undone() -> None:
    def weighed(*, fails: bool) -> Weighting:
        model, weighting = llama(num_hidden_layers=2, attention_dropout=0.0), Weighting()
        ids = rows(2)[0]["input_ids"][None]
        with hf_ckpt.apply(model, "attention") as applied:
            for number in range(2):

                def closure() -> Tensor:
                    loss = weighting(model(input_ids=ids, labels=ids).loss)
                    loss.backward()
                    return loss.detach()

                model.zero_grad()
                if fails and number:
                    fail_once(model)
                applied.step(closure)
        return weighting

    plain, found = weighed(fails=False), weighed(fails=True)
    assert torch.equal(plain.num_calls, found.num_calls)
    assert plain.weight.grad is not None
    assert found.weight.grad is not None
    assert torch.equal(plain.weight.grad, found.weight.grad)
