"""Hooks on gradients that a forward places: they run as often as without a plan, on the same gradients."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from hf_ckpt.errors import HFCkptError
from tests.attack.models import WIDTH, Attention, Mlp
from tests.modes import REGIONS

IDS = torch.arange(16).view(2, 8) + 3
STEPS = 2
Note = Callable[[Any], Any]
"""A hook that changes a gradient, and counts."""
Place = Callable[[Any, Note], None]
"""Places hooks on the modules of a model that place hooks on gradients."""


def on_forward(name: str, place: Callable[[Any, tuple[Any, ...], Note], object]) -> Place:
    """Return what has `place` called before each forward of a module, with its arguments."""

    def place_all(model: Any, note: Note) -> None:
        for layer in model.model.layers:
            layer.get_submodule(name).register_forward_pre_hook(lambda module, args: place(module, args, note) and None)

    return place_all


def all_of(hook: Note, tensors: tuple[Tensor, ...]) -> None:
    def count(gradients: Any) -> None:
        hook(gradients[1])

    register_multi_grad_hook(tensors, count)


def after_accumulation(module: Any, args: Any, note: Note) -> None:
    def halve(weight: Tensor) -> None:
        weight.grad = note(weight.grad)

    module.weight.register_post_accumulate_grad_hook(halve)


def in_place_of_the_last(module: Any, args: Any, note: Note) -> None:
    if hasattr(module, "handle"):
        module.handle.remove()
    module.handle = module.weight.register_hook(note)


def in_place_of_the_last_in_a_closure() -> Callable[[Any, Any, Note], None]:
    handles: dict[Any, Any] = {}

    def place(module: Any, args: Any, note: Note) -> None:
        if module in handles:
            handles.pop(module).remove()
        handles[module] = module.weight.register_hook(note)

    return place


def for_one_step(module: Any, args: Any, note: Note) -> None:
    """Takes itself off."""

    def once(gradient: Tensor) -> Tensor:
        handle.remove()
        return note(gradient)

    handle = module.weight.register_hook(once)


def on_output(model: Any, note: Note) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, args, output: output.register_hook(note) and None)


KINDS: dict[str, Place] = {
    "input": on_forward("input_layernorm", lambda module, args, note: args[0].register_hook(note)),
    "input of a part": on_forward("self_attn.q_proj", lambda module, args, note: args[0].register_hook(note)),
    "node": on_forward(
        "input_layernorm",
        lambda module, args, note: args[0].grad_fn and args[0].grad_fn.register_prehook(lambda g: (note(g[0]), *g[1:])),
    ),
    "weight": on_forward("mlp.down_proj", lambda module, args, note: module.weight.register_hook(note)),
    "accumulated": on_forward("mlp.down_proj", after_accumulation),
    "several": on_forward("mlp.down_proj", lambda module, args, note: all_of(note, (args[0], module.weight))),
    "exchanged": on_forward("mlp.down_proj", in_place_of_the_last),
    "exchanged in a closure": on_forward("self_attn.v_proj", in_place_of_the_last_in_a_closure()),
    "once": on_forward("mlp.down_proj", for_one_step),
    "output": on_output,
}


def run(kind: str, policy: tuple[Any, dict[str, Any]] | None, *, factor: float = 0.5) -> tuple[list[Any], int]:
    """Return the gradients of two steps, and how often a hook ran."""
    calls: list[int] = []

    def note(gradient: Tensor) -> Tensor:
        calls.append(1)
        # Another number each time: hooks that run too often, or in another order, are seen.
        return gradient * factor

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=24, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2)
    model = LlamaForCausalLM(config).train()
    KINDS[kind](model, note)
    if policy is not None:
        hf_ckpt.apply(model, policy[0], **policy[1])
    found = []
    for _ in range(STEPS):
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        found += [parameter.grad for parameter in model.parameters()]
    return found, len(calls)


@pytest.mark.sweep(keep=12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", REGIONS)
def test_hooks_run_as_often_as_without_a_plan(policy: str, kind: str) -> None:
    expected, num_calls = run(kind, None)
    got, num = run(kind, REGIONS[policy])
    assert num == num_calls
    assert all(map(torch.equal, expected, got))


@dataclass
class Held:
    """Holds a tensor, as a context of a model's own does."""

    shift: Tensor


