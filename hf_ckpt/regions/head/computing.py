"""What is computed from put-off logits: functions of each row in chunks; the whole logits where nothing else does."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_ckpt.regions.head import losses, operations
from hf_ckpt.regions.head.chunks import at_once, in_chunks
from hf_ckpt.regions.head.head_proof import HeadProof, PlainLoss
from hf_ckpt.regions.head.logits import DeferredLogits, allows_gradient, passed_through

logger = logging.getLogger(__name__)

_LOSSES = {"cross_entropy": functional.cross_entropy, "nll_loss": functional.nll_loss}
_SIGNATURES = {name: inspect.signature(function) for name, function in _LOSSES.items()}

LOSSES = frozenset(_LOSSES)


def of_rows(logits: DeferredLogits, function: Callable[..., Any], *operands: Tensor) -> Any:
    """Return a function of each row, with the positions in their shape.

    Args:
        logits: [..., V].
        function: of some rows [n, V] and their operands; returns a tensor with n rows, or a named tuple of such.
        operands: [..., k].
    """
    leading = logits.shape[:-1]
    parts = _in_chunks(logits, function, *(operand.reshape(-1, operand.shape[-1]) for operand in operands))
    if isinstance(parts[0], Tensor):
        return passed_through(_joined(parts, leading), logits)
    joined = (_joined(each, leading) for each in zip(*parts, strict=True))
    return type(parts[0])([passed_through(each, logits) for each in joined])


def reduced(
    function: Callable[..., Any], name: str, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return what a function of torch makes of each row; NotImplemented where it does not work along the vocabulary.

    Args:
        function: one of `operations.REDUCTIONS`.
        name: its name.
        logits: [..., V].
        args: what it was called with, after the logits.
        kwargs: likewise.
    """
    place = operations.REDUCTIONS[name]
    dim = args[place] if len(args) > place else kwargs.get("dim", -1 if name == "topk" else None)
    if not operations.is_of_vocabulary(dim, logits.dim()):
        return NotImplemented
    if name == "gather":
        index = kwargs["index"] if "index" in kwargs else args[1]
        is_by_row = isinstance(index, Tensor) and index.shape[:-1] == logits.shape[:-1]
        return of_rows(logits, partial(_gathered, function), index) if is_by_row else NotImplemented
    if len(args) > place:
        args = (*args[:place], -1, *args[place + 1 :])
    else:
        kwargs = {**kwargs, "dim": -1}
    return of_rows(logits, partial(_called, function, args, kwargs))


def loss(name: str, logits: DeferredLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a loss in float32, for logits in a lower precision as well; NotImplemented where it is another's.

    Args:
        name: one of `LOSSES`.
        logits: [T, V], or [B, V, S].
        args: what the loss was called with, logits included.
        kwargs: likewise.
    """
    bound = _SIGNATURES[name].bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    target, weight, leading = given["target"], given["weight"], logits.state.hidden.shape[:-1]
    has_classes = isinstance(target, Tensor) and not target.is_floating_point() and target.shape == leading
    is_in_order = logits.dim() == 2 or logits.state.has_classes_first
    if not (is_in_order and has_classes) or given["size_average"] is not None or given["reduce"] is not None:
        return NotImplemented
    proof = _proof(_LOSSES[name], logits, given)
    exact: Any = logits.to(torch.promote_types(logits.dtype, torch.float32))
    compute = partial(_in_chunks, exact)
    value = losses.in_chunks_of(
        compute if proof is None else partial(proof.compute, compute),
        _LOSSES[name],
        target.flatten(),
        weight=None if weight is None else weight.to(exact.dtype),
        ignore_index=given["ignore_index"],
        reduction=given["reduction"],
        **({"label_smoothing": given["label_smoothing"]} if name == "cross_entropy" else {}),
    )
    value = passed_through(value if value.dim() == 0 else value.view(leading), logits)
    if proof is not None:
        proof.look_at(value)
    return value


def _proof(function: Callable[..., Tensor], logits: DeferredLogits, given: Mapping[str, Any]) -> HeadProof | None:
    """Return what looks at a loss, if one is due."""
    region = logits.state.source.chunking.proof
    if region is None or not allows_gradient(logits):
        return None
    call = region.watch(function, [logits.state.hidden])
    if call is None or call.is_simulated:
        return None
    options = {key: given[key] for key in ("label_smoothing",) if key in given}
    loss = PlainLoss(
        function, given["target"], given["weight"], given["ignore_index"], given["reduction"], options=options
    )
    return HeadProof(call, logits, loss)


def whole(logits: DeferredLogits, name: str) -> Tensor:
    """Return the real logits, and keep them: whoever asks once usually asks again. Warns of their size, once.

    Args:
        logits: [..., V].
        name: the function that needs them.
    """
    if logits.whole is None:
        _warn(logits, name)
        state, has_gradient = logits.state, allows_gradient(logits)
        with torch.set_grad_enabled(has_gradient):
            rows = at_once(state.source, state.steps, state.rows(has_gradient=has_gradient))
            found = rows.view(*state.hidden.shape[:-1], rows.shape[-1])
        logits.whole = passed_through(found.movedim(-1, 1) if state.has_classes_first else found, logits)
    return logits.whole


def _in_chunks(
    logits: DeferredLogits, function: Callable[..., Any], *operands: Tensor, proof: HeadProof | None = None
) -> list[Any]:
    """Return what a function returns for each chunk of rows.

    Args:
        logits: with T rows in all.
        function: see `in_chunks`.
        operands: with T rows.
        proof: see `in_chunks`.
    """
    state, has_gradient = logits.state, allows_gradient(logits)
    rows = state.rows(has_gradient=has_gradient)
    with torch.set_grad_enabled(has_gradient):
        lengths = state.source.lengths(len(rows))
        return in_chunks(state.source, state.steps, rows, lengths, function, *operands, proof=proof)


def _joined(parts: Any, leading: torch.Size) -> Tensor:
    joined = torch.cat(list(parts))
    return joined.view(*leading, *joined.shape[1:])


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], logits: Tensor) -> Any:
    return function(logits, *args, **kwargs)


def _gathered(function: Callable[..., Any], logits: Tensor, index: Tensor) -> Any:
    return function(logits, -1, index)


def _warn(logits: DeferredLogits, name: str) -> None:
    source = logits.state.source
    # As many rows as a chunk has are no more than what the loss needs.
    if logits.shape[:-1].numel() <= max(source.lengths(source.num_rows)) or source.chunking.has_warned:
        return
    source.chunking.has_warned = True
    logger.warning(
        "head: chunked keeps logits from being held, but %s asks for all of them (%s in %s, %.2f GiB), and gets them. "
        "Compute it with torch.nn.functional.cross_entropy or from a few rows at a time, or leave head: chunked out.",
        name,
        tuple(logits.shape),
        str(logits.dtype).removeprefix("torch."),
        logits.numel() * logits.element_size() / 2**30,
    )
