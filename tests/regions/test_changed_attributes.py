"""Plain attributes of a region's modules that change between its forward and its recomputation, in any step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Trainer, TrainerCallback, TrainingArguments

import hf_ckpt
from hf_ckpt import HFCkptCallback
from hf_ckpt.regions.module_state import STATE
from tests import exactness, modes, plain_models, training, zoo
from tests.regions.test_changed_modules import hold, in_force, loss_of

WAYS = ["full", "attention", "ffn", "segments_2", "nested", "selective", "offload", "full_tiles", "none_tiles"]
every_way = pytest.mark.parametrize("way", WAYS)
one_of_each_kind = pytest.mark.parametrize("way", ["full", "ffn", "segments_2", "selective"])


class Curve(Enum):
    FLAT = 1.0
    STEEP = 1.5


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 0.9

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gain


def flat(hidden: Tensor) -> Tensor:
    return hidden


def steep(hidden: Tensor) -> Tensor:
    return 1.5 * hidden


class Tuned(nn.Module):
    """Computes with attributes of every kind, after another module if there is one."""

    factor = 1.0

    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.inner = first or nn.Identity(), nn.Sequential(Inner())
        self.scale, self.power, self.flips, self.kind, self.shift = 0.5, 2, False, "tanh", None
        self.bounds, self.gains, self.table, self._slope = (-3.0, 3.0), [1.0, 0.5], {"up": 1.0, "all": [1.0]}, 0.7
        self.dtype, self.curve, self.share, self.size = torch.float32, Curve.FLAT, np.float32(0.5), torch.Size([4])
        self.function, self.kernel = flat, torch.cos

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inner(self.first(hidden)) * self.scale * self.gains[0] * self.table["up"] * self.table["all"][0]
        hidden = (torch.tanh if self.kind == "tanh" else torch.sin)(hidden) + hidden.abs() ** self.power
        hidden = hidden.clamp(*self.bounds) * self._slope * self.curve.value * float(self.share) * self.factor
        hidden = hidden.to(self.dtype).exp().to(hidden.dtype) * self.size.numel()
        hidden = self.function(hidden) + self.kernel(hidden)
        return (-hidden if self.flips else hidden) + (0.0 if self.shift is None else self.shift)


CHANGES: dict[str, Callable[[Any], object]] = {
    "float": lambda tuned: setattr(tuned, "scale", 0.3),
    "int": lambda tuned: setattr(tuned, "power", 3),
    "bool": lambda tuned: setattr(tuned, "flips", True),
    "str": lambda tuned: setattr(tuned, "kind", "sin"),
    "None": lambda tuned: setattr(tuned, "shift", 0.25),
    "tuple": lambda tuned: setattr(tuned, "bounds", (-0.1, 0.1)),
    "item of a list": lambda tuned: tuned.gains.__setitem__(0, 0.2),
    "item of a dict": lambda tuned: tuned.table.update(up=0.2),
    "list in a dict": lambda tuned: tuned.table["all"].__setitem__(0, 0.2),
    "private": lambda tuned: setattr(tuned, "_slope", 0.2),
    "two levels down": lambda tuned: setattr(tuned.inner[0], "gain", 0.2),
    "dtype": lambda tuned: setattr(tuned, "dtype", torch.bfloat16),
    "enum": lambda tuned: setattr(tuned, "curve", Curve.STEEP),
    "number of numpy": lambda tuned: setattr(tuned, "share", np.float32(0.2)),
    "size": lambda tuned: setattr(tuned, "size", torch.Size([2])),
    "of the class, set on the module": lambda tuned: setattr(tuned, "factor", 0.2),
    "function": lambda tuned: setattr(tuned, "function", steep),
    "function of torch": lambda tuned: setattr(tuned, "kernel", torch.sin),
    "to a tensor": lambda tuned: setattr(tuned, "shift", torch.tensor(0.25)),
}


def tuned(way: str = "") -> zoo.Case:
    """A Llama with such modules in the attention and in the ffn."""
    case = modes.llama()
    for layer in case.model.model.layers:
        layer.self_attn.o_proj = Tuned(layer.self_attn.o_proj)
        layer.mlp.act_fn = Tuned()
    return case


def change_all(model: nn.Module, name: str) -> None:
    for module in model.modules():
        if isinstance(module, Tuned):
            CHANGES[name](module)


def attributes(model: nn.Module) -> list[Any]:
    return [value for module in model.modules() if isinstance(module, Tuned | Inner) for value in vars(module).items()]


def two_passes(name: str, step: int, case: zoo.Case) -> Tensor:
    """In one of three steps, two forwards with a change between them and one backward."""
    for number in range(3):
        case.model.zero_grad()
        loss = loss_of(case)
        if number == step:
            change_all(case.model, name)
            loss = loss + 2 * loss_of(case)
        found = attributes(case.model)
        loss.backward()
        assert [value is before for (_, value), (_, before) in zip(attributes(case.model), found, strict=True)]
        if number == step:
            break
    return loss


@pytest.mark.parametrize("name", CHANGES)
@one_of_each_kind
@pytest.mark.sweep(keep=8)
def test_every_kind_of_attribute_is_brought_back(name: str, way: str) -> None:
    hold(tuned, partial(two_passes, name, 1), way)


class Reading(nn.Module):
    """Reads a switch of its config when it runs."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden) * self.config.gain


