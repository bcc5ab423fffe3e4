"""Claims about what recomputation costs, counted: one extra forward, backward over forward, every N layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.checkpoint import set_checkpoint_early_stop

import hf_ckpt
from benchmarks.claims.following import Followed
from benchmarks.claims.small import HIDDEN, SCALE, Change, batch, follow_llama, llama, policy

ROWS, TOKENS = 1, 2048 // SCALE
LAYERS = 8


def extra_forward() -> dict[str, Any]:
    """Claim: checkpointing costs one extra forward, 33 % (20, 25 to 30, 40 to 50 %). Operations of full over none."""
    full_fine_tune = llama(layers=LAYERS)
    subjects = {
        "full_fine_tune": (full_fine_tune, 64),
        "lora": (llama(layers=LAYERS, is_lora=True), 64),
        "large_vocabulary": (llama(layers=4, vocabulary=8192), 8192),
    }
    return {
        "case": f"Llama of width {HIDDEN}, {ROWS} x {TOKENS} tokens (stands for 2,048 in the 7B model), float32, sdpa: "
        f"{LAYERS} layers with a vocabulary of 64, fully trained and with LoRA of rank 2 on all linear layers; 4 "
        "layers with a vocabulary of 8,192",
        **{name: _full_over_none(model, size) for name, (model, size) in subjects.items()},
    }


def _full_over_none(model: Any, vocabulary: int) -> dict[str, Any]:
    inputs = batch(ROWS, TOKENS, vocabulary)
    none = follow_llama(model, inputs)
    full, whole = (follow_llama(model, inputs, change) for change in (policy("full"), without_early_stop))
    return {
        "none": none.as_json(),
        "full": full.as_json(),
        "full_without_early_stop": whole.as_json(),
        "flops_ratio": full.total_flops / none.total_flops,
        "flops_ratio_without_early_stop": whole.total_flops / none.total_flops,
        "backward_over_forward": {
            name: followed.backward_flops / followed.num_flops["forward"]
            for name, followed in (("none", none), ("full", full), ("full_without_early_stop", whole))
        },
    }


@contextmanager
def without_early_stop(model: Any) -> Iterator[Any]:
    """Put policy `full` on a model, and let each region run again to its end."""
    with hf_ckpt.apply(model, "full", prove="off"), set_checkpoint_early_stop(False):
        yield model


def backward_over_forward() -> dict[str, Any]:
    """Claim: backward takes 2.0 times as long as forward without checkpointing, 2.66 to 3.0 with. Operations."""
    counted = extra_forward()
    ratios = {name: found["backward_over_forward"] for name, found in counted.items() if name != "case"}
    return {"case": counted["case"], **ratios}


def every_n() -> dict[str, Any]:
    """Claim: every 4 layers cost 10 to 15 %, 2 layers 25 to 35 %, 1 layer 40 to 50 %. Each meaning of "every N"."""
    model, inputs = llama(layers=LAYERS), batch(ROWS, TOKENS)
    none = follow_llama(model, inputs)
    return {
        "case": f"Llama of width {HIDDEN}, {LAYERS} layers, fully trained, {ROWS} x {TOKENS} tokens, float32, sdpa; N "
        "of 1, 2 and 4. checkpoint_every_nth: layers 0, N, 2N, ... are recomputed (every_n_layers). segments_of_n: N "
        "layers share one saved input (segment_size). keep_every_nth: all are recomputed but layers 0, N, 2N, ...",
        "none": none.as_json(),
        **{
            meaning: {str(n): against(follow_llama(model, inputs, change), none) for n, change in changes.items()}
            for meaning, changes in every_n_changes(LAYERS).items()
        },
    }


def every_n_changes(layers: int) -> dict[str, dict[int, Change]]:
    """Return what to do to a model for each meaning of "every N"."""
    return {
        meaning: {n: policy(mode, **options) for n, (mode, options) in policies.items()}
        for meaning, policies in every_n_policies(layers).items()
    }


def every_n_policies(layers: int) -> dict[str, dict[int, tuple[Any, dict[str, Any]]]]:
    """Return the policy and its options for each meaning of "every N" and each N."""
    return {
        "checkpoint_every_nth": {n: ("full", {"every_n_layers": n}) for n in (1, 2, 4)},
        "segments_of_n": {n: ("full", {"segment_size": n}) for n in (1, 2, 4)},
        "keep_every_nth": {n: ([{"layers": _others(layers, n), "mode": "full"}], {}) for n in (2, 4)},
    }


def _others(layers: int, n: int) -> list[int]:
    return [layer_idx for layer_idx in range(layers) if layer_idx % n]


def against(followed: Followed, none: Followed) -> dict[str, Any]:
    """Return the figures of a step, and each as a share of those without checkpointing."""
    ratios = {
        "flops_ratio": followed.total_flops / none.total_flops,
        "held_ratio": followed.held_bytes / none.held_bytes,
        "peak_ratio": followed.peak_bytes / none.peak_bytes,
    }
    return {
        **followed.as_json(),
        **ratios,
        "flops_added": ratios["flops_ratio"] - 1,
        "held_saved": 1 - ratios["held_ratio"],
        "peak_saved": 1 - ratios["peak_ratio"],
    }
