"""What layers write for later is written once, and a recomputation starts from what the forward found."""

from __future__ import annotations

import copy
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_ckpt
from hf_ckpt.errors import RecomputationError, UnsupportedError
from hf_ckpt.regions.held_state import HeldState
from tests import zoo
from tests.modes import REGIONS

pytestmark = pytest.mark.core

WIDTH = 8


@dataclass
class Statistics:
    mean: Tensor
    count: int = 0


class Counter:
    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def next(self) -> int:
        self.__count += 1
        return self.__count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and self.__count == other.__count


class Layer(nn.Module):
    """Writes with `write`, a function of itself and of its input, and computes with what that returns."""

    def __init__(self, make: Callable[[Any], None], write: Callable[[Any, Tensor], Tensor | float]) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._write = [write]
        make(self)

    def forward(self, hidden: Tensor) -> Any:
        scale = self._write[0](self, hidden)
        return hidden + self.mlp(torch.tanh(self.self_attn(hidden) * scale))


class Model(nn.Module):
    def __init__(self, make: Callable[[Any], None], write: Callable[[Any, Tensor], Tensor | float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(make, write) for _ in range(3))

    def forward(self, hidden: Tensor) -> Any:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def mean_of(hidden: Tensor) -> Any:
    return hidden.detach().abs().mean((0, 1))


# --- What is kept where, and how it is written. ---


def in_attribute(layer: Any) -> None:
    layer.seen = torch.zeros(WIDTH)


def in_buffer(layer: Any) -> None:
    layer.register_buffer("seen", torch.zeros(WIDTH))


def in_containers(layer: Any) -> None:
    layer.kept = {"all": [(torch.zeros(WIDTH), [])], "last": deque(maxlen=2)}


def in_object(layer: Any) -> None:
    layer.kept = Statistics(torch.zeros(WIDTH))


def in_private_slot(layer: Any) -> None:
    layer.kept = Counter()


def in_array(layer: Any) -> None:
    layer.seen = np.zeros(WIDTH, np.float32)


def in_views(layer: Any) -> None:
    layer.both = torch.zeros(2, WIDTH)
    layer.seen = layer.both[0]


def with_generators(layer: Any) -> None:
    layer.generator, layer.random = torch.Generator().manual_seed(3), random.Random(3)


def nothing(layer: Any) -> None:
    pass


def norm(layer: Any) -> None:
    layer.norm = nn.BatchNorm1d(WIDTH)


def added_in_place(layer: Any, hidden: Tensor) -> Any:
    layer.seen += mean_of(hidden)
    return 1 + layer.seen


def averaged(layer: Any, hidden: Tensor) -> Any:
    layer.seen.lerp_(mean_of(hidden), 0.1)
    return 1 + layer.seen.clone()


def past_the_version(layer: Any, hidden: Tensor) -> Any:
    layer.seen.data.index_add_(0, torch.arange(WIDTH), mean_of(hidden))
    return 1 + layer.seen.clone()


def rebound(layer: Any, hidden: Tensor) -> Any:
    layer.seen = 0.9 * layer.seen + mean_of(hidden)
    return 1 + layer.seen


def counted(layer: Any, hidden: Tensor) -> Any:
    layer.calls = getattr(layer, "calls", 0) + 1
    return 1 / layer.calls


def into_containers(layer: Any, hidden: Tensor) -> Any:
    seen, means = layer.kept["all"][0]
    seen.add_(mean_of(hidden))
    means.append(mean_of(hidden))
    layer.kept["last"].append(len(means))
    layer.kept["new"] = layer.kept.get("new", 0) + 1
    return 1 + seen + len(layer.kept["last"]) / 4 + layer.kept["new"]


def into_object(layer: Any, hidden: Tensor) -> Any:
    layer.kept.count += 1
    layer.kept.mean = layer.kept.mean + mean_of(hidden)
    return layer.kept.mean / layer.kept.count


def into_private_slot(layer: Any, hidden: Tensor) -> float:
    return 1 / layer.kept.next()


def into_array(layer: Any, hidden: Tensor) -> Any:
    layer.seen += mean_of(hidden).numpy()
    return 1 + torch.from_numpy(layer.seen.copy())


def into_views(layer: Any, hidden: Tensor) -> Any:
    layer.seen += mean_of(hidden)
    return 1 + layer.both.sum(0)


def drawn(layer: Any, hidden: Tensor) -> Any:
    return torch.rand(WIDTH, generator=layer.generator) + layer.random.random()


def made_lazily(layer: Any, hidden: Tensor) -> Any:
    if not hasattr(layer, "table") or len(layer.table) < hidden.shape[1]:
        layer.table = torch.arange(float(hidden.shape[1]))
        layer.made = getattr(layer, "made", 0) + 1
    return 1 + layer.table[: hidden.shape[1], None]


def normalized(layer: Any, hidden: Tensor) -> Any:
    return layer.norm(hidden.flatten(0, 1)).view_as(hidden)


WAYS: dict[str, tuple[Callable[[Any], None], Callable[[Any, Tensor], Any]]] = {
    "attribute, in place": (in_attribute, added_in_place),
    "attribute, lerp_": (in_attribute, averaged),
    "attribute, .data": (in_attribute, past_the_version),
    "attribute, rebound": (in_attribute, rebound),
    "buffer, in place": (in_buffer, added_in_place),
    "buffer, .data": (in_buffer, past_the_version),
    "buffer, rebound": (in_buffer, rebound),
    "number": (nothing, counted),
    "containers": (in_containers, into_containers),
    "object": (in_object, into_object),
    "private slot": (in_private_slot, into_private_slot),
    "array": (in_array, into_array),
    "views": (in_views, into_views),
    "generators": (with_generators, drawn),
    "made lazily": (nothing, made_lazily),
    "batch norm": (norm, normalized),
}
PLANS = {name: REGIONS[name] for name in ("full", "segments", "nested", "revolve", "selective")}
PLANS["offload"] = "full", {"offload": "cpu"}


def state_of(model: Any) -> Any:
    """Return all that modules hold, copied."""
    names = ("seen", "both", "kept", "calls", "table", "made", "generator", "random")
    held = [{name: value for name, value in vars(each).items() if name in names} for each in model.modules()]
    return copy.deepcopy([held, dict(model.named_buffers())])


def are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor | np.ndarray):
        return type(one) is type(other) and bool(np.all(np.asarray(one == other)))
    if isinstance(one, Statistics):
        return are_same(vars(one), vars(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(are_same, one, other))
    if isinstance(one, torch.Generator):
        return torch.equal(one.get_state(), other.get_state())
    if isinstance(one, random.Random):
        return bool(one.getstate() == other.getstate())
    return isinstance(one, nn.Module) or callable(one) or bool(one == other)


def inputs(number: int, length: int = 4) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(number))