SHARED: list[Tensor] = []
WAYS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Held, lambda given: given.shift),
    "namespace": (lambda shift: SimpleNamespace(shift=shift), lambda given: given.shift),
    "user dict": (lambda shift: UserDict(shift=shift), lambda given: given["shift"]),
    "dict in a list": (lambda shift: [{"shift": shift}], lambda given: given[0]["shift"]),
    "input": (lambda shift: None, lambda given: given),
    "global": (lambda shift: SHARED.append(shift), lambda given: SHARED[-1]),
}
"""How a tensor reaches all layers, and how they take it out."""


class Hooked(nn.Module):
    """A layer that places a hook on what it is given besides its input."""

    def __init__(self, way: str, is_exchanged: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.way, self.is_exchanged = way, is_exchanged

    def forward(self, hidden: Tensor, context: Any) -> Tensor:
        shift = hidden if self.way == "input" else WAYS[self.way][1](context)
        if self.is_exchanged and hasattr(self, "handle"):
            self.handle.remove()
        self.handle = shift.register_hook(lambda gradient: 1.5 * gradient)
        hidden = hidden + self.self_attn(hidden + shift)
        return hidden + self.mlp(hidden)


class Stack(nn.Module):
    def __init__(self, way: str, is_exchanged: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hooked(way, is_exchanged) for _ in range(3))
        self.shift, self.way = nn.Parameter(torch.randn(WIDTH)), way

    def forward(self, hidden: Tensor) -> Tensor:
        shift = torch.tanh(self.shift)
        context, hidden = WAYS[self.way][0](shift), hidden + shift
        for layer in self.layers:
            hidden = layer(hidden, context)
        return hidden


@pytest.mark.parametrize("prove", ["off", "first_step"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", REGIONS)
@pytest.mark.parametrize("is_exchanged", [False, True])
@pytest.mark.sweep(keep=20)
def test_hooks_on_what_a_layer_reaches_run_once(is_exchanged: bool, policy: str, way: str, prove: Any) -> None:
    found = []
    for plan, options in (("none", {}), REGIONS[policy]):
        torch.manual_seed(0)
        stack = Stack(way, is_exchanged).train()
        with hf_ckpt.apply(stack, plan, **options, prove=prove, layers=["layers"], attention="self_attn", ffn="mlp"):
            for _ in range(STEPS):
                stack(torch.randn(2, 4, WIDTH)).square().sum().backward()
        found.append([each.grad for each in stack.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.sweep(keep=4)
@pytest.mark.parametrize("kind", ["weight", "accumulated", "exchanged", "exchanged in a closure", "once"])
@pytest.mark.parametrize("policy", ["none", "full", "ffn"])
def test_tiles_hand_a_weights_gradient_to_its_hooks_once(policy: str, kind: str) -> None:
    expected, num_calls = run(kind, None)
    got, num = run(kind, (policy, {"tiles": 3}))
    assert num == num_calls
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("first_step", [0, 1])
@pytest.mark.parametrize("place", ["tensor", "full backward", "full backward pre"])
def test_tiles_refuse_hooks_that_make_a_position_depend_on_others(place: str, first_step: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=24, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(config).train()

    def place_hook(linear: nn.Module, factor: Callable[[Tensor], Tensor]) -> Any:
        if place == "tensor":
            return linear.register_forward_hook(
                lambda module, args, output: output.register_hook(lambda gradient: gradient * factor(gradient)) and None
            )
        if place == "full backward":
            return linear.register_full_backward_hook(lambda module, given, _: (given[0] * factor(given[0]),))
        return linear.register_full_backward_pre_hook(lambda module, given: (given[0] * factor(given[0]),))

    with hf_ckpt.apply(model, "full", tiles=3):
        linear = model.model.layers[0].mlp.up_proj
        place_hook(linear, lambda gradient: torch.tensor(0.5))
        for _ in range(first_step + 1):
            model(input_ids=IDS, labels=IDS).loss.backward()
        place_hook(linear, lambda gradient: 1 / gradient.norm())
        with pytest.raises(HFCkptError, match="other gradients alone"):
            model(input_ids=IDS, labels=IDS).loss.backward()
