"""The generators of a device, whose state a recomputation brings back: which devices a region's call may draw on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_ckpt.regions import execution_state, recompute
from hf_ckpt.regions.execution_state import RandomState

DEVICE = torch.device("meta")
# A device that every build of torch has. A stand-in says that it has a generator.


@pytest.fixture(autouse=True)
def _meta_is_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(_initialized=True, current_device=lambda: 0, get_rng_state=lambda device: torch.zeros(1))
    monkeypatch.setattr(execution_state, "_accelerator_type", lambda: "meta")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Any]]:
    """Return what says, in each call, on which devices it may draw."""
    found: list[Sequence[Any]] = []

    def devices_in_use(kind: str, values: Sequence[Any]) -> list[torch.device]:
        found.append(values)
        return []

    monkeypatch.setattr(execution_state, "_devices_in_use", devices_in_use)
    return found


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_an_input_by_keyword_names_its_device(given: list[Sequence[Any]], needs_gradient: bool) -> None:
    layer, hidden = nn.Linear(2, 2, device=DEVICE), torch.ones(1, 2, device=DEVICE, requires_grad=needs_gradient)
    returned = recompute.recompute(partial(layer.forward, input=hidden))
    assert returned.shape == (1, 2)
    (values,) = given
    assert any(each is hidden for each in values)


def test_the_state_of_the_current_device_is_read_without_a_tensor_on_it() -> None:
    assert RandomState.of().devices == (0,)
    assert RandomState.of(torch.ones(1)).devices == (0,)


def test_states_of_other_devices_are_no_difference() -> None:
    cpu, one, two = torch.zeros(1), torch.ones(1), torch.ones(1) * 2
    forward = RandomState(cpu, (0, 1), (one, two), "cuda")
    assert forward.is_same(RandomState(cpu, (1,), (two,), "cuda"))
    assert not forward.is_same(RandomState(cpu, (1,), (one,), "cuda"))


def test_the_current_device_counts_only_where_no_tensor_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the backward, whose threads have one each, it is another one.
    module = SimpleNamespace(_initialized=True, current_device=lambda: 3)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    elsewhere = SimpleNamespace(device=torch.device("meta", 1))
    monkeypatch.setattr(execution_state, "tensors_in", lambda value: [value])
    assert execution_state._devices_in_use("meta", [elsewhere]) == [torch.device("meta", 1)]
    assert execution_state._devices_in_use("meta", []) == [torch.device("meta", 3)]


def test_a_weight_says_where_a_layer_computes(given: list[Sequence[Any]]) -> None:
    layer = nn.Linear(2, 2)
    recompute.recompute(partial(layer.forward, input=torch.ones(1, 2)))
    assert given[0][-1] is layer.weight


def test_a_device_that_was_not_used_has_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(_initialized=False))
    assert RandomState.of(torch.ones(1, device=DEVICE)).devices == ()


def test_a_block_draws_what_was_drawn_on_the_device_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    start, later = torch.zeros(1), torch.ones(1)
    states = [start]

    def set_states(devices: Sequence[int], wanted: Sequence[torch.Tensor], device_type: str) -> None:
        assert (list(devices), device_type) == ([0], "cuda")
        states[:] = wanted

    # torch leaves the generators of meta alone.
    monkeypatch.setattr(execution_state, "_accelerator_type", lambda: "cuda")
    module = torch.get_device_module("cuda")
    monkeypatch.setattr(module, "get_rng_state", lambda device: states[0])
    monkeypatch.setattr(module, "set_rng_state", lambda state, device: states.__setitem__(0, state), raising=False)
    monkeypatch.setattr(execution_state, "set_device_states", set_states)
    found = RandomState.of()
    states[0] = later
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with found.brought_back():
        assert states[0] is start
        torch.rand(1)
        states[0] = torch.full((1,), 2.0)
    assert states[0] is later
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_of_the_host_are_brought_back_and_go_on_from_where_they_were() -> None:
    random.seed(0)
    found = RandomState.of()
    first, second = random.random(), random.random()
    random.seed(0)
    random.random()
    with found.brought_back():
        assert random.random() == first
    assert random.random() == second
