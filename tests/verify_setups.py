"""What a user's script does to a model, for `hf-ckpt verify --setup tests.verify_setups:...` in several processes."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.regions.execution_state import RandomState
from tests.planted import random_state_left


def lose_random_state_in_process_1(model: nn.Module) -> None:
    """Let process 1, and only that, recompute with other random numbers."""
    if os.environ["RANK"] == "1":
        RandomState.brought_back = random_state_left  # type: ignore[method-assign]


class _Wrapping:
    """The callback's own on_train_begin, and torch's wrapper around each layer after it."""

    found = HFCkptCallback.on_train_begin


def _wrap_layers(self: HFCkptCallback, *args: Any, **kwargs: Any) -> None:
    _Wrapping.found(self, *args, **kwargs)
    layers = {id(module) for module in kwargs["model"].modules() if type(module).__name__.endswith("DecoderLayer")}
    apply_activation_checkpointing(
        kwargs["model"], check_fn=lambda module: id(module) in layers, checkpoint_wrapper_fn=checkpoint_wrapper
    )


def wrap_layers(model: nn.Module) -> None:
    """Let the planned run wrap its layers, as accelerate does with FSDP's own activation checkpointing."""
    HFCkptCallback.on_train_begin = _wrap_layers  # type: ignore[method-assign]
