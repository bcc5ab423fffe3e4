"""trl's trainers on a tiny model: each with the ways in which it comes to its reference. Needs trl 1.16."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer

from tests.byte_tokenizer import byte_tokenizer
from tests.training import arguments, llama

TOKENIZER = byte_tokenizer(pad_token="<pad>")
ADAPTER: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1, "init_lora_weights": False}
_ROWS = 16


def words(length: int, seed: int) -> str:
    """Letters, one token each."""
    generator = torch.Generator().manual_seed(seed)
    return "".join(chr(97 + int(letter)) for letter in torch.randint(0, 26, (length,), generator=generator))


def column(start: int, length_of: Callable[[int], int]) -> list[str]:
    """A text for each example, of a length that its number gives."""
    return [words(length_of(number), start + number) for number in range(_ROWS)]


# In each batch the longest row is as long.
PAIRS = {
    "prompt": column(0, lambda _: 30),
    "chosen": column(100, lambda _: 27),
    "rejected": column(200, lambda number: 20 + number % 4),
}
UNPAIRED = {
    "prompt": column(0, lambda _: 30),
    "completion": column(100, lambda number: 25 if number % 2 else 20),
    "label": [number % 2 == 0 for number in range(_ROWS)],
}
TEXTS = {"text": column(0, lambda _: 50)}


def model(**changes: Any) -> nn.Module:
    """A Llama of the tokenizer's vocabulary, always the same one."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    tokens = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id}
    return llama(**{**sizes, **tokens, **changes})


def scoring_model() -> nn.Module:
    """A Llama with a head that scores a row."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2}
    tokens = {"vocab_size": len(TOKENIZER), "pad_token_id": TOKENIZER.pad_token_id}
    return LlamaForSequenceClassification(LlamaConfig(**sizes, **tokens, num_labels=1, attention_dropout=0.1))


CASES: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    # Arguments of the trainer, and of its config.
    "whole": lambda: ({}, {}),
    "separate": lambda: ({"ref_model": model()}, {}),
    "adapters off": lambda: ({"peft_config": LoraConfig(**ADAPTER)}, {}),
    "adapter of its own": lambda: ({"model": get_peft_model(model(), LoraConfig(**ADAPTER))}, {}),
    "computed before": lambda: ({}, {"precompute_ref_log_probs": True}),
    "synchronised": lambda: ({"ref_model": model()}, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
}
REFERENCES = ("separate", "adapters off", "adapter of its own", "computed before", "synchronised")
KINDS: dict[str, tuple[dict[str, list[Any]], dict[str, Any]]] = {
    "SFT": (TEXTS, {"dataset_text_field": "text"}),
    "DPO": (PAIRS, {}),
    "KTO": (UNPAIRED, {"per_device_train_batch_size": 4}),
    "Reward": (PAIRS, {}),
}


def trainer(
    kind: str,
    case: str,
    folder: Path,
    *callbacks: Any,
    data: Any = None,
    derived: type[Trainer] | None = None,
    **changes: Any,
) -> Trainer:
    """A run of two steps without activation checkpointing.

    `derived` is a class of the user's; `changes` are arguments of the trainer by their names, or of its config.
    """
    import trl

    columns, settings = KINDS[kind]
    given, of_case = CASES[case]()
    of_trl, config_of = (getattr(trl, f"{kind}{what}") for what in ("Trainer", "Config"))
    kind_of: Any = derived or of_trl
    names = inspect.signature(of_trl).parameters
    given |= {name: changes.pop(name) for name in list(changes) if name in names}
    own = {"max_length": 64, "bf16": False, "gradient_checkpointing": False, **settings, **of_case, **changes}
    return kind_of(  # type: ignore[no-any-return]  # upstream
        **{"model": scoring_model() if kind == "Reward" else model(), **given},
        args=config_of(**arguments(folder, **own)),
        train_dataset=Dataset.from_dict(columns) if data is None else data,
        processing_class=TOKENIZER,
        callbacks=list(callbacks),
    )
