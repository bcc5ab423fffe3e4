"""The optimizer simulated by itself: which state there is, and what its step allocates."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn

from hf_ckpt.simulation import optimizers, simulator
from hf_ckpt.simulation.constant_folding import fold
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.optimizers import SUPPORTED, OptimizerStep, simulate_optimizer
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import MemoryChange, Storage
from hf_ckpt.simulation.tracker import Tracker
from tests import zoo

STEP = Step(optim="adamw_torch", max_grad_norm=1.0)


def model() -> nn.Module:
    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False), nn.Linear(8, 8, bias=False))
    made[0].requires_grad_(False)
    return made


def simulated(step: Step, *names: str, is_cuda: bool = True) -> OptimizerStep:
    return simulate_optimizer(model(), step, frozenset(names), Tracker(), is_cuda=is_cuda)


@pytest.mark.parametrize(("optim", "names"), [("adamw_torch", {"1.weight"}), ("adagrad", {"1.weight", "2.weight"})])
def test_only_adagrad_keeps_state_of_a_parameter_without_gradient(optim: str, names: set[str]) -> None:
    state = simulated(replace(STEP, optim=optim), "1.weight").state
    assert {storage.parameter for storage in state} == names
    assert {storage.category for storage in state} == {Category.OPTIMIZER}


def test_the_state_of_adamw_is_two_tensors_like_the_parameter_and_a_count() -> None:
    state = simulated(STEP, "1.weight").state
    assert sorted(storage.num_bytes for storage in state) == [4, 4 * 32, 4 * 32]


def test_what_the_step_allocates_is_freed_in_it() -> None:
    events = simulated(STEP, "1.weight", "2.weight").events
    made = [event.storage for event in events if event.change is MemoryChange.ALLOCATE]
    freed = [event.storage for event in events if event.change is MemoryChange.FREE]
    assert made
    assert set(map(id, made)) == set(map(id, freed))
    assert {event.place.phase for event in events} == {Phase.OPTIMIZER}


def of_equal_layers(*, is_cuda: bool, optim: str, copies: bool) -> OptimizerStep:
    """Simulate the optimizer of a model with equal layers, an embedding like a layer, biases, and two dtypes."""
    with torch.device("meta"):
        layers = [nn.Linear(320, 400) for _ in range(4)]
        made = nn.Sequential(nn.Embedding(400, 320), *layers, nn.Linear(320, 400, dtype=torch.bfloat16))
    names = frozenset(name for name, _ in made.named_parameters() if name != "2.weight")
    looks = mock.patch.object(optimizers, "_makes_state_by_looks", return_value=False)
    tracker = Tracker(run=fold)
    with nullcontext() if copies else looks:
        return simulate_optimizer(made, replace(STEP, optim=optim), names, tracker, is_cuda=is_cuda)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize(
    ("optim", "is_cuda"),
    # A CPU has no memory that CUDA manages; AdEMAMix asks for it all the same.
    [(optim, is_cuda) for optim in SUPPORTED for is_cuda in (True, False) if is_cuda or "paged_ademamix" not in optim],
)
def test_state_copied_from_a_parameter_of_equal_looks_is_what_the_optimizer_makes(optim: str, is_cuda: bool) -> None:
    traced, copied = (of_equal_layers(is_cuda=is_cuda, optim=optim, copies=given) for given in (False, True))
    assert sorted(map(shown, copied.state)) == sorted(map(shown, traced.state))
    assert copied.host_bytes == traced.host_bytes
    assert copied.state or copied.host_bytes or optim == "sgd"
    assert [(each.change, each.seconds, shown(each.storage)) for each in copied.events] == [
        (each.change, each.seconds, shown(each.storage)) for each in traced.events
    ]


def shown(storage: Storage | None) -> tuple[object, ...]:
    return () if storage is None else (storage.parameter, storage.num_bytes, storage.shape, storage.dtype)


def test_copies_have_storages_of_their_own() -> None:
    found = simulated(STEP, "1.weight")
    ids = {id(event.storage) for event in found.events if event.storage is not None}
    for event, copied in zip(found.events, found.copied_events(), strict=True):
        assert id(copied.storage) not in ids
        assert copied.place == event.place
    assert [storage.num_bytes for storage in found.copied_state()] == [storage.num_bytes for storage in found.state]


def test_steps_of_other_lengths_share_the_optimizer() -> None:
    shared = simulator.StepSimulator(zoo.build("llama").model, STEP, CPU)
    with mock.patch.object(simulator, "simulate_optimizer", wraps=simulate_optimizer) as calls:
        peaks = [shared.without_traces(replace(STEP, seq_length=length)).memory(None).peak_bytes for length in (16, 32)]
    assert peaks[0] < peaks[1]
    assert calls.call_count == 1