def train(model: Any) -> list[Any]:
    """Two steps: one micro-batch after the other, then two forwards before a backward; lengths grow."""
    found: list[Any] = []
    for step in range(2):
        model.zero_grad()
        model(inputs(step)).backward()
        sum(model(inputs(10 + step + number, 5 + step + number)) for number in range(2)).backward()
        found += [[p.grad.clone() for p in model.parameters()], state_of(model)]
    return found


def hold(make: Callable[[], nn.Module], plan: str, flow: Callable[[Any], list[Any]] = train) -> None:
    policy, options = PLANS[plan]
    expected = flow(make())
    model = make()
    with hf_ckpt.apply(model, policy, layers=["layers"], **options):
        found = flow(model)
    assert are_same(expected, found)


@pytest.mark.sweep(keep=20)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_layer_keeps_for_later_is_what_its_forwards_left(way: str, plan: str) -> None:
    hold(lambda: Model(*WAYS[way]), plan)


# --- What is special. ---


def in_large(layer: Any) -> None:
    layer.seen = torch.zeros(3000, WIDTH)


def with_losses(layer: Any) -> None:
    layer.losses, layer.latest = [], {}


def large_added(layer: Any, hidden: Tensor) -> float:
    layer.seen += mean_of(hidden)
    return 1.0


def large_read(layer: Any, hidden: Tensor) -> Any:
    scale = 1 + layer.seen.mean(0)
    layer.seen = layer.seen + mean_of(hidden)
    return scale


def large_made_anew(layer: Any, hidden: Tensor) -> float:
    layer.latest = (layer.mlp.weight.sum() + hidden.sum()) * torch.ones(3000, WIDTH)
    return 1.0


