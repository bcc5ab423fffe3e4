"""Fake copies of models whose forwards were replaced on the instance: the copy runs on its own modules."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_ckpt.simulation.fake_model import fake_copy, meta_copy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)


def as_method_over_a_closure(model: Model) -> None:
    before = model.forward

    def fused(self: Model, hidden: torch.Tensor) -> torch.Tensor:
        return before(hidden) * 2

    model.forward = types.MethodType(fused, model)  # type: ignore[method-assign]


def as_closure_over_a_closure(model: Model) -> None:
    inner = model.inner
    before = inner.forward

    def rescaled(hidden: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
        return before(hidden) * factor if inner.training else hidden

    inner.forward = lambda *args, **kwargs: rescaled(*args, **kwargs)  # type: ignore[method-assign]


def as_partial(model: Model) -> None:
    def called(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return type(module).forward(module, hidden) * 2

    model.inner.forward = functools.partial(called, model.inner)  # type: ignore[method-assign]


@pytest.mark.parametrize("put_on", [as_method_over_a_closure, as_closure_over_a_closure, as_partial])
def test_a_forward_put_on_an_instance_runs_on_the_copy(put_on: Any) -> None:
    model = Model().train()
    put_on(model)
    found = [vars(module).get("forward") for module in model.modules()]
    copied = fake_copy(model)
    twin, mode = copied.model, copied.mode
    with mode:
        out = twin(torch.ones(2, 4))
        out.sum().backward()
    assert isinstance(out, FakeTensor)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(isinstance(parameter.grad, FakeTensor) for parameter in twin.parameters())
    assert [vars(module).get("forward") for module in model.modules()] == found
    given = torch.ones(2, 4)
    assert torch.equal(model(given), 2 * nn.functional.linear(given, model.inner.weight, model.inner.bias))


def test_copy_without_autocast_keeps_the_forward_that_another_library_put_on_the_model() -> None:
    model = Model()
    before = model.forward

    @functools.wraps(type(model).forward)
    def fused(self: Model, hidden: torch.Tensor) -> torch.Tensor:
        return before(hidden) * 2

    model.forward = types.MethodType(fused, model)  # type: ignore[method-assign]
    # As `accelerate.Accelerator.prepare_model` does under mixed precision.
    model._original_forward = model.forward  # type: ignore[assignment]
    wrapped = torch.autocast("cpu", torch.bfloat16)(fused)
    model.forward = types.MethodType(wrapped, model)  # type: ignore[method-assign]
    copied = meta_copy(model)
    assert copied.forward.__func__.__code__ is fused.__code__
    assert copied.forward.__self__ is copied
    assert not hasattr(copied, "_original_forward")
    assert copied(torch.empty(2, 4, device="meta")).dtype is torch.float32


def test_a_copy_leaves_the_functions_of_methods_that_a_model_holds_as_they_are() -> None:
    def plain(self: Model, hidden: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return hidden * factor

    decorated = functools.wraps(plain)(lambda self, hidden: plain(self, hidden))
    model = Model()
    # As PEFT keeps a method of the model in it, whose function is the class's.
    model.inner.kept = types.MethodType(decorated, model)  # type: ignore[assignment]
    before = dict(vars(decorated))
    fake_copy(model)
    assert vars(decorated) == before
