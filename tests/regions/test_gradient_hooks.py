"""Hooks on gradients that a forward places: they run as often as without a plan, on the same gradients."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from hf_ckpt.regions.tiling import Tiling, run_tiled
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


@pytest.mark.sweep(keep=6)
# Hooks on several gradients together hold what they are placed on, which tiles refuse.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "several"])
@pytest.mark.parametrize("policy", ["none", "full", "ffn"])
def test_hooks_run_as_often_in_tiles(policy: str, kind: str) -> None:
    expected, num_calls = run(kind, None)
    got, num = run(kind, (policy, {"tiles": 3}))
    assert num == num_calls
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def on_tensor(linear: nn.Module, hook: Note) -> None:
    linear.register_forward_hook(lambda module, args, output: output.register_hook(hook) and None)


def on_node(linear: nn.Module, hook: Note) -> None:
    def place(module: nn.Module, args: Any, output: Tensor) -> None:
        output.grad_fn.register_prehook(lambda gradients: (hook(gradients[0]), *gradients[1:]))

    linear.register_forward_hook(place)


INSIDE: dict[str, Place] = {
    "tensor": on_tensor,
    "node": on_node,
    "full backward": lambda linear, hook: linear.register_full_backward_hook(
        lambda module, given, _: (hook(given[0]),)
    ),
    "full backward pre": lambda linear, hook: linear.register_full_backward_pre_hook(
        lambda module, given: (hook(given[0]),)
    ),
}


@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize("place", INSIDE)
@pytest.mark.sweep(keep=4)
def test_hooks_inside_tiles_see_the_gradient_of_the_whole_once(place: str, first_step: int) -> None:
    def train(*, tiles: bool) -> tuple[list[Any], list[torch.Size]]:
        seen: list[torch.Size] = []

        def shrink(gradient: Tensor) -> Tensor:
            """Next to nothing changes, as the norm is small: a slice's norm is smaller."""
            seen.append(gradient.shape)
            return gradient / (1 + gradient.norm())

        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=24, **sizes)).train()
        with hf_ckpt.apply(model, "full", tiles=3) if tiles else nullcontext():
            for step in range(first_step + 1):
                if step == first_step:
                    INSIDE[place](model.model.layers[0].mlp.up_proj, shrink)
                model.zero_grad()
                model(input_ids=IDS, labels=IDS).loss.backward()
        return [parameter.grad for parameter in model.parameters()], seen

    expected, seen = train(tiles=False)
    got, seen_in_tiles = train(tiles=True)
    assert seen_in_tiles == seen
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


def test_hooks_in_tiles_run_for_each_slice_where_each_draws_a_mask() -> None:
    """The whole would draw another one."""

    def train(*, recomputes: bool) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        module, seen = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 8)), list[Tensor]()
        on_tensor(module[1], seen.append)
        hidden = torch.randn(2, 9, 8, requires_grad=True)
        run_tiled(Tiling(3, recomputes=recomputes), module, None, hidden).square().sum().backward()
        return hidden.grad, seen

    gradient, seen = train(recomputes=True)
    expected, _ = train(recomputes=False)
    assert [each.shape[1] for each in seen] == [3, 3, 3]
    assert torch.equal(gradient, expected)