def from_the_second_step(write: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    def wait(layer: Any, hidden: Tensor) -> Any:
        layer.calls = getattr(layer, "calls", 0) + 1
        return write(layer, hidden) if layer.calls > 2 else 1.0

    return wait


def for_a_loss(layer: Any, hidden: Tensor) -> float:
    layer.losses.append(layer.mlp(hidden).square().mean())
    layer.latest["loss"] = layer.self_attn(hidden).square().mean()
    return 1.0


def train_with_losses(model: Any) -> list[Any]:
    """Adds losses that layers have kept, of the real forward and no other."""
    found: list[Any] = []
    for step in range(2):
        model.zero_grad()
        loss = model(inputs(step))
        # Recomputes, and then adds what was kept before.
        loss.backward(retain_graph=True)
        aux = sum(sum(layer.losses) + layer.latest["loss"] for layer in model.layers)
        aux.backward()
        for layer in model.layers:
            layer.losses.clear()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def one_by_one(model: Any) -> list[Any]:
    found: list[Any] = []
    for step in range(4):
        model.zero_grad()
        model(inputs(step)).backward()
        found += [[p.grad.clone() for p in model.parameters()], state_of(model)]
    return found


@pytest.mark.parametrize("plan", ["full", "segments", "selective"])
def test_losses_that_layers_keep_stay_those_of_the_forward(plan: str) -> None:
    hold(lambda: Model(with_losses, for_a_loss), plan, train_with_losses)


@pytest.mark.parametrize("plan", ["full", "nested"])
@pytest.mark.parametrize("way", ["attribute, .data", "containers", "array"])
def test_a_write_that_begins_later_is_made_once(way: str, plan: str) -> None:
    make, write = WAYS[way]
    hold(lambda: Model(make, from_the_second_step(write)), plan)


@pytest.mark.parametrize("write", [large_added, large_made_anew])
def test_large_tensors_are_what_forwards_left(write: Callable[[Any, Tensor], Any]) -> None:
    hold(lambda: Model(in_large, write), "full", one_by_one)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (from_the_second_step(large_added), r"layers\.2 .* it wrote to large tensors for the first time: seen"),
        (from_the_second_step(large_read), r"reads seen, but its forward has put another"),
    ],
)
def test_what_cannot_be_brought_back_is_refused_by_name(write: Callable[[Any, Tensor], Any], message: str) -> None:
    model = Model(in_large, write)
    with hf_ckpt.apply(model, "full", layers=["layers"]):
        for step in range(2):
            model(inputs(step)).backward()
        loss = model(inputs(2))
        with pytest.raises(UnsupportedError, match=message):
            loss.backward()


def test_no_note_keeps_an_earlier_graph_alive() -> None:
    model: Any = Model(in_attribute, large_made_anew)
    with hf_ckpt.apply(model, "full", layers=["layers"]):
        model(inputs(0)).backward()
        earlier = weakref.ref(model.layers[0].latest)
        loss = model(inputs(1))
        assert earlier() is None
        loss.backward()


def test_state_is_put_back_when_a_recomputation_raises() -> None:
    def write(layer: Any, hidden: Tensor) -> Any:
        layer.seen += 1
        if fails and torch._C._current_graph_task_id() != -1:
            raise KeyError("in the recomputation")
        return layer.seen.clone()

    fails: list[int] = []
    model: Any = Model(in_attribute, write)
    with hf_ckpt.apply(model, "full", layers=["layers"]):
        model(inputs(0)).backward()
        loss, seen = model(inputs(1)), [layer.seen for layer in model.layers]
        fails.append(1)
        with pytest.raises(RecomputationError, match="KeyError: 'in the recomputation'"):
            loss.backward()
        assert all(
            layer.seen is found and bool((found == 2).all()) for layer, found in zip(model.layers, seen, strict=True)
        )


def test_a_module_of_several_layers_counts_each_of_them() -> None:
    def make() -> Any:
        model: Any = Model(in_attribute, lambda layer, hidden: layer.shared(hidden))
        model.layers[0].shared = nn.BatchNorm1d(4)
        for layer in model.layers[1:]:
            layer.shared = model.layers[0].shared
        return model

    for plan in ("full", "segments"):
        hold(make, plan, one_by_one_of_one_length)


def one_by_one_of_one_length(model: Any) -> list[Any]:
    found: list[Any] = []
    for step in range(2):
        model.zero_grad()
        (model(inputs(step)) + model(inputs(7))).backward()
        found += [[p.grad.clone() for p in model.parameters()], state_of(model)]
    return found


def normalised_later(model: Any) -> list[Any]:
    model(inputs(0)).backward()
    for layer in model.layers:
        # A linear layer gets its first child, which counts in buffers of its own.
        nn.utils.parametrizations.spectral_norm(layer.mlp)
    return one_by_one(model)


