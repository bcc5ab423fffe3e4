"""One optimizer step of the Trainer, run on a real model or on a fake one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tracker import Tracker

_MICRO_BATCHES = 2
"""The first one makes the gradients, all others add to them."""

_TOKEN = 5
"""Every token of the step: one that means nothing special, such as padding."""

_Forward = Callable[..., Any]


def run_step(
    model: nn.Module,
    step: Step,
    tracker: Tracker,
    optimizer: torch.optim.Optimizer | None,
    *,
    is_cuda: bool = False,
) -> None:
    """Run an optimizer step as the Trainer does: forward, backward, clipping, step. Of many micro-batches, two run.

    Args:
        model: in training mode.
        step: its sizes.
        tracker: is entered.
        optimizer: with its state; None for a step that ends with the last backward.
        is_cuda: whether it stands for a step on a CUDA device, where clipping works on all gradients together.
    """
    forward = prepared(model, step)
    with tracker.silence():
        # The Trainer draws the micro-batches of a step before it runs the first one, and keeps them to the end.
        batches = [make_inputs(step) for _ in range(step.gradient_accumulation_steps)]
    for inputs in batches:
        tracker.know(inputs.items(), Category.TEMPORARY)
    for number, inputs in enumerate(batches[:_MICRO_BATCHES]):
        tracker.start_micro_batch(number)
        _run_backward(_loss(forward, inputs))
    if optimizer is not None:
        with tracker.phase(Phase.OPTIMIZER):
            if step.max_grad_norm > 0:
                trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
                torch.nn.utils.clip_grad_norm_(trainable, step.max_grad_norm, foreach=is_cuda or None)
            optimizer.step()
            model.zero_grad()


def make_inputs(step: Step) -> dict[str, Tensor]:
    """Return one micro-batch: token ids and labels [B, S], and what padding or packing adds."""
    shape = (step.batch_size, step.seq_length)
    inputs = {name: torch.full(shape, _TOKEN, dtype=torch.long) for name in ("input_ids", "labels")}
    if step.is_padded:
        # One token of the first row is padding: whatever asks whether there is any finds it.
        inputs["attention_mask"] = torch.ones(shape, dtype=torch.long).index_fill_(1, torch.tensor([-1]), 0)
    if step.is_packed:
        # Two documents in each row.
        positions = torch.arange(step.seq_length) % max(1, (step.seq_length + 1) // 2)
        inputs["position_ids"] = positions.expand(shape).contiguous()
    return inputs


def _run_backward(loss: Tensor) -> None:
    # What `loss.backward()` does. That would be a function of torch to a function mode, which is off while one runs,
    # and so while layers run forward again.
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _loss(forward: _Forward, inputs: dict[str, Tensor]) -> Tensor:
    # A function of its own, so that the logits are let go where the Trainer lets them go.
    loss: Tensor = forward(**inputs)["loss"]
    return loss


def prepared(model: nn.Module, step: Step) -> _Forward:
    """Return the forward as accelerate prepares it: under autocast, with outputs in float32."""
    if step.autocast is None:
        return model
    autocast = torch.autocast("cpu", getattr(torch, step.autocast))
    forward: _Forward = convert_outputs_to_fp32(autocast(model))
    return forward
