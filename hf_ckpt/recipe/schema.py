"""Which keys each section of a recipe takes, and what their values may be.

`training`, `lora`, `adapter` and `quantization` take the upstream classes' own fields (`upstream_fields`); the keys of
`model`, `data` and `checkpointing` are listed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_type_hints

from hf_ckpt.errors import did_you_mean, shortened
from hf_ckpt.policy.options import CallbackOptions
from hf_ckpt.recipe import upstream_fields
from hf_ckpt.recipe.document import Entry, Location, Mistakes
from hf_ckpt.recipe.field_types import Hint, accepts, advice, describe, show, simplified
from hf_ckpt.recipe.optional_packages import install_command
from hf_ckpt.recipe.trainer_kinds import (
    NOT_POSSIBLE,
    OLDEST_TRL,
    REWARDS,
    TEXT,
    TRAINERS,
    TrainerKind,
    kind_of,
)
from hf_ckpt.recipe.upstream_fields import DTYPES, Key, Keys


@dataclass(frozen=True)
class Section:
    """One section of a recipe."""

    name: str  # As written in the recipe.
    owner: str  # Whose keys they are, in words.
    keys: Keys  # The keys that it takes.
    required: tuple[str, ...] = ()  # The keys that it cannot do without.


TRAINER = "trainer"  # The key besides the sections, with `REWARDS`.
REQUIRED_SECTIONS = ("model", "data", "training")

_MODEL = {
    "name_or_path": str | None,
    "config": dict | None,
    "tokenizer": str | dict | None,
    "dtype": Literal["auto", *DTYPES] | None,
    "attn_implementation": str | None,
    "experts_implementation": str | None,
    "revision": str | None,
    "trust_remote_code": bool,
    "num_labels": int | None,
    "base_recipe": str | None,
}
PREPARE_FOR_KBIT = "prepare_model_for_kbit_training"
"""The key of `quantization` that is a function of PEFT, and no field of `BitsAndBytesConfig`."""
QUANTIZE_EXPERTS = "quantize_experts"
"""The key of `quantization` by which the experts of a mixture, which bitsandbytes skips, are in 4 bits too."""

_DATA = {
    "path": str | list[str],
    "name": str | None,
    "split": str | None,
    "eval_path": str | list[str] | None,
    "eval_split": str | None,
    "eval_fraction": float | None,
    "columns": dict | None,
    "format": Literal["text", "prompt_completion", "messages", "images"] | None,
    "max_length": int | None,
    "max_pixels": int | None,
    "max_images": int | None,
    "packing": bool,
    "chat_template": str | None,
    "loss_on": Literal["completion", "assistant", "all"] | None,
    "max_examples": int | None,
    "seed": int,
    "num_proc": int | None,
}
NO_PARALLELISM = (
    "a recipe's model is loaded whole in each process, or shared by FSDP or DeepSpeed: processes that share matrices "
    "or rows (tp_size, cp_size, sp_size) are not for recipes. Leave it out, or write a script that loads the model "
    "with DistributedConfig(tp_size=...) and gives its Trainer HFCkptCallback(...), which proves the first step to "
    "the bit."
)
"""Why a recipe cannot ask for more than data parallelism, and what to do."""
DEFAULT_MAX_LENGTH = 1024  # Of `data.max_length`, in tokens.

_COLUMNS = ("text", "prompt", "completion", "messages")
_CHECKPOINTING = {
    "policy": str | dict | list[dict[str, Any]],
    "micro_batch": Literal["auto"] | None,
    **get_type_hints(CallbackOptions),
}

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


def sections(adapter: str | None, trainer: TrainerKind) -> dict[str, Section]:
    """Return the sections of a recipe by name, as the installed libraries know them.

    `adapter`: one of PEFT's kinds of adapters, where the recipe has one. `trainer`: whose arguments `training` takes.
    """
    transformers = f"transformers {upstream_fields.version('transformers')}"
    arguments_of = "trl" if trainer.of_trl else "transformers"
    known = (
        Section("model", "the model section", _own(_MODEL)),
        Section("lora", f"LoraConfig (peft {upstream_fields.version('peft')})", upstream_fields.adapter_keys("lora")),
        _adapter_section(adapter),
        Section(
            "quantization",
            f"BitsAndBytesConfig ({transformers})",
            {**upstream_fields.quantization_keys(), **_own({PREPARE_FOR_KBIT: bool, QUANTIZE_EXPERTS: bool})},
        ),
        Section("data", "the data section", _own(_DATA), ("path",)),
        Section("checkpointing", "HFCkptCallback", _own(_CHECKPOINTING), ("policy",)),
        Section(
            "training",
            f"{trainer.arguments} ({arguments_of} {upstream_fields.version(arguments_of)})",
            upstream_fields.training_keys(trainer.of_trl),
            ("output_dir",),
        ),
    )
    return {section.name: section for section in known}


def _adapter_section(kind: str | None) -> Section:
    owner, keys = "the adapter section", {}
    if kind is not None:
        _, class_name = upstream_fields.adapter_classes()[kind]
        owner, keys = f"{class_name} (peft {upstream_fields.version('peft')})", dict(upstream_fields.adapter_keys(kind))
    return Section("adapter", owner, {**_own({"type": str}), **keys}, ("type",))


def nested_sections(model_type: object, trainer: TrainerKind) -> dict[str, Section]:
    """Return what is known of the mappings inside sections, by key path."""
    columns = _COLUMNS if trainer.is_text else (*trainer.columns, *trainer.more_columns)
    known = {
        "model.tokenizer": Section("model.tokenizer", "a tokenizer", _own({"train": dict}), ("train",)),
        "model.tokenizer.train": Section(
            "model.tokenizer.train", "a tokenizer's training", _own({"vocab_size": int}), ("vocab_size",)
        ),
        "data.columns": Section("data.columns", "the mapping of columns", _own(dict.fromkeys(columns, str))),
    }
    config = upstream_fields.config_keys(model_type) if isinstance(model_type, str) else None
    if config is not None:
        class_name, keys = config
        owner = f"{class_name} (transformers {upstream_fields.version('transformers')})"
        known["model.config"] = Section("model.config", owner, keys, ("model_type",))
    return known


def _own(hints: Mapping[str, Hint]) -> Keys:
    return {name: Key(simplified(hint)) for name, hint in hints.items()}


# In what is ours, null means that a key is not there: it takes away what another recipe gave.
_NULL_IS_ABSENT = ("model", "model.tokenizer", "model.tokenizer.train", "data", "data.columns", "checkpointing")
# Where to look first for the home of a key that is in the wrong section.
_LIKELY_HOMES = ("model", "training", "data", "lora", "adapter", "quantization", "checkpointing")
_LONGEST_SHOWN = 80


# --- Bounds of single values. ---


@dataclass(frozen=True)
class Bounds:
    """Between which bounds a number lies; `at_least` is included, `above` and `below` are not."""

    at_least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf

    def accepts(self, value: float) -> bool:
        """Tell whether `value` lies between the bounds."""
        return self.at_least <= value and self.above < value < self.below

    def describe(self) -> str:
        """Return the bounds in words."""
        bounds = (("of at least", self.at_least), ("above", self.above), ("below", self.below))
        return "a number " + " and ".join(f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound))


COUNT = Bounds(at_least=1)
_NOT_NEGATIVE = Bounds(at_least=0)
_POSITIVE = Bounds(above=0)
_SHARE = Bounds(at_least=0, below=1)

LIMITS = {
    "model.tokenizer.train.vocab_size": Bounds(at_least=259),  # 256 bytes, and where a text begins, ends and is padded
    "model.num_labels": COUNT,
    "model.config.vocab_size": COUNT,
    "model.config.hidden_size": COUNT,
    "model.config.num_hidden_layers": COUNT,
    "model.config.num_attention_heads": COUNT,
    "checkpointing.max_length": COUNT,
    "lora.lora_alpha": _POSITIVE,
    "lora.lora_dropout": _SHARE,
    "adapter.num_virtual_tokens": COUNT,
    "adapter.lora_alpha": _POSITIVE,
    "adapter.lora_dropout": _SHARE,
    "quantization.llm_int8_threshold": _NOT_NEGATIVE,
    "data.max_length": Bounds(at_least=2),  # each token is learnt from those before it
    "data.max_pixels": COUNT,
    "data.max_images": COUNT,
    "data.eval_fraction": Bounds(above=0, below=1),
    "data.max_examples": COUNT,
    "data.num_proc": COUNT,
    "data.seed": _NOT_NEGATIVE,
    "training.per_device_train_batch_size": COUNT,
    "training.per_device_eval_batch_size": COUNT,
    "training.gradient_accumulation_steps": COUNT,
    "training.eval_accumulation_steps": COUNT,
    "training.torch_empty_cache_steps": COUNT,
    "training.num_train_epochs": _POSITIVE,
    "training.learning_rate": _NOT_NEGATIVE,
    "training.warmup_steps": _NOT_NEGATIVE,
    "training.weight_decay": _NOT_NEGATIVE,
    "training.max_grad_norm": _NOT_NEGATIVE,
    "training.adam_beta1": _SHARE,
    "training.adam_beta2": _SHARE,
    "training.adam_epsilon": _NOT_NEGATIVE,
    "training.label_smoothing_factor": _SHARE,
    "training.neftune_noise_alpha": _NOT_NEGATIVE,
    "training.logging_steps": _POSITIVE,
    "training.eval_steps": _POSITIVE,
    "training.save_steps": _POSITIVE,
    "training.dataloader_num_workers": _NOT_NEGATIVE,
    "training.ddp_timeout": _POSITIVE,
    "training.seed": _NOT_NEGATIVE,
    "training.data_seed": _NOT_NEGATIVE,
}
"""Bounds of single values, by key path."""


# --- A recipe while it is checked. ---


Refusal = tuple[str, str]  # A key path, and what is wrong with its value, or with its absence. Noted by `Draft.refuse`.


@dataclass(frozen=True)
class Draft:
    """A recipe while it is checked."""

    document: Entry  # Everything as written.
    sections: dict[str, dict[str, Any]]  # What is of the right type: values by section and key.
    mistakes: Mistakes  # What is wrong.
    trainer: TrainerKind | None = TEXT  # None where the recipe names one that cannot be had.

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path, or `default` where it is not given or not of the right type."""
        value: Any = self.sections
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return default
            value = value[key]
        return value

    def written(self, path: str) -> Any:
        """Return what is written at a dotted path, valid or not; None where nothing is."""
        entry = self.document.find(path)
        return None if entry is None else entry.plain()

    def has(self, path: str) -> bool:
        """Tell whether something is written at a dotted path, valid or not."""
        return path in self.mistakes.unread or self.written(path) is not None

    def place(self, path: str) -> Location:
        """Return where the value at a dotted path is written, or else what would hold it."""
        while (entry := self.document.find(path)) is None:
            path = path.rpartition(".")[0]
        return entry.place

    def refuse(self, path: str, text: str) -> None:
        """Note what is wrong with the value at a dotted path, or with its absence."""
        self.mistakes.add(self.place(path), f"{path}{_shown(self.document.find(path))}: {text}")


