"""Selective activation checkpointing by operator, by torchtitan's rule, on the layers of a transformers model.

The rule (torchtitan's `SelectiveAC`, as of August 2026): in each layer keep what attention and matrix products return,
but of the plain products (`aten.mm`) only the first, third, fifth and so on; recompute the rest, the whole layer to its
end. It is put into the seam of transformers' layers and not around them, so that names stay and caches are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.side_by_side.contender import Contender, NotHereError
from benchmarks.side_by_side.theirs.transformers_own import put_back
from hf_ckpt.errors import StructureError
from hf_ckpt.structure.layers import find_layers

_PRODUCT = torch.ops.aten.mm.default
_KEPT = frozenset(
    operator.default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "convolution",
        "convolution_backward",
        "upsample_bilinear2d",
        "_scaled_mm",
        # Largest values, for scales of low precision, and choices of experts.
        "max",
        "topk",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        # Not in torchtitan's list, which is of operators on GPUs: what the same call is on a CPU.
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(operator := getattr(torch.ops.aten, name, None), "default")
)


class _EverySecondProduct:
    """Says of each operator of one run of a layer whether it is kept."""

    def __init__(self) -> None:
        # Of the forward, and of the recomputation, in which torch before 2.13 asks again.
        self._num_products = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operator in _KEPT
        if operator is _PRODUCT:
            self._num_products[context.is_recompute] += 1
            is_kept = self._num_products[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_EverySecondProduct())


@contextmanager
def _selective(model: nn.Module) -> Iterator[nn.Module]:
    # torchtitan does not stop where the last tensor that is needed has been recomputed.
    function = partial(checkpoint, use_reentrant=False, context_fn=_contexts, early_stop=False)
    layers = _layers(model)
    with put_back(model):
        for layer in layers:
            layer._gradient_checkpointing_func = function
            layer.gradient_checkpointing = True
        yield model


def _layers(model: nn.Module) -> list[Any]:
    try:
        layers = [layer.module for stack in find_layers(model) for layer in stack.layers]
    except StructureError as error:
        raise NotHereError(str(error)) from error
    without = sorted({type(layer).__name__ for layer in layers if not hasattr(layer, "gradient_checkpointing")})
    if without:
        raise NotHereError(f"{', '.join(without)} has no seam for checkpointing (GradientCheckpointingLayer)")
    return layers


CONTENDERS = (
    Contender(
        name="torchtitan_selective",
        title="selective, as torchtitan",
        group="elsewhere",
        enter=_selective,
    ),
)
