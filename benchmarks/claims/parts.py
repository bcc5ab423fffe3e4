"""Claims about attention, ffn and norms, counted by length, with eager and with fused attention."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama

from benchmarks.claims.following import Followed
from benchmarks.claims.overhead import against
from benchmarks.claims.small import HIDDEN, SCALE, batch, follow_llama, llama, policy

LENGTHS = (512, 2048, 8192)
"""That the rows stand for in the 7B model."""
ATTENTIONS = ("eager", "sdpa")
MODES = ("attention", "ffn", "full")
LAYERS = 8
_CASE = (
    f"Llama of width {HIDDEN}, {LAYERS} layers, fully trained, 1 row, float32, by attention and by the length in Llama "
    f"2 7B that the row stands for: width and row are {SCALE} times smaller than there, heads as many. Operations of "
    "attention are counted without leaving out the causal half"
)


@cache
def followed(attention: str, length: int, mode: str) -> Followed:
    """Return a step of the small model under one mode.

    Args:
        attention: `eager` or `sdpa`.
        length: in the 7B model that the row stands for.
        mode: of the policy.
    """
    return follow_llama(_model(attention), batch(1, length // SCALE), policy(mode))


@cache
def _model(attention: str) -> Any:
    return llama(layers=LAYERS, attention=attention)


def _by_length(mode: str) -> dict[str, Any]:
    return {
        attention: {
            str(length): against(followed(attention, length, mode), followed(attention, length, "none"))
            for length in LENGTHS
        }
        for attention in ATTENTIONS
    }


def attention_only() -> dict[str, Any]:
    """Claim: checkpointing attention only saves 40 to 60 % (60 to 80 %) at about 10 %."""
    return {"case": f"{_CASE}; mode attention over none", **_by_length("attention")}


def ffn_only_with_flash() -> dict[str, Any]:
    """Claim: with flash attention checkpoint the ffn only, at 18 to 20 %."""
    return {"case": f"{_CASE}; mode ffn over none", **_by_length("ffn")}


def full_saves() -> dict[str, Any]:
    """Claim: full checkpointing saves 60 to 80 % of memory, 8 to 12 times less activation memory."""
    by_length = _by_length("full")
    for rows in by_length.values():
        for row in rows.values():
            row["times_less_held"] = 1 / row["held_ratio"]
    return {"case": f"{_CASE}; mode full over none", **by_length}


def attention_or_ffn_first() -> dict[str, Any]:
    """Claim: checkpoint attention first; claim: checkpoint the ffn first. Held bytes that each frees per operation."""
    found: dict[str, Any] = {"case": f"{_CASE}; held bytes freed, operations added, and bytes per 1,000 operations"}
    for attention in ATTENTIONS:
        rows: dict[str, Any] = {}
        for length in LENGTHS:
            row: dict[str, Any] = {part: _freed(attention, length, part) for part in ("attention", "ffn")}
            row["first"] = max(row, key=lambda part: row[part]["bytes_per_kiloflop"])
            rows[str(length)] = row
        found[attention] = rows
    return found


def _freed(attention: str, length: int, part: str) -> dict[str, Any]:
    none, some = followed(attention, length, "none"), followed(attention, length, part)
    freed, added = none.held_bytes - some.held_bytes, some.total_flops - none.total_flops
    return {"freed_bytes": freed, "added_flops": added, "bytes_per_kiloflop": 1000 * freed / added}


# --- Attention scores. ---


def attention_logits() -> dict[str, Any]:
    """Claim: do not store the attention logits, recompute them. What that frees and costs with eager attention."""
    rows = {}
    for length in LENGTHS:
        none = followed("eager", length, "none")
        row = against(follow_llama(_model("eager"), batch(1, length // SCALE), scores_recomputed), none)
        row["freed_bytes"] = none.held_bytes - row["held_bytes"]
        row["added_flops"] = row["total_flops"] - none.total_flops
        row["held_by_fused_ratio"] = followed("sdpa", length, "none").held_bytes / none.held_bytes
        rows[str(length)] = row
    return {
        "case": f"{_CASE}; eager attention, of which scores, softmax and their product with the values are "
        "checkpointed, over eager attention; held_by_fused_ratio: sdpa without checkpointing over eager without",
        "eager": rows,
    }


@contextmanager
def scores_recomputed(model: Any) -> Iterator[None]:
    """Checkpoint what eager attention does between its projections, and nothing else."""
    found = modeling_llama.eager_attention_forward
    recomputed = partial(checkpoint, found, use_reentrant=False)
    with mock.patch.object(modeling_llama, "eager_attention_forward", recomputed):
        yield


# --- Norms. ---

_NORMS = ("input_layernorm", "post_attention_layernorm")
_PARTS = ("self_attn", "mlp")


def norms_left_out() -> dict[str, Any]:
    """Claim: leave the norms out of checkpointing. What they hold, and what leaving them out keeps."""
    rows = {}
    for length in LENGTHS:
        none, full = (followed("sdpa", length, mode) for mode in ("none", "full"))
        outside, alone = (
            follow_llama(_model("sdpa"), batch(1, length // SCALE), partial(modules_recomputed, names=names))
            for names in (_PARTS, _NORMS)
        )
        held = sum(none.held_by_module[name] for name in _NORMS)
        rows[str(length)] = {
            "held_by_norms_bytes": held,
            "held_by_norms_share": held / none.held_bytes,
            "full": against(full, none),
            "full_but_norms": against(outside, none),
            "norms_only": against(alone, none),
        }
    return {
        "case": f"{_CASE}; sdpa. held_by_norms: what the two norms of each layer make and hold without checkpointing, "
        "their outputs among it. full_but_norms: attention and ffn of each layer are checkpointed, norms and residuals "
        "are not. norms_only: the norms are, and nothing else",
        "sdpa": rows,
    }


@contextmanager
def modules_recomputed(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Checkpoint each module that has one of these names, and nothing else."""
    found = [module for path, module in model.named_modules() if path.rpartition(".")[2] in names]
    try:
        for module in found:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        yield
    finally:
        for module in found:
            del module.forward
