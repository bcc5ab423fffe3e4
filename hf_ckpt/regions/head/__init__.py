"""The language-model head and the loss without ever holding the logits: some tokens at a time.

The head returns deferred logits (`deferred_logits`); the loss that the model computes from them runs in chunks, each
through the model's own head and recomputed in backward (`chunked_loss`). So the model's own code decides what the loss
is, and whatever is attached to the head takes part: adapters, soft-capping, hooks that gather a sharded weight, a
quantised weight.

Note [torch's linear_cross_entropy]: torch 2.13 and later has a chunked kernel of its own, which is not used. It is
right for float32 alone (in bf16 it returns the loss in bf16), where it saves a frozen head's recomputation: 1.6 s
against 1.9 s on a CPU core (2,048 tokens, vocabulary 16,000, hidden size 256), and nothing with a trainable head. It
knows no adapter, no soft-capping and no hook, refuses a second backward, and neither its operations nor its memory can
be counted from outside. Liger's is left to govern where it is on (`hf_ckpt.structure.lm_head.governed_by_other`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.errors import PlanMismatchError, UnsupportedError
from hf_ckpt.regions.execution_state import Function, keeps_activations, refuse_transforms
from hf_ckpt.regions.head.chunking import Chunking
from hf_ckpt.regions.head.deferred_logits import DeferredLogits, defer
from hf_ckpt.regions.head.head_call import COMPUTE_NOW, HeadCall, LogitsState
from hf_ckpt.regions.recompute import original_forward

__all__ = ["Chunking", "DeferredLogits", "check_reached", "run_head"]


def run_head(chunking: Chunking, module: nn.Module, found: Function | None, *args: Any, **kwargs: Any) -> Any:
    """Instance `forward` of a head that is computed in chunks; it takes the hidden states [..., H] alone.

    Returns `DeferredLogits` [..., V] in a training forward, real logits in any other. `found` is the forward that stood
    on the instance before, or None for the class's own.
    """
    forward = original_forward(module, found)
    chunking.is_called = True
    if kwargs.pop(COMPUTE_NOW, False) or not keeps_activations(module):
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        _refuse_compiled()
    refuse_transforms()
    hidden = _hidden(args, kwargs)
    sources = [tensor for tensor in (hidden, *module.parameters()) if tensor.requires_grad]
    if not sources:
        return forward(*args, **kwargs)
    with torch.no_grad():
        # No row: its output shows the dtype, the device and the width.
        sample: Tensor = forward(hidden.detach().flatten(0, -2)[:0])
    head_call = HeadCall(chunking, module, hidden, sample.shape[-1])
    return defer(LogitsState(head_call, hidden, (), sample, hidden._version), *sources)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _refuse_compiled() -> None:
    """Raise where compiled code runs, and not while it is traced: torch.compile would go around the error there."""
    raise UnsupportedError(
        "head: chunked cannot be compiled as part of the model: torch.compile cannot trace logits that are put off. "
        "Compile the layers alone, or leave head: chunked out."
    )


def check_reached(chunking: Chunking, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook (with keyword arguments) of the model around the head: raise if the model bypasses its head.

    That is if it computed a loss in training, and not from what its head returned.
    """
    has_labels = kwargs.get("labels") is not None
    if chunking.is_called or not has_labels or not keeps_activations(model) or torch.compiler.is_compiling():
        return
    raise PlanMismatchError(
        f"head: chunked is set, but {type(model).__name__} computed its loss without calling its head: it multiplies "
        "with the head's weight itself, or another library has put a fused head in since (Liger, trl). Leave head: "
        "chunked out."
    )


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = (*args, *kwargs.values())
    if len(given) == 1 and isinstance(given[0], Tensor) and given[0].ndim > 1:
        return given[0]
    raise UnsupportedError(
        "head: chunked computes a head from hidden states alone, and the model calls its head with "
        f"{len(args)} positional arguments and {list(kwargs)}. Leave head: chunked out for this model."
    )
