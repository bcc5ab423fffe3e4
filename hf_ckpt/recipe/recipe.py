"""Recipes: a YAML file in, checked as a whole, a frozen `Recipe` out.

Nothing heavy is imported: a recipe is read and refused in a fraction of a second, before any download. Knows no model,
no data set and no device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hf_ckpt.errors import RecipeError
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recipe import shipped
from hf_ckpt.recipe.checkpointing import Checkpointing
from hf_ckpt.recipe.document import Entry, Mistakes, document_of, read_document, resolve_path, there_is_no, write_yaml
from hf_ckpt.recipe.rules import check_rules, written_rewards
from hf_ckpt.recipe.schema import REQUIRED_SECTIONS, TRAINER, Draft, check_sections
from hf_ckpt.recipe.trainer_kinds import IMAGES, REWARDS, TrainerKind, kind_of
from hf_ckpt.recipe.upstream_fields import has_virtual_tokens

Values = Mapping[str, Any]

_ORDER = ("model", "lora", "adapter", "quantization", "data", "checkpointing", "training")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe that was read and checked. Sections hold what was written, under upstream's own names.

    Args:
        model: `name_or_path` or `config`, and how to load it.
        data: what to train and evaluate on.
        training: fields of `transformers.TrainingArguments`, or of the trainer's own arguments.
        trainer: one of `TRAINERS`; None for the Trainer of transformers on text.
        reward_funcs: names of what rewards completions, where the trainer generates them.
        lora: fields of `peft.LoraConfig`; short for an adapter of type `lora`.
        adapter: `type`, one of PEFT's kinds of adapters, and the fields of its config.
        quantization: fields of `transformers.BitsAndBytesConfig`, if weights are quantised.
        checkpointing: arguments of `HFCkptCallback`, if there is a policy; parsed.
        path: the file it was read from.
    """

    model: Values
    data: Values
    training: Values
    trainer: str | None = None
    reward_funcs: tuple[str, ...] = ()
    lora: Values | None = None
    adapter: Values | None = None
    quantization: Values | None = None
    checkpointing: Checkpointing | None = None
    path: Path

    @property
    def kind(self) -> TrainerKind:
        """What the trainer needs of model and data."""
        return kind_of(self.trainer, self.data.get("format"))

    @property
    def adapter_section(self) -> Values | None:
        """The adapter that is trained, whichever section says so, with its `type`; None for a full fine-tune."""
        return self.adapter if self.lora is None else {"type": "lora", **self.lora}

    @property
    def has_virtual_tokens(self) -> bool:
        """Whether tokens of an adapter's own are trained, in front of a row's (prompt and prefix tuning)."""
        return self.adapter is not None and has_virtual_tokens(self.adapter["type"])

    @property
    def is_auto(self) -> bool:
        """Whether the plan is left to the planner."""
        return self.checkpointing is not None and self.checkpointing.is_auto

    def to_yaml(self) -> str:
        """Return the recipe with everything resolved, as YAML that loads as an equal recipe."""
        written: dict[str, Any] = {} if self.trainer is None else {TRAINER: self.trainer}
        written |= {REWARDS: list(self.reward_funcs)} if self.reward_funcs else {}
        return write_yaml(
            written | {name: dict(section) for name in _ORDER if (section := getattr(self, name)) is not None}
        )


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe and check it as a whole.

    Args:
        path: a YAML file, or the name of a recipe that comes with the package, such as `llama7b_lora`.
        overrides: `key.path=value`, the value in YAML, laid on the file as if another recipe extended it.

    Returns:
        The recipe, with what it extends and the overrides in it.

    Raises:
        RecipeError: one line for each mistake, with file and line, key path, value, and what to write instead.

    Example:
        >>> recipe = load_recipe("recipes/tiny_llama_lora.yaml", ["training.max_steps=10"])
        >>> recipe.training["max_steps"]
        10
    """
    return _load(shipped.find(Path(path)), tuple(overrides), ())


def _load(path: Path, overrides: tuple[str, ...], needed_by: tuple[Path, ...]) -> Recipe:
    mistakes = Mistakes()
    return _checked(read_document(path, overrides, mistakes), path, needed_by, mistakes)


def recipe_of(values: Mapping[str, Any], name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Check a recipe that is in no file.

    `values`: what a file would hold. `name`: what messages and reports call it. `overrides` and what is raised: see
    `load_recipe`.
    """
    mistakes = Mistakes()
    return _checked(document_of(values, name, overrides, mistakes), Path(name), (), mistakes)


def _checked(document: Entry, path: Path, needed_by: tuple[Path, ...], mistakes: Mistakes) -> Recipe:
    keys = {str(key) for key in document.value}
    other = _other_format(keys) if len(keys & set(REQUIRED_SECTIONS)) < len(REQUIRED_SECTIONS) - 1 else None
    if other is not None:
        raise RecipeError(
            f"{path}: this is a configuration of {other}, and no recipe. Read docs/coming_from.md#{other.lower()}: it "
            f"says how to keep {other}, and how to write a recipe."
        )
    draft = check_sections(document, mistakes)
    if mistakes.is_whole:
        check_rules(draft)
    _check_base(draft, (*needed_by, path))
    if mistakes.lines:
        raise RecipeError("\n".join(mistakes.lines))
    # Once, for whatever loads from there and writes there: to some libraries "~" is the name of a folder.
    for section, key in (("model", "name_or_path"), ("model", "tokenizer"), ("training", "output_dir")):
        if isinstance(value := draft.get(f"{section}.{key}"), str):
            draft.sections[section][key] = os.path.expanduser(value)
    sections: dict[str, Any] = {name: MappingProxyType(values) for name, values in draft.sections.items()}
    if "checkpointing" in sections:
        sections["checkpointing"] = Checkpointing(sections["checkpointing"])
    trainer = draft.trainer.name or None if draft.trainer else None
    return Recipe(path=path, trainer=trainer, reward_funcs=tuple(written_rewards(draft)), **sections)


