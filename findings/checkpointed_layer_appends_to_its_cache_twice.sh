#!/usr/bin/env bash
# Under transformers' own checkpointing a layer that calls its cache `past_key_values` appends to it twice.
#
# Good guess: `GradientCheckpointingLayer` takes a key/value cache out of a layer that it checkpoints, whichever of the two
# names it has, since the old one goes on working everywhere in 5.24.0 (with a warning). So it was in 5.23.0, by the old
# name, and code for it, such as models of remote code, trains exactly there with the cache left on.
# Behaviour: 5.24.0 takes out `cache` and `layer_past` only. A layer that is handed `past_key_values` appends in the
# forward and again when it is recomputed, where it attends to everything twice. Reentrant: the loss is that without
# checkpointing, and the gradients are off by half of their norm, without a word. Non-reentrant raises CheckpointError.
# Versions: torch 2.13.0, transformers 5.24.0.
# Seen: "cache: reentrant exact, non-reentrant exact", "past_key_values: reentrant 0.469 off at an equal loss,
# non-reentrant CheckpointError".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - <<'PYTHON'
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer


class Layer(GradientCheckpointingLayer):
    def __init__(self, name: str, index: int) -> None:
        super().__init__()
        self.qkv, self.name, self.index = nn.Linear(16, 48), name, index

    def forward(self, hidden: torch.Tensor, **kwargs: object) -> torch.Tensor:
        query, key, value = self.qkv(hidden)[:, None].chunk(3, -1)
        if (cache := kwargs.get(self.name)) is not None:
            key, value = cache.update(key, value, self.index)
        return hidden + nn.functional.scaled_dot_product_attention(query, key, value)[:, 0]


def step(name: str, is_on: bool, use_reentrant: bool) -> tuple[float, torch.Tensor]:
    torch.manual_seed(0)
    layers = [Layer(name, index).train() for index in range(2)]
    hidden = torch.randn(2, 8, 16, requires_grad=True)
    cache = DynamicCache()
    for layer in layers:
        layer.gradient_checkpointing = is_on
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=use_reentrant)
        hidden = layer(hidden, **{name: cache})
    loss = hidden.square().sum()
    loss.backward()
    return float(loss.detach()), layers[0].qkv.weight.grad


def verdict(name: str, use_reentrant: bool) -> str:
    loss, gradient = step(name, False, use_reentrant)
    try:
        checkpointed_loss, checkpointed = step(name, True, use_reentrant)
    except CheckpointError:
        return "CheckpointError"
    if torch.equal(gradient, checkpointed):
        return "exact"
    error = float((gradient - checkpointed).norm() / gradient.norm())
    return f"{error:.3f} off at {'an equal' if loss == checkpointed_loss else 'another'} loss"


found = {name: (verdict(name, True), verdict(name, False)) for name in ("cache", "past_key_values")}
for name, (reentrant, non_reentrant) in found.items():
    print(f"{name}: reentrant {reentrant}, non-reentrant {non_reentrant}")
assert found["cache"] == ("exact", "exact"), "this has changed"
assert found["past_key_values"] == ("0.469 off at an equal loss", "CheckpointError"), "this has changed"
PYTHON
