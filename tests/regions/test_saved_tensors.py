"""What autograd saves in a region: made again once for each backward that asks, and gone with the graph."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import GraphExecGroup, set_checkpoint_early_stop

import hf_ckpt
from hf_ckpt.errors import RecomputationError
from hf_ckpt.regions import saved_tensors
from hf_ckpt.regions.recompute import recompute
from tests import exactness, modes, zoo


class Reads(torch.autograd.Function):
    """A square, whose backward reads what it saved several times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.times = times
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * sum(ctx.saved_tensors[0] for _ in range(ctx.times)) * (2 / ctx.times), None


class Block(nn.Module):
    """Counts its forwards."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.times = times
        self.runs: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(False)
        hidden = torch.tanh(self.first(nn.functional.dropout(x, 0.5)))
        returned = self.second(Reads.apply(hidden, self.times))
        self.runs[-1] = True
        return returned


@pytest.fixture
def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 4, requires_grad=True)


def gradients(block: Block, inputs: Tensor, run: Callable[..., Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    return list(torch.autograd.grad(run(block, inputs).square().sum(), [inputs, *block.parameters()]))


def plainly(block: Block, inputs: Tensor) -> Tensor:
    returned: Tensor = block(inputs)
    return returned


@pytest.mark.parametrize(("times", "runs"), [(1, 2), (2, 3), (4, 5)])
def test_what_is_asked_for_again_is_computed_again(inputs: Tensor, times: int, runs: int) -> None:
    block = Block(times)
    expected = gradients(block, inputs, plainly)
    block.runs.clear()
    assert all(map(torch.equal, gradients(block, inputs, recompute), expected))
    assert len(block.runs) == runs


def test_each_backward_over_a_graph_recomputes_once(inputs: Tensor) -> None:
    block = Block()
    loss = recompute(block, inputs).square().sum()
    found = [torch.autograd.grad(loss, [inputs, *block.parameters()], retain_graph=True) for _ in range(3)]
    assert len(block.runs) == 4
    assert all(all(map(torch.equal, each, found[0])) for each in found)


@pytest.mark.parametrize(("is_grouped", "runs"), [(False, 3), (True, 2)])
def test_backwards_in_a_group_of_torch_share_one_recomputation(inputs: Tensor, is_grouped: bool, runs: int) -> None:
    first, second = Block(), Block()
    one, other = recompute(lambda x: (first(x), second(x)), inputs)
    with GraphExecGroup() if is_grouped else torch.enable_grad():
        # They have nothing in common, as torch asks of such backwards.
        one.sum().backward()
        other.sum().backward()
    assert len(first.runs) == runs


@pytest.mark.parametrize("is_early", [True, False])
def test_torchs_switch_says_whether_it_stops_early(inputs: Tensor, is_early: bool) -> None:
    block = Block()
    with set_checkpoint_early_stop(is_early):
        recompute(block, inputs).sum().backward()
    assert block.runs == [True, not is_early]


def test_who_asks_outside_of_a_backward_gets_what_there_is(inputs: Tensor) -> None:
    block = Block()
    returned = recompute(block, inputs)
    node: Any = returned.grad_fn
    for number in (1, 2):
        assert node._saved_self.shape == (2, 4)
        assert len(block.runs) == 1 + number
    returned.sum().backward()
    assert len(block.runs) == 4


def test_hooks_around_a_region_see_its_inputs_alone(inputs: Tensor) -> None:
    block, seen = Block(), []
    with saved_tensors_hooks(lambda tensor: seen.append(tensor.shape) or tensor * 2, lambda tensor: tensor / 2):
        returned = recompute(block, inputs)
    assert seen == [inputs.shape]
    returned.sum().backward()
    assert len(block.runs) == 2


def test_an_input_that_is_written_to_is_noticed(inputs: Tensor) -> None:
    given = inputs * 1
    returned = recompute(Block(), given)
    with torch.no_grad():
        given.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        returned.sum().backward()


def test_a_table_that_was_made_in_inference_mode_is_no_part_of_the_graph(inputs: Tensor) -> None:
    with torch.inference_mode():
        table = torch.linspace(0, 1, 4)
    linear = nn.Linear(4, 4)
    steps = [
        run(lambda x, shift: linear(x + shift), inputs, table) for run in (recompute, lambda run, *args: run(*args))
    ]
    found, expected = (torch.autograd.grad(step.square().sum(), [inputs, linear.weight]) for step in steps)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("has_backward", [False, True])
def test_nothing_outlives_the_graph(inputs: Tensor, has_backward: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        block, held = Block(), []

        def noted(module: nn.Module, args: Any, output: Tensor) -> None:
            held.append(weakref.ref(output))

        block.first.register_forward_hook(noted)
        given = inputs * 1
        held.append(weakref.ref(given))
        loss = recompute(block, given).sum()
        del given
        if has_backward:
            loss.backward()
        del loss
        assert [each() for each in held] == [None] * (2 + has_backward)
    finally:
        gc.enable()


def test_inputs_are_saved_by_a_node_where_torch_has_no_other_way(
    inputs: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = Block()
    expected = gradients(block, inputs, plainly)
    monkeypatch.setattr(saved_tensors.SAVED, "gone", "torch._C._autograd._make_saved_tensor")
    monkeypatch.setattr(saved_tensors, "make_saved_tensor", None)
    assert all(map(torch.equal, gradients(block, inputs, recompute), expected))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[2, 2], [2, 3]], r"a tensor of \(torch\.Size\(\[3, 1, 4\]\), .* is saved where the forward saved one of "),
        ([[2, 2], [2]], "2 tensors are saved where the forward saved 3"),
        ([[2], [2, 2]], "does not repeat its forward there"),
    ],
)
def test_other_tensors_than_in_the_forward_stop_the_backward(
    inputs: Tensor, rows: list[list[int]], message: str
) -> None:
    steps = iter(rows)

    def unsteady(x: Tensor) -> Tensor:
        for number in next(steps):
            x = (x * torch.ones(number, 1, 4)).sum(0)
        return x.exp()

    with pytest.raises(RecomputationError, match=message):
        recompute(unsteady, inputs).sum().backward()


@pytest.mark.parametrize("mode", modes.REGIONS)
def test_later_steps_leave_no_cycles_behind(mode: str) -> None:
    case = exactness.build("llama", num_layers=3)
    expected = cycles_of_a_step(case)
    policy, options = modes.REGIONS[mode]
    with hf_ckpt.apply(case.model, policy, **options):
        assert cycles_of_a_step(case) == expected


def cycles_of_a_step(case: zoo.Case) -> int:
    """Return how many objects are in cycles after a step that is like those before it."""
    for _ in range(4):
        exactness.step(case)
    gc.collect()
    gc.disable()
    try:
        exactness.step(case)
        return gc.collect()
    finally:
        gc.enable()