@dataclass
class Settings:
    gain: float = 1.0


CONFIGS: dict[str, Callable[[], Any]] = {
    "of transformers": lambda: LlamaConfig(gain=1.0),
    "a dataclass": Settings,
    "a namespace": lambda: SimpleNamespace(gain=1.0),
}


@pytest.mark.parametrize("kind", CONFIGS)
@one_of_each_kind
def test_switches_of_a_config_are_brought_back(kind: str, way: str) -> None:
    def build(way: str) -> zoo.Case:
        case, config = modes.llama(), CONFIGS[kind]()
        for layer in case.model.model.layers:
            layer.mlp.act_fn = Reading(config)
        return case

    def flow(case: zoo.Case) -> Tensor:
        config = case.model.model.layers[0].mlp.act_fn.config
        first = loss_of(case)
        config.gain = 0.3
        loss = first + 2 * loss_of(case)
        loss.backward()
        assert config.gain == 0.3
        return loss

    hold(build, flow, way)


@one_of_each_kind
def test_attention_is_computed_again_as_it_was(way: str) -> None:
    def flow(case: zoo.Case) -> Tensor:
        loss = loss_of(case)
        case.model.set_attn_implementation("eager")
        loss = loss + 2 * loss_of(case)
        loss.backward()
        return loss

    hold(lambda way: modes.llama(), flow, way)


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("name", ["float", "item of a list", "two levels down"])
@every_way
def test_an_attribute_is_brought_back_in_every_step_and_mode(name: str, step: int, way: str) -> None:
    hold(tuned, partial(two_passes, name, step), way)


def by_a_hook(case: zoo.Case) -> Tensor:
    rates = iter([0.5, 0.3, 0.8])

    def move(module: nn.Module, args: Any, kwargs: Any) -> None:
        rate = next(rates)
        for each in module.modules():
            if isinstance(each, Tuned):
                each.scale, each.gains[1] = rate, rate

    hook = case.model.register_forward_pre_hook(move, with_kwargs=True)
    loss = loss_of(case) + 2 * loss_of(case) + 3 * loss_of(case)
    loss.backward()
    hook.remove()
    return loss


def back_and_forth(case: zoo.Case) -> Tensor:
    """A value that comes back, and backwards in the order of the forwards."""
    losses = []
    for scale in (0.5, 0.3, 0.5, 0.3):
        for module in case.model.modules():
            if isinstance(module, Tuned):
                module.scale = scale
        losses.append(loss_of(case))
    for loss in losses:
        loss.backward()
    return losses[-1]


def taken_away(case: zoo.Case) -> Tensor:
    change_all(case.model, "of the class, set on the module")
    loss = loss_of(case)
    for module in case.model.modules():
        if isinstance(module, Tuned):
            del module.factor
    loss = loss + 2 * loss_of(case)
    loss.backward()
    assert not any("factor" in vars(module) for module in case.model.modules())
    return loss


@pytest.mark.parametrize("flow", [by_a_hook, back_and_forth, taken_away])
@every_way
def test_whoever_changes_an_attribute_it_is_brought_back(flow: Callable[[zoo.Case], Tensor], way: str) -> None:
    hold(tuned, flow, way)


@pytest.mark.parametrize("policy", ["full", "ffn", "selective"])
def test_under_the_trainer_an_attribute_that_a_callback_changes_is_brought_back(policy: str, tmp_path: Path) -> None:
    class Anneals(TrainerCallback):
        """Two passes differ from the second step on."""

        rate = 0.5

        def on_step_begin(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
            self.rate = 0.5 - 0.2 * (state.global_step > 0)

    class TwoPasses(Trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            total = 0.0
            for rate in (0.5, anneals.rate):
                for module in model.modules():
                    if isinstance(module, Tuned):
                        module.scale = rate
                total = total + super().compute_loss(model, *args, **kwargs)
            return total

    found = []
    for callbacks in ([], [HFCkptCallback(policy, quiet=True)]):
        model = training.llama()
        for layer in model.model.layers:
            layer.self_attn.o_proj = Tuned(layer.self_attn.o_proj)
            layer.mlp.act_fn = Tuned()
        anneals = Anneals()
        args = TrainingArguments(**training.arguments(tmp_path))
        TwoPasses(model=model, args=args, train_dataset=training.rows(), callbacks=[anneals, *callbacks]).train()
        found.append(training.weights(model))
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def change_rates(name: str, case: zoo.Case) -> Tensor:
    """As contrastive losses do: two dropout rates, which are plain attributes of the layers of some models."""
    layers = [module for module in case.model.modules() if isinstance(getattr(module, name, None), float)]
    assert layers
    for _ in range(2):
        case.model.zero_grad()
        loss = torch.zeros(())
        for rate in (0.1, 0.3):
            for layer in layers:
                setattr(layer, name, rate)
            loss = loss + loss_of(case)
        loss.backward()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "attention", "ffn", "selective"])