def check_sections(document: Entry, mistakes: Mistakes) -> Draft:
    """Check the keys of a document and the types of their values."""
    draft = Draft(document, {}, mistakes)
    draft = replace(draft, trainer=_trainer_kind(draft))
    adapter = draft.written("adapter.type")
    # Looked up only where it is needed: that reads a file of each kind.
    if not isinstance(adapter, str) or adapter not in upstream_fields.adapter_classes():
        adapter = None
    known = sections(adapter, draft.trainer or TEXT)
    for name in document.value:
        if name not in (*known, TRAINER, REWARDS):
            draft.refuse(str(name), f"unknown section. Sections are {', '.join(known)}.{_elsewhere(name, None, known)}")
    for section in known.values():
        entry = document.value.get(section.name)
        if section.name == "adapter" and adapter is None:
            _refuse_adapter(draft, entry)
        elif draft.trainer is None and section.name == "training":
            # Nothing is known of what a trainer takes that cannot be had.
            continue
        elif entry is not None and entry.value is not None:
            draft.sections[section.name] = _check_section(draft, section, entry, known)
        elif section.name in REQUIRED_SECTIONS and mistakes.is_whole and not draft.has(section.name):
            draft.refuse(section.name, f"the section is missing. {_EXAMPLES[section.name]}")
    _check_nested(draft, known)
    return draft


