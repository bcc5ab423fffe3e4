"""What the chain of a model has, where modes do not work in some layers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import hf_ckpt
from hf_ckpt.planner.chain import FULL, NONE
from hf_ckpt.planner.layer_costs import chain_of, with_chunked_head
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.policy.policy import Mode
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Step
from tests import exactness, zoo

ATTENTION, FFN = LayerPlan(Mode.ATTENTION), LayerPlan(Mode.FFN)


class Once:
    """A number that is there once in each forward of a model."""

    left: list[float]

    def fill(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.left = [1.5]

    def take(self, mlp: nn.Module, args: Any, output: Any) -> Any:
        return output * self.left.pop()


def planted(*layers: int) -> zoo.Case:
    """Return a model in which the mlps of some layers take something that is there once."""
    case = exactness.build("llama", num_layers=4)
    for layer in layers:
        once = Once()
        case.model.register_forward_pre_hook(once.fill, with_kwargs=True)
        case.model.model.layers[layer].mlp.register_forward_hook(once.take)
    return case


def test_modes_that_raise_in_some_layers_are_left_out_there(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    simulator = StepSimulator(planted(1, 2).model, Step(batch_size=2, seq_length=8, is_proven=True), CPU)
    chain = chain_of(simulator)
    for layer in chain.layers:
        assert {NONE, ATTENTION, FFN} <= layer.costs.keys()
        assert (FULL in layer.costs) is (layer.layer_idx in (0, 3))
    assert 'Mode "full" is left out for 2 layers: model.layers.' in caplog.text
    chunked = with_chunked_head(chain, simulator)
    assert chunked is not None
    assert chunked.head_bytes < chain.head_bytes


@pytest.mark.sweep
def test_auto_plans_without_them() -> None:
    case = planted(1)
    expected = exactness.step(case)
    size = {"batch_size": 2, "seq_length": 64}
    budget = 0.98 * StepSimulator(case.model, Step(**size), CPU).memory(None).peak_bytes
    with hf_ckpt.apply(case.model, "auto", memory_budget=f"{budget / 2**20:.3f}MiB", exact=True, **size) as applied:
        modes = [str(entry.mode) for entry in applied.plan.stacks[0].layers]
        assert set(modes) != {"none"}
        assert modes[1] in ("none", "attention", "ffn")
        assert exactness.differences(expected, exactness.step(case)) == []
