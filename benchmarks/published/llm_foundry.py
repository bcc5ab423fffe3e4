"""What LLM Foundry does at b2a43a1 with its MPT, and Composer 0.16.4 around it.

https://github.com/mosaicml/llm-foundry/tree/b2a43a1477a45f40f4086a1c72f851b0ab42d0ac/llmfoundry/models
Norms run in half precision (`low_precision_layernorm`), the loss is flash-attn's kernel, positions are learned, and
ranks reduce gradients in float32 (`mixed_precision: DEFAULT` of Composer).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.published.torchtitan import sent_in_float32
from hf_ckpt.simulation.fsdp_tape import FsdpTape


class Mpt(nn.Module):
    """MPT with learned positions and tied embeddings, without dropout: every linear layer and norm has a bias."""

    def __init__(self, config: Any, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        self.wte = nn.Embedding(config.vocab_size, width, dtype=dtype)
        self.wpe = nn.Embedding(config.max_seq_len, width, dtype=dtype)
        self.blocks = nn.ModuleList(_Block(width, config.n_heads, dtype) for _ in range(config.n_layers))
        self.norm_f = _HalfPrecisionNorm(width, dtype=dtype)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        held: list[Tensor] = []
        hidden = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]).unsqueeze(0))
        hidden = _Metrics.apply(hidden, held, labels)  # type: ignore[no-untyped-call]
        for block in self.blocks:
            hidden = block(hidden)
        logits = functional.linear(self.norm_f(hidden), self.wte.weight)
        losses: Tensor = _FusedLoss.apply(logits.flatten(0, 1))  # type: ignore[no-untyped-call]
        held.append(logits.detach())
        return {"loss": losses.float().mean()}


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (_HalfPrecisionNorm(width, dtype=dtype) for _ in range(2))
        self.self_attn = _Attention(width, num_heads, dtype)
        wide = nn.Linear(width, 4 * width, dtype=dtype)
        self.mlp = nn.Sequential(wide, nn.GELU(), nn.Linear(4 * width, width, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.norm_1(hidden))
        ffn: Tensor = self.mlp(self.norm_2(hidden))
        return hidden + ffn


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.Wqkv = nn.Linear(width, 3 * width, dtype=dtype)
        self.out_proj = nn.Linear(width, width, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        parts = self.Wqkv(hidden).chunk(3, dim=2)
        query, key, value = (part.view(rows, length, self.num_heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        returned: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(rows, length, width))
        return returned


class _HalfPrecisionNorm(nn.LayerNorm):
    """Autocast would run it in float32."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden, weight, bias = (each.to(torch.bfloat16) for each in (hidden, self.weight, self.bias))
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps)


class _FusedLoss(torch.autograd.Function):
    """Reads the logits once, keeps them, and writes their gradient: as much as the kernel does; numbers mean nothing.

    https://github.com/Dao-AILab/flash-attention/blob/v2.3.2/flash_attn/losses/cross_entropy.py
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.amax(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        return logits * 1


class _Metrics(torch.autograd.Function):
    """When the layers' backward is done, computes the loss of the kept logits anew for each of two metrics.

    Cross-entropy and perplexity, with torch and under autocast, so of a float32 copy. Composer does that behind
    backward (`_eval_train_metrics`), one operator later than here.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, held: list[Tensor], labels: Tensor) -> Tensor:
        ctx.held, ctx.labels = held, labels
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits = ctx.held.pop().flatten(0, 1)
        for _ in range(2):
            functional.cross_entropy(logits.float(), ctx.labels.flatten())
        return gradient, None, None


@contextmanager
def reduced_in_float32() -> Iterator[None]:
    """Reduce gradients in float32."""
    with mock.patch.object(FsdpTape, "_sent_bytes", sent_in_float32):
        yield
