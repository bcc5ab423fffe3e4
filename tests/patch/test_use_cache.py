"""`use_cache` is False in training steps, and the user's own value everywhere else."""

from __future__ import annotations

import copy
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaModel, Trainer, TrainingArguments
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import hf_ckpt
from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.patch import apply as patch_apply
from hf_ckpt.patch.use_cache import UseCache
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.upstream.transformers import CACHE
from tests import exactness, zoo
from tests.training import LENGTH, During, arguments, llama, lora, losses, rows, trainer

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


def test_config_without_the_value_has_none_after_training_an_adapter(tmp_path: Path) -> None:
    model = get_peft_model(zoo.build("qwen2_vl").model, LoraConfig(r=2, target_modules=["q_proj"]))
    run = trainer(model, tmp_path, HFCkptCallback("full", skip_frozen=True), max_steps=1)
    run.train_dataset = [{name: tokens % 20 + zoo.FIRST_TOKEN for name, tokens in text.items()} for text in rows(4)]
    run.train()
    assert not hasattr(model.base_model.model.config, "use_cache")


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
    values.set({})
    values.restore()
    model.config = config
    values = UseCache(model)
    values.set({})
    values.restore()
    assert model.config == config


def test_value_that_somebody_sets_while_it_is_off_is_not_overwritten() -> None:
    model = llama(use_cache=False)
    values = UseCache(model)
    values.set({})
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


@pytest.mark.parametrize("policy", ["ffn", "full"])
@pytest.mark.parametrize("model_type", ["llama", "t5", "qwen2_vl", "gpt2"])
def test_applied_plan_lets_training_forwards_make_no_cache(model_type: str, policy: str) -> None:
    case = caching(model_type)
    values = [config.use_cache for config in configs_of(case.model)]
    assert case.model(**case.inputs).get(CACHE) is not None
    with hf_ckpt.apply(case.model, policy):
        assert case.model(**case.inputs).get(CACHE) is None
        assert [config.use_cache for config in configs_of(case.model)] == values
        with torch.no_grad():
            assert case.model(**case.inputs).get(CACHE) is not None
        assert case.model.eval()(**case.inputs).get(CACHE) is not None
        case.model.train()
    assert case.model(**case.inputs).get(CACHE) is not None


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
    with hf_ckpt.apply(case.model, "ffn"):
        assert case.model(**case.inputs, use_cache=True).get(CACHE) is not None
        ids = case.inputs["input_ids"]
        # By position: attention_mask, position_ids, the cache, inputs_embeds, labels, use_cache.
        assert case.model(ids, None, None, None, None, None, True).get(CACHE) is not None
        assert case.model(ids, None, None, None, None, None, None).get(CACHE) is None


@pytest.mark.parametrize(
    ("policy", "is_empty"), [("full", True), ("attention", True), ("segments_2", True), ("ffn", False), ("none", False)]
)
def test_a_cache_that_a_plan_empties_is_said_once(
    policy: str, is_empty: bool, caplog: pytest.LogCaptureFixture
) -> None:
    case = caching("llama")
    with exactness.apply(case.model, policy), caplog.at_level(logging.WARNING, logger="hf_ckpt"):
        for _ in range(2):
            output = case.model(**case.inputs, use_cache=True)
            assert (output[CACHE].get_seq_length() == 0) is is_empty
        case.model(**case.inputs)
        case.model.eval()(**case.inputs, use_cache=True)
    told = [text for text in caplog.messages if "it comes back empty there" in text]
    assert len(told) == is_empty


def test_generation_under_an_applied_plan_in_training_mode_has_its_cache() -> None:
    model = llama(attention_dropout=0.0)
    prompt = torch.tensor([[5, 6, 7]])
    lengths: list[int] = []
    with hf_ckpt.apply(model, "full"):
        model.model.embed_tokens.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
        model.train().generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert lengths == [3, 1, 1]


