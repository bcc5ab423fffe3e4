"""Tiny twins of what the shipped recipes name on the hub: the same architecture and the same columns, made in code."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.byte_tokenizer import CHATML, byte_tokenizer

# 4-bit weights come in blocks of 64, and 8-bit optimizers keep anything of less than 4,096 numbers in float32.
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_GEMMA3 = {
    "text_config": {**_SIZES, "num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "vision_config": {**_SIZES, "num_hidden_layers": 2, "image_size": 28, "patch_size": 14},
    "mm_tokens_per_image": 4,
}
_QWEN3_VL: dict[str, Any] = {
    "text_config": {
        **_SIZES,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]},
    },
    # Patches are as large as those of the model, so that an image is as many tokens.
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "depth": 3,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1],
    },
}
NUM_EXPERTS = 4
_MIXTURE = {**_SIZES, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": {"model_type": "llama", **_SIZES},
    "meta-llama/Llama-2-70b-hf": {"model_type": "llama", **_SIZES},
    "meta-llama/Llama-3.1-8B-Instruct": {"model_type": "llama", **_SIZES},
    "meta-llama/Llama-3.1-70B-Instruct": {"model_type": "llama", **_SIZES},
    "meta-llama/Llama-3.2-3B": {"model_type": "llama", **_SIZES},
    "Qwen/Qwen3-4B": {"model_type": "qwen3", **_SIZES},
    "Qwen/Qwen3-8B-Base": {"model_type": "qwen3", **_SIZES},
    "Qwen/Qwen3-32B": {"model_type": "qwen3", **_SIZES},
    "Qwen/Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        **_SIZES,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "Qwen/Qwen3-VL-8B-Instruct": {"model_type": "qwen3_vl", **_QWEN3_VL},
    "google/gemma-3-4b-it": {"model_type": "gemma3", **_GEMMA3},
    "mistralai/Mixtral-8x7B-v0.1": {"model_type": "mixtral", **_MIXTURE},
    "openai/gpt-oss-20b": {"model_type": "gpt_oss", **_MIXTURE, "sliding_window": 16},
    "mistralai/Mistral-7B-v0.3": {"model_type": "mistral", **_SIZES, "sliding_window": None},
}
"""Configs of the twins, by the hub id that recipes name."""

QUESTIONS = [f"What is the {word} letter of the alphabet?" for word in ("first", "second", "third", "fourth", "fifth")]
ANSWERS = [
    f"It is {letter}, as in {word}." for letter, word in zip("ABCDE", "ant bee cat dog elk".split(), strict=True)
]


def _alpaca() -> Iterator[dict[str, Any]]:
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        yield {"instruction": question, "input": "", "output": answer, "text": f"{question}\n{answer}"}


def _smoltalk() -> Iterator[dict[str, Any]]:
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        turns = (("user", "Hi"), ("assistant", "Hello!"), ("user", question), ("assistant", answer))
        yield {"full_topic": "Letters", "messages": [{"role": role, "content": content} for role, content in turns]}


def _longalign() -> Iterator[dict[str, Any]]:
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        turns = (("user", f"{question} " * 8), ("assistant", answer))
        messages = [{"role": role, "content": content} for role, content in turns]
        yield {"messages": messages, "length": sum(len(content) for _, content in turns)}


def _ultrafeedback() -> Iterator[dict[str, Any]]:
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        chosen, rejected = (
            [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
            for said in (answer, answer[::-1])
        )
        yield {"chosen": chosen, "rejected": rejected, "score_chosen": 8.0, "score_rejected": 2.0}


def _llava() -> Iterator[dict[str, Any]]:
    from PIL import Image

    folder = _new_folder()
    for number, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True)):
        pixels = np.random.default_rng(number).random((32 + 16 * number, 48, 3))
        Image.fromarray((255 * pixels).astype("uint8")).save(folder / f"{number}.png")
        parts = [
            ("user", [{"type": "image", "text": None, "index": 0}, {"type": "text", "text": question, "index": None}]),
            ("assistant", [{"type": "text", "text": answer, "index": None}]),
        ]
        messages = [{"role": role, "content": content} for role, content in parts]
        yield {"messages": messages, "images": [str(folder / f"{number}.png")]}


def _deepmath() -> Iterator[dict[str, Any]]:
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        yield {"prompt": [{"role": "user", "content": question}], "solution": answer}


def has_letters_of_solution(completions: list[Any], solution: list[str], **more: Any) -> list[float]:
    """Stand where functions are that need more than is installed: reward letters of the solution."""
    return [len(set(each[0]["content"]) & set(right)) / 10 for each, right in zip(completions, solution, strict=True)]


DATA = {
    "trl-lib/DeepMath-103K": _deepmath,
    "HuggingFaceH4/llava-instruct-mix-vsft": _llava,
    "tatsu-lab/alpaca": _alpaca,
    "HuggingFaceTB/smoltalk": _smoltalk,
    "THUDM/LongAlign-10k": _longalign,
    "trl-lib/ultrafeedback_binarized": _ultrafeedback,
}
"""Rows of the twins, by the hub id that recipes name."""

# What makes a folder of files a data set with the configuration and the splits that the hub's has.
_CARD = """---
configs:
- config_name: everyday-conversations
  default: true
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""
_NUM_ROWS = 60