def _trainer_kind(draft: Draft) -> TrainerKind | None:
    """Return the trainer that a recipe names, if it can be had; it is refused otherwise."""
    name = draft.written(TRAINER)
    if name is None:
        return TEXT
    if not isinstance(name, str) or name not in TRAINERS:
        if name in list(NOT_POSSIBLE):
            draft.refuse(TRAINER, f"{NOT_POSSIBLE[name]}.")
        else:
            draft.refuse(TRAINER, f"expected one of {', '.join(TRAINERS)}.{did_you_mean(str(name).lower(), TRAINERS)}")
        return None
    kind = kind_of(name, draft.written("data.format"))
    found = upstream_fields.trl_version() if kind.of_trl else OLDEST_TRL
    if found is not None and found >= OLDEST_TRL:
        return kind
    what = "is not installed" if found is None else f"is installed in version {upstream_fields.version('trl')}"
    draft.refuse(TRAINER, f"is a trainer of trl, which {what}. Run: {install_command('trl')}")
    return None


def _refuse_adapter(draft: Draft, entry: Entry | None) -> None:
    """Refuse an adapter section whose kind is not known: nothing is known of its other keys either."""
    if entry is None or entry.value is None or "adapter" in draft.mistakes.unread:
        return
    if not isinstance(entry.value, dict):
        draft.refuse("adapter", f"expected a mapping. {_EXAMPLES['adapter']}")
        return
    kind, kinds = draft.written("adapter.type"), sorted(upstream_fields.adapter_classes())
    if kind is None:
        draft.refuse("adapter.type", f"missing. {_EXAMPLES['adapter']}")
    else:
        near = did_you_mean(str(kind).lower(), kinds)
        version = upstream_fields.version("peft")
        draft.refuse("adapter.type", f"peft {version} has no such adapter.{near} It has {', '.join(kinds)}.")


