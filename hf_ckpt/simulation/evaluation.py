"""One batch of the Trainer's evaluation between two training steps, simulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.simulation.cuda.cublas import add_workspaces
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.fake_model import fake_twin
from hf_ckpt.simulation.reading import read
from hf_ckpt.simulation.run_step import make_inputs, prepared
from hf_ckpt.simulation.sharding import computes_in, on_one_rank, weights_of
from hf_ckpt.simulation.simulator import followed
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, StepMemory
from hf_ckpt.simulation.tracker import BLOCK_BYTES, Tracker
from hf_ckpt.structure.layers import find_layers


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What evaluation needs while training goes on.

    Args:
        memory: one batch; the optimizer has its state, gradients are let go.
        kept_bytes: what each batch leaves behind where predictions are kept, for `compute_metrics`: logits in the
            dtype in which the model returns them, and labels, of all ranks.
    """

    memory: StepMemory
    kept_bytes: int


def simulate_evaluation(model: nn.Module, step: Step, device: Device, **structure: Any) -> Evaluation:
    """Predict the memory of one batch of `Trainer.evaluate()`, without gradients and in evaluation mode.

    The model's `use_cache` is taken as it is: with it, keys and values of the batch are held too.

    Args:
        model: see `simulate_step`.
        step: rows and tokens are those of a batch of evaluation; optimizer and engine are the training's.
        device: where.
        structure: `layers`, `attention` and `ffn` of `apply`.

    Raises:
        UnsupportedError: see `simulate_step`.
    """
    twin, mode = fake_twin(model, partial(computes_in, step), is_cuda=device.is_cuda)
    tracker = Tracker(rounding=BLOCK_BYTES if device.is_cuda else 1)
    with followed(twin.train(), mode, find_layers(twin, **structure), step, device, tracker):
        kept_bytes = _run_batch(twin.eval(), step, tracker)
    tape = on_one_rank(tracker.tape, weights_of(model, find_layers(model, **structure), step), step, device)
    add_workspaces(tape, device, has_trained=True)
    memory = read(tape, device=device.name, plan=None, tokens=step.batch_size * step.seq_length)
    return Evaluation(memory, kept_bytes * step.sharding.world_size)


def _run_batch(model: nn.Module, step: Step, tracker: Tracker) -> int:
    """Run a forward and return the bytes of the predictions and labels that come of it."""
    with tracker.silence():
        inputs = make_inputs(step)
    tracker.know(inputs.items(), Category.TEMPORARY)
    with torch.no_grad():
        output = prepared(model, step)(**inputs)
    logits: Tensor = output["logits"]
    return logits.nbytes + inputs["labels"].nbytes
