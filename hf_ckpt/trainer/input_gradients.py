"""Gradients of the embeddings' output, which PEFT users ask for together with activation checkpointing.

transformers' `enable_input_require_grads` switches them on with a closure, after which the model can no longer be
pickled, and leaves attributes behind.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_ckpt.structure.layers import Stack
from hf_ckpt.structure.stored import adapter_configs

logger = logging.getLogger(__name__)


def switch_input_gradients(model: nn.Module, is_on: bool | None) -> list[RemovableHandle]:
    """Place a hook that has gradients of the input embeddings' output on or off; none where that is None."""
    embeddings = None if is_on is None else input_embeddings(model)
    # Placed last, so that it sees what the hook of `enable_input_require_grads` has done.
    return [] if embeddings is None else [embeddings.register_forward_hook(partial(_set_requires_grad, is_on))]


def choose_input_gradients(model: nn.Module, stacks: Sequence[Stack], requested: bool | None) -> bool | None:
    """Decide whether the embeddings' output should require gradients, and log the choice and its price."""
    # What the user `requested` counts. Otherwise they are on for PEFT models, unless the first trainable parameter is
    # in a later layer, where they would make the frozen layers below keep activations and run backward for nothing.
    # Returns None to leave a model without PEFT as it is.
    if requested is not None:
        return requested
    if not any(map(adapter_configs, model.modules())):
        return None
    language = next((stack for stack in stacks if "language" in stack.roles), stacks[0])
    first = next((layer.layer_idx for layer in language.layers if layer.needs_gradient), None)
    if first == 0:
        logger.info("Input gradients are on, as PEFT users expect; they cost one gradient of the embeddings' output.")
        return True
    below = len(language.layers) if first is None else first
    logger.info(
        "Input gradients are off: the first trainable parameter is behind layer %d, and with them %d frozen layers "
        "would keep activations and run backward for nothing. input_require_grads=True turns them on.",
        below - 1,
        below,
    )
    return False


def input_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the input embeddings of a model, or those of the outermost model inside it that has some."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        try:
            embeddings = module.get_input_embeddings()
        except NotImplementedError:
            # A model without token embeddings says so in this way.
            continue
        if isinstance(embeddings, nn.Module):
            return embeddings
    return None


def _set_requires_grad(is_on: bool | None, module: nn.Module, args: Any, output: Any) -> None:
    if not (isinstance(output, Tensor) and output.is_floating_point() and module.training and torch.is_grad_enabled()):
        return
    # A tensor that was computed from trainable embeddings keeps its gradient in any case.
    if output.is_leaf:
        output.requires_grad_(bool(is_on))
