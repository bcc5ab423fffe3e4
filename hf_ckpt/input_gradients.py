"""Gradients of the embeddings' output, which PEFT users ask for beside activation checkpointing.

transformers' `enable_input_require_grads` does the same with a closure, after which the model can no longer be
pickled, and leaves attributes behind.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_ckpt.layers import Stack

logger = logging.getLogger(__name__)


class InputGradients:
    """Hooks that make the embeddings' output require gradients in training."""

    def __init__(self, model: nn.Module) -> None:
        self._hooks: list[RemovableHandle] = [
            embeddings.register_forward_hook(_require_grad) for embeddings in embeddings_of(model)
        ]

    def restore(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def are_wanted(model: nn.Module, stacks: Sequence[Stack], asked: bool | None) -> bool:
    """Decide whether to ask for gradients of the embeddings' output, and say the choice and its price.

    Args:
        model: the model that is trained.
        stacks: its stacks.
        asked: the user's choice; None decides: on PEFT models, unless the first trainable parameter is in a later
            layer, where it would make the frozen layers below keep activations and run backward for nothing.
    """
    if asked is not None or not _is_peft(model):
        return bool(asked)
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


def embeddings_of(model: nn.Module) -> list[nn.Module]:
    """Return the input embeddings of a model and of the models inside it, each once."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        try:
            embeddings = module.get_input_embeddings()
        except NotImplementedError:
            # A model without token embeddings says so in this way.
            continue
        if isinstance(embeddings, nn.Module):
            found[id(embeddings)] = embeddings
    return list(found.values())


def _is_peft(model: nn.Module) -> bool:
    return any(hasattr(module, "peft_config") for module in model.modules())


def _require_grad(module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.is_floating_point() and module.training and torch.is_grad_enabled():
        output.requires_grad_(True)
