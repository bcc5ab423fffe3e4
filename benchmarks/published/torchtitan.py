"""What torchtitan does at 9dec370 with its Llama, which has the products and shapes of the one of transformers.

https://github.com/pytorch/torchtitan/blob/9dec370ad26b5f8e9a7333a0e36165018262644b/
`train.py` frees the logits before backward, `torchtitan/parallelisms/parallelize_llama.py` checkpoints and shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.integrations import sdpa_attention
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from benchmarks.published.points import StepPoint
from hf_ckpt.simulation import fsdp_tape, rank_tape
from hf_ckpt.simulation.fsdp_tape import FsdpTape
from hf_ckpt.simulation.tape import Storage

_PRODUCT = torch.ops.aten.mm.default
_SAVED = (
    _PRODUCT,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
)


def torchtitan_loss(model: Any) -> None:
    """Compute the loss of a float32 copy of the logits, and return it alone."""
    model.__class__ = _Llama


@contextmanager
def torchtitan_selective(model: Any, point: StepPoint) -> Iterator[None]:
    """Checkpoint every layer, but save attention and every second product (`selective_ac_option = 'op'`)."""
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = _checkpoint
    yield


@contextmanager
def torchtitan_heads(model: Any, point: StepPoint) -> Iterator[None]:
    """Repeat keys and values, one for each head of the queries, and keep them so for backward."""
    # No Mock: it would hold the keys that it is called with.
    with mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", _repeats):
        yield


def _repeats(*args: Any) -> bool:
    return False


@contextmanager
def torchtitan_fsdp2() -> Iterator[None]:
    """Shard layers and the whole model, no embeddings and no head apart; reduce gradients in float32."""
    with ExitStack() as entered:
        for module in (fsdp_tape, rank_tape):
            entered.enter_context(mock.patch.object(module, "HAS_UNITS_AT_THE_ENDS", False))
        entered.enter_context(mock.patch.object(FsdpTape, "_sent_bytes", sent_in_float32))
        yield


def sent_in_float32(self: FsdpTape, gradient: Storage) -> int:
    """Return what of a whole gradient is sent: it is reduced in float32."""
    return max(gradient.num_bytes, prod(gradient.shape) * torch.float32.itemsize)


class _Llama(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        logits = self.lm_head(self.model(input_ids, use_cache=False)[0])
        return {"loss": functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}


def _checkpoint(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts)


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, Counter()))


def _policy(num_products: Counter[bool], context: Any, operator: Any, *args: Any, **_: Any) -> CheckpointPolicy:
    num_products[context.is_recompute] += operator is _PRODUCT
    is_second = operator is _PRODUCT and num_products[context.is_recompute] % 2 == 0
    return CheckpointPolicy.MUST_SAVE if operator in _SAVED and not is_second else CheckpointPolicy.PREFER_RECOMPUTE
