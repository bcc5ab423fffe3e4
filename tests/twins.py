"""Tiny twins of what the shipped recipes name on the hub: the same architecture and the same columns, made in code."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
MODELS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": {"model_type": "llama", **_SIZES},
    "meta-llama/Llama-2-70b-hf": {"model_type": "llama", **_SIZES},
    "meta-llama/Llama-3.1-8B-Instruct": {"model_type": "llama", **_SIZES},
    "meta-llama/Llama-3.2-3B": {"model_type": "llama", **_SIZES},
    "Qwen/Qwen3-8B-Base": {"model_type": "qwen3", **_SIZES},
    "Qwen/Qwen3-32B": {"model_type": "qwen3", **_SIZES},
    "google/gemma-3-4b-it": {"model_type": "gemma3", **_GEMMA3},
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


DATA = {
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
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    made.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
