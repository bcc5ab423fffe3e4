"""Claims about the square root of the number of layers, measured: on chains of equal layers, and on a decoder."""

from __future__ import annotations

from typing import Any

from benchmarks.claims.small import HIDDEN, SCALE, Chain, batch, follow_chain, follow_llama, llama, policy

CHAIN_LAYERS = 64
DECODER_LAYERS = 16
ROWS, TOKENS = 1, 2048 // SCALE
INPUT_BYTES = 4 * ROWS * TOKENS * HIDDEN
"""One layer's input, in float32."""
INTERNALS = 24
"""Of a layer, in units of its input: about as many as a decoder layer holds."""


def sqrt_is_optimal() -> dict[str, Any]:
    """Claim: segments of sqrt(L) layers need the least memory."""
    chain = {str(k): follow_chain(Chain(CHAIN_LAYERS, segment=k)) for k in _divisors(CHAIN_LAYERS)}
    return {
        "case": f"chain: {CHAIN_LAYERS} layers that hold one tensor each, peak in units of that tensor. decoder: Llama "
        f"of width {HIDDEN}, {DECODER_LAYERS} layers, {ROWS} x {TOKENS} tokens (stands for 2,048 in the 7B model), "
        "float32; peak beyond weights and their gradients, in units of a layer's input. k: layers of a segment",
        "chain": {
            "num_layers": CHAIN_LAYERS,
            "none": follow_chain(Chain(CHAIN_LAYERS)),
            "by_k": chain,
            "best_k": _best(chain),
        },
        **{f"decoder_{attention}": _decoder(attention) for attention in ("eager", "sdpa")},
    }


def _divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


def _best(by_k: dict[str, dict[str, Any]]) -> int:
    return int(min(by_k, key=lambda k: by_k[k]["peak_units"]))


def _decoder(attention: str) -> dict[str, Any]:
    model, inputs = llama(layers=DECODER_LAYERS, attention=attention), batch(ROWS, TOKENS)
    none = follow_llama(model, inputs)
    plain, nested = (
        {
            str(k): _in_units(follow_llama(model, inputs, policy("full", segment_size=k, **options)))
            for k in _divisors(DECODER_LAYERS)
            if k > 1 or not options
        }
        for options in ({}, {"nested": True})
    )
    return {
        "num_layers": DECODER_LAYERS,
        # Of a layer in the middle: neither the first nor the last one.
        "internals_over_input": none.held_by_layer[1] / INPUT_BYTES,
        "none": _in_units(none),
        "by_k": plain,
        "by_k_nested": nested,
        "best_k": _best(plain),
        "best_k_nested": _best(nested),
    }


def _in_units(followed: Any) -> dict[str, Any]:
    return {
        "held_units": followed.held_bytes / INPUT_BYTES,
        "peak_units": followed.peak_bytes / INPUT_BYTES,
        "peak_bytes": followed.peak_bytes,
    }


def sqrt_table() -> dict[str, Any]:
    """Claim: a table of sqrt(L) memory for one more forward, up to 1,024 layers."""
    return {
        "case": "chains of L layers that hold one tensor each (internals_1), or as many as a decoder layer does "
        f"(internals_{INTERNALS}); peak in units of a layer's input, and how often a layer runs forward. sqrt: "
        "segments of sqrt(L) layers; nested: their layers are checkpointed again while a segment is recomputed",
        "internals_1": {str(layers): _row(layers, 1) for layers in (16, 64, 256, 1024)},
        f"internals_{INTERNALS}": {str(layers): _row(layers, INTERNALS) for layers in (16, 64, 256)},
    }


def _row(layers: int, internals: int) -> dict[str, Any]:
    root = round(layers**0.5)
    return {
        "none": follow_chain(Chain(layers, internals)),
        "full": follow_chain(Chain(layers, internals, segment=1)),
        "sqrt": follow_chain(Chain(layers, internals, segment=root)),
        "sqrt_nested": follow_chain(Chain(layers, internals, segment=root, nested=True)),
    }
