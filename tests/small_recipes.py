"""Recipes that are carried out in a second: a tiny model made from a config, sentences in a local file."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import yaml

from hf_ckpt.recipe import upstream_fields

SENTENCES = [
    ("The sun", " rises in the east and sets in the west."),
    ("Water", " boils at a hundred degrees, and freezes at none."),
    ("A loop", " runs its body once for each item of a list."),
    ("An error", " says what was asked, what is true and what to do."),
    ("A checkpoint", " keeps what a run needs to go on."),
    ("Rain", " falls on the hills and runs down to the sea."),
]

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
"""Of a model with two layers."""

MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
"""Of a mixture of experts."""

_SECTIONS: dict[str, Any] = {
    "model": {
        "config": CONFIG | {"num_hidden_layers": 4, "attention_dropout": 0.1},
        "tokenizer": {"train": {"vocab_size": 300}},
    },
    "data": {"path": "sentences.jsonl", "eval_fraction": 0.2, "max_length": 64},
    "checkpointing": {"policy": [{"layers": "0:2", "mode": "full"}, {"layers": 2, "mode": "ffn"}]},
    "training": {
        "output_dir": "run",
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
    },
}
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}


def write(folder: Path, name: str = "small.yaml", **sections: dict[str, Any] | None) -> Path:
    """Write a recipe, with its data and its output in `folder`.

    Args:
        folder: where everything goes.
        name: the recipe's file.
        sections: keys to lay on a section; a section that is None is left out.
    """
    contents = copy.deepcopy(_SECTIONS)
    contents["data"]["path"] = str(folder / "sentences.jsonl")
    contents["training"]["output_dir"] = str(folder / "run")
    for section, keys in sections.items():
        contents[section] = None if keys is None else {**contents.get(section, {}), **keys}
    rows = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in SENTENCES * 16]
    (folder / "sentences.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    path = folder / name
    path.write_text(yaml.safe_dump({key: value for key, value in contents.items() if value is not None}))
    return path


PAIRS = [{"prompt": prompt, "chosen": text, "rejected": text[::-1]} for prompt, text in SENTENCES]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": prompt, "completion": text} for prompt, text in SENTENCES],
    "dpo": PAIRS,
    "reward": PAIRS,
    "kto": [
        {"prompt": prompt, "completion": text[:: 1 if is_good else -1], "label": is_good}
        for prompt, text in SENTENCES
        for is_good in (True, False)
    ],
    "grpo": [{"prompt": prompt, "wanted": text[1]} for prompt, text in SENTENCES],
    "classification": [{"text": f"{prompt}{text}", "label": at % 2} for at, (prompt, text) in enumerate(SENTENCES)],
}
"""What each trainer that a recipe may name reads."""


def of_trainer(folder: Path, trainer: str, **sections: dict[str, Any] | None) -> Path:
    """Write a recipe that names a trainer, with an adapter and rows of its own. See `write`."""
    rows = folder / f"{trainer}.jsonl"
    rows.write_text("\n".join(map(json.dumps, ROWS[trainer] * 6)) + "\n", encoding="utf-8")
    labels = {"num_labels": 2} if trainer == "classification" else {}
    given = {"lora": LORA, **sections}
    if trainer == "grpo":
        given["training"] = {"num_generations": 2, "max_completion_length": 8, **(sections.get("training") or {})}
    given["data"] = {"path": str(rows), **(sections.get("data") or {})}
    given["model"] = {**labels, **(sections.get("model") or {})}
    path = write(folder, f"{trainer}.yaml", **given)
    rewards = "reward_funcs: ['tests.small_recipes:has_wanted']\n" if trainer == "grpo" else ""
    path.write_text(f"trainer: {trainer}\n{rewards}{path.read_text()}")
    return path


def has_wanted(completions: list[Any], wanted: list[str], **more: Any) -> list[float]:
    """Reward a completion, a text or a turn, for each letter that its row asks for, and for how many it has."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [text.count(letter) + len(set(text)) / 100 for text, letter in zip(texts, wanted, strict=True)]


def can_be_loaded(recipe: Path) -> bool:
    """Whether what a recipe needs to be read is installed."""
    return upstream_fields.trl_version() is not None or not re.search(
        "^trainer:", recipe.read_text("utf-8"), re.MULTILINE
    )


def on_weights(weights: Path) -> dict[str, Any]:
    """Return the `model` section of a recipe that starts from weights."""
    return {"config": None, "tokenizer": None, "name_or_path": str(weights), "dtype": "float32"}
