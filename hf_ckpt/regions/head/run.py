"""The forward of a head that puts off its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.errors import PlanMismatchError, UnsupportedError
from hf_ckpt.regions.call import Function, keeps_activations
from hf_ckpt.regions.head.chunking import Chunking
from hf_ckpt.regions.head.logits import put_off
from hf_ckpt.regions.head.source import AT_ONCE, Source, State
from hf_ckpt.regions.recompute import original_forward
from hf_ckpt.regions.transforms import refuse_transforms


def run_head(chunking: Chunking, module: nn.Module, found: Function | None, *args: Any, **kwargs: Any) -> Any:
    """Instance `forward` of a head that is computed in chunks.

    Args:
        chunking: how; the head's own.
        module: the head.
        found: the forward that stood on the instance before, or None for the class's own.
        *args: what the forward takes: hidden states [..., H].
        **kwargs: what the forward takes.

    Returns:
        Logits [..., V]: `DeferredLogits` in a training forward, real ones in any other.

    Raises:
        UnsupportedError: the model is compiled, or calls its head with more than the hidden states.
    """
    forward = original_forward(module, found)
    chunking.is_called = True
    if kwargs.pop(AT_ONCE, False) or not keeps_activations(module):
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        _refuse_compiled()
    refuse_transforms()
    hidden = _hidden(args, kwargs)
    sources = [tensor for tensor in (hidden, *module.parameters()) if tensor.requires_grad]
    if not sources:
        return forward(*args, **kwargs)
    with torch.no_grad():
        # No row, for the dtype, the device and the width of what it returns.
        sample: Tensor = forward(hidden.detach().flatten(0, -2)[:0])
    source = Source(chunking, module, hidden, sample.shape[-1])
    return put_off(State.of(source, hidden, sample), *sources)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _refuse_compiled() -> None:
    """Raise where compiled code runs, and not while it is traced: torch.compile would go around the error there."""
    raise UnsupportedError(
        "head: chunked cannot be compiled as part of the model: torch.compile cannot trace logits that are put off. "
        "Compile the layers alone, or leave head: chunked out."
    )


def check_reached(chunking: Chunking, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook (with keyword arguments) of the model around the head: a head that is passed over is said at once.

    Args:
        chunking: the head's.
        model: the model that is given the labels.
        args: what it was given.
        kwargs: likewise.
        output: what it returned.

    Raises:
        PlanMismatchError: the model computed a loss in training, and not from what its head returned.
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
