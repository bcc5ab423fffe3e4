"""What the measured versions did differently from the installed ones, as far as it takes memory.

An emulation changes a model on `meta`, before adapters come; `reentrant_checkpointing` changes its fake copy. Each
repeats what the code of that version does, and holds no fitted figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def loss_4_46(model: Any) -> None:
    """Compute the loss as transformers 4.46 to 4.49 does: logits in float32, and those but the last as a copy."""
    model.loss_function = _upcast_loss


def loss_4_45(model: Any) -> None:
    """Compute the loss as models of transformers up to 4.45 do: the model itself keeps its logits in float32 alone."""
    model.loss_function = _loss_of_copies
    model.get_output_embeddings().__class__ = _Float32Linear


def loss_gpt_bigcode(model: Any) -> None:
    """Compute the loss as GPTBigCode does up to transformers 4.49: of a copy of the logits, in their own dtype."""
    model.loss_function = _loss_of_copies


def float32_norms(model: nn.Module) -> None:
    """Keep norms in float32, as `prepare_model_for_kbit_training` does."""
    for name, module in model.named_modules():
        if "norm" in name.rpartition(".")[2]:
            module.to(torch.float32)


@contextmanager
def reentrant_checkpointing(model: Any, *, keeps_inputs: bool) -> Iterator[nn.Module]:
    """Checkpoint every layer as `TrainingArguments(gradient_checkpointing=True)` does up to transformers 4.57.

    A layer that runs again runs to its end, its output stays while it runs backward, and the output of the embeddings
    is made to need a gradient.

    With `keeps_inputs` the input of each layer that ran again, and its gradient, stay to the end of backward: as under
    FSDP1 where the layer's own weights are frozen. The FSDP unit lies inside of the checkpoint, and the hook that frees
    its weights holds its input (`_register_post_backward_reshard_only_hook` in
    `torch/distributed/fsdp/_runtime_utils.py`).
    """
    held: list[Tensor] = []
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(_checkpoint, held if keeps_inputs else None)
    model.enable_input_require_grads()
    if keeps_inputs:
        model.get_input_embeddings().register_forward_hook(partial(_release_after_backward, held))
    yield model


def _checkpoint(held: list[Tensor] | None, function: Callable[..., Any], *args: Any) -> Any:
    run = function if held is None else partial(_run, held, function)
    return checkpoint(run, *args, use_reentrant=True)


def _run(held: list[Tensor], function: Callable[..., Any], hidden: Tensor, *args: Any) -> Any:
    if torch.is_grad_enabled():
        held.append(hidden)
    return function(hidden, *args)


def _release_after_backward(held: list[Tensor], embeddings: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: held.clear())


EMULATIONS: Mapping[str, Callable[[Any], None]] = {
    emulate.__name__: emulate for emulate in (loss_4_46, loss_4_45, loss_gpt_bigcode, float32_norms)
}


def _upcast_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return _loss_of_copies(logits.float(), labels, vocab_size)


def _loss_of_copies(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    shifted = logits[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    shifted = shifted.view(-1, vocab_size)
    return functional.cross_entropy(shifted, targets.view(-1))


class _Float32Linear(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).float()
