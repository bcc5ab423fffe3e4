"""Compiled layers are exact, also where the backend does not bring back random numbers, wherever they were compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_ckpt
from hf_ckpt.regions.recompute import recompute
from hf_ckpt.upstream.torch import top_saved_tensors_hooks
from tests import exactness, zoo
from tests.exactness import Result
from tests.training import callback, llama, losses, trainer

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore")]


def as_it_is(graph: Any, inputs: Any, **options: Any) -> Any:
    """A backend for looking at graphs."""
    return graph


class Printing:
    """Another one."""

    def __call__(self, graph: Any, inputs: Any) -> Any:
        return graph.forward


def through_aot(graph: Any, inputs: Any) -> Any:
    """One that brings random numbers back, which nothing shows."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(graph, inputs)


BACKENDS: dict[str, Any] = {
    "eager": "eager",
    "function": as_it_is,
    "partial": partial(as_it_is, name="graph"),
    "object": Printing(),
    "unknown": through_aot,
    "aot_eager": "aot_eager",
}


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_layers(model: Any, backend: Any) -> nn.Module:
    for layer in model.transformer.h:
        layer.compile(backend=backend)
    return model


def compile_forwards(model: Any, backend: Any) -> nn.Module:
    for layer in model.transformer.h:
        layer.forward = torch.compile(layer.forward, backend=backend)
    return model


def replace_layers(model: Any, backend: Any) -> nn.Module:
    for at, layer in enumerate(model.transformer.h):
        model.transformer.h[at] = torch.compile(layer, backend=backend)
    return model


def compile_parts(model: Any, backend: Any) -> nn.Module:
    for layer in model.transformer.h:
        layer.attn.compile(backend=backend)
        layer.mlp.compile(backend=backend)
    return model


def compile_model(model: Any, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)


WAYS = [compile_layers, compile_forwards, replace_layers, compile_parts, compile_model]
every_way = pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)


def gpt2() -> zoo.Case:
    return exactness.build("gpt2", num_layers=2)


def step(case: zoo.Case, model: nn.Module) -> Result:
    case.model.zero_grad()
    torch.manual_seed(0)
    loss = zoo.loss(model, case.inputs)
    loss.backward()
    # `torch.compile(layer)` stands around the layer.
    found = {name.replace("_orig_mod.", ""): each for name, each in exactness.gradients(case.model).items()}
    return loss.detach(), found


def hold(make: Callable[[Any, Any], nn.Module], backend: Any, policy: str, *, is_later: bool, **options: Any) -> None:
    case = gpt2()
    expected = exactness.step(case)
    model = case.model if is_later else make(case.model, backend)
    # Around the whole, the plan is on the model inside.
    with hf_ckpt.apply(case.model, policy, **options):
        model = make(case.model, backend) if is_later else model
        for _ in range(2):
            assert exactness.differences(expected, step(case, model)) == []


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_layers_compiled_by_hand_are_exact(backend: Any) -> None:
    hold(compile_layers, backend, "full", is_later=False)


@pytest.mark.slow
@every_way
@pytest.mark.sweep(keep=1)
def test_what_was_compiled_before_the_plan_is_exact(make: Callable[[Any, Any], nn.Module]) -> None:
    hold(make, "eager", "full", is_later=False)


@pytest.mark.slow
@every_way
@pytest.mark.sweep
def test_what_is_compiled_under_the_plan_is_exact(make: Callable[[Any, Any], nn.Module]) -> None:
    hold(make, "eager", "full", is_later=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("ffn", {}),
        ("attention", {}),
        ("selective", {}),
        ("selective_attention", {}),
        ("full", {"segment_size": 2}),
        ("full", {"offload": "cpu"}),
    ],
)
@pytest.mark.sweep
def test_every_mode_is_exact_under_a_backend_that_runs_graphs_as_they_are(policy: str, options: dict[str, Any]) -> None:
    hold(compile_model, "eager", policy, is_later=False, **options)


def test_layer_around_its_attention_is_exact_under_it() -> None:
    # The ffn of an OPT is written out in its layers.
    case = exactness.build("opt", num_layers=2)
    expected = exactness.step(case)
    for layer in case.model.model.decoder.layers:
        layer.compile(backend="eager")
    with hf_ckpt.apply(case.model, "ffn"):
        assert exactness.differences(expected, exactness.step(case)) == []


@pytest.mark.parametrize("policy", ["full", "ffn", "mixed"])
def test_trainer_with_layers_compiled_by_hand_has_the_losses_of_one_without(tmp_path: Path, policy: str) -> None:
    plain = trainer(llama(), tmp_path)
    plain.train()
    model = llama()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    run = trainer(model, tmp_path, callback(policy))
    run.train()
    assert losses(run) == losses(plain)


@pytest.mark.parametrize(("part", "policy"), [("", "full"), ("", "attention"), ("mlp", "ffn")])
@pytest.mark.sweep(keep=1)
def test_a_compiler_may_stand_around_one_layer_or_part(part: str, policy: str) -> None:
    case = exactness.build("llama", num_layers=2)
    expected = exactness.step(case)
    path = f"model.layers.0.{part}".rstrip(".")
    case.model.set_submodule(path, torch.compile(case.model.get_submodule(path), backend="eager"))
    with hf_ckpt.apply(case.model, policy):
        assert exactness.differences(expected, step(case, case.model)) == []


@pytest.mark.parametrize("has_compiled", [False, True])
def test_compiler_without_work_is_not_asked_for_each_saved_tensor(has_compiled: bool) -> None:
    if has_compiled:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    model, packs = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), []
    hook = model.register_forward_pre_hook(lambda *_: packs.append(top_saved_tensors_hooks(False)[0]))
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, requires_grad=True)
    recompute(model, inputs).sum().backward()
    hook.remove()
    _, pack = packs
    assert hasattr(pack, "__wrapped__") is has_compiled
    inputs.grad, found = None, inputs.grad
    model(inputs).sum().backward()
    torch.testing.assert_close(inputs.grad, found, rtol=0, atol=0)