def test_a_cache_is_said_to_come_back_empty_of_no_simulated_step(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    class Asking(Trainer):
        def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, {**inputs, "use_cache": True}, *args, **kwargs)

    model = llama()
    needed = simulate_step(model, None, Step(batch_size=2, seq_length=LENGTH), CPU).peak_bytes
    args = TrainingArguments(**arguments(tmp_path, max_steps=1))
    planned = HFCkptCallback("auto", memory_budget=f"{int(0.9 * needed)}B", quiet=True)
    with pytest.raises(UnsupportedError, match="use_cache=True keeps tensors that the simulated step does not have"):
        Asking(model, args, train_dataset=rows(), callbacks=[planned]).train()
    assert not any("comes back empty" in text for text in caplog.messages)


# --- Layers that share an index in the cache. ---


def repeated(case: zoo.Case) -> None:
    """Each layer stands in the list twice."""
    layers = case.model.model.layers
    case.model.model.layers = nn.ModuleList([*layers[:2], *layers[:2]])


def copied(case: zoo.Case) -> None:
    """Layers grown from others, with weights of their own and the others' index."""
    layers = case.model.model.layers
    case.model.model.layers = nn.ModuleList([*layers[:2], *copy.deepcopy(layers[:2])])


class Twice(nn.Module):
    """Runs a layer two times."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.self_attn, self.mlp = layer.input_layernorm, layer.self_attn, layer.mlp

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for _ in range(2):
            hidden = hidden + self.mlp(self.norm(self.self_attn(self.norm(hidden), **kwargs)[0]))
        return hidden


def looped(case: zoo.Case) -> None:
    case.model.model.layers = nn.ModuleList(map(Twice, case.model.model.layers))


class TwoLists(LlamaModel):
    """Two stacks that count from 0 each, in one cache."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.more = nn.ModuleList(LlamaDecoderLayer(config, layer_idx) for layer_idx in range(2))
        self.post_init()

    def forward(
        self, inputs_embeds: torch.Tensor, use_cache: bool | None = None, **kwargs: Any
    ) -> BaseModelOutputWithPast:
        cache = DynamicCache() if (self.config.use_cache if use_cache is None else use_cache) else None
        positions = torch.arange(inputs_embeds.shape[1])[None]
        tables = self.rotary_emb(inputs_embeds, position_ids=positions)
        hidden = inputs_embeds
        for layer in (*self.layers, *self.more):
            hidden = layer(hidden, **{CACHE: cache}, position_embeddings=tables, position_ids=positions)
        return BaseModelOutputWithPast(last_hidden_state=hidden, **{CACHE: cache})


def two_lists(case: zoo.Case) -> None:
    model = TwoLists(case.model.config)
    case.model.model = model.train()


SHARED = {"repeated": repeated, "copied": copied, "looped": looped, "two lists": two_lists}


def sharing(kind: str, **call: object) -> zoo.Case:
    # A mask would not fit the keys of two layers; without dropout `sdpa` needs none.
    model = llama(attention_dropout=0.0, initializer_range=0.5)
    ids = torch.arange(12).view(2, 6) + 3
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    case = zoo.Case("llama", model.train(), inputs)
    SHARED[kind](case)
    if kind == "two lists":
        inputs = {"inputs_embeds": torch.randn(2, 6, model.config.hidden_size), "labels": ids}
    return zoo.Case("llama", model, {**inputs, **call})


@pytest.mark.parametrize("policy", ["none", "ffn", "full", "attention", "selective", "segments_2"])
@pytest.mark.parametrize("kind", SHARED)
def test_layers_that_share_an_index_are_refused_or_the_loss_is_that_without_a_plan(kind: str, policy: str) -> None:
    expected = exactness.step(sharing(kind))
    assert not torch.equal(expected[0], exactness.step(sharing(kind, use_cache=False))[0])
    for call in ({}, {"use_cache": True}, {"use_cache": False}):
        case = sharing(kind, **call)
        if policy == "segments_2" and kind == "repeated":
            continue
        mode, options = {"segments_2": ("full", {"segment_size": 2})}.get(policy, (policy, {}))
        with hf_ckpt.apply(case.model, mode, **options):
            if call.get("use_cache") is False or policy == "none" or (call and policy == "ffn"):
                assert exactness.differences(exactness.step(sharing(kind, **call)), exactness.step(case)) == []
                continue
            for _ in range(2):
                with pytest.raises(UnsupportedError, match=r"has layer_idx 0 in a forward that has used it before"):
                    exactness.step(case)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in case.model.modules())