def _check_base(draft: Draft, needed_by: tuple[Path, ...]) -> None:
    """Check the recipe that makes the weights too, and note where it lies."""
    written = draft.get("model.base_recipe")
    if written is None:
        return
    path = resolve_path(draft.place("model.base_recipe"), written)
    try:
        is_file = path.is_file()
    # A name that is too long.
    except OSError as error:
        draft.refuse("model.base_recipe", f"no file has this name: {error.strerror}.")
        return
    if path.resolve() in map(Path.resolve, needed_by):
        draft.refuse("model.base_recipe", "recipes wait for each other's weights. Break the circle.")
    elif not is_file:
        draft.refuse("model.base_recipe", there_is_no(path))
    else:
        draft.sections["model"]["base_recipe"] = str(path.resolve())
        try:
            _load(path, (), needed_by)
        except RecipeError as error:
            draft.mistakes.extend(str(error).splitlines())


# --- YAML of other trainers, by their public formats: it is no recipe, and one line says where to read on. ---


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


def _other_format(keys: Set[str]) -> str | None:
    """Return whose configuration a YAML file is, by its keys; None where nobody's is recognised."""
    for name, firsts, others in _FORMATS:
        if any(first in keys and any(other in keys and other != first for other in others) for first in firsts):
            return name
    return None


# --- A recipe for a model, of which nothing is known but its name and the way to train it. ---


METHODS = ("lora", "qlora", "full")
DEFAULT_RANK = 16
_4BIT = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}
# As in the recipe qwen3_vl_8b_lora: all-linear would reach into the tower of images.
_OF_TEXT = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


@dataclass(frozen=True)
class Training:
    """How a model is trained, under policy `auto`."""

    method: str = "lora"  # One of `METHODS`.
    rank: int = DEFAULT_RANK  # Of LoRA's matrices.
    targets: tuple[str, ...] = ()  # Names of the layers that LoRA is on; empty for PEFT's `all-linear`.
    experts: tuple[str, ...] = ()  # Names of the parameters, below a layer, that it is on.
    has_experts: bool = False  # Whether the model is a mixture, of which 4 bits are for the experts too.
    length: int = 2048  # Tokens of the longest row.
    batch: int = 1  # Rows of a micro-batch.
    data: str = "rows.jsonl"
    classes: int = 0  # Of which each sequence gets one; 0 for a model that writes.
    is_reward: bool = False  # Whether each sequence gets a score, learnt from pairs.
    images: int = 0  # Of an example.
    pixels: int = 2**20  # Of the largest image.
    dtype: str = "bfloat16"  # Of matrix products: or float16, where the GPU has no matrix units for the other.

    def recipe_for(self, model: str, overrides: Iterable[str] = ()) -> Recipe:
        """Return the recipe for a model, an id on the hub or a folder, checked as any other.

        Raises:
            RecipeError: see `load_recipe`.
        """
        # The gradient scaler that float16 needs takes no gradients of float16: what is trained is in float32.
        stored = "float32" if self.dtype == "float16" and self.method == "full" else self.dtype
        values: dict[str, Any] = {"model": {"name_or_path": model, "dtype": stored, "attn_implementation": "sdpa"}}
        if self.method != "full":
            targets = list(self.targets) or (_OF_TEXT if self.images else "all-linear")
            values["lora"] = {"r": self.rank, "lora_alpha": 2 * self.rank, "target_modules": targets}
            if self.experts:
                values["lora"]["target_parameters"] = list(self.experts)
        if self.method == "qlora":
            values["quantization"] = {**_4BIT, "bnb_4bit_compute_dtype": self.dtype}
            if self.has_experts:
                values["quantization"]["quantize_experts"] = True
        values["data"] = {"path": self.data, "max_length": self.length}
        if self.images:
            values["trainer"] = "sft"
            values["data"] |= {"format": IMAGES, "max_images": self.images, "max_pixels": self.pixels}
        elif self.is_reward:
            values["trainer"] = "reward"
        elif self.classes:
            values["trainer"] = "classification"
            values["model"]["num_labels"] = self.classes
        values["checkpointing"] = {"policy": AUTO}
        values["training"] = {
            "output_dir": f"runs/{Path(model).name.lower()}_{self.method}",
            "per_device_train_batch_size": self.batch,
            "learning_rate": 1e-5 if self.method == "full" else 2e-4,
            "optim": "adamw_torch_fused",
            ("bf16" if self.dtype == "bfloat16" else "fp16"): True,
        }
        return recipe_of(values, model, overrides)
