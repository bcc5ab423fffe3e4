"""What trl's SFTTrainer has: activations offloaded, with activation checkpointing and without, and attention kept.

`SFTConfig(activation_offloading=True)` does both, since activation checkpointing is on by default in trl: what goes to
the host is then the inputs of the layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.side_by_side.contender import OFFLOAD_WARMUP, Contender, NotHereError
from benchmarks.side_by_side.theirs.transformers_own import enable, put_back, try_out


class _TrainingSteps:
    """Opens trl's context where a step begins, and closes it where the next one does.

    `SFTTrainer.training_step` has it around forward and backward; a contender sees forwards only.
    """

    def __init__(self, context: saved_tensors_hooks) -> None:
        self._context = context
        self._is_open = False

    def begin(self, *args: Any) -> None:
        """Forward pre-hook of the model."""
        self.end()
        self._context.__enter__()
        self._is_open = True

    def end(self) -> None:
        """The last step is over."""
        if self._is_open:
            self._is_open = False
            self._context.__exit__(None, None, None)


@contextmanager
def _offloaded(model: nn.Module) -> Iterator[nn.Module]:
    with put_back(model):
        steps = _TrainingSteps(_context(model))
        model.register_forward_pre_hook(steps.begin)
        try:
            yield model
        finally:
            steps.end()


def _context(model: nn.Module) -> saved_tensors_hooks:
    """Return trl's context, with the hooks on the head of the model that it makes.

    Raises:
        NotHereError: no trl, no accelerator, or a model that is not on it.
    """
    try:
        from trl.models import get_act_offloading_ctx_manager
    except ImportError as error:
        raise NotHereError(f"trl is not installed: {error}") from error
    accelerator = torch.accelerator.current_accelerator()
    try:
        context: saved_tensors_hooks = get_act_offloading_ctx_manager(model)
    except AttributeError as error:
        if accelerator is not None:
            raise
        raise NotHereError(
            f"trl's OffloadActivations asks torch for an accelerator and takes what it gets: {error}"
        ) from error
    device = next(model.parameters()).device
    if accelerator is None or device.type != accelerator.type:
        raise NotHereError(f"trl's OffloadActivations moves nothing that is on {device}")
    return context


@contextmanager
def _checkpointed_and_offloaded(model: nn.Module) -> Iterator[nn.Module]:
    with _offloaded(model):
        enable(model)
        yield model


@contextmanager
def _selective(model: nn.Module) -> Iterator[nn.Module]:
    try:
        from trl.models import enable_selective_activation_checkpointing
    except ImportError as error:
        raise NotHereError(f"trl is not installed, or too old: {error}") from error
    with put_back(model):
        enable_selective_activation_checkpointing(model)
        with warnings.catch_warnings():
            # trl goes by the name that transformers 5.23 gives up.
            warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning)
            enable(model, {"selective": True})
        # On a model of peft transformers goes past what trl has put on it.
        try_out(model, "trl's selective")
        yield model


CONTENDERS = (
    Contender(
        name="trl_offload",
        title="trl, activation_offloading",
        group="elsewhere",
        enter=_checkpointed_and_offloaded,
        num_warmup=OFFLOAD_WARMUP,
    ),
    Contender(
        name="trl_offload_all",
        title="trl, activation_offloading without checkpointing",
        group="elsewhere",
        enter=_offloaded,
        num_warmup=OFFLOAD_WARMUP,
    ),
    Contender(name="trl_selective", title="trl, selective", group="elsewhere", enter=_selective),
)
