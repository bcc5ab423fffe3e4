"""Claims that are arithmetic: common formulas for activations, attention scores and caches, worked out."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig

from benchmarks.claims.overhead import against
from benchmarks.claims.parts import followed
from benchmarks.claims.small import HEADS as SMALL_HEADS
from benchmarks.claims.small import HIDDEN as SMALL_HIDDEN
from benchmarks.claims.small import SCALE

GB = 10**9
GIB = 2**30
LAYERS, HIDDEN, HEADS = 32, 4096, 32
"""Of LLaMA 7B."""
BATCH, TOKENS = 8, 2048
_SBHL = TOKENS * BATCH * HIDDEN * LAYERS


def activations_by_formula(batch: int, tokens: int, *, is_fused: bool) -> int:
    """Return the bytes of activations of LLaMA 7B by Korthikanti's formula for 16 bits: s b h (34 + 5 a s / h) L.

    Args:
        batch: rows.
        tokens: of a row.
        is_fused: leave out the second term, for attention that does not hold its scores.
    """
    per_value = 34 + (0 if is_fused else 5 * HEADS * tokens / HIDDEN)
    return int(tokens * batch * HIDDEN * per_value * LAYERS)


def llama_7b_activations() -> dict[str, Any]:
    """Claim: the activations of LLaMA 7B at batch 8 x 2,048 are 51 GB by the common formula."""
    eager, fused = (activations_by_formula(BATCH, TOKENS, is_fused=is_fused) for is_fused in (False, True))
    return {
        "case": "LLaMA 7B (32 layers, width 4,096, 32 heads), 8 x 2,048 tokens, 16 bits: s b h (34 + 5 a s / h) L, and "
        "without its second term for attention that holds no scores. bytes_per_value_for_51_gb: the factor of s b h L "
        "that the claim comes to",
        "formula_eager_bytes": eager,
        "formula_fused_bytes": fused,
        "formula_eager_gb": eager / GB,
        "formula_fused_gb": fused / GB,
        "bytes_per_value_for_51_gb": 51 * GB / _SBHL,
        "layer_inputs_bytes": 2 * _SBHL,
        "layer_inputs_gb": 2 * _SBHL / GB,
    }


def attention_scores() -> dict[str, Any]:
    """Claim: attention scores take 8 GB at 4,096 tokens x 8. One tensor [B, H, S, S]; and how many eager holds."""
    one = 2 * BATCH * HEADS * 4096 * 4096
    none, fused = followed("eager", 2048, "none"), followed("sdpa", 2048, "none")
    tokens = 2048 // SCALE
    small = 4 * SMALL_HEADS * tokens * tokens
    layers = len(none.held_by_layer)
    return {
        "case": "one tensor of scores [8, 32, 4096, 4096] in 16 bits, of one layer of LLaMA 7B; and, measured on a "
        f"Llama of width {SMALL_HIDDEN} at 1 x {tokens} tokens in float32, how many tensors of that shape each layer "
        "holds with eager attention more than with sdpa",
        "one_tensor_bytes": one,
        "one_tensor_gb": one / GB,
        "one_tensor_gib": one / GIB,
        "all_layers_gb": one * LAYERS / GB,
        "tensors_held_by_eager": (none.held_bytes - fused.held_bytes) / small / layers,
        "small": against(fused, none),
    }


def eager_attention_100_gb() -> dict[str, Any]:
    """Claim: 32 layers at 2,048 x 8 with eager attention take 100 GB of activations. By the formula."""
    scores = 5 * HEADS * TOKENS * TOKENS * BATCH * LAYERS
    return {
        "case": "LLaMA 7B, 8 x 2,048 tokens, 16 bits: s b h (34 + 5 a s / h) L; the second term alone; and one tensor "
        "of scores in 16 bits in each layer",
        "formula_gb": activations_by_formula(BATCH, TOKENS, is_fused=False) / GB,
        "formula_scores_gb": scores / GB,
        "one_tensor_a_layer_gb": 2 * BATCH * HEADS * TOKENS * TOKENS * LAYERS / GB,
    }


def kv_cache_70b() -> dict[str, Any]:
    """Claim: the KV cache of a 70B model at batch 32 x 2k takes 40 GB. From the config, and grouped or not."""
    sizes: dict[str, Any] = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    grouped, whole = (LlamaConfig(**sizes, num_key_value_heads=heads) for heads in (8, 64))
    return {
        "case": "Llama 2 70B and Llama 3 70B (80 layers, 64 heads of 128 numbers, 8 of them for keys and values), 32 x "
        "2,048 tokens, 16 bits; the same at 4,096 tokens; and with keys and values in all 64 heads. "
        "cache_over_formula: a cache of transformers of one layer, filled, over the same formula",
        "grouped_bytes": kv_bytes(grouped, 32, 2048),
        "grouped_gb": kv_bytes(grouped, 32, 2048) / GB,
        "grouped_gib": kv_bytes(grouped, 32, 2048) / GIB,
        "whole_gb": kv_bytes(whole, 32, 2048) / GB,
        "grouped_4096_gb": kv_bytes(grouped, 32, 4096) / GB,
        "cache_over_formula": _cache_over_formula(),
    }


def kv_bytes(config: LlamaConfig, batch: int, tokens: int) -> int:
    """Return the bytes of a cache in 16 bits."""
    head_dim = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * batch * tokens * int(config.num_key_value_heads or 0) * head_dim * 2


def _cache_over_formula() -> float:
    config = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    cache = DynamicCache(config=config)
    states = torch.zeros(3, 2, 5, 16, dtype=torch.bfloat16)
    keys, values = cache.update(states, states.clone(), 0)
    return (keys.nbytes + values.nbytes) / kv_bytes(config, 3, 5)
