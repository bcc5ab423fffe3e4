"""Whether the embeddings' output requires gradients: on PEFT models where that is worth it, or as the user says."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_ckpt
from hf_ckpt import HFCkptCallback
from hf_ckpt.trainer.input_gradients import input_embeddings
from tests import zoo
from tests.exactness import POLICIES
from tests.training import During, llama, lora, losses, trainer

pytestmark = pytest.mark.core

ON = "Input gradients are on, as PEFT users expect; they cost one gradient of the embeddings' output."
LATER = {"layers_to_transform": [2, 3], "target_modules": ["q_proj", "v_proj"]}


def watch(model: nn.Module) -> list[tuple[bool, bool]]:
    """Collect (is training, output requires gradients) of the first layer's input."""
    seen: list[tuple[bool, bool]] = []
    layers = next(module for name, module in model.named_modules() if name.endswith("model.layers"))

    def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append((module.training, args[0].requires_grad))

    # Not on the layer itself: under transformers 5.0 its hooks lie inside the region.
    layers[0].input_layernorm.register_forward_pre_hook(note)
    return seen


def run(model: nn.Module, folder: Path, policy: str = "none", **options: Any) -> list[float]:
    mode, given = POLICIES[policy]
    done = trainer(model, folder, HFCkptCallback(mode, **given, **options), eval_strategy="steps", eval_steps=1)
    done.train()
    return losses(done)


def test_adapters_in_all_layers_get_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = lora()
    seen = watch(model)
    with caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run(model, tmp_path)
    assert set(seen) == {(True, True), (False, False)}
    assert caplog.messages.count(ON) == 1


def test_adapters_in_later_layers_alone_do_not_and_the_price_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = lora(**LATER)
    seen = watch(model)
    with caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run(model, tmp_path)
    assert set(seen) == {(True, False), (False, False)}
    assert (
        "Input gradients are off: the first trainable parameter is behind layer 1, and with them 2 frozen layers "
        "would keep activations and run backward for nothing. input_require_grads=True turns them on."
    ) in caplog.messages


@pytest.mark.parametrize("adapters", [{}, LATER])
@pytest.mark.parametrize("asked", [True, False])
def test_the_users_word_decides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: bool, adapters: dict[str, Any]
) -> None:
    model = lora(**adapters)
    seen = watch(model)
    with caplog.at_level(logging.INFO, logger="hf_ckpt"):
        run(model, tmp_path, input_require_grads=asked)
    assert set(seen) == {(True, asked), (False, False)}
    assert "Input gradients" not in caplog.text


@pytest.mark.parametrize(("asked", "expected"), [(None, False), (True, True), (False, False)])
def test_frozen_model_without_peft_gets_them_on_request_only(
    tmp_path: Path, asked: bool | None, expected: bool
) -> None:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    seen = watch(model)
    run(model, tmp_path, input_require_grads=asked)
    assert set(seen) == {(True, expected), (False, False)}


def test_trainable_embeddings_keep_their_gradient_when_told_off(tmp_path: Path) -> None:
    model = llama()
    before = model.model.embed_tokens.weight.detach().clone()
    run(model, tmp_path, input_require_grads=False)
    assert not torch.equal(model.model.embed_tokens.weight, before)


@pytest.mark.parametrize("policy", ["none", "full", "segments_2"])
@pytest.mark.parametrize("asked", [True, False, None])
def test_losses_do_not_depend_on_the_choice(tmp_path: Path, asked: bool | None, policy: str) -> None:
    plain = trainer(lora(**LATER), tmp_path, eval_strategy="steps", eval_steps=1)
    plain.train()
    assert run(lora(**LATER), tmp_path, policy, input_require_grads=asked) == losses(plain)


def test_those_of_another_library_are_switched_off_where_they_only_cost(tmp_path: Path) -> None:
    model = lora(**LATER)
    # As trl and transformers do where activation checkpointing is on in the training arguments.
    model.enable_input_require_grads()
    seen = watch(model)
    run(model, tmp_path)
    assert {requires_grad for is_training, requires_grad in seen if is_training} == {False}
    seen.clear()
    trainer(model, tmp_path).train()
    assert set(seen) == {(True, True)}


def test_nothing_is_left_of_them_and_the_model_can_be_pickled_throughout(tmp_path: Path) -> None:
    pickles: list[bytes] = []
    model = lora()
    used = HFCkptCallback("full", input_require_grads=True)
    during = During("on_step_end", lambda model: pickles.append(pickle.dumps(model)))
    trainer(model, tmp_path, used, during).train()
    assert not any(module._forward_hooks for module in model.modules())
    assert pickle.loads(pickle.dumps(model)).peft_config.keys() == {"default"}
    copy = pickle.loads(pickles[0])
    assert hf_ckpt.remove(copy)
    assert len(pickles) == 2


def test_frozen_vision_tower_does_not_get_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = zoo.build("llava")
    targets = r".*language_model.*\.(q|v)_proj"
    model = get_peft_model(case.model, LoraConfig(r=2, target_modules=targets)).train()
    seen: dict[str, bool] = {}
    for name in ("vision", "language"):
        layer = next(layer for path, layer in model.named_modules() if name in path and path.endswith("layers.0"))
        layer.self_attn.q_proj.register_forward_pre_hook(
            lambda _, args, name=name: seen.__setitem__(name, args[0].requires_grad)
        )
    stepped = trainer(model, tmp_path, HFCkptCallback("none"), max_steps=1, remove_unused_columns=False)
    stepped.train_dataset = [{name: values[idx] for name, values in case.inputs.items()} for idx in range(2)]
    stepped.train()
    assert seen == {"vision": False, "language": True}


def test_embeddings_are_those_of_the_model_as_a_whole() -> None:
    model = lora()
    assert input_embeddings(model) is model.base_model.model.model.embed_tokens
    assert input_embeddings(nn.Linear(2, 2)) is None