_EXAMPLES = {
    "model": "Write model: {name_or_path: ...} with a hub id or a folder.",
    "lora": "Write lora: {r: 16, target_modules: all-linear}.",
    "adapter": "Write adapter: {type: ia3}, or another kind of PEFT's, with the fields of its config.",
    "quantization": "Write quantization: {load_in_4bit: true}.",
    "data": "Write data: {path: ...} with a hub id or a file.",
    "checkpointing": "Write checkpointing: {policy: full}.",
    "training": "Write training: {output_dir: runs/NAME}.",
    "model.config": "Write config: {model_type: llama, hidden_size: 128, ...}.",
    "model.tokenizer": "Write a hub id or a folder, or {train: {vocab_size: 4096}}.",
    "model.tokenizer.train": "Write train: {vocab_size: 4096}.",
    "data.columns": "Write columns: {prompt: NAME, completion: NAME}.",
}


def _check_section(draft: Draft, section: Section, entry: Entry, known: dict[str, Section]) -> dict[str, Any]:
    """Return the values of a section that are of the right type."""
    if not isinstance(entry.value, dict):
        draft.refuse(section.name, f"expected a mapping. {_EXAMPLES[section.name]}")
        return {}
    valid: dict[str, Any] = {}
    for name, value in entry.value.items():
        path = f"{section.name}.{name}"
        if name not in section.keys:
            draft.refuse(path, f"unknown key of {section.owner}.{_elsewhere(name, section, known)}")
        elif value.value is None and section.name in _NULL_IS_ABSENT:
            continue
        elif _check_type(draft, path, value.plain(), section.keys[name].type):
            valid[name] = value.plain()
    for name in section.required:
        if draft.mistakes.is_whole and not draft.has(f"{section.name}.{name}"):
            draft.refuse(f"{section.name}.{name}", f"missing. {_EXAMPLES[section.name]}")
    return valid


def _check_type(draft: Draft, path: str, value: object, expected: Hint) -> bool:
    if path == "training.parallelism_config" and value is not None:
        draft.refuse(path, NO_PARALLELISM)
        return False
    # Python's None is text in YAML, and would be taken for a name.
    is_python_none = value == "None" and accepts(expected, None)
    if accepts(expected, value) and not is_python_none:
        return True
    draft.refuse(path, f"expected {describe(expected)}.{' Write null.' if is_python_none else advice(value, expected)}")
    return False


def _check_nested(draft: Draft, known: dict[str, Section]) -> None:
    model_type = draft.get("model.config.model_type")
    if draft.has("model.config"):
        _check_model_type(draft, model_type)
    for path, section in nested_sections(model_type, draft.trainer or TEXT).items():
        if draft.trainer is None and path == "data.columns":
            continue
        entry = draft.document.find(path)
        if isinstance(draft.get(path), dict) and entry is not None:
            parent, _, key = path.rpartition(".")
            draft.get(parent)[key] = _check_section(draft, section, entry, known)


def _check_model_type(draft: Draft, model_type: object) -> None:
    scores_rows = draft.trainer is not None and draft.trainer.scores_rows
    types = upstream_fields.model_types("SEQUENCE_CLASSIFICATION" if scores_rows else "CAUSAL_LM")
    if model_type is None:
        draft.refuse("model.config.model_type", f"missing. {_EXAMPLES['model.config']}")
    elif types and model_type not in types:
        near, what = did_you_mean(model_type, types), "sequence classification" if scores_rows else "causal language"
        draft.refuse("model.config.model_type", f"transformers has no {what} model of this type.{near}")


def _elsewhere(name: object, section: Section | None, known: dict[str, Section]) -> str:
    """Return where an unknown key belongs, or which known key it resembles."""
    own = (*known, TRAINER, "extends") if section is None else tuple(section.keys)
    for candidate in (str(name), OTHER_NAMES.get(str(name), "")):
        if candidate in own:
            return f' Did you mean "{candidate}"?'
        homes = [home for home in _LIKELY_HOMES if candidate in known[home].keys]
        if homes and (section is None or section.name in known):
            return f' Did you mean "{homes[0]}.{candidate}"?'
    return (_of_trainers(str(name)) if section and section.name == "training" else "") or did_you_mean(name, own)


def _of_trainers(name: str) -> str:
    """Return which other trainers take a key of `training`."""
    if upstream_fields.trl_version() is None:
        return ""
    words = [
        word for word, kind in TRAINERS.items() if kind.of_trl and name in upstream_fields.training_keys(kind.of_trl)
    ]
    choices = " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
    return f" It belongs to trainer: {choices}." if words else ""


def _shown(entry: Entry | None) -> str:
    if entry is None or isinstance(entry.value, dict):
        return ""
    return f" = {shortened(show(entry.plain()), _LONGEST_SHOWN)}"
