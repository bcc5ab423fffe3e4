"""One optimizer step as the Trainer runs it: forward, backward, clipping, AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import Tensor, nn

from benchmarks.cases import Case

_MAX_GRAD_NORM = 1.0


class TrainingStep:
    """A model with its optimizer and a batch.

    The learning rate is zero: all work is done and no weight moves, so that each contender's loss and gradient norm
    are those of the same weights.

    Args:
        model: in training mode, on its device.
        case: how it trains.
        batch: what the model is called with.
    """

    def __init__(self, model: nn.Module, case: Case, batch: dict[str, Tensor]) -> None:
        self.model = model
        self.batch = batch
        self._autocast = case.autocast
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self._trainable, lr=0.0, weight_decay=0.0, fused=True)

    def make_state(self) -> None:
        """Make the optimizer's state by a step with gradients of zero, which takes no activations."""
        for parameter in self._trainable:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward(self, called: nn.Module) -> Tensor:
        """Return the loss.

        Args:
            called: what a contender made of the model.
        """
        loss: Tensor = self._prepared(called)(**self.batch)["loss"]
        return loss

    def backward(self, loss: Tensor) -> None:
        """Make gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> Tensor:
        """Clip and step; return the norm of the gradients."""
        norm = torch.nn.utils.clip_grad_norm_(self._trainable, _MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def run(self, called: nn.Module) -> tuple[Tensor, Tensor]:
        """Run it all; return the loss, detached, and the norm of the gradients."""
        loss = self.forward(called)
        self.backward(loss)
        return loss.detach(), self.update()

    def _prepared(self, called: nn.Module) -> Callable[..., Any]:
        if self._autocast is None:
            return called
        device = next(self.model.parameters()).device.type
        mixed = torch.autocast(device, getattr(torch, self._autocast))
        prepared: Callable[..., Any] = convert_outputs_to_fp32(mixed(called))
        return prepared
