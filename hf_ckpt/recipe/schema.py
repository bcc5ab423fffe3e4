"""Which keys each section of a recipe takes, and what their values may be.

`training`, `lora` and `quantization` take the upstream classes' own fields (`upstream` reads them); the keys of
`model`, `data` and `checkpointing` are listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_ckpt.recipe import upstream_fields
from hf_ckpt.recipe.upstream_fields import DTYPES, Key, Keys
from hf_ckpt.recipe.values import parse_type


@dataclass(frozen=True)
class Section:
    """One section of a recipe.

    Args:
        name: as written in the recipe.
        owner: whose keys they are, in words.
        keys: the keys that it takes.
        required: the keys that it cannot do without.
    """

    name: str
    owner: str
    keys: Keys
    required: tuple[str, ...] = ()


REQUIRED_SECTIONS = ("model", "data", "training")

_MODEL = {
    "name_or_path": "str | None",
    "config": "dict | None",
    "tokenizer": "str | dict | None",
    "dtype": f"Literal{['auto', *DTYPES]} | None",
    "attn_implementation": "str | None",
    "revision": "str | None",
    "trust_remote_code": "bool",
    "base_recipe": "str | None",
}
_TOKENIZER = {"train": "dict"}
_TOKENIZER_TRAINING = {"vocab_size": "int"}
_DATA = {
    "path": "str | list[str]",
    "name": "str | None",
    "split": "str | None",
    "eval_path": "str | list[str] | None",
    "eval_split": "str | None",
    "eval_fraction": "float | None",
    "columns": "dict | None",
    "format": "Literal['text', 'prompt_completion', 'messages'] | None",
    "max_length": "int | None",
    "packing": "bool",
    "chat_template": "str | None",
    "loss_on": "Literal['completion', 'assistant', 'all'] | None",
    "max_examples": "int | None",
    "seed": "int",
    "num_proc": "int | None",
}
DEFAULT_MAX_LENGTH = 1024
"""Of `data.max_length`, in tokens."""

_COLUMNS = {"text": "str", "prompt": "str", "completion": "str", "messages": "str"}
_CHECKPOINTING = {
    "policy": "str | dict | list[dict]",
    "memory_budget": "str | float | None",
    "max_length": "int | None",
    "exact": "bool | Literal['prefer'] | None",
    "micro_batch": "Literal['auto'] | None",
    "every_n_layers": "int | None",
    "segment_size": "int | Literal['sqrt'] | None",
    "nested": "bool | None",
    "save": "str | list[str] | None",
    "offload": "str | dict | None",
    "tiles": "int | Literal['auto'] | None",
    "head": "Literal['plain', 'chunked'] | None",
    "skip_frozen": "bool",
    "layers": "str | list[str] | None",
    "attention": "str | None",
    "ffn": "str | None",
    "input_require_grads": "bool | None",
    "on_mismatch": "Literal['error', 'warn']",
    "strict_resume": "bool",
    "prove": "int | Literal['first_step', 'off']",
}
OF_AUTO = ("memory_budget", "max_length", "exact", "micro_batch")
"""The keys of `checkpointing` that belong to policy `auto`."""
OF_RECIPES = ("micro_batch",)
"""The keys of `checkpointing` that a run reads, and `HFCkptCallback` does not take."""

POLICY_OPTIONS = ("every_n_layers", "segment_size", "nested", "save", "offload", "tiles", "head", "skip_frozen")
"""The keys of `checkpointing` that `Policy.parse` reads beside the policy."""

OTHER_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "group_by_length": "train_sampling_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "no_cuda": "use_cpu",
    "torch_dtype": "dtype",
    "use_flash_attention_2": "attn_implementation",
    "model_name_or_path": "name_or_path",
    "max_seq_length": "max_length",
    "dataset": "path",
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
}
"""What keys are called in other versions of transformers and in other trainers, and what they are called here."""


def sections() -> dict[str, Section]:
    """Return the sections of a recipe by name, as the installed libraries know them."""
    transformers = f"transformers {upstream_fields.version('transformers')}"
    known = (
        Section("model", "the model section", _own(_MODEL)),
        Section("lora", f"LoraConfig (peft {upstream_fields.version('peft')})", upstream_fields.lora_keys()),
        Section("quantization", f"BitsAndBytesConfig ({transformers})", upstream_fields.quantization_keys()),
        Section("data", "the data section", _own(_DATA), ("path",)),
        Section("checkpointing", "HFCkptCallback", _own(_CHECKPOINTING), ("policy",)),
        Section("training", f"TrainingArguments ({transformers})", upstream_fields.training_keys(), ("output_dir",)),
    )
    return {section.name: section for section in known}


def nested_sections(model_type: object) -> dict[str, Section]:
    """Return what is known of the mappings inside sections, by key path.

    Args:
        model_type: of `model.config`.
    """
    known = {
        "model.tokenizer": Section("model.tokenizer", "a tokenizer", _own(_TOKENIZER), ("train",)),
        "model.tokenizer.train": Section(
            "model.tokenizer.train", "a tokenizer's training", _own(_TOKENIZER_TRAINING), ("vocab_size",)
        ),
        "data.columns": Section("data.columns", "the mapping of columns", _own(_COLUMNS)),
    }
    config = upstream_fields.config_keys(model_type) if isinstance(model_type, str) else None
    if config is not None:
        owner = f"{config.class_name} (transformers {upstream_fields.version('transformers')})"
        known["model.config"] = Section("model.config", owner, config.keys, ("model_type",))
    return known


def _own(types: Mapping[str, str]) -> Keys:
    return {name: Key(parse_type(annotation)) for name, annotation in types.items()}
