"""Models that are no decoders, asked about by id or by folder: what is answered, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt.errors import RecipeError
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, subject_of
from hf_ckpt.loading.model import rehearse
from hf_ckpt.recipe.recipe import Training
from hf_ckpt.simulation.devices import find_device

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
_HALF = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, **_HEADS}


def folder(path: Path, **fields: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    return str(path)


def asked(name: str, **training: Any) -> Subject:
    return subject_of(Training(**training).recipe_for(name))


def facts(subject: Subject) -> dict[str, str]:
    return dict(subject.facts)


def test_t5_has_a_sequence_for_each_half(tmp_path: Path) -> None:
    name = folder(tmp_path / "t5", model_type="t5", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    found = asked(name, length=256)
    assert found.class_name == "T5ForConditionalGeneration"
    assert [len(stack.layers) for stack in found.stacks] == [2, 2]
    assert facts(found)["task"].startswith("an encoder and a decoder: a sequence in, and a sequence")
    assert Predictor(found, find_device("rtx4090")).memory(None).peak_bytes > 0


def test_whisper_hears_all_and_writes_as_far_as_its_positions(tmp_path: Path) -> None:
    name = folder(
        tmp_path / "whisper", model_type="whisper", max_source_positions=100, max_target_positions=48, **_HALF
    )
    found = asked(name)
    assert found.class_name == "WhisperForConditionalGeneration"
    assert (found.step.seq_length, found.longest) == (48, 48)
    assert facts(found)["positions"] == "2,048 tokens are more than the model has: predicted for 48"
    assert "all the sound that it has positions for" in facts(found)["task"]


@pytest.mark.parametrize(
    ("model_type", "positions"), [("bert", 512), ("modernbert", None), ("deberta-v2", 512), ("roberta", 512)]
)
def test_encoder_gives_each_sequence_a_class(model_type: str, positions: int | None, tmp_path: Path) -> None:
    found = asked(folder(tmp_path / model_type, model_type=model_type, **_SIZES))
    assert found.class_name.endswith("ForSequenceClassification")
    assert facts(found)["task"] == "an encoder writes no text: a class of 2 for each sequence"
    assert found.step.seq_length == (positions or 2048)
    recipe = Training().recipe_for(str(tmp_path / model_type))
    with pytest.raises(RecipeError, match=r"is an encoder, and writes no text\. Write trainer: classification"):
        rehearse(recipe, recipe.model)


def test_classes_and_rewards_are_asked_for_by_flag(tmp_path: Path) -> None:
    name = folder(tmp_path / "qwen3", model_type="qwen3", vocab_size=256, **_SIZES)
    classes, reward = asked(name, classes=7), asked(name, is_reward=True)
    assert classes.model.config.num_labels == 7
    assert reward.step.rows == 2
    assert "RewardTrainer" in facts(reward)["loss"]


def test_attention_that_a_model_lacks_is_not_asked_for(tmp_path: Path) -> None:
    sizes = {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16}
    found = asked(folder(tmp_path / "gpt_oss", model_type="gpt_oss", vocab_size=256, **sizes))
    assert "attention by eager" in facts(found)["versions"]


def test_llama_4_is_its_text_model_and_its_router_no_layer_for_adapters(tmp_path: Path) -> None:
    text = {"model_type": "llama4_text", "vocab_size": 256, "num_local_experts": 4, "num_key_value_heads": 2, **_SIZES}
    name = folder(tmp_path / "llama4", model_type="llama4", text_config={**text, "head_dim": 16})
    assert asked(name, method="full").class_name == "Llama4ForCausalLM"
    with pytest.raises(RecipeError, match="target_modules reach router, a Llama4Router, which returns more than one"):
        asked(name)
    recipe = Training().recipe_for(name, ["lora.target_modules=[q_proj,v_proj]"])
    assert subject_of(recipe).class_name == "Llama4ForCausalLM"


def test_code_in_place_of_a_missing_kernel_is_named(tmp_path: Path) -> None:
    sizes = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    found = asked(folder(tmp_path / "qwen3_next", model_type="qwen3_next", vocab_size=256, **sizes), method="full")
    assert facts(found)["kernels"].startswith(
        "causal-conv1d and flash-linear-attention, which Qwen3NextForCausalLM runs"
    )
    assert "kernels" not in facts(asked("Qwen/Qwen3-0.6B"))


def test_images_that_are_read_at_one_size_have_as_many_tokens_each(tmp_path: Path) -> None:
    name = folder(
        tmp_path / "llava",
        model_type="llava",
        image_token_index=7,
        text_config={"model_type": "llama", "vocab_size": 256, **_SIZES},
        vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, **_SIZES},
    )
    found = asked(name, images=3, length=128)
    assert "each sequence with 3 images of 16 tokens, read at 28 x 28 pixels" in facts(found)["loss"]
    inputs = found.step.loss.make_inputs(found.step, found.model)
    assert inputs["pixel_values"].shape == (3, 3, 28, 28)
    assert int((inputs["input_ids"] == 7).sum()) == 48
    shorter = replace(found.step, seq_length=40)
    assert found.step.loss.make_inputs(shorter, found.model)["pixel_values"].shape[0] == 2
    with pytest.raises(RecipeError, match=r"3 images of data\.max_pixels"):
        asked(name, images=3, length=32)


def test_encoder_and_decoder_are_not_trained_by_a_recipe(tmp_path: Path) -> None:
    recipe = Training().recipe_for(folder(tmp_path / "bart", model_type="bart", **_HALF))
    with pytest.raises(RecipeError, match="Train it in a script, with Seq2SeqTrainer and HFCkptCallback"):
        rehearse(recipe, recipe.model)


@pytest.mark.parametrize(("training", "what"), [({"images": 1}, "reads images"), ({"classes": 2}, "scores sequences")])
def test_what_transformers_lacks_is_refused_in_a_line(training: dict[str, Any], what: str, tmp_path: Path) -> None:
    name = folder(tmp_path / "whisper", model_type="whisper", **_HALF)
    with pytest.raises(RecipeError) as refused:
        asked(name, **training)
    assert str(refused.value) == f"model: no model that {what} can be made: transformers has none of type whisper."