def test_shared_index_is_named() -> None:
    case = sharing("copied")
    with hf_ckpt.apply(case.model, "full"), pytest.raises(UnsupportedError) as raised:
        exactness.step(case)
    assert str(raised.value) == (
        "The plan runs layers without a key/value cache in training, but model.layers.2 has layer_idx 0 in a forward "
        "that has used it before (a layer that runs again, or several with one index): with a cache, as without the "
        "plan, it would attend to those keys too, and the loss be another. Set use_cache=False in the call or the "
        "config, which changes the model with and without a plan alike, or give each layer a layer_idx of its own."
    )


# Attention and cross-attention of one layer; a layer shared under several indices; two attentions in a layer; rounds.
@pytest.mark.parametrize("model_type", ["t5", "bart", "zamba", "zamba2", "longcat_flash", "hrm_text", "jamba"])
def test_layers_with_places_of_their_own_are_not_refused(model_type: str) -> None:
    case = caching(model_type)
    expected = exactness.step(case)
    hooks = [len(module._forward_pre_hooks) for module in case.model.modules()]
    with patch_apply.apply(case.model, "none"):
        placed = [len(module._forward_pre_hooks) for module in case.model.modules()]
        for _ in range(2):
            assert exactness.differences(expected, exactness.step(case)) == []
            # Looked at once: later steps run no hook for it.
            assert [len(module._forward_pre_hooks) for module in case.model.modules()] == placed
    assert [len(module._forward_pre_hooks) for module in case.model.modules()] == hooks


def test_forward_that_fails_is_looked_at_again() -> None:
    case = sharing("copied")
    fail = case.model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with hf_ckpt.apply(case.model, "full"):
        with pytest.raises(ZeroDivisionError):
            exactness.step(case)
        fail.remove()
        with pytest.raises(UnsupportedError, match="has layer_idx 0"):
            exactness.step(case)


def test_trainer_that_makes_a_cache_is_refused_where_layers_share_an_index(tmp_path: Path) -> None:
    def shared_llama() -> nn.Module:
        model = llama()
        model.model.layers = nn.ModuleList([*model.model.layers[:2]] * 2)
        return model

    plain = trainer(shared_llama(), tmp_path)
    plain.train()
    planned = trainer(shared_llama(), tmp_path, HFCkptCallback("full"))
    planned.train()
    # As the Trainer's own switch is off, there is no cache without the plan either.
    assert losses(planned) == losses(plain)
    with pytest.raises(UnsupportedError, match="has layer_idx 0"):
        trainer(shared_llama(), tmp_path, HFCkptCallback("full"), use_cache=True).train()


# --- Rows packed one after another, which transformers keeps apart only where there is no cache. ---


@pytest.mark.parametrize("use_cache", [None, True, False])
@pytest.mark.parametrize("policy", ["none", "full", "attention", "ffn", "segments_2"])
def test_packed_rows_have_the_loss_of_a_model_without_a_plan(policy: str, use_cache: bool | None) -> None:
    case = caching("llama")
    ids = case.inputs["input_ids"][:1]
    positions = torch.cat([torch.arange(3), torch.arange(ids.shape[1] - 3)])[None]
    inputs = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": use_cache}
    packed = zoo.Case("llama", case.model, inputs)
    assert exactness.check(packed, policy) == []


def packed_inputs(case: zoo.Case, begins_again: int) -> dict[str, torch.Tensor]:
    """Rows of documents of so many tokens, without a mask."""
    ids = case.inputs["input_ids"]
    positions = torch.arange(ids.shape[1]).remainder(begins_again).expand_as(ids)
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


