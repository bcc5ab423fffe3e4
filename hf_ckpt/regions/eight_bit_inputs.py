"""Inputs that 8-bit layers of bitsandbytes keep where no recomputation reaches them: let go as soon as they are kept.

Their autograd functions set the input on their node, past what autograd saves, so that a region that is recomputed
would hold the inputs of all its layers. The backward reads it for the gradient of the weight alone, and these weights
mostly have none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.upstream.bitsandbytes import HELD_INPUTS

logger = logging.getLogger(__name__)


def let_go_of_inputs(region: nn.Module) -> Iterator[RemovableHandle]:
    """Place hooks on the 8-bit layers inside of a module; yield their handles."""
    # By name, so that no library has to be there.
    layers: list[Any] = [module for module in region.modules() if type(module).__name__ == "Linear8bitLt"]
    layers = [module for module in layers if type(module).__module__.startswith("bitsandbytes.")]
    trained = sum(module.weight.requires_grad for module in layers)
    if trained:
        logger.info(
            "%d 8-bit layers of %s train their weights: their backward reads their inputs, which are held, "
            "recomputed or not.",
            *(trained, type(region).__name__),
        )
    for module in layers:
        # Before hooks of others, which may return something else.
        yield module.register_forward_hook(_let_go, prepend=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _let_go(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook of an 8-bit layer."""
    node: Any = output.grad_fn if isinstance(output, Tensor) else None
    held = HELD_INPUTS.get(type(node).__name__)
    # The second input is the weight.
    if held is not None and not node.needs_input_grad[1]:
        setattr(node, *held)
