"""What fused kernels of fms-acceleration keep and make, at 733992a: norms, rotary embedding, and two losses.

Each does what its kernel does with memory, in the order of its code, and reads and writes as much; numbers mean
nothing.
https://github.com/foundation-model-stack/fms-acceleration/tree/733992a/plugins/fused-ops-and-kernels
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRMSNorm

from benchmarks.published.points import StepPoint

_VOCABULARY_AT_ONCE = 2**16
"""So many logits of a row are read by one program of the kernel of the loss."""


def fast_norms(model: nn.Module) -> None:
    """Let norms keep their input alone, and write the gradient of their output over; their weights get none."""
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.__class__ = _FastNorm


def fast_loss(model: Any) -> None:
    """Compute the loss of a copy of the logits without a further tensor of their size, and write its gradient there."""
    model.loss_function = _fast_loss


def fused_linear_loss(model: Any) -> None:
    """Compute loss and gradients chunk by chunk in forward, without logits."""
    model.__class__ = _FusedLossLlama


@contextmanager
def fast_rotary(model: Any, point: StepPoint) -> Iterator[None]:
    """Rotate queries and keys in place, in forward and in backward."""
    with mock.patch.object(modeling_llama, "apply_rotary_pos_emb", _rotate):
        yield


def shift(tensor: Tensor) -> Tensor:
    """Return `tensor[..., :-1, :]` as torch 2.4 does: `:` is a slice as well, whose backward makes one more tensor.

    Newer versions leave it out (`applySlice` in `aten/src/ATen/TensorIndexing.h`).
    """
    shifted: Tensor = torch.ops.aten.slice.Tensor(tensor[..., :-1, :], -1, 0, sys.maxsize)
    return shifted


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        normed = rows * 1
        scales = rows.new_empty(len(rows), dtype=torch.float32)
        ctx.save_for_backward(rows, weight, scales)
        return normed.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows, _, _ = ctx.saved_tensors
        written = gradient.view(rows.shape).mul_(rows)
        return written.view(gradient.shape), None


class _FastNorm(LlamaRMSNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        normed: Tensor = _NormFunction.apply(hidden, self.weight)
        return normed


class _RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        shape = states.shape
        ctx.tables = cosines, sines
        return states.view(shape[0] * shape[1], -1).mul_(1).view(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        shape = gradient.shape
        return gradient.reshape(shape[0] * shape[1], -1).mul_(1).view(shape), None, None


def _rotate(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Take and return [B, H, S, D]."""
    rotated = (
        _RotaryFunction.apply(each.transpose(1, 2), cosines, sines).transpose(1, 2)  # type: ignore[no-untyped-call]
        for each in (queries, keys)
    )
    return next(rotated), next(rotated)


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        num_rows, num_columns = logits.shape
        num_chunks = -(-num_columns // _VOCABULARY_AT_ONCE)
        partial_sums = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
        losses = logits.amax(1)
        sums = partial_sums if num_chunks == 1 else partial_sums.logsumexp(1)
        ctx.save_for_backward(logits, sums, labels)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, _, _ = ctx.saved_tensors
        return logits.mul_(1), None


def _fast_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    shifted = shift(logits).contiguous()
    targets = labels[..., 1:].contiguous().view(-1)
    losses: Tensor = _LossFunction.apply(shifted.view(-1, vocab_size), targets)
    return losses.sum() / torch.count_nonzero(targets != -100)


class _LinearLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        (num_rows, width), num_columns = hidden.shape, len(weight)
        chunk = _next_power_of_two(-(-num_rows // -(-num_columns // width)))
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_hidden = torch.zeros_like(hidden)
        losses = hidden.new_zeros(num_rows, dtype=torch.float32)
        num_counted = (targets != -100).sum()
        for begin in range(0, num_rows, chunk):
            rows = hidden[begin : begin + chunk]
            # Names are bound as there: what the last chunk left lives until it is bound anew.
            logits = rows @ weight.t()
            logits = logits.float()
            logits.mul_(1)
            logits = logits.to(hidden.dtype)
            share = len(rows) / num_counted
            losses[begin : begin + chunk] = losses[begin : begin + chunk] * share
            scaled = logits * share
            of_hidden[begin : begin + chunk] = scaled @ weight
            if of_weight is not None:
                of_weight.addmm_(logits.t(), rows)
        ctx.save_for_backward(of_hidden, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden, of_weight, None


class _FusedLossLlama(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids, **inputs)[0]
        shifted = shift(hidden).contiguous()
        targets = labels[..., 1:].contiguous().view(-1)
        loss = _LinearLossFunction.apply(shifted.view(-1, shifted.shape[-1]), self.lm_head.weight, targets)
        return CausalLMOutputWithPast(loss=loss)


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
