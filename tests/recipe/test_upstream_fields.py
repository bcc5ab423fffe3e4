"""Keys of a recipe are the fields of the installed libraries' own classes."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest

from hf_ckpt.recipe import upstream_fields
from hf_ckpt.recipe.field_types import accepts, words
from hf_ckpt.recipe.recipe import load_recipe
from tests.recipe.recipe_texts import adapter, lora, text_of, write

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", ["SFT", "DPO", "KTO", "Reward"])
def test_keys_of_a_trainer_are_the_fields_of_its_arguments(name: str) -> None:
    trl = pytest.importorskip("trl", minversion="1.16")
    config = getattr(trl, f"{name}Config")
    assert set(upstream_fields.training_keys(name)) == {
        field.name for field in dataclasses.fields(config) if field.init
    }


def test_losses_of_dpo_are_those_that_trl_computes() -> None:
    trl = pytest.importorskip("trl", minversion="1.16")
    computed = re.findall(r'loss_type == "(\w+)"', inspect.getsource(sys.modules[trl.DPOTrainer.__module__]))
    assert len(computed) > 10
    assert set(computed) == set(words(upstream_fields.training_keys("DPO")["loss_type"].type))


def test_keys_of_training_are_the_fields_of_training_arguments() -> None:
    from transformers import TrainingArguments

    assert set(upstream_fields.training_keys()) == {
        field.name for field in dataclasses.fields(TrainingArguments) if field.init
    }


def test_keys_of_lora_are_the_fields_of_lora_config() -> None:
    from peft import LoraConfig

    assert set(upstream_fields.adapter_keys("lora")) == {
        field.name for field in dataclasses.fields(LoraConfig) if field.init
    }


def test_keys_of_each_adapter_are_the_fields_of_its_config() -> None:
    from peft import PromptLearningConfig
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    expected = {
        kind.value.lower(): {field.name for field in dataclasses.fields(config) if field.init}
        for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    }
    assert {kind: set(upstream_fields.adapter_keys(kind)) for kind in upstream_fields.adapter_classes()} == expected
    with_tokens = {
        kind.value.lower()
        for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
        if issubclass(config, PromptLearningConfig)
    }
    assert {kind for kind in expected if upstream_fields.has_virtual_tokens(kind)} == with_tokens


def test_lora_is_short_for_an_adapter_of_type_lora(tmp_path: Path) -> None:
    short, long = (
        load_recipe(write(tmp_path, text, name))
        for text, name in ((lora("r: 4"), "short.yaml"), (adapter("type: lora, r: 4"), "long.yaml"))
    )
    assert short.adapter_section == long.adapter_section == {"type": "lora", "r": 4}
    assert load_recipe(write(tmp_path, long.to_yaml(), "again.yaml")).adapter == long.adapter
    assert load_recipe(write(tmp_path, text_of(), "none.yaml")).adapter_section is None


def test_keys_of_quantization_are_the_parameters_of_bits_and_bytes_config() -> None:
    from transformers import BitsAndBytesConfig

    parameters = set(inspect.signature(BitsAndBytesConfig.__init__).parameters) - {"self", "kwargs"}
    assert set(upstream_fields.quantization_keys()) == parameters


def test_defaults_of_training_arguments_are_accepted() -> None:
    from transformers import TrainingArguments

    plain = (bool, int, float, str)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments) if field.init}
    keys = upstream_fields.training_keys()
    assert [
        n for n, default in defaults.items() if isinstance(default, plain) and not accepts(keys[n].type, default)
    ] == []


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "qwen3_moe", "mamba", "gpt_neox", "phi3"])
def test_keys_of_a_config_are_those_of_its_class(model_type: str) -> None:
    from transformers import AutoConfig

    found = upstream_fields.config_keys(model_type)
    config = AutoConfig.for_model(model_type)
    assert found is not None
    class_name, keys = found
    assert class_name == type(config).__name__
    saved = {key for key in config.to_dict() if not key.startswith("_")} - {"ignore_keys_at_rope_validation"}
    assert saved <= set(keys)