@pytest.mark.parametrize(
    ("model_type", "name"), [("opt", "dropout"), ("bart", "activation_dropout"), ("llama", "attention_dropout")]
)
def test_rates_of_real_layers_are_brought_back(model_type: str, name: str, way: str) -> None:
    hold(lambda way: exactness.build(model_type), partial(change_rates, name), way)


# --- What the region writes itself. ---


class Counting(plain_models.Block):
    """Writes attributes in its forward, and reads others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.lengths, self.scale, self.made = 0, [], 0.5, None

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.lengths.append(hidden.shape[1])
        if self.made is None:
            self.made = 1.25
        self.latest = hidden.shape
        return super().forward(hidden * self.scale * self.made, mask)


class Masking(plain_models.Block):
    """Keeps a mask, and beside it the length that it was made for."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.kept = 0, None

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.length != hidden.shape[1]:
            self.length = hidden.shape[1]
            self.kept = torch.full((self.length, self.length), -1e4).triu(1)
        return super().forward(hidden, self.kept)


def blocks(block: type[nn.Module], way: str) -> zoo.Case:
    torch.manual_seed(0)
    return plain_models.case(plain_models.Decoder([block() for _ in range(4)]))


def set_all(case: zoo.Case, name: str, value: Any) -> None:
    for block in case.model.blocks:
        setattr(block, name, value)


def of_length(case: zoo.Case, length: int) -> Tensor:
    return loss_of(zoo.Case(case.model_type, case.model, {"hidden": case.inputs["hidden"][:, :length]}))


def of_two_scales(case: zoo.Case) -> Tensor:
    """Beside what the layers write, somebody else changes what they read."""
    for _ in range(2):
        case.model.zero_grad()
        set_all(case, "scale", 0.5)
        loss = of_length(case, 6)
        set_all(case, "scale", 0.3)
        set_all(case, "made", 2.0)
        loss = loss + 2 * of_length(case, 5)
        loss.backward()
    assert {block.scale for block in case.model.blocks} == {0.3}
    return loss


def in_turn(case: zoo.Case) -> Tensor:
    """As `of_two_scales`, with a value that comes back, and a backward for each forward, in their order."""
    losses = []
    for scale in (0.5, 0.3, 0.5):
        set_all(case, "scale", scale)
        losses.append(of_length(case, 6))
    for loss in losses:
        loss.backward()
    return losses[0]


def of_three_lengths(case: zoo.Case) -> Tensor:
    for _ in range(2):
        case.model.zero_grad()
        loss = sum(of_length(case, length) for length in (6, 6, 4, 4, 5))
        loss.backward()
    return loss


@pytest.mark.parametrize("way", ["full", "segments_2", "nested"])
@pytest.mark.parametrize(
    ("block", "flow"),
    [(Counting, of_two_scales), (Counting, in_turn), (Counting, of_three_lengths), (Masking, of_three_lengths)],
)
def test_what_a_layer_writes_is_no_change(block: type[nn.Module], flow: Callable[..., Tensor], way: str) -> None:
    hold(partial(blocks, block), flow, way)
    # Nor does the proof of the first step say anything.
    case = blocks(block, way)
    with exactness.apply(case.model, way):
        flow(case)


class Remembering(plain_models.Block):
    def __init__(self) -> None:
        super().__init__()
        self.latest: Tensor | None = None

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        self.latest = hidden.detach() + 0
        return super().forward(hidden, mask)


def test_a_tensor_that_takes_the_place_of_a_plain_value_is_not_kept_alive() -> None:
    case = blocks(Remembering, "full")
    with in_force(case, "full"):
        for _ in range(3):
            loss = loss_of(case)
            seen = weakref.ref(case.model.blocks[1].latest)
            set_all(case, "latest", None)
            gc.collect()
            assert seen() is None
            loss.backward()


def test_attributes_are_read_again_only_when_one_comes_or_goes() -> None:
    case = tuned()
    with in_force(case, "full"):
        layer = case.model.model.layers[0]
        loss_of(case).backward()
        first = vars(layer)[STATE].layout(layer).held.look().places
        loss_of(case).backward()
        change_all(case.model, "float")
        loss_of(case).backward()
        assert vars(layer)[STATE].layout(layer).held.look().places is first
        change_all(case.model, "of the class, set on the module")
        loss_of(case).backward()
        assert vars(layer)[STATE].layout(layer).held.look().places is not first


def test_removal_leaves_attributes_as_they_are() -> None:
    case = tuned()
    found = [(name, value) for name, value in attributes(case.model) if not name.startswith("_f")]
    applied = hf_ckpt.apply(case.model, "full")
    loss_of(case).backward()
    applied.remove()
    left = [(name, value) for name, value in attributes(case.model) if not name.startswith("_f")]
    assert [name for name, _ in left] == [name for name, _ in found]
    assert all(value is before for (_, value), (_, before) in zip(left, found, strict=True))
