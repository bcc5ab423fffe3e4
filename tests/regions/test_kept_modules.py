"""Layers that are recomputed around their attention: what that returns, and who looks at what autograd saves in it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import hf_ckpt
from hf_ckpt.errors import ChangedSinceForwardError
from tests.attack.models import VOCAB, WIDTH, Attention, Decoder

IDS = torch.arange(12).view(2, 6) % VOCAB


@dataclass
class Returned:
    """What an attention may return in the place of a tensor."""

    hidden: Tensor


class Wrapped(Attention):
    """An attention that returns a container."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, hidden: Tensor) -> Any:
        return self.form(super().forward(hidden))


def in_dict(hidden: Tensor) -> Any:
    return {"hidden": hidden}


class Layer(nn.Module):
    """A layer that strings its ffn together itself.

    Args:
        form: what its attention returns: `Returned`, or `in_dict`.
        does: what it does with that: "exchanges" what is in it, "writes" into it; "saves" has hooks around attention.
    """

    def __init__(self, form: Any, does: str) -> None:
        super().__init__()
        self.self_attn_layer_norm, self.self_attn = nn.LayerNorm(WIDTH), Wrapped(form)
        self.final_layer_norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.does = does

    def forward(self, hidden: Tensor, context: Any) -> Tensor:
        given = self.self_attn_layer_norm(hidden)
        if self.does == "saves":
            with save_on_cpu():
                out = self.self_attn(given)
        else:
            out = self.self_attn(given)
        held = out if isinstance(out, dict) else vars(out)
        if self.does == "exchanges":
            held["hidden"] = torch.tanh(held["hidden"])
        if self.does == "writes":
            held["hidden"].add_(1)
        hidden = hidden + held["hidden"]
        return hidden + self.fc2(torch.relu(self.fc1(self.final_layer_norm(hidden))))


def trained(form: Any, does: str, policy: str, prove: Any = "off") -> list[Tensor | None]:
    torch.manual_seed(0)
    model = Decoder("tensor").train()
    model.layers = nn.ModuleList(Layer(form, does) for _ in range(2))
    with hf_ckpt.apply(model, policy, prove=prove):
        loss = model(IDS, IDS)["loss"]
        # Each backward recomputes.
        loss.backward(retain_graph=True)
        loss.backward()
    return [each.grad for each in model.parameters()]


@pytest.mark.parametrize("form", [Returned, in_dict])
@pytest.mark.parametrize("does", ["exchanges", "saves"])
@pytest.mark.parametrize("prove", ["off", 1])
def test_what_attention_returns_is_that_of_the_forward(form: Any, does: str, prove: Any) -> None:
    found, expected = trained(form, does, "ffn", prove), trained(form, does, "none")
    assert all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("form", [Returned, in_dict])
def test_a_write_into_it_is_refused(form: Any) -> None:
    with pytest.raises(ChangedSinceForwardError, match="attention's output in place"):
        trained(form, "writes", "ffn")


def test_a_graph_that_is_dropped_leaves_nothing() -> None:
    """What attention returned is held without its graph, which would hold it for ever."""
    model = Decoder("tensor").train()
    model.layers = nn.ModuleList(Layer(Returned, "nothing") for _ in range(2))
    held: list[weakref.ref[Tensor]] = []
    model.layers[0].self_attn.register_forward_hook(lambda module, args, out: held.append(weakref.ref(out.hidden)))
    with hf_ckpt.apply(model, "ffn", prove="off"):
        model(IDS, IDS)
        gc.collect()
        assert [each() for each in held] == [None]
