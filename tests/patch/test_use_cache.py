"""`use_cache` is False in training steps, and the user's own value everywhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_ckpt
from hf_ckpt import HFCkptCallback
from hf_ckpt.patch.use_cache import UseCache
from tests import exactness, zoo
from tests.training import During, llama, lora, rows, trainer

pytestmark = pytest.mark.core

BUSY = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


def watch(model: nn.Module) -> dict[str, set[object]]:
    """Collect the values that forwards see, in training and in evaluation."""
    seen: dict[str, set[object]] = {"training": set(), "evaluation": set()}

    def note(module: nn.Module, *args: Any) -> None:
        seen["training" if module.training else "evaluation"].add(module.config.use_cache)

    model.register_forward_pre_hook(note)
    return seen


def saved(folder: Path) -> list[object]:
    """Return the value in every saved config below a folder; "missing" where there is none."""
    configs = sorted(folder.rglob("config.json"))
    return [json.loads(path.read_text()).get("use_cache", "missing") for path in configs]


@pytest.mark.parametrize("user", [True, False])
@pytest.mark.parametrize("policy", ["full", "none"])
def test_training_sees_false_and_everything_else_the_users_value(tmp_path: Path, policy: str, user: bool) -> None:
    model = llama(use_cache=user)
    seen = watch(model)
    run = trainer(model, tmp_path, HFCkptCallback(policy), gradient_accumulation_steps=2, **BUSY)
    run.train()
    run.save_model()
    assert seen == {"training": {False}, "evaluation": {user}}
    assert model.config.use_cache is user
    assert saved(tmp_path) == [user] * 3


def test_evaluation_before_the_first_step_sees_the_users_value(tmp_path: Path) -> None:
    model = llama()
    seen = watch(model)
    trainer(model, tmp_path, HFCkptCallback("full"), eval_on_start=True, max_steps=1).train()
    assert seen == {"training": {False}, "evaluation": {True}}


@pytest.mark.parametrize("training", [True, False])
def test_generation_from_on_evaluate_has_its_cache_and_the_right_tokens(tmp_path: Path, training: bool) -> None:
    found: list[tuple[bool, list[torch.Tensor], list[int]]] = []

    def generate(model: nn.Module) -> None:
        # Even in training mode, where the seam of transformers would drop the cache; dropout is off for it.
        lengths: list[int] = []
        hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
        prompt = torch.tensor([[5, 6, 7]])
        short = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        tokens = [model.train(training).generate(prompt, **short), model.eval().generate(prompt, **short)]
        hook.remove()
        found.append((model.config.use_cache, tokens, lengths))

    model = llama(attention_dropout=0.0)
    trainer(model, tmp_path, HFCkptCallback("full"), During("on_evaluate", generate), **BUSY).train()
    for use_cache, tokens, lengths in found:
        assert use_cache is True
        assert torch.equal(tokens[0], tokens[1])
        assert lengths == [3, 1, 1, 1] * 2
    assert len(found) == 2


def test_configs_inside_a_vision_language_model_come_back_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.build("qwen2_vl").model
    language = model.model.language_model
    language.config.use_cache = True
    assert not hasattr(model.config, "use_cache")
    seen = watch(language)
    run = trainer(model, tmp_path, HFCkptCallback("full", skip_frozen=True), **BUSY)
    texts = [{name: tokens % 20 + zoo.FIRST_TOKEN for name, tokens in text.items()} for text in rows(4)]
    run.train_dataset = run.eval_dataset = texts
    run.train()
    run.save_model()
    assert seen == {"training": {False}, "evaluation": {True}}
    # The Trainer adds the value to a config that had none.
    assert not hasattr(model.config, "use_cache")
    assert saved(tmp_path) == ["missing"] * 3
    inner = [json.loads(path.read_text())["text_config"]["use_cache"] for path in tmp_path.rglob("config.json")]
    assert inner == [True] * 3


def test_base_model_of_an_adapter_gets_its_value_back(tmp_path: Path) -> None:
    model = lora()
    seen = watch(model.base_model.model)
    trainer(model, tmp_path, HFCkptCallback("full"), **BUSY).train()
    assert seen == {"training": {False}, "evaluation": {True}}
    assert model.config.use_cache is True


def test_second_train_sees_the_users_value_again(tmp_path: Path) -> None:
    model = llama()
    run = trainer(model, tmp_path, HFCkptCallback("full"), **BUSY)
    run.train()
    seen = watch(model)
    run.train()
    assert seen == {"training": {False}, "evaluation": {True}}
    assert model.config.use_cache is True


def test_value_set_between_two_trainings_is_the_users(tmp_path: Path) -> None:
    model = llama()
    run = trainer(model, tmp_path, HFCkptCallback("full"), **BUSY)
    run.train()
    model.config.use_cache = False
    run.train()
    assert model.config.use_cache is False


def test_value_set_after_the_trainer_was_built_is_the_users(tmp_path: Path) -> None:
    model = llama(use_cache=False)
    run = trainer(model, tmp_path, HFCkptCallback("full"), **BUSY)
    model.config.use_cache = True
    seen = watch(model)
    run.train()
    assert seen == {"training": {False}, "evaluation": {True}}
    assert model.config.use_cache is True


def test_value_outlives_a_second_trainer_that_is_built_before_training(tmp_path: Path) -> None:
    base = llama()
    trainer(base, tmp_path, HFCkptCallback("none"))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    run = trainer(model, tmp_path, HFCkptCallback("full"))
    seen = watch(base)
    run.train()
    assert seen["training"] == {False}
    assert base.config.use_cache is True
    assert not any(name.startswith("_hf_ckpt") for module in model.modules() for name in module.__dict__)


def test_value_in_the_training_arguments_is_the_users_wish_for_evaluation(tmp_path: Path) -> None:
    model = llama(use_cache=False)
    seen = watch(model)
    trainer(model, tmp_path, HFCkptCallback("full"), use_cache=True, **BUSY).train()
    assert seen == {"training": {False}, "evaluation": {True}}


@pytest.mark.parametrize("config", [None, {"use_cache": True}, "small"])
def test_model_without_a_config_of_transformers_is_left_alone(config: object) -> None:
    model = nn.Linear(2, 2)
    values = UseCache(model)
    values.off()
    values.restore()
    model.config = config
    values = UseCache(model)
    values.off()
    values.restore()
    assert model.config == config


def test_value_that_somebody_sets_while_it_is_off_is_not_overwritten() -> None:
    model = llama(use_cache=False)
    values = UseCache(model)
    values.off()
    model.config.use_cache = True
    values.restore()
    assert model.config.use_cache is True


# --- Without a Trainer. ---


def configs_of(model: nn.Module) -> list[Any]:
    found = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return [config for config in found.values() if hasattr(config, "use_cache")]


def caching(model_type: str) -> zoo.Case:
    """A model whose configs ask for a cache, as most do when they are loaded."""
    case = exactness.build(model_type)
    for config in configs_of(case.model):
        # An encoder refuses one.
        config.use_cache = config is case.model.config or getattr(config, "is_decoder", True)
    return case


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("model_type", ["llama", "t5", "qwen2_vl", "gpt2"])
def test_applied_plan_lets_training_forwards_make_no_cache(model_type: str, policy: str) -> None:
    case = caching(model_type)
    values = [config.use_cache for config in configs_of(case.model)]
    assert case.model(**case.inputs).past_key_values is not None
    with hf_ckpt.apply(case.model, policy):
        assert case.model(**case.inputs).past_key_values is None
        assert [config.use_cache for config in configs_of(case.model)] == values
        with torch.no_grad():
            assert case.model(**case.inputs).past_key_values is not None
        assert case.model.eval()(**case.inputs).past_key_values is not None
        case.model.train()
    assert case.model(**case.inputs).past_key_values is not None


@pytest.mark.parametrize("model_type", ["llama", "bamba", "jamba"])
def test_step_under_an_applied_plan_is_that_without_a_cache(model_type: str) -> None:
    case = exactness.build(model_type)
    expected = exactness.step(case)
    case = caching(model_type)
    with hf_ckpt.apply(case.model, "full"):
        assert exactness.differences(expected, exactness.step(case)) == []


def test_config_saved_while_a_plan_is_applied_has_the_users_value(tmp_path: Path) -> None:
    case = caching("llama")
    with hf_ckpt.apply(case.model, "full"):
        hook = case.model.model.register_forward_pre_hook(lambda *_: case.model.save_pretrained(tmp_path))
        case.model(**case.inputs)
        hook.remove()
    assert saved(tmp_path) == [True]


def test_cache_that_the_caller_asks_for_is_made() -> None:
    case = caching("llama")
    with hf_ckpt.apply(case.model, "none"):
        assert case.model(**case.inputs, use_cache=True).past_key_values is not None
        ids = case.inputs["input_ids"]
        # By position: attention_mask, position_ids, past_key_values, inputs_embeds, labels, use_cache.
        assert case.model(ids, None, None, None, None, None, True).past_key_values is not None
        assert case.model(ids, None, None, None, None, None, None).past_key_values is None


def test_generation_under_an_applied_plan_in_training_mode_has_its_cache() -> None:
    model = llama(attention_dropout=0.0)
    prompt = torch.tensor([[5, 6, 7]])
    lengths: list[int] = []
    with hf_ckpt.apply(model, "full"):
        model.model.embed_tokens.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
        model.train().generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert lengths == [3, 1, 1]
