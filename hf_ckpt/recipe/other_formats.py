"""YAML of other trainers, by their public formats: it is no recipe, and one line says where to read on."""

from __future__ import annotations

from collections.abc import Set

_LLAMA_FACTORY = "stage finetuning_type template cutoff_len do_train lora_target dataset_dir dataset".split()
_TRL = (
    "output_dir learning_rate per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps "
    "gradient_checkpointing dataset_name datasets dataset_config use_peft lora_r max_length load_in_4bit bf16"
).split()
_FORMATS = (
    ("axolotl", ("base_model",), "datasets sequence_len micro_batch_size num_epochs val_set_size output_dir".split()),
    ("LLaMA-Factory", ("model_name_or_path",), _LLAMA_FACTORY),
    ("trl", ("model_name_or_path", "dataset_name", "datasets"), _TRL),
)
"""Of each: its name, keys of which one is there, and others of which one is there besides. LLaMA-Factory before trl,
whose keys it has too."""


def other_format(keys: Set[str]) -> str | None:
    """Return whose configuration a YAML file is, by its keys; None where nobody's is recognised."""
    for name, firsts, others in _FORMATS:
        if any(first in keys and any(other in keys and other != first for other in others) for first in firsts):
            return name
    return None


def says_other_format(path: object, name: str) -> str:
    """Return the line that refuses such a file."""
    anchor = name.lower()
    return (
        f"{path}: this is a configuration of {name}, and no recipe. Read docs/coming_from.md#{anchor}: it says how to "
        f"keep {name}, and how to write a recipe."
    )
