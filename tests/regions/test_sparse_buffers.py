"""Layers with a sparse buffer: trained as without a plan, and refused where it has changed since the forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hf_ckpt
from hf_ckpt.errors import ChangedSinceForwardError
from tests.attack.models import VOCAB, WIDTH, Decoder, layers_of
from tests.modes import REGIONS

IDS = torch.arange(12).view(2, 6) % VOCAB
NAMES = {"layers": ["layers"], "attention": "self_attn", "ffn": "mlp"}


class Mixes(nn.Module):
    """Runs a module, and mixes channels by a sparse matrix."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("mix", (torch.eye(WIDTH) + torch.eye(WIDTH).roll(1, 0)).to_sparse())

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inner(hidden)
        return torch.sparse.mm(self.mix, hidden.flatten(0, 1).T).T.reshape(hidden.shape)


def decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder("tensor").train()
    for layer in layers_of(model):
        layer.self_attn, layer.mlp = Mixes(layer.self_attn), Mixes(layer.mlp)
    return model


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.sweep(keep=4)
def test_gradients_are_those_without_a_plan(region: str) -> None:
    found = []
    for policy, options in (("none", {}), REGIONS[region]):
        model = decoder()
        with hf_ckpt.apply(model, policy, **options, **NAMES):
            model(IDS, IDS)["loss"].backward()
        found.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(map(torch.equal, *found))


def test_one_that_is_exchanged_before_backward_is_refused() -> None:
    model = decoder()
    with hf_ckpt.apply(model, "full", **NAMES):
        loss = model(IDS, IDS)["loss"]
        for layer in layers_of(model):
            layer.mlp.mix = 2 * layer.mlp.mix
        with pytest.raises(ChangedSinceForwardError, match="buffers have got other values"):
            loss.backward()
