"""Copies, pickles and saved files of a model under a plan are as without it."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

import hf_ckpt
from hf_ckpt.patch.apply import plan_of
from tests import exactness, traces, zoo
from tests.exactness import every_kind_of_policy, every_policy

pytestmark = pytest.mark.core


def llama(**options: object) -> zoo.Case:
    return exactness.build("llama", **options)


# --- Copies and pickles. ---


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@every_policy
@pytest.mark.parametrize("model_type", ["llama", "opt"])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copy_carries_the_plan_and_runs_its_own_weights(
    copied: Callable[[nn.Module], nn.Module], model_type: str, policy: str
) -> None:
    case = exactness.build(model_type)
    exactness.apply(case.model, policy)
    exactness.step(case)
    other = zoo.Case(model_type, copied(case.model), case.inputs)
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.zero_()
    with exactness.counted_entries(case.model) as (original, _), exactness.counted_entries(other.model) as (_, again):
        got = exactness.step(other)
    assert not original
    assert bool(again) == (policy != "none")
    hf_ckpt.remove(other.model)
    assert exactness.differences(exactness.step(other), got) == []
    assert exactness.differences(exactness.step(exactness.build(model_type)), got) == []


@every_kind_of_policy
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_plans_of_a_model_and_its_copy_are_removed_apart(copied: Callable[[nn.Module], nn.Module], policy: str) -> None:
    case = llama()
    exactness.step(case)
    case.model.zero_grad()
    found = traces.snapshot(case.model)
    applied = exactness.apply(case.model, policy)
    other = copied(case.model)
    assert hf_ckpt.remove(other) is True
    assert hf_ckpt.remove(other) is False
    assert plan_of(case.model) is applied.plan
    for one, two in zip(case.model.modules(), other.modules(), strict=True):
        assert "_hf_ckpt_applied" not in two.__dict__
        assert found[name_of(case.model, one)].keys() == two.__dict__.keys()
    with exactness.counted_entries(case.model) as (_, backward):
        exactness.step(case)
    assert backward

    second = copied(case.model)
    applied.remove()
    assert plan_of(second) == applied.plan
    case.model.zero_grad()
    assert traces.differences(found, traces.snapshot(case.model)) == []
    with exactness.counted_entries(second) as (_, backward):
        exactness.step(zoo.Case("llama", second, case.inputs))
    assert backward


def name_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, candidate in model.named_modules() if candidate is module)


def test_pickle_of_a_removed_plan_is_that_of_the_model() -> None:
    model = llama().model
    before = pickle.dumps(model)
    hf_ckpt.apply(model, "full").remove()
    assert pickle.dumps(model) == before


# --- Files. ---


@every_kind_of_policy
def test_saved_model_is_as_without_the_plan(policy: str, tmp_path: Path) -> None:
    case = llama()
    case.model.save_pretrained(tmp_path / "before")
    with exactness.apply(case.model, policy):
        exactness.step(case)
        case.model.save_pretrained(tmp_path / "during")
    case.model.save_pretrained(tmp_path / "after")
    files = {folder: contents(tmp_path / folder) for folder in ("before", "during", "after")}
    assert files["during"] == files["before"]
    assert files["after"] == files["before"]
    loaded = type(case.model).from_pretrained(tmp_path / "during", attn_implementation="sdpa").train()
    expected = exactness.step(case)
    assert exactness.differences(expected, exactness.step(zoo.Case("llama", loaded, case.inputs))) == []
    with exactness.apply(loaded, policy):
        assert exactness.differences(expected, exactness.step(zoo.Case("llama", loaded, case.inputs))) == []


def contents(folder: Path) -> dict[str, object]:
    """Read every file of a folder, JSON as what it says."""
    return {
        path.name: json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()
        for path in folder.iterdir()
        if path.name != "README.md"
    }


@every_kind_of_policy
def test_saved_adapter_is_as_without_the_plan(policy: str, tmp_path: Path) -> None:
    case = exactness.lora(llama())
    case.model.save_pretrained(tmp_path / "before")
    with exactness.apply(case.model, policy):
        exactness.step(case)
        case.model.save_pretrained(tmp_path / "during")
    assert contents(tmp_path / "during") == contents(tmp_path / "before")
    tensors = load_file(tmp_path / "during" / "adapter_model.safetensors")
    assert len(tensors) == 4 * 2 * 2
    assert "base_model.model.model.layers.3.mlp.down_proj.lora_B.weight" in tensors
    assert all(tensor.any() for tensor in tensors.values())


@every_kind_of_policy
def test_adapter_is_loaded_during_the_plan(policy: str, tmp_path: Path) -> None:
    case = exactness.lora(llama())
    case.model.save_pretrained(tmp_path)
    expected = exactness.step(case)
    other = llama()
    with exactness.apply(other.model, policy):
        loaded = PeftModel.from_pretrained(other.model, tmp_path, is_trainable=True)
        got = exactness.step(zoo.Case("llama", loaded, case.inputs))
        assert exactness.differences(expected, got) == []


@every_kind_of_policy
def test_adapter_is_merged_during_the_plan(policy: str) -> None:
    merged = exactness.lora(llama()).model.merge_and_unload()
    expected = exactness.step(zoo.Case("llama", merged.requires_grad_(True), llama().inputs))
    case = exactness.lora(llama())
    with exactness.apply(case.model, policy):
        exactness.step(case)
        model = case.model.merge_and_unload().requires_grad_(True)
        assert isinstance(model, PreTrainedModel)
        assert list(model.state_dict()) == list(merged.state_dict())
        assert exactness.differences(expected, exactness.step(zoo.Case("llama", model, case.inputs))) == []
    assert exactness.differences(expected, exactness.step(zoo.Case("llama", model, case.inputs))) == []
