"""Tracing equal slices of tiled modules once changes nothing: neither events nor places, neither times nor storages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ckpt.policy.policy import Policy
from hf_ckpt.simulation import simulator
from hf_ckpt.simulation.devices import DEVICES
from hf_ckpt.simulation.layer_reuse import run_unlike
from hf_ckpt.simulation.simulator import StepSimulator, TracedStep
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.simulation.tracker import Tracker
from tests import zoo

pytestmark = pytest.mark.slow

A100 = next(device for device in DEVICES.values() if device.capability == (8, 0))
# Of 75 tokens, 8 tiles are 3 of 10 and 5 of 9.
STEP = Step(batch_size=2, seq_length=75, optim="sgd")
PROVEN = replace(STEP, gradient_accumulation_steps=4, autocast="bfloat16", is_proven=True)
FSDP = Sharding(engine="fsdp1", world_size=4)
OFFLOAD: dict[str, Any] = {"tiles": 9, "offload": "cpu", "head": "chunked"}
BY_RANGE = [{"layers": "0", "mode": "none", "tiles": 7}, {"layers": "1", "mode": "full", "tiles": 8}]
Bounds = Sequence[tuple[int, int]]

# Model type, policy and its options, and step.
CASES: dict[str, tuple[str, Any, dict[str, Any], Step]] = {
    "llama-ffn-packed": ("llama", "ffn", {"tiles": 8}, replace(STEP, is_packed=True)),
    "llama-offload-proven": ("llama", "full", OFFLOAD, PROVEN),
    "llama-by-range": ("llama", BY_RANGE, {}, replace(STEP, autocast="bfloat16")),
    "lora-full-proven": ("lora", "full", {"tiles": 8}, PROVEN),
    "lora-offload-fsdp1": ("lora", "full", OFFLOAD, replace(STEP, autocast="bfloat16", sharding=FSDP)),
    "gemma3-none-zero3": (
        "gemma3_text",
        "none",
        {"tiles": 8},
        replace(STEP, sharding=Sharding(engine="zero3", world_size=4)),
    ),
    "qwen3-moe-attention-padded": ("qwen3_moe", "attention", {"tiles": 8}, replace(STEP, is_padded=True)),
    "mixtral-full-fsdp2": (
        "mixtral",
        "full",
        {"tiles": 8},
        replace(PROVEN, sharding=Sharding(engine="fsdp2", world_size=3)),
    ),
}


def model(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    if model_type != "lora":
        return zoo.build(model_type, num_layers=2).model
    settings = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    return get_peft_model(zoo.build("llama", num_layers=2).model, settings)


class Slices:
    """Lets slices run as a simulation does, and counts those that run."""

    def __init__(self, *, reuses: bool = True) -> None:
        self.num_run = self.num_slices = 0
        self._reuses = reuses

    def run(self, tracker: Tracker, bounds: Bounds, inputs: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
        self.num_slices += len(bounds)
        for each in run_unlike(tracker, bounds, inputs) if self._reuses else bounds:
            self.num_run += 1
            yield each


def traced(built: nn.Module, policy: Policy, step: Step, slices: Slices, **options: Any) -> TracedStep:
    """Simulate a step, event by event."""
    simulated = StepSimulator(built, step, A100)
    with mock.patch.object(simulator, "run_unlike", slices.run):
        return simulated.trace(simulated.plan_of(policy), **options)


def events(step: TracedStep) -> list[tuple[object, ...]]:
    """Return all that there is to an event, with storages as numbers in the order in which they appear."""
    numbers: dict[int, int] = {}
    found = []
    for event in step.tape.events:
        storage, look = event.storage, tuple[object, ...]()
        if storage is not None:
            number = numbers.setdefault(id(storage), len(numbers))
            look = (number, storage.num_bytes, storage.shape, storage.dtype, storage.category)
            look = *look, storage.why, storage.parameter
        found.append(
            (
                event.place,
                event.change,
                look,
                event.seconds,
                event.num_flops,
                event.mark,
                event.is_copy,
                event.transfer,
            )
        )
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sweep(keep=1)
def test_slices_traced_once_are_all_slices(name: str) -> None:
    model_type, policy, options, step = CASES[name]
    built, parsed, some, every = model(model_type), Policy.parse(policy, **options), Slices(), Slices(reuses=False)
    once, whole = traced(built, parsed, step, some), traced(built, parsed, step, every)
    assert events(once) == events(whole)
    assert once.host_bytes == whole.host_bytes
    assert some.num_slices == every.num_slices == every.num_run
    # Of 8: the first, which makes the whole tensors, and two of each length.
    assert some.num_run <= 0.67 * some.num_slices


def test_what_is_held_is_explained_alike() -> None:
    built, parsed = model("llama"), Policy.parse("ffn", tiles=8)
    once, whole = (traced(built, parsed, STEP, Slices(reuses=reuses), explains=True) for reuses in (True, False))
    assert any(event.storage is not None and event.storage.why for event in once.tape.events)
    assert events(once) == events(whole)


class Log:
    """What calls leave behind, where it is no state of a module: tiles refuse that."""

    num_calls = 0
    last: Tensor | None = None


class Alternating(nn.Module):
    """Does one thing and another in turn."""

    def forward(self, hidden: Tensor) -> Tensor:
        Log.num_calls += 1
        return hidden.sigmoid() if Log.num_calls % 2 else hidden.tanh().sigmoid()


class Drawing(nn.Module):
    """Draws a random number that has a value."""

    def forward(self, hidden: Tensor) -> Tensor:
        torch.rand(1)
        return hidden.sigmoid()


class Keeping(nn.Module):
    """Holds something until it is called again."""

    def forward(self, hidden: Tensor) -> Tensor:
        output = hidden.sigmoid()
        Log.last = output.detach() + 1
        return output


@pytest.mark.parametrize("kind", [Alternating, Drawing, Keeping])
def test_all_slices_run_where_two_in_a_row_are_unlike(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "last", None)
    built, parsed, some = model("llama"), Policy.parse("none", tiles=8), Slices()
    for layer in built.model.layers:
        layer.mlp.act_fn = kind()
    once, whole = traced(built, parsed, STEP, some), traced(built, parsed, STEP, Slices(reuses=False))
    # Forward and backward, of two layers: all slices of the ffn, and 5 of 8 of two norms and four projections.
    assert some.num_run == 2 * 2 * (8 + 6 * 5)
    assert events(once) == events(whole)


def test_all_slices_run_of_inputs_with_values() -> None:
    bounds = [(number, 1) for number in range(5)]
    with FakeTensorMode(), Tracker() as tracker:
        assert len(list(run_unlike(tracker, bounds, [torch.empty(5)]))) == 2
    assert list(run_unlike(tracker, bounds, [torch.empty(5)])) == bounds


def test_all_slices_run_where_all_is_traced() -> None:
    slices = Slices()
    traced(model("llama"), Policy.parse("ffn", tiles=8), STEP, slices, traces_all=True)
    assert slices.num_slices == 0