@functools.cache
def model(hub_id: str, **fields: Any) -> Path:
    """Return a folder with the tiny twin of a model, in bfloat16, and a tokenizer with a chat template.

    Args:
        hub_id: a key of `MODELS`.
        fields: of its config, in place of those there.
    """
    folder = _new_folder()
    tokenizer = byte_tokenizer(pad_token="<pad>")
    tokenizer.chat_template = CHATML
    config = json.loads(json.dumps({**MODELS[hub_id], **fields}))
    of_text = config.get("text_config", config)
    of_text["vocab_size"] = len(tokenizer)
    of_text |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    kind = AutoModelForCausalLM
    if config["model_type"] == "qwen3_vl":
        config |= _save_processor(tokenizer, folder)
        of_text["vocab_size"] = len(tokenizer)
        kind = AutoModelForImageTextToText
    torch.manual_seed(0)
    made = kind.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_IMAGE_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_PARTS = (
    "{% for message in messages %}<{{ message['role'] }}>{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}</{{ message['role'] }}>\n{% endfor %}"
)


def _save_processor(tokenizer: Any, folder: Path) -> dict[str, int]:
    """Save a processor of images, and return the tokens of the model's config. See `reads_no_videos`."""
    from transformers import Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer.add_special_tokens({"additional_special_tokens": [*_IMAGE_TOKENS.values()]})
    images = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=1024, max_pixels=2**24)
    Qwen3VLProcessor(images, tokenizer, chat_template=_PARTS).save_pretrained(folder)
    tokenizer.chat_template = _PARTS
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in _IMAGE_TOKENS.items()}


def reads_no_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Qwen3-VL's processor do without the part that needs torchvision."""
    from transformers import Qwen3VLProcessor

    every = Qwen3VLProcessor.get_attributes.__func__  # type: ignore[attr-defined]  # a class method
    of_images = classmethod(lambda cls: [name for name in every(cls) if name != "video_processor"])
    monkeypatch.setattr(Qwen3VLProcessor, "get_attributes", of_images)


@functools.cache
def data(hub_id: str) -> Path:
    """Return a folder with the tiny twin of a data set."""
    folder = _new_folder()
    rows = [json.dumps(row) for row in DATA[hub_id]()]
    (folder / "README.md").write_text(_CARD, encoding="utf-8")
    (folder / "train.jsonl").write_text("\n".join(rows * (_NUM_ROWS // len(rows))) + "\n", encoding="utf-8")
    (folder / "test.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder


def _new_folder() -> Path:
    # The cache of the tests, which goes away with them.
    return Path(tempfile.mkdtemp(dir=os.environ["HF_HOME"]))
