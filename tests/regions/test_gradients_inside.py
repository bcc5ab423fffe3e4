"""Layers that take gradients inside of their forward: test-time training, energies, an inner step on a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from tests.modes import CPU, REGIONS

IDS = torch.arange(12).view(2, 6) + 3
POLICIES: dict[str, tuple[Any, dict[str, Any]]] = {
    **REGIONS,
    "nested": ("full", {"segment_size": 4, "nested": True}),
    "selective_offload": ("selective", {"offload": CPU}),
}

Inside = Callable[[nn.Module, Tensor], Tensor]


def fast_weight(module: Any, x: Tensor) -> Tensor:
    """One inner step on a weight, through which the outer loss trains."""
    fast = module.up_proj.weight
    (step,) = torch.autograd.grad(((x @ fast.T) ** 2).mean(), fast, create_graph=True)
    return module.down_proj(functional.silu(module.gate_proj(x)) * (x @ (fast - 0.5 * step).T))


def three_steps(module: Any, x: Tensor) -> Tensor:
    """Noise between the steps, and a loss over several operators."""
    fast = module.up_proj.weight
    for _ in range(3):
        noisy = functional.dropout(x, 0.2)
        inner = (functional.silu(noisy @ fast.T) @ module.down_proj.weight.T - x).square().mean()
        (step,) = torch.autograd.grad(inner, fast, create_graph=True)
        fast = fast - 0.5 * step
    return module.down_proj(functional.silu(x @ fast.T))


def energy(module: Any, x: Tensor) -> Tensor:
    """Goes down the gradient of an energy, without a graph behind it."""
    value = functional.softplus(module.gate_proj(x)).logsumexp(-1).sum()
    (force,) = torch.autograd.grad(value, x, retain_graph=True)
    return module.down_proj(module.up_proj(x - 0.1 * force))


def copy_of_input(module: Any, x: Tensor) -> Tensor:
    """`backward` on leaves of its own."""
    state, weight = x.detach().clone().requires_grad_(), module.up_proj.weight.detach().clone().requires_grad_()
    (state @ weight.T).square().mean().backward()
    return module.down_proj(functional.silu(module.gate_proj(x + state.grad)) * (x @ (weight - weight.grad).detach().T))


INSIDE: dict[str, Inside] = {each.__name__: each for each in (fast_weight, three_steps, energy, copy_of_input)}


class Block(nn.Module):
    """An ffn, from its second call on `inside` if it is to begin late."""

    def __init__(self, mlp: Any, inside: Inside, first_call: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.inside, self.step, self.first_step = inside, 0, first_call

    def forward(self, x: Tensor) -> Tensor:
        if self.step < self.first_step:
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.inside(self, x)


def gradients(inside: str, policy: str | None, *, first_step: int = 0) -> list[Tensor | None]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        attention_dropout=0.1,
    )
    model = LlamaForCausalLM(config).train()
    blocks = []
    for layer in model.model.layers:
        layer.mlp = Block(layer.mlp, INSIDE[inside], first_step)
        blocks.append(layer.mlp)
    if policy is not None:
        hf_ckpt.apply(model, POLICIES[policy][0], **POLICIES[policy][1])
    for step in range(first_step + 2):
        for block in blocks:
            block.step = step
        model(input_ids=IDS, labels=IDS).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def check(inside: str, policy: str, **options: Any) -> None:
    expected, got = gradients(inside, None, **options), gradients(inside, policy, **options)
    # A weight that only an inner loss goes through gets no gradient.
    for one, other in zip(expected, got, strict=True):
        assert one is other is None or (one is not None and other is not None and torch.equal(one, other))


@pytest.mark.sweep(keep=8)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_without_a_plan(policy: str, inside: str) -> None:
    check(inside, policy)


@pytest.mark.sweep(keep=3)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_forward_may_begin_to_take_gradients_later(policy: str) -> None:
    check("three_steps", policy, first_step=2)


def test_what_is_saved_is_held_in_the_forward_only() -> None:
    """A region that takes gradients keeps no more for its backward than any other."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=24, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(config).train()
    shapes: list[int] = []

    def step(module: Any, x: Tensor) -> Tensor:
        shapes.append(1)
        return fast_weight(module, x)

    for layer in model.model.layers:
        layer.mlp = Block(layer.mlp, step, 0)
    hf_ckpt.apply(model, "full")
    runs = []
    for _ in range(2):
        shapes.clear()
        loss = model(input_ids=IDS, labels=IDS).loss
        in_forward = len(shapes)
        loss.backward()
        runs.append((in_forward, len(shapes)))
    # The first forward of each layer starts again; a proof runs the original once more.
    assert runs[0][0] == 4
    assert runs[1] == (2, 4)
