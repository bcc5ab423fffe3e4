"""Models that a CPU steps through in a moment: decoders with the proportions of Llama 2 7B, and chains of plain layers.

A decoder is a layer of the 7B model with width and row divided by one number and as many heads. So the bytes of a
layer stand to each other as they do there, attention scores among them, and so do its operations. The vocabulary is
small: what is counted is of layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from benchmarks.claims.following import Followed, follow

SCALE = 16
"""Widths and rows are smaller by it than those of Llama 2 7B."""
HIDDEN = 4096 // SCALE
HEADS = 32

Change = Callable[[Any], AbstractContextManager[object]]
"""Takes a model and changes how it runs until it is left."""


def llama(
    *, layers: int = 4, hidden: int = HIDDEN, vocabulary: int = 64, attention: str = "sdpa", is_lora: bool = False
) -> Any:
    """Build a Llama in float32 on the CPU, or one whose adapters alone are trained."""
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 11008 // 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "vocab_size": vocabulary,
        "attn_implementation": attention,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).train()
    if not is_lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2))


def batch(rows: int, tokens: int, vocabulary: int = 64) -> dict[str, Tensor]:
    """Return token ids [B, S], which are their own labels."""
    ids = torch.arange(rows * tokens).reshape(rows, tokens) % vocabulary
    return {"input_ids": ids, "labels": ids}


def policy(mode: object, **options: Any) -> Change:
    """Return what puts one of our policies on a model."""
    return partial(hf_ckpt.apply, policy=mode, prove="off", **options)


def follow_llama(model: Any, inputs: dict[str, Tensor], change: Change | None = None) -> Followed:
    """Follow one step of a model, with a change to how it runs."""
    with nullcontext() if change is None else change(model):
        return follow(model, lambda: model(**inputs)["loss"], tuple(inputs.values()))


# --- Chains. ---


class Plain(nn.Module):
    """A layer that holds so many tensors of its input's size for backward; the last one is its output.

    Args:
        internals: how many.
    """

    def __init__(self, internals: int = 1) -> None:
        super().__init__()
        self.internals = internals
        self.num_forwards = 0

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply a function whose backward needs what it returned, several times."""
        self.num_forwards += 1
        for _ in range(self.internals):
            hidden = torch.relu(hidden)
        return hidden


class Chain(nn.Module):
    """Equal layers one after another, in segments of which only the input is held.

    Args:
        layers: how many.
        internals: of each.
        segment: layers of a segment; 0 for no checkpointing.
        nested: whether the layers of a segment are checkpointed again while it is recomputed.
    """

    def __init__(self, layers: int, internals: int = 1, *, segment: int = 0, nested: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Plain(internals) for _ in range(layers))
        self.segment = segment
        self.nested = nested

    def forward(self, hidden: Tensor) -> Tensor:
        """Run all layers."""
        if not self.segment:
            return self._run(0, len(self.layers), hidden)
        for first in range(0, len(self.layers), self.segment):
            end = min(first + self.segment, len(self.layers))
            hidden = _checkpointed(partial(self._run, first, end, nested=self.nested), hidden)
        return hidden

    def _run(self, first: int, end: int, hidden: Tensor, *, nested: bool = False) -> Tensor:
        for layer in self.layers[first:end]:
            hidden = _checkpointed(layer, hidden) if nested else layer(hidden)
        return hidden

    def num_forwards(self) -> int:
        """Return how often layers ran."""
        return sum(layer.num_forwards for layer in self.layers if isinstance(layer, Plain))


def _checkpointed(function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    out: Tensor = checkpoint(function, hidden, use_reentrant=False)
    return out


UNIT_SHAPE = (64, 64)
UNIT_BYTES = 4 * 64 * 64
"""One tensor of a chain, in float32."""


def follow_chain(chain: Chain) -> dict[str, Any]:
    """Follow one forward and backward of a chain; bytes in units of a layer's input.

    The chain's own input is there before, and the gradients that pass back are among the peak: two of them at a time.
    """
    hidden = torch.ones(UNIT_SHAPE, requires_grad=True)
    followed = follow(chain, lambda: chain(hidden).sum(), [hidden])
    layers = len(chain.layers)
    return {
        "held_units": followed.held_bytes / UNIT_BYTES,
        "peak_units": followed.peak_bytes / UNIT_BYTES,
        "forwards_per_layer": chain.num_forwards() / layers,
    }