@pytest.mark.sweep(keep=3)
@pytest.mark.parametrize("has_positions", [True, False])
@pytest.mark.parametrize(
    "model_type",
    "llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 gpt2 gpt_neox opt olmo2 granite mixtral bamba cohere".split(),
)
def test_a_plan_reads_rows_without_a_mask_as_the_model_does(model_type: str, has_positions: bool) -> None:
    for policy in ("none", "full"):
        case = caching(model_type)
        inputs = packed_inputs(case, 3)
        if not has_positions:
            del inputs["position_ids"]
        assert exactness.check(zoo.Case(model_type, case.model, inputs), policy) == []


@pytest.mark.parametrize(
    ("begins_again", "call", "is_told"),
    [
        ([3, 3], {}, True),
        ([100, 3, 3], {}, True),
        ([100, 100], {}, False),
        ([3, 3], {"use_cache": False}, False),
        ([3, 3], {"use_cache": True}, False),
        ([3, 3], {"attention_mask": torch.ones(2, zoo.LENGTH, dtype=torch.long)}, False),
    ],
)
def test_what_becomes_of_packed_rows_is_said_once(
    caplog: pytest.LogCaptureFixture, begins_again: list[int], call: dict[str, Any], is_told: bool
) -> None:
    case = caching("llama")
    first = hf_ckpt.apply(case.model, "ffn")
    for number in begins_again:
        case.model(**packed_inputs(case, number), **call).loss.backward()
    applied = first.exchange(partial(patch_apply.apply, case.model, "full"))
    case.model(**packed_inputs(case, begins_again[-1]), **call).loss.backward()
    applied.remove()
    said = [line for line in caplog.messages if line.startswith("Position ids begin again within a sequence")]
    assert len(said) == is_told


@pytest.mark.parametrize("model_type", ["llama", "t5", "qwen2_vl", "gpt2"])
def test_policy_none_leaves_the_cache_on(model_type: str) -> None:
    case = caching(model_type)
    with patch_apply.apply(case.model, "none"):
        assert case.model(**case.inputs).get(CACHE) is not None


def test_policy_none_is_like_the_plans_that_may_take_its_place() -> None:
    # With dropout in attention a cache changes the last bit.
    case = caching("llama")
    with hf_ckpt.apply(case.model, "none") as applied:
        assert applied.step(lambda: case.model(**case.inputs)).get(CACHE) is None


@pytest.mark.parametrize("user", [True, False])
def test_policy_none_leaves_the_trainers_own_value(tmp_path: Path, user: bool) -> None:
    model = llama(use_cache=user)
    seen = watch(model)
    trainer(model, tmp_path, HFCkptCallback("none"), use_cache=not user, **BUSY).train()
    assert seen["training"] == {not user}


def test_a_plan_in_place_of_another_begins_anew_after_a_forward_that_failed() -> None:
    case = caching("llama")
    expected = exactness.step(case)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    first = patch_apply.apply(case.model, "none")
    layer = hf_ckpt.find_layers(case.model)[0].layers[1].module
    for policy in ("attention", "full"):
        hook = layer.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="planted"):
            exactness.step(case)
        hook.remove()
        first = first.exchange(partial(patch_apply.apply, case.model, policy))
    assert exactness.differences(expected, exactness.step(case)) == []
    first.remove()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in case.model.modules())


def test_a_plan_in_place_of_another_knows_the_cache_that_there_would_be() -> None:
    # Rows that are packed are kept apart only where there is no cache.
    case = caching("llama")
    length = case.inputs["input_ids"].shape[1]
    positions = torch.arange(length).remainder(length // 2).expand_as(case.inputs["input_ids"])
    inputs = {name: value for name, value in case.inputs.items() if name != "attention_mask"}
    case = zoo.Case("llama", case.model, {**inputs, "position_ids": positions})
    expected = exactness.step(case)
    config = case.model.config
    # As the Trainer's callback does.
    config.use_cache = False
    assert not torch.equal(expected[0], exactness.step(case)[0])
    applied = patch_apply.apply(case.model, "none")
    applied.note_use_cache({id(config): True})
    applied = applied.exchange(partial(patch_apply.apply, case.model, "full"))
    assert exactness.differences(expected, exactness.step(case)) == []
    applied.remove()
