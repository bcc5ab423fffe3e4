"""The workspaces that torch gives cuBLAS: one for each thread that runs matrix products, on CUDA alone."""

from __future__ import annotations

import pytest
from torch import nn

import hf_ckpt
from hf_ckpt.planner.search import plan_for
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.simulation.cuda.cublas import add_workspaces
from hf_ckpt.simulation.devices import CPU, find_device, workspace_bytes
from hf_ckpt.simulation.evaluation import simulate_evaluation
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, Place, StepMemory
from hf_ckpt.simulation.tape import Event, Tape
from tests import exactness

A100, H100 = find_device("a100-80gb"), find_device("h100")
MIB = 2**20
SMALL, LARGE = 8 * MIB + 128 * 1024, 32 * MIB
STEP = Step(batch_size=1, seq_length=16)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    built: nn.Module = exactness.build("llama").model
    return built


def workspaces(memory: StepMemory) -> int:
    return memory.by_category.get(Category.WORKSPACES, 0)


def products(*phases: Phase, operator: str = "aten.mm.default") -> Tape:
    return Tape(events=[Event(Place(phase, operator=operator)) for phase in phases])


@pytest.mark.parametrize(
    ("phases", "num_threads"),
    [
        ((), 0),
        ((Phase.FORWARD, Phase.FORWARD), 1),
        ((Phase.FORWARD, Phase.OPTIMIZER), 1),
        ((Phase.OPTIMIZER,), 1),
        ((Phase.BACKWARD, Phase.RECOMPUTATION), 1),
        ((Phase.FORWARD, Phase.RECOMPUTATION), 2),
        ((Phase.FORWARD, Phase.BACKWARD), 2),
    ],
)
def test_each_thread_that_runs_products_has_one(phases: tuple[Phase, ...], num_threads: int) -> None:
    tape = products(*phases)
    add_workspaces(tape, A100)
    assert [storage.num_bytes for storage in tape.before] == [SMALL] * num_threads


@pytest.mark.parametrize(
    ("operator", "has_one"),
    [
        ("aten.addmm.default", True),
        ("aten.addmm_.default", True),
        ("aten.bmm.out", True),
        ("aten._int_mm.default", True),
        ("aten.mul.Tensor", False),
        ("aten._scaled_dot_product_flash_attention.default", False),
        ("aten._grouped_mm.default", False),
        ("bitsandbytes.mm.default", False),
        ("", False),
    ],
)
def test_products_of_cublas_alone_need_one(operator: str, has_one: bool) -> None:
    tape = products(Phase.FORWARD, operator=operator)
    add_workspaces(tape, A100)
    assert len(tape.before) == has_one


def test_a_step_has_two_all_the_time(model: nn.Module) -> None:
    for device, each in ((A100, SMALL), (H100, LARGE)):
        memory = simulate_step(model, None, STEP, device)
        column = memory.timeline.bytes_by_category[Category.WORKSPACES]
        assert set(column) == {2 * each}
        assert workspaces(memory) == 2 * each == 2 * workspace_bytes(device)
        assert sum(memory.by_category.values()) == memory.peak_bytes
    assert Category.WORKSPACES not in simulate_step(model, None, STEP, CPU).timeline.bytes_by_category


@pytest.mark.parametrize("policy", ["full", "selective", "ffn"])
def test_plans_have_the_same_two_also_where_equal_layers_are_traced_once(model: nn.Module, policy: str) -> None:
    for traces_all in (False, True):
        assert workspaces(simulate_step(model, policy, STEP, A100, traces_all=traces_all)) == 2 * SMALL


def test_a_batch_of_evaluation_has_those_of_the_steps_around_it(model: nn.Module) -> None:
    assert workspaces(simulate_evaluation(model, STEP, A100).memory) == 2 * SMALL


def test_the_planner_counts_them_once(model: nn.Module) -> None:
    full = simulate_step(model, "full", STEP, A100)
    # They are in the least that there is, and so in what the planner compares with a budget.
    least = plan_for(model, STEP, A100, full.peak_bytes, allowed=Allowed(exact=True))
    assert workspaces(least.memory) == 2 * SMALL
    assert least.memory.peak_bytes <= full.peak_bytes
    with pytest.raises(hf_ckpt.BudgetError):
        plan_for(model, STEP, A100, least.memory.peak_bytes - 2 * SMALL, allowed=Allowed(exact=True))
