"""Where a recomputation stops: as soon as it has what backward needs, whatever a layer makes of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rrelu

import hf_ckpt
from tests.attack.models import VOCAB, Decoder, layers_of
from tests.modes import REGIONS

IDS = torch.arange(12).view(2, 6) % VOCAB
NAMES = {"layers": ["layers"], "attention": "self_attn", "ffn": "mlp"}
EACH_REGION = pytest.mark.parametrize("region", REGIONS)

Ending = Callable[[nn.Module, Tensor], Tensor]
"""How a part of a layer ends: with a module, and what that is given."""


class Ends(nn.Module):
    """A part of a layer that ends in a way of its own."""

    def __init__(self, inner: nn.Module, ending: Ending) -> None:
        super().__init__()
        self.inner, self.ending = inner, ending

    def forward(self, hidden: Tensor) -> Tensor:
        return self.ending(self.inner, hidden)


def falls_back(inner: nn.Module, hidden: Tensor) -> Tensor:
    try:
        return torch.tanh(inner(hidden))
    except Exception:  # noqa: BLE001  (as layers do that try a fast kernel)
        return torch.sigmoid(inner(hidden))


def falls_back_from_all(inner: nn.Module, hidden: Tensor) -> Tensor:
    try:
        return torch.tanh(inner(hidden))
    except:  # noqa: E722  (as careless ones do)
        return torch.sigmoid(inner(hidden))


def says_so(inner: nn.Module, hidden: Tensor) -> Tensor:
    try:
        return torch.tanh(inner(hidden))
    except BaseException as error:
        raise ValueError("the layer failed") from error


def draws_last(inner: nn.Module, hidden: Tensor) -> Tensor:
    """Save the memory of noise before that is drawn."""
    return rrelu(inner(hidden), training=True)


def trained(ending: Ending, region: str | None, **more: Any) -> list[Tensor]:
    torch.manual_seed(0)
    model = Decoder("tensor").train()
    for layer in layers_of(model):
        layer.self_attn, layer.mlp = Ends(layer.self_attn, ending), Ends(layer.mlp, ending)
    if region is not None:
        policy, options = REGIONS[region]
        hf_ckpt.apply(model, policy, **options, **more, **NAMES)
    # In its first step a recomputation may run to its end, to be compared.
    for _ in range(3):
        model(IDS, IDS)["loss"].backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@EACH_REGION
@pytest.mark.parametrize("ending", [falls_back, falls_back_from_all, says_so, draws_last])
@pytest.mark.parametrize("prove", ["off", "first_step"])
@pytest.mark.sweep(keep=10)
def test_gradients_are_those_without_a_plan(region: str, ending: Ending, prove: Any) -> None:
    expected, found = trained(ending, None), trained(ending, region, prove=prove)
    assert all(map(torch.equal, expected, found))
    assert len(expected) == len(found)
