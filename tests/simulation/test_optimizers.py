"""The optimizer of a simulated step: the Trainer's class and groups, and the state that a real one has."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import Trainer, TrainingArguments

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.simulation.optimizers import SUPPORTED, host_tensors, make_optimizer
from hf_ckpt.simulation.step import Sharding, Step


class Model(nn.Module):
    """Two parameters have at least 4,096 elements, from which bitsandbytes keeps 8-bit state: `embed` and `wide`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.wide = nn.Linear(64, 128)
        self.narrow = nn.Linear(128, 8, bias=False)
        self.norm = nn.LayerNorm(8)


def on_fakes(model: nn.Module) -> tuple[nn.Module, FakeTensorMode]:
    mode = FakeTensorMode()
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(mode.from_tensor(parameter.detach())) for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo), mode


def two_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """For each parameter, what the optimizer keeps: shape and dtype of tensors, type of the rest."""
    return {
        name: {
            key: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value).__name__
            for key, value in optimizer.state[parameter].items()
        }
        for name, parameter in model.named_parameters()
    }


def simulated(model: nn.Module, step: Step, *, is_cuda: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    twin, mode = on_fakes(model)
    with mode:
        optimizer = make_optimizer(twin, step, is_cuda=is_cuda)
        two_steps(twin, optimizer)
    return twin, optimizer


def real(model: nn.Module, folder: Path, **arguments: Any) -> torch.optim.Optimizer:
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **arguments)
    return Trainer(model=model, args=args).create_optimizer()


@pytest.mark.parametrize("optim", SUPPORTED)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
def test_state_is_that_of_the_trainers_own_optimizer(optim: str, tmp_path: Path) -> None:
    model = Model()
    expected = real(model, tmp_path, optim=optim)
    two_steps(model, expected)

    for is_cuda in (False, True):
        twin, optimizer = simulated(model, Step(optim=optim), is_cuda=is_cuda)
        assert type(optimizer) is type(expected)
        assert state_of(twin, optimizer) == state_of(model, expected)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_groups_and_arguments_are_those_of_the_trainer(optim: str, tmp_path: Path) -> None:
    arguments = {"weight_decay": 0.1, "adam_beta2": 0.95, "learning_rate": 1e-4}
    model = Model()
    twin, optimizer = simulated(model, Step(optim=optim, optim_arguments=arguments), is_cuda=False)
    expected = real(model, tmp_path, optim=optim, **arguments)

    names = {id(parameter): name for name, parameter in [*model.named_parameters(), *twin.named_parameters()]}
    described = [
        [{**group, "params": [names[id(each)] for each in group["params"]]} for group in each.param_groups]
        for each in (optimizer, expected)
    ]
    assert described[0] == described[1]
    assert [group["params"] for group in described[0]] == [
        ["embed.weight", "wide.weight", "narrow.weight"],
        ["wide.bias", "norm.weight", "norm.bias"],
    ]


def test_eight_bit_state_is_for_large_matrices_and_never_for_embeddings() -> None:
    twin, optimizer = simulated(Model(), Step(optim="adamw_8bit"), is_cuda=True)
    dtypes = {name: optimizer.state[parameter]["state1"].dtype for name, parameter in twin.named_parameters()}
    assert [name for name, dtype in dtypes.items() if dtype is torch.uint8] == ["wide.weight"]


def test_settings_of_bitsandbytes_that_are_one_for_the_process_stay_as_they_are() -> None:
    from bitsandbytes.optim import GlobalOptimManager

    before = copy.copy(vars(GlobalOptimManager.get_instance()))
    overrides = list(before["module_weight_config_triple"])
    simulated(Model(), Step(optim="adamw_8bit"), is_cuda=True)
    assert vars(GlobalOptimManager.get_instance()) == before
    assert before["module_weight_config_triple"] == overrides


def test_paged_state_of_large_parameters_lies_on_the_host_on_cuda_alone() -> None:
    sizes = {}
    for is_cuda in (False, True):
        twin, optimizer = simulated(nn.Linear(400, 300), Step(optim="paged_adamw_32bit"), is_cuda=is_cuda)
        sizes[is_cuda] = [each.untyped_storage().nbytes() for each in host_tensors(optimizer)]
        assert all(isinstance(optimizer.state[twin.weight][key], FakeTensor) for key in ("state1", "state2"))
    assert sizes == {False: [], True: [400 * 300 * 4, 400 * 300 * 4]}


def test_paged_ademamix_has_two_averages_in_one_tensor_on_the_host() -> None:
    _, optimizer = simulated(nn.Linear(400, 300), Step(optim="paged_ademamix_32bit"), is_cuda=True)
    assert [tuple(each.shape) for each in host_tensors(optimizer)] == [(2, 300, 400), (300, 400)]


def test_on_cuda_torchs_optimizers_work_on_all_tensors_of_a_group_together() -> None:
    chosen = {}
    for optim in ("adamw_torch", "sgd", "adagrad", "rmsprop", "adamw_torch_fused", "adafactor"):
        _, optimizer = simulated(Model(), Step(optim=optim), is_cuda=True)
        (chosen[optim],) = {(group.get("foreach"), group.get("fused")) for group in optimizer.param_groups}
    assert chosen == {
        "adamw_torch": (True, None),
        "sgd": (True, None),
        "adagrad": (True, None),
        "rmsprop": (True, None),
        "adamw_torch_fused": (None, True),
        "adafactor": (None, None),
    }


def test_state_of_paged_optimizers_alone_lies_on_the_host() -> None:
    made = {optim: simulated(nn.Linear(400, 300), Step(optim=optim), is_cuda=True)[1] for optim in SUPPORTED}
    assert [optim for optim, optimizer in made.items() if [*host_tensors(optimizer)]] == [
        "paged_adamw_8bit",
        "paged_adamw_32bit",
        "paged_ademamix_8bit",
        "paged_ademamix_32bit",
        "paged_lion_8bit",
        "paged_lion_32bit",
    ]


@pytest.mark.parametrize("optim", ["galore_adamw", "lomo", "adamw_torch_8bit", "stable_adamw"])
def test_other_optimizers_are_refused_by_name(optim: str) -> None:
    with pytest.raises(UnsupportedError, match=f'The step of optimizer "{optim}" cannot be simulated. Those that can'):
        make_optimizer(Model(), Step(optim=optim), is_cuda=True)


def test_a_misspelt_optimizer_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnsupportedError, match='Did you mean "adamw_8bit"'):
        make_optimizer(Model(), Step(optim="adamw_8bits"), is_cuda=True)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "zero3"])
def test_adafactor_is_refused_where_its_shards_are_flat(engine: str) -> None:
    step = Step(optim="adafactor", sharding=Sharding(engine=engine, world_size=2))
    with pytest.raises(UnsupportedError, match=f"Adafactor cannot be simulated under {engine}: of a shard"):
        make_optimizer(Model(), step, is_cuda=True)
