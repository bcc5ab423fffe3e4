"""Routers are found by what code calls and by names, and nothing else is taken for one."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from hf_ckpt.structure.called_names import calls, class_calls
from hf_ckpt.structure.layers import find_layers
from hf_ckpt.structure.routers import has_router
from tests import zoo

# Layers of a mixture come after dense ones in some.
MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss", "olmoe", "qwen3_next", "llama4_text", "phimoe", "granitemoe", "jetmoe"]
DENSE = ["llama", "qwen3", "gemma3_text", "gpt2", "falcon", "mamba2", "bamba", "t5", "bert", "qwen3_5_text"]


@pytest.mark.parametrize(
    ("model_type", "is_mixture"), [*((each, True) for each in MIXTURES), *((each, False) for each in DENSE)]
)
def test_layers_with_a_router(model_type: str, is_mixture: bool) -> None:
    torch.manual_seed(0)
    case = zoo.build(model_type, num_layers=2)
    found = {has_router(layer.module.modules()) for stack in find_layers(case.model) for layer in stack.layers}
    assert found == {is_mixture}


def test_only_the_ffn_of_a_mixture_has_it() -> None:
    torch.manual_seed(0)
    (stack,) = find_layers(zoo.build("qwen3_moe", num_layers=1).model)
    (layer,) = stack.layers
    assert [has_router(layer.submodule(name).modules()) for name in (*layer.attention, *layer.ffn)] == [False, True]


def _second_best(scores: Tensor) -> Tensor:
    return scores.topk(2).indices[..., 1]


class _Calls(nn.Linear):
    """Chooses by a function of its module."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _second_best(super().forward(hidden))


class _Inherits(_Calls):
    """By what another class defines."""


class _Router(nn.Linear):
    """By its name."""


@pytest.mark.parametrize(("kind", "found"), [(_Calls, True), (_Inherits, True), (_Router, True), (nn.Linear, False)])
def test_classes(kind: type[nn.Linear], found: bool) -> None:
    assert has_router([kind(2, 2)]) is found


def test_names_are_matched_as_a_whole() -> None:
    assert calls(_second_best, re.compile("topk"))
    assert not calls(_second_best, re.compile("top"))
    assert not class_calls(_Inherits, re.compile("topk"))
    # What has no Python code calls nothing, and neither does what torch defines.
    assert not calls(len, re.compile("topk"))
    assert not class_calls(nn.Module, re.compile(".*"))