@pytest.mark.parametrize("plan", ["full", "nested", "selective"])
def test_parametrization_that_comes_later_writes_once(plan: str) -> None:
    hold(lambda: Model(lambda _: None, lambda *_: 1.0), plan, normalised_later)


ABOVE: dict[str, Callable[[Any, Tensor], None]] = {
    "number": lambda model, _: setattr(model, "calls", model.calls + 1),
    "buffer": lambda model, hidden: model.table.add_(mean_of(hidden)),
    "attribute": lambda model, hidden: setattr(model, "seen", model.seen + mean_of(hidden)),
    "container": lambda model, hidden: model.kept.append(float(hidden.detach().mean())),
}


@pytest.mark.parametrize("plan", ["full", "nested"])
@pytest.mark.parametrize("way", ABOVE)
def test_what_a_layer_writes_on_the_model_is_what_its_forwards_left(way: str, plan: str) -> None:
    def make() -> Any:
        model: Any = Model(lambda _: None, lambda _, hidden: (ABOVE[way](model, hidden), 1.0)[1])
        model.calls, model.seen, model.kept = 0, torch.zeros(WIDTH), []
        model.register_buffer("table", torch.zeros(WIDTH))
        return model

    hold(make, plan)


def test_what_is_reached_past_the_module_is_refused() -> None:
    kept = torch.zeros(WIDTH)
    model = Model(lambda layer: setattr(layer, "seen", kept), lambda layer, hidden: kept.add_(1).sum() * 0 + 1)
    with hf_ckpt.apply(model, "full", layers=["layers"]):
        loss = model(inputs(0))
        with pytest.raises(UnsupportedError, match="written a second time to what is reached past its module: seen"):
            loss.backward()


class Counting(nn.Module):
    """An ffn that writes with a function of itself and of its input."""

    def __init__(self, ffn: nn.Module, make: Callable[[Any], None], write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.table: Any
        self.ffn, self.write = ffn, [write]
        make(self)

    def forward(self, hidden: Tensor) -> Any:
        self.write[0](self, hidden)
        return self.ffn(hidden)


def counting(make: Callable[[Any], None], write: Callable[[Any, Tensor], Any]) -> zoo.Case:
    config = LlamaConfig(
        vocab_size=16, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).train()
    for layer in model.model.layers:
        layer.mlp = Counting(layer.mlp, make, write)
    ids = torch.arange(8).view(1, 8)
    return zoo.Case("llama", model, {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("mode", ["full", "none"])
@pytest.mark.parametrize("way", ["attribute, in place", "buffer, .data", "number", "containers", "array"])
def test_what_each_slice_would_write_is_refused_in_tiles(way: str, mode: str) -> None:
    case = counting(*WAYS[way])
    name = {"number": "calls", "containers": "kept"}.get(way, "seen")
    with (
        hf_ckpt.apply(case.model, mode, tiles=2),
        pytest.raises(UnsupportedError, match=f"is to run in tiles, but it writes .*{name}"),
    ):
        case.model(**case.inputs).loss.backward()


def test_what_the_first_slice_makes_for_all_is_no_alarm_in_tiles() -> None:
    case = counting(lambda _: None, lambda ffn, _: vars(ffn).setdefault("table", torch.ones(3)))
    with hf_ckpt.apply(case.model, "full", tiles=2):
        case.model(**case.inputs).loss.backward()
    tables = [module.table.tolist() for module in case.model.modules() if isinstance(module, Counting)]
    assert tables == [[1, 1, 1]] * 2


def read(layer: Any, hidden: Tensor) -> Any:
    return 1 + layer.seen


@pytest.mark.parametrize("make", [in_attribute, in_buffer])
def test_what_others_write_before_backward_is_brought_back(make: Callable[[Any], None]) -> None:
    def flow(model: Any) -> list[Any]:
        loss = model(inputs(0))
        for layer in model.layers:
            layer.seen.add_(2.0)
        loss.backward()
        return [[p.grad.clone() for p in model.parameters()], state_of(model)]

    # In place before the backward: autograd itself asks for what it has saved.
    hold(lambda: Model(make, lambda layer, hidden: read(layer, hidden).clone()), "full", flow)


def test_weights_that_deepspeed_holds_by_another_name_are_not_copied() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.statistic = torch.ones(WIDTH)  # type: ignore[assignment]
    layer._original_parameters = {"weight": torch.ones(WIDTH, WIDTH)}  # type: ignore[assignment]
    assert HeldState({layer: ""}).names() == ["training", "statistic"]
