"""Writes that begin in a later step, to what layers are given or return, are seen or do no harm."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

import hf_ckpt

pytestmark = pytest.mark.core

WIDTH = 8


@dataclass(frozen=True)
class Frozen:
    shift: Any


@dataclass
class Output(ModelOutput):
    shift: Any = None


Named = namedtuple("Named", "shift")  # of such a kind, whatever its types

WRAPS: dict[str, Callable[[Tensor], Any]] = {
    "dict in a list": lambda shift: [{"shift": shift}],
    "frozen": lambda shift: Frozen((shift,)),
    "output": lambda shift: Output(shift=shift),
    "named tuple in a dict": lambda shift: {"a": Named([shift])},
}


def inner(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = next(iter(value.values())) if isinstance(value, dict) else value
        value = value[0] if isinstance(value, list | tuple) else getattr(value, "shift", value)
    return value


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, residual: Any) -> tuple[Tensor, Any]:
        added = torch.tanh(self.mlp(torch.tanh(self.self_attn(hidden * 1.0 + inner(residual) * 1.0))))
        return added, inner(residual) + 0.3 * added


class Model(nn.Module):
    """Hands two streams on, and has `write` change what comes out of a layer, from the second step on."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any], wrap: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.steps, self.write, self.wrap = 0, write, wrap

    def forward(self, hidden: Tensor) -> Tensor:
        self.steps += 1
        residual, shift = hidden * 1.0, torch.zeros(WIDTH)
        for number, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual if self.wrap is None else self.wrap(shift))
            if self.steps > 1 and number < 3:
                self.write(hidden, residual if self.wrap is None else shift)
        return hidden.square().mean() + residual.square().mean()


def gradients(model: nn.Module, policy: str, **options: Any) -> list[Tensor | None]:
    inputs = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    with hf_ckpt.apply(model, policy, layers=["layers"], **options):
        for _ in range(2):
            model.zero_grad()
            model(inputs).backward()
    return [weight.grad for weight in model.parameters()]


SEGMENTS: list[dict[str, Any]] = [
    {"segment_size": 2},
    {"segment_size": 4, "nested": True},
    {"nested": "revolve", "snapshots": 1},
]


@pytest.mark.parametrize("options", SEGMENTS)
@pytest.mark.parametrize(
    "write", [lambda _, residual: residual.mul_(0.5), lambda _, residual: residual[:, 0].zero_()], ids=["whole", "view"]
)
def test_a_segment_ends_where_a_second_output_is_written_to(
    write: Callable[[Tensor, Tensor], Any], options: dict[str, Any]
) -> None:
    found = gradients(Model(write), "full", **options)
    assert all(map(torch.equal, gradients(Model(write), "none"), found))


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("min_bytes", [1, 1 << 20])
def test_a_write_to_what_offload_leaves_on_the_device_is_refused(policy: str, min_bytes: int) -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = hidden * 1.0
            for number, layer in enumerate(self.layers):
                added, _ = layer(hidden, torch.zeros(WIDTH))
                hidden = hidden.add_(added) if number < 1 else hidden + added
            return hidden.square().mean()

    options = {"offload": {"to": "cpu", "min_bytes": min_bytes}, "prove": "off"}
    if min_bytes == 1:
        assert all(map(torch.equal, gradients(Adding(), "none"), gradients(Adding(), policy, **options)))
        return
    with pytest.raises(RuntimeError, match="stays on its device, and that has been written to"):
        gradients(Adding(), policy, **options)


@pytest.mark.parametrize("options", [{}, SEGMENTS[1]])
@pytest.mark.parametrize("kind", WRAPS)
def test_a_write_into_what_a_call_holds_deeper_is_refused(kind: str, options: dict[str, Any]) -> None:
    model = Model(lambda _, shift: shift.add_(0.5), WRAPS[kind])
    with pytest.raises(RuntimeError, match=r"layers\.\d is to be recomputed, but it .* the argument residual"):
        gradients(model, "full", **options)
