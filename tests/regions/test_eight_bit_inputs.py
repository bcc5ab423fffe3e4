"""Regions with 8-bit layers of bitsandbytes hold no more than others: what those keep past autograd is let go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_ckpt
from tests import exactness, live_storages, modes, zoo

bitsandbytes = pytest.importorskip("bitsandbytes")
NODES = ("MatMul8bitFpBackward", "MatMul8bitLtBackward")
PLANS = {name: modes.REGIONS[name] for name in ("full", "segments", "attention", "ffn", "selective", "offload")}


def packed(case: zoo.Case, *, is_trained: bool = False) -> zoo.Case:
    """Return the case with 8-bit weights in its layers, and adapters around some of them."""
    for path, linear in list(case.model.model.layers.named_modules()):
        if type(linear) is nn.Linear:
            layer = bitsandbytes.nn.Linear8bitLt(
                linear.in_features, linear.out_features, bias=False, has_fp16_weights=is_trained
            )
            layer.weight = bitsandbytes.nn.Int8Params(
                linear.weight.data, requires_grad=is_trained, has_fp16_weights=is_trained
            )
            case.model.model.layers.set_submodule(path, layer)
    return exactness.lora(zoo.Case(case.model_type, case.model.requires_grad_(is_trained).to("cpu"), case.inputs))


def built(kind: str) -> zoo.Case:
    case = exactness.build("llama")
    return packed(case) if kind == "int8" else exactness.lora(case)


def held_bytes(case: zoo.Case, policy: str, options: dict[str, Any]) -> int:
    with torch.no_grad():
        zoo.loss(case.model, case.inputs)
    alive = live_storages.of(case.model, case.inputs.values())
    with hf_ckpt.apply(case.model, policy, prove="off", **options), alive:
        loss = zoo.loss(case.model, case.inputs)
        num_bytes = alive.num_bytes()
        loss.backward()
    return num_bytes


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_those_without_a_plan(plan: str) -> None:
    case = built("int8")
    expected = exactness.step(case)
    policy, options = PLANS[plan]
    with hf_ckpt.apply(case.model, policy, **options):
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []


def test_held_share_is_no_larger_than_with_float32_weights() -> None:
    names = ("none", "full", "attention", "selective")
    held = {kind: {name: held_bytes(built(kind), name, {}) for name in names} for kind in ("int8", "float32")}
    full = {kind: found["full"] / found["none"] for kind, found in held.items()}
    assert full["int8"] <= 1.1 * full["float32"]
    assert held["int8"]["selective"] < held["int8"]["none"]
    assert held["int8"]["attention"] < held["int8"]["none"]


def kept_on_nodes(loss: Tensor) -> list[Any]:
    """Return what the nodes of 8-bit products keep in a graph."""
    found, todo, seen = [], [loss.grad_fn], set()
    while todo:
        node: Any = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            if type(node).__name__ in NODES:
                found += [node.A] if hasattr(node, "A") else node.tensors
    return found


@pytest.mark.parametrize("is_training", [True, False])
def test_both_kinds_of_nodes_keep_nothing(is_training: bool) -> None:
    case = built("int8")
    # In evaluation, and on CUDA, layers take other kernels.
    for module in case.model.modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            module.train(is_training)
    assert any(each is not None for each in kept_on_nodes(zoo.loss(case.model, case.inputs)))
    with hf_ckpt.apply(case.model, "full"):
        found = kept_on_nodes(zoo.loss(case.model, case.inputs))
    assert found
    assert all(each is None for each in found)


def test_weights_that_train_keep_their_inputs_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    case = packed(exactness.build("llama"), is_trained=True)
    case.model.requires_grad_(True)
    caplog.set_level("INFO")
    with hf_ckpt.apply(case.model, "full"):
        assert any(each is not None for each in kept_on_nodes(zoo.loss(case.model, case.inputs)))
    assert "8-bit layers of LlamaDecoderLayer train their weights" in caplog.text


def test_hooks_are_gone_with_the_plan() -> None:
    case = built("int8")
    before = [dict(module._forward_hooks) for module in case.model.modules()]
    hf_ckpt.apply(case.model, "full").remove()
    assert [dict(module._forward_hooks) for module in case.model.modules()] == before
