"""Layers are taken for alike only where everything that a copy of them can see is."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.layer_likeness import number_kinds
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Step
from hf_ckpt.structure.layers import find_layers

pytestmark = pytest.mark.core

ODD = 4
"""The layer that is another one."""


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up_proj(hidden)


class Block(nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.self_attn = nn.Linear(8, 8)
        self.mlp = Ffn()
        self.mlp.name = f"layers.{layer_idx}.mlp"

    def forward(self, hidden: Tensor, number: int = 0) -> Tensor:
        hidden = hidden + self.mlp(self.self_attn(hidden))
        for _ in range(self.more(number)):
            hidden = hidden.sin()
        return hidden

    def more(self, number: int) -> int:
        return 0


class Model(nn.Module):
    hands_number_on = False

    def __init__(self, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(map(block, range(9)))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embed(input_ids)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, number) if self.hands_number_on else layer(hidden)
        return {"loss": hidden.square().mean()}


def kinds(model: nn.Module) -> list[Any]:
    stack = find_layers(model, attention="self_attn", ffn="mlp")[0]
    numbers = number_kinds([stack], set())
    return [numbers[layer.outer] for layer in stack.layers]


def hook(number: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.sin() if number == ODD else output


def closing_over(number: int) -> Callable[..., Any]:
    return lambda module, args, output: output if number == ODD else None


class Doubled(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = [times]

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def parametrized(ffn: Any, number: int) -> None:
    parametrize.register_parametrization(ffn.up_proj, "weight", Doubled(0))


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "a hook": lambda ffn, number: number == ODD and ffn.register_forward_hook(closing_over(0)),
    "a pre-hook below": lambda ffn, number: number == ODD and ffn.up_proj.register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda ffn, number: number == ODD and ffn.register_full_backward_hook(lambda *_: None),
    "how a hook is called": lambda ffn, number: ffn.register_forward_hook(hook, with_kwargs=number == ODD),
    "what a hook closes over": lambda ffn, number: ffn.register_forward_hook(closing_over(number // ODD)),
    "an argument of a partial": lambda ffn, number: ffn.register_forward_hook(functools.partial(hook, number // ODD)),
    "a forward": lambda ffn, number: setattr(ffn, "forward", types.MethodType(closing_over(number // ODD), ffn)),
    "a private number": lambda ffn, number: setattr(ffn, "_times", number == ODD),
    "a list": lambda ffn, number: setattr(ffn, "times", [0] * (number == ODD)),
    "a nested dict": lambda ffn, number: setattr(ffn, "times", {"a": [{"b": number == ODD}]}),
    "an object": lambda ffn, number: setattr(ffn, "settings", types.SimpleNamespace(times=number == ODD)),
    "a tensor": lambda ffn, number: setattr(ffn, "table", [torch.zeros(1 + (number == ODD))]),
    "a class": lambda ffn, number: number == ODD and setattr(ffn, "__class__", type("Ffn", (Ffn,), {})),
    "a parametrization": lambda ffn, number: number == ODD and parametrized(ffn, number),
    "what is shared": lambda ffn, number: setattr(ffn, "pair", [ffn.up_proj, nn.Linear(8, 8) if number == ODD else 0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_differs_is_like_no_other(change: str) -> None:
    model = Model()
    for number, layer in enumerate(model.layers):
        CHANGES[change](layer.mlp, number)
    found = kinds(model)
    assert found[ODD] not in (*found[:ODD], found[0])
    assert len(set(found[:ODD])) == 1


def adapted() -> nn.Module:
    # It keeps the names of modules.
    return get_peft_model(Model(), LoraConfig(r=2, target_modules=["up_proj"], lora_dropout=0.1))


def with_hooks() -> nn.Module:
    model = Model()
    for number, layer in enumerate(model.layers):
        layer.mlp.register_forward_hook(closing_over(0))
        layer.mlp.settings = types.SimpleNamespace(times=[3], itself=layer)
        layer.mlp.generator = torch.Generator().manual_seed(number)
        layer.mlp.forward = types.MethodType(Ffn.forward, layer.mlp)
        parametrized(layer.mlp, number)
    return model


@pytest.mark.parametrize("made", [Model, adapted, with_hooks])
def test_layers_that_differ_in_nothing_are_alike(made: Callable[[], nn.Module]) -> None:
    assert len(set(kinds(made()))) == 1


class Compares(Block):
    def more(self, number: int) -> int:
        return 9 * (self.layer_idx == ODD)


class Looks(Block):
    def more(self, number: int) -> int:
        return [0, 0, 0, 0, 9, 0, 0, 0, 0][self.layer_idx]


class Counts(Block):
    def more(self, number: int) -> int:
        return len(range(self.layer_idx))


class ReadsItsName(Block):
    def more(self, number: int) -> int:
        return 9 * self.mlp.name.endswith(f"{ODD}.mlp")


class IsTold(Block):
    def more(self, number: int) -> int:
        return 9 * (number == ODD)


class Scales(Block):
    def forward(self, hidden: Tensor, number: int = 0) -> Tensor:
        return super().forward(hidden) / (self.layer_idx + 1.0)


# How often a step is traced, to find what sets its layers apart.
@pytest.mark.parametrize(
    ("block", "traced"),
    [(Compares, 2), (Looks, 2), (Counts, 2), (ReadsItsName, 2), (IsTold, 2), (Scales, 1), (Block, 1)],
)
def test_what_follows_from_an_index_is_traced(
    block: Callable[[int], nn.Module], traced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(block)
    model.hands_number_on = block is IsTold
    step = Step(batch_size=2, seq_length=4, optim="sgd")
    simulated = StepSimulator(model, step, CPU, {"attention": "self_attn", "ffn": "mlp"})
    calls: list[object] = []
    trace = StepSimulator._trace
    monkeypatch.setattr(StepSimulator, "_trace", lambda *args, **kwargs: calls.append(1) or trace(*args, **kwargs))
    once = simulated.simulate("full")
    assert len(calls) == traced
    whole = simulated.simulate("full", traces_all=True)
    assert once.timeline.bytes_by_category == whole.timeline.bytes_by_category
    assert once.peak_bytes == whole.peak_bytes
