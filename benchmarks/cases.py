"""Models with random weights that the benchmarks run on, and one training step of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, kw_only=True)
class Case:
    """A Llama and a batch. Proportions are those of Llama 2 7B where the size allows."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    tokens: int
    dtype: torch.dtype = torch.float32


CASES = {
    "llama_tiny": Case(hidden=64, ffn=128, layers=4, heads=4, vocabulary=128, batch=2, tokens=32),
    "llama_38m": Case(hidden=512, ffn=1408, layers=8, heads=4, vocabulary=8192, batch=2, tokens=512),
    "llama_1b": Case(
        hidden=2048, ffn=5632, layers=22, heads=16, vocabulary=32000, batch=2, tokens=2048, dtype=torch.bfloat16
    ),
    "llama_7b": Case(
        hidden=4096, ffn=11008, layers=32, heads=32, vocabulary=32000, batch=1, tokens=2048, dtype=torch.bfloat16
    ),
}


def build(
    case: Case, device: str, attn_implementation: str = "sdpa"
) -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    """Build the model on the device, and a batch [B, S] that is its own label."""
    config = LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=case.ffn,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        vocab_size=case.vocabulary,
        max_position_embeddings=case.tokens,
        use_cache=False,
        attn_implementation=attn_implementation,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(case.dtype).train()
        ids = torch.randint(case.vocabulary, (case.batch, case.tokens))
    return model, {"input_ids": ids, "labels": ids}


def step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Run forward and backward; return the loss."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach())
