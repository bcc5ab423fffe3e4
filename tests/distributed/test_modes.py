"""Selective, offload, tiles and the chunked head under each engine: losses and weights of a run without a plan.

Tiles and the head add the same terms in another order (`tests/regions/test_exact_modes.py`); everything else is exact
to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy

import hf_ckpt
from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import HFCkptError
from tests import modes, zoo
from tests.distributed.runs import ENGINES, KINDS, STEPS, Outcome, local, rows, train
from tests.distributed.test_same_numbers import without_plan
from tests.training import changed

CPU = {"to": "cpu", "min_bytes": 0}
MODES: dict[str, tuple[object, dict[str, Any]]] = {
    "selective": ("selective", {}),
    "selective_attention_offload": ("selective_attention", {"offload": CPU}),
    "offload": ("full", {"offload": CPU}),
    "weights": ("full", {"weights": "cpu"}),
    "tiles": ("full", {"tiles": 3}),
    "none_tiles": ("none", {"tiles": 3}),
    "head": ("none", {"head": "chunked"}),
    "all": ("full", {"offload": CPU, "tiles": 3, "head": "chunked"}),
}
IN_ANOTHER_ORDER = {"tiles", "none_tiles", "head", "all"}
# Dropout of the adapters lies inside the tiles.
SETTINGS = {mode: ("full", 1) if mode in IN_ANOTHER_ORDER else ("lora", 2) for mode in MODES}
CLOSE = 1e-6
"""Of the losses, and of the length of a weight, after a few steps in float32."""
# Adam takes a step of full size for the rounding error of a gradient that should be zero.
SGD = {"optim": "sgd", "learning_rate": 0.1}


# Sharded weights are what can go wrong: FSDP2 meets all, DDP what stands for all.
MODES_OF = {
    "ddp": ["selective", "weights", "all"],
    "fsdp1": ["selective", "offload", "tiles", "head"],
    "fsdp2": [mode for mode in MODES if mode != "weights"],
}


def cases() -> Iterator[tuple[str, str, str, int, str]]:
    for engine in ENGINES:
        for mode in MODES_OF[engine]:
            yield engine, "llama", *SETTINGS[mode], mode
    yield "fsdp2", "qwen3_moe", "full", 1, "selective"
    yield "fsdp2", "qwen3_moe", "full", 1, "all"


@functools.cache
def without_plan_by_sgd(engine: str, model_type: str) -> Outcome:
    return train(KINDS["full"](model_type), engine, **SGD)


@pytest.mark.parametrize(("engine", "model_type", "kind", "accumulation", "mode"), [*cases()])
def test_training_is_as_without_a_plan(engine: str, model_type: str, kind: str, accumulation: int, mode: str) -> None:
    policy, options = MODES[mode]
    model, plugin = KINDS[kind](model_type), HFCkptCallback(policy, **options)
    if mode in IN_ANOTHER_ORDER:
        expected, got = without_plan_by_sgd(engine, model_type), train(model, engine, plugin, **SGD)
        check_near(expected, got)
    else:
        expected = without_plan(engine, model_type, kind, accumulation)
        got = train(model, engine, plugin, gradient_accumulation_steps=accumulation)
        assert got.losses == expected.losses
        assert changed(expected.weights, got.weights) == []
    assert expected.engine == got.engine == engine
    assert len(got.losses) == STEPS
    assert got.names == expected.names


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_weights_that_an_engine_shards_do_not_wait(engine: str) -> None:
    with pytest.raises(HFCkptError, match="FSDP shards them over the ranks"):
        train(KINDS["lora"]("llama"), engine, HFCkptCallback("full", weights="cpu"))


def test_a_model_whose_weights_wait_can_be_wrapped() -> None:
    """DDP refuses parameters on two kinds of devices, and sends what rank 0 has: both leave out what waits."""
    case = zoo.build("llama")
    for layer in case.model.model.layers:
        layer.mlp.requires_grad_(False)
    with hf_ckpt.apply(case.model, "full", weights="cpu") as applied:
        left_out = case.model._ddp_params_and_buffers_to_ignore
        assert len(left_out) == sum(len(each.names) for each in applied.waiting.layers) > 0
        wrapped = nn.parallel.DistributedDataParallel(case.model)
        zoo.loss(wrapped, case.inputs).backward()
        gradient = next(each.grad for each in case.model.parameters() if each.grad is not None)
        others = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(others, gradient)
        assert all(torch.equal(gradient, other) for other in others)
    assert not hasattr(case.model, "_ddp_params_and_buffers_to_ignore")


def check_near(expected: Outcome, got: Outcome) -> None:
    """Assert what runs that add up in another order have in common."""
    assert got.losses == pytest.approx(expected.losses, rel=CLOSE)
    assert [name for name, weight in expected.weights.items() if not is_close(weight, got.weights[name])] == []


def is_close(expected: Tensor, got: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(expected - got) <= CLOSE * torch.linalg.vector_norm(expected))


# --- Where the head's weight is. ---


def by_fsdp1(model: nn.Module) -> nn.Module:
    units = {*model.model.layers, model.lm_head}
    policy = CustomPolicy(units.__contains__)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def by_fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*model.model.layers, model.lm_head, model):
        fully_shard(unit, mesh=mesh)
    return model


@pytest.mark.parametrize("shard", [by_fsdp1, by_fsdp2])
def test_head_that_is_a_unit_of_its_own_is_gathered(shard: Callable[[nn.Module], nn.Module]) -> None:
    batch = {"input_ids": rows()[dist.get_rank()]["input_ids"][None]}
    results = []
    for policy in ({}, {"head": "chunked"}):
        torch.manual_seed(0)
        model = shard(zoo.build("llama", dropout=0.0).model)
        with hf_ckpt.apply(model, "none", **policy):
            loss = model(**batch, labels=batch["input_ids"]).loss
            loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.numel()}
        results.append((loss.detach(), {name: local(gradient) for name, gradient in gradients.items()}))
    expected, got = results
    assert expected[1].keys() == got[1].keys() != set()
    assert modes.worst(modes.apart(expected, got))[0] <= CLOSE
