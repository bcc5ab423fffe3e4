"""A process under DDP that runs out of memory before it has sent a gradient runs again while the other waits."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from hf_ckpt import HFCkptCallback
from hf_ckpt.policy.policy import Mode
from tests import zoo
from tests.distributed.runs import Outcome, rows, train
from tests.recovery.limits import FailingOperators

NUM_STEPS = 5


class Phases(TrainerCallback):
    """Tells a mode what runs, by hooks: a Trainer with methods of its own is not run again."""

    def __init__(self, mode: FailingOperators) -> None:
        self._mode = mode

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        model.register_forward_pre_hook(lambda *_: self._mode.begin("forward"))
        model.register_forward_hook(lambda *_: self._mode.begin("backward"))

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._mode.begin_step()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self._mode.begin(None)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self._mode.begin(None)


def model() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("llama").model


def trained(mode: FailingOperators, callback: HFCkptCallback) -> Outcome:
    # The modes of the other process would see operators of the next test.
    with mode if mode is not None else nullcontext():
        return train(
            model(),
            "ddp",
            callback,
            Phases(mode),
            max_steps=NUM_STEPS,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
        )


@functools.cache
def whole() -> tuple[Outcome, list[int]]:
    """A run in which nothing fails, and the numbers that the phases of its second step begin with."""
    mode = FailingOperators()
    return trained(mode, HFCkptCallback("none", on_oom="escalate", prove="off")), mode.starts[1]


def failures(second: int) -> list[dict[int, list[int]]]:
    """Where operators fail, in one step after the other; from rung to rung the forwards keep their numbers."""
    starts = whole()[1]
    first_forward, first_backward, second_forward, second_backward = (starts[at] for at in (0, 1, 3, 4))
    points = [
        first_forward + 3,
        # The first micro-batch sends nothing.
        (first_backward + second_forward) // 2,
        second_forward,
        second_backward - 1,
        second_backward,
        first_backward,
        second_backward + 1,
        (second_forward + second_backward) // 2,
    ]
    return [
        {step: [number] for step, number in enumerate(points[4 * half : 4 * half + 4], start=1)} for half in (second,)
    ]


def evaluated(most: int) -> tuple[Outcome, HFCkptCallback]:
    """Train, and evaluate after each step; in a batch of more than so many rows this process runs out of memory."""
    bare = model()

    def check(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not module.training and kwargs["input_ids"].shape[0] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    bare.register_forward_hook(check, with_kwargs=True)
    callback = HFCkptCallback("none", on_oom="escalate", prove="off")
    asked = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3}
    return train(bare, "ddp", callback, evaluated=rows(12), max_steps=2, **asked), callback


@pytest.mark.two("rows are given out to two")
def test_an_evaluation_in_parts_sends_what_the_whole_sends() -> None:
    expected, _ = evaluated(3)
    got, callback = evaluated(1 if dist.get_rank() else 3)
    assert (callback.report()["ckpt/oom_recovered"] > 0) is (dist.get_rank() == 1)
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    assert [name for name in got.weights if not torch.equal(got.weights[name], expected.weights[name])] == []


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("victims", [{0}, {1}, {0, 1}], ids=str)
def test_both_go_on_to_the_same_weights(victims: set[int], half: int) -> None:
    expected, _ = whole()
    is_victim = dist.get_rank() in victims
    (at,) = failures(half)
    mode = FailingOperators(at if is_victim else {}, after=bool(half))
    callback = HFCkptCallback("none", on_oom="escalate", prove="off")
    got = trained(mode, callback)
    assert got.losses == expected.losses
    assert [name for name in got.weights if not torch.equal(got.weights[name], expected.weights[name])] == []
    assert mode.raised == callback.report()["ckpt/oom_recovered"] == len(at) * is_victim
    assert (callback.plan.count(Mode.FULL) > 0) is is_victim
