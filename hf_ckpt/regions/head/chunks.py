"""Functions of the rows of put-off logits, computed some rows at a time and recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_ckpt.regions.head.gradients import InParts
from hf_ckpt.regions.head.source import Source, Step
from hf_ckpt.regions.recompute import recompute

if TYPE_CHECKING:
    from hf_ckpt.regions.head.head_proof import HeadProof


def in_chunks(
    source: Source,
    steps: Sequence[Step],
    hidden: Tensor,
    lengths: Sequence[int],
    function: Callable[..., Any],
    *operands: Tensor,
    proof: HeadProof | None = None,
) -> list[Any]:
    """Return what a function returns for each chunk of rows.

    Held for backward is `hidden` alone; there each chunk costs one more forward of the head.

    Args:
        source: the call of the head.
        steps: applied to its logits.
        hidden: [T, H].
        lengths: rows of each chunk.
        function: of the logits [n, V] of a chunk, and its rows of the operands.
        operands: with T rows.
        proof: looks at the gradients that the chunks give.
    """
    rows = [torch.split(each, list(lengths)) for each in operands]
    if not torch.is_grad_enabled():
        chunks = zip(torch.split(hidden, list(lengths)), *rows, strict=True)
        return [function(at_once(source, steps, chunk), *others) for chunk, *others in chunks]
    weights = {
        name: InParts.repeated(weight, None if proof is None else partial(proof.parts, name))
        for name, weight in source.trainable_weights().items()
    }
    chunks = zip(_slices(hidden, lengths, proof), *rows, strict=True)
    return [
        recompute(partial(_run, source.head, source, tuple(steps), function, weights, number), *chunk)
        for number, chunk in enumerate(chunks)
    ]


def at_once(
    source: Source, steps: Sequence[Step], hidden: Tensor, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the logits of some rows, [n, V].

    Args:
        source: the call of the head.
        steps: applied to its logits.
        hidden: [n, H].
        weights: in place of the head's own, by name.
    """
    logits = source.run(hidden, weights or {})
    for step in steps:
        # Nothing but the step's own input and output is alive meanwhile.
        logits = step.run(logits)
    return logits


def _run(
    head: nn.Module,
    source: Source,
    steps: tuple[Step, ...],
    function: Callable[..., Any],
    weights: Mapping[str, InParts],
    number: int,
    hidden: Tensor,
    *operands: Tensor,
) -> Any:
    """Return what `function` returns for a chunk; `head` comes first, as a module whose state is followed does."""
    parts = {name: weight(number) for name, weight in weights.items()}
    return function(at_once(source, steps, hidden, parts), *operands)


def _slices(hidden: Tensor, lengths: Sequence[int], proof: HeadProof | None) -> Sequence[Tensor]:
    if not hidden.requires_grad:
        return torch.split(hidden, list(lengths))
    rows = InParts.by_rows(hidden, lengths, None if proof is None else proof.rows)
    return [rows(number) for number in range(len(lengths))]
