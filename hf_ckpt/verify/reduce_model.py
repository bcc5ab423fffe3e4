"""The recipe on a small model of the same structure: its own model class with few layers and small widths.

    found config -> model at full size on `meta`, with adapters and plan -> fewer layers -> small widths -> weights

Each step builds what it proposes, and falls back to a smaller change where the result is not equivalent: depth is tried
on `meta` until every kept layer is of the kind that it stands for, widths until the model trains one step.

A recipe made for GPUs is first adapted to this machine; what decides over loss and gradients stays the recipe's own.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ckpt.errors import HFCkptError, RecipeError, StructureError
from hf_ckpt.estimate.recipe_plan import with_auto_plan
from hf_ckpt.loading.model import Found, find_config, rehearse
from hf_ckpt.loading.tokenizer import MIN_VOCAB_SIZE, load_tokenizer, train_tokenizer
from hf_ckpt.patch.apply import apply
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.recipe.checkpointing import Checkpointing
from hf_ckpt.recipe.recipe import Recipe, Values
from hf_ckpt.structure.layers import Stack, find_layers, nearest_config
from hf_ckpt.verify import processes, reduce_depth, reduce_widths
from hf_ckpt.verify.reduce_depth import KeptStack
from hf_ckpt.verify.reduce_widths import make_weights, with_special_tokens

VOCAB_SIZE = 320
"""Tokens of a reduced model: 256 bytes, three that frame a text, and room for those of images and the like."""
_KEPT_KEYS = ("trust_remote_code", "attn_implementation", "dtype", "num_labels")
_MAX_PARAMETERS = 300_000_000
"""Of a reduced model; it is trained several times, on a CPU."""
_MAX_ROWS = 2
# Reporting, resuming, evaluation, data loading and schedules: nothing that a trial does.
_DROPPED = (
    *("hub_model_id", "hub_token", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision"),
    *("resume_from_checkpoint", "run_name", "logging_dir", "project", "trackio_space_id"),
    *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "do_eval", "eval_accumulation_steps"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("save_only_model", "save_total_limit", "logging_steps", "auto_find_batch_size"),
    *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_persistent_workers"),
    # A warm-up is longer than the trial, and its first step has a learning rate of zero.
    *("warmup_steps", "warmup_ratio", "num_train_epochs", "max_steps"),
)
_NEEDS_GPU = ("tf32", "torch_empty_cache_steps")
Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ReducedRecipe:
    """What trials run in place of a recipe."""

    recipe: Recipe  # on the small model; `model.name_or_path` is a folder with its weights
    tokenizer: PreTrainedTokenizerBase  # with padding and EOS
    facts: Facts  # what was changed, as (name, text) rows for the report


@dataclass(frozen=True)
class MetaModel:
    """A recipe's model on `meta`, as fine-tuning would build it, and its plan."""

    model: Any  # with adapters, without weights
    stacks: tuple[Stack, ...]
    plan: Plan | None  # None without a policy

    @property
    def class_name(self) -> str:
        """Name of the model's own class, without adapters around it."""
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return type(base).__name__

    @property
    def num_parameters(self) -> int:
        """Parameters, adapters included."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def reduce_recipe(recipe: Recipe, folder: Path, *, is_full: bool) -> ReducedRecipe:
    """Make a recipe for trials: its own model class, small unless `is_full`, with weights in a folder.

    At full size the real weights are taken where they are available. Raises RecipeError if there is no config, if a
    section does not suit the model, or if the model cannot be made smaller; and what `build_on_meta` raises.
    """
    # One folder for each process, until all take the first one's weights.
    folder = folder / f"process-{os.environ.get('RANK', '0')}"
    planned, chosen = with_auto_plan(recipe)
    wanted, notes = adapt_to_machine(planned)
    notes.extend(chosen)
    found = find_config(wanted)
    fields = config_fields(found.config)
    wanted, unpacked = _with_quantisation_of_config(wanted, fields.pop("quantization_config", None))
    full = build_on_meta(wanted, write_config(fields, wanted, found, folder / "full"))
    make = _make_full_size if is_full else _make_reduced
    made = _shared_by_processes(make(wanted, found, fields, full, folder))
    rows = (("model", f"{full.class_name}, config from {found.source}"), *made.facts)
    notes.extend(unpacked)
    return replace(made, facts=(*rows, ("changed", "; ".join(notes))) if notes else rows)


def build_on_meta(recipe: Recipe, section: Values) -> MetaModel:
    """Build a recipe's model on `meta`, in the shape of a `model` section, and resolve its policy.

    Refuses all that fine-tuning would refuse: RecipeError where a section does not suit the model; PolicyError,
    StructureError or UnsupportedError where the policy does not.
    """
    model: Any = rehearse(recipe, section)
    checkpointing = recipe.checkpointing
    if checkpointing is None:
        try:
            return MetaModel(model, find_layers(model), None)
        except StructureError:
            return MetaModel(model, (), None)
    stacks = find_layers(model, **checkpointing.structure)
    applied = apply(model, checkpointing.policy, **checkpointing.policy_options, **checkpointing.structure)
    applied.remove()
    return MetaModel(model, stacks, applied.plan)


def config_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return every field of a config and its sub-configs, as JSON types."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


# --- At full size, and reduced. ---


def _make_full_size(recipe: Recipe, found: Found, fields: Values, full: MetaModel, folder: Path) -> ReducedRecipe:
    if found.has_weights:
        tokenizer = load_tokenizer(recipe.model, recipe.data, cache_dir=folder / "tokenizer")
        return ReducedRecipe(
            recipe, tokenizer, (("size", f"full, {full.num_parameters:,} parameters, its own weights"),)
        )
    tokenizer = _byte_tokenizer(folder)
    vocab_size = full.model.config.get_text_config().vocab_size
    section = write_config(with_special_tokens(fields, tokenizer, vocab_size), recipe, found, folder / "model")
    num_parameters = make_weights(section, tokenizer, _seed(recipe))
    facts = (("size", f"full, {num_parameters:,} parameters, random weights"),)
    return ReducedRecipe(replace(recipe, model=section), tokenizer, facts)


def _make_reduced(recipe: Recipe, found: Found, fields: Values, full: MetaModel, folder: Path) -> ReducedRecipe:
    shallow, shallow_fields, kept = _shallow(recipe, found, fields, full, folder)
    tokenizer = _byte_tokenizer(folder)
    reasons: list[str] = []
    for number, (narrow, what) in enumerate(_widths(shallow_fields)):
        section = write_config(
            with_special_tokens(narrow, tokenizer, VOCAB_SIZE), shallow, found, folder / f"widths-{number}"
        )
        try:
            small = _checked(shallow, section, full, kept)
            _check_size(small)
            num_parameters = make_weights(section, tokenizer, _seed(recipe))
        except HFCkptError as error:
            reasons.append(str(error))
            continue
        facts = [(stack.name_in_base, reduce_depth.describe_kept_layers(stack)) for stack in kept]
        facts.append(("size", f"{num_parameters:,} of {full.num_parameters:,} parameters: {what}"))
        return ReducedRecipe(replace(shallow, model=section), tokenizer, tuple(facts))
    raise RecipeError(
        f"{full.class_name} cannot be tried at a reduced size: {reasons[0]} Try it at its real size with --full."
    )


def _shared_by_processes(made: ReducedRecipe) -> ReducedRecipe:
    """Let every process load the first one's weights: transformers lets no other process save any."""
    name = processes.gather(made.recipe.model["name_or_path"])[0]
    return replace(made, recipe=replace(made.recipe, model={**made.recipe.model, "name_or_path": name}))


# --- Fewer layers. ---


def _shallow(
    recipe: Recipe, found: Found, fields: Values, full: MetaModel, folder: Path
) -> tuple[Recipe, Values, tuple[KeptStack, ...]]:
    """Return the recipe, the fields of its config and the kept layers, with the first proposal that is equivalent."""
    for number, kept in enumerate(_proposals(recipe, full)):
        fewer = _with_fewer_layers(fields, full, kept)
        planned = replace(recipe, checkpointing=_carried_policy(recipe.checkpointing, kept, full, folder))
        section = write_config(fewer, recipe, found, folder / f"layers-{number}")
        for candidate in _with_adapters(planned, full, kept):
            try:
                _checked(candidate, section, full, kept)
            except HFCkptError:
                continue
            return candidate, fewer, kept
    kept = tuple(reduce_depth.all_layers(stack, entries) for stack, entries in _stacks_with_entries(full))
    return replace(recipe, checkpointing=_carried_policy(recipe.checkpointing, kept, full, folder)), fields, kept


def _proposals(recipe: Recipe, full: MetaModel) -> Iterator[tuple[KeptStack, ...]]:
    if (recipe.adapter_section or {}).get("layer_replication"):
        # LoRA repeats layers by number: none can be left out.
        return
    few, first, whole = (
        [keep(stack, entries) for stack, entries in _stacks_with_entries(full)]
        for keep in (reduce_depth.two_of_each_kind, reduce_depth.first_layers, reduce_depth.all_layers)
    )
    is_language = ["language" in stack.roles for stack in full.stacks]
    for language, others in ((few, few), (few, whole), (first, few), (first, whole)):
        yield tuple(
            ours if is_ours else theirs for ours, theirs, is_ours in zip(language, others, is_language, strict=True)
        )


def _stacks_with_entries(full: MetaModel) -> list[tuple[Stack, Sequence[LayerPlan]]]:
    if full.plan is None:
        return [(stack, [LayerPlan()] * len(stack.layers)) for stack in full.stacks]
    return [(stack, planned.layers) for stack, planned in zip(full.stacks, full.plan.stacks, strict=True)]


def _with_fewer_layers(fields: Values, full: MetaModel, kept: Sequence[KeptStack]) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(dict(fields))
    for stack, left in zip(full.stacks, kept, strict=True):
        part = changed
        for name in _path_to(full.model.config, nearest_config(full.model, stack.path.rpartition(".")[0])):
            part = part[name]
        part.update(reduce_depth.with_fewer_layers(part, left))
    return changed


def _path_to(config: PreTrainedConfig, part: PreTrainedConfig) -> tuple[str, ...]:
    """Return the names that lead from a config to a sub-config; by type where the model has copied it."""
    places = list(_config_paths(config))
    same = [place for place, other in places if other is part]
    return (same or [place for place, other in places if type(other) is type(part)] or [()])[0]


def _config_paths(
    config: PreTrainedConfig, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], PreTrainedConfig]]:
    yield above, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _config_paths(value, (*above, name))


def _carried_policy(
    checkpointing: Checkpointing | None, kept: Sequence[KeptStack], full: MetaModel, folder: Path
) -> Checkpointing | None:
    if checkpointing is None or full.plan is None:
        return checkpointing
    offloads = any(entry.offload is not None for stack in kept for entry in stack.entries)
    if all(stack.is_whole for stack in kept) and not offloads:
        return checkpointing
    # One folder for all processes: they must have the same policy.
    return checkpointing.with_policy(reduce_depth.policy_rules(kept, folder.parent), head=full.plan.head.value)


def _with_adapters(recipe: Recipe, full: MetaModel, kept: Sequence[KeptStack]) -> Iterator[Recipe]:
    """Yield the recipe with its own adapter, and with LoRA that names the modules of the kept layers."""
    yield recipe
    section = recipe.adapter_section
    if section is not None and section["type"] == "lora":
        wanted = reduce_depth.adapters_of_kept(reduce_depth.adapters_of(full.model), kept)
        yield replace(recipe, lora=None, adapter=reduce_depth.explicit_section(section, wanted))


def _checked(recipe: Recipe, section: Values, full: MetaModel, kept: Sequence[KeptStack]) -> MetaModel:
    """Build a smaller model on `meta`; raise HFCkptError if that fails or its layers, plan or adapters differ."""
    try:
        small = build_on_meta(recipe, section)
    except HFCkptError:
        raise
    except Exception as error:  # a config of unusual sizes may make a model raise anything
        raise RecipeError(f"{type(error).__name__}: {str(error).strip()}") from error
    if not reduce_depth.same_layers(kept, full.stacks, small.stacks):
        raise StructureError(f"{full.class_name} with fewer layers has other kinds of layers.")
    if small.plan is not None and not reduce_depth.same_plan(kept, small.plan):
        raise StructureError(f"{full.class_name} with fewer layers has another plan.")
    if recipe.adapter_section is not None:
        wanted = reduce_depth.adapters_of_kept(reduce_depth.adapters_of(full.model), kept)
        if reduce_depth.adapters_of(small.model) != wanted:
            raise StructureError(f"{full.class_name} with fewer layers has other adapters.")
    return small


# --- Small widths. ---


def _widths(fields: Values) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the fields of smaller models, each with its description; the one that keeps most of the structure first."""
    for keeps_ratios in (True, False):
        sizes = reduce_widths.sizes_for(fields, VOCAB_SIZE, keeps_ratios=keeps_ratios)
        what = f"hidden size {sizes.hidden}, feed-forward {sizes.inner}, vocabulary {sizes.vocab_size}"
        yield reduce_widths.with_small_widths(fields, sizes), what
    yield reduce_widths.with_vocabulary(fields, VOCAB_SIZE), f"widths as they are, vocabulary {VOCAB_SIZE}"


def _check_size(small: MetaModel) -> None:
    if small.num_parameters > _MAX_PARAMETERS:
        raise RecipeError(f"It has {small.num_parameters:,} parameters where nothing but its layers could be left out.")


# --- Files. ---


def write_config(fields: Values, recipe: Recipe, found: Found, folder: Path) -> dict[str, Any]:
    """Write a config, with the code that came with it, to a new folder, and return a `model` section for that folder.

    Dtype, attention and trust in the code are those of the recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    kept = {key: recipe.model[key] for key in _KEPT_KEYS if key in recipe.model}
    if kept.get("trust_remote_code"):
        for code in Path(found.section.get("name_or_path", "")).expanduser().glob("*.py"):
            shutil.copy(code, folder)
    # New weights are float32 by default; those of a folder have the dtype in which they were saved.
    default = "auto" if "name_or_path" in found.section else "float32"
    return {"dtype": default, **kept, "name_or_path": str(folder)}


def _byte_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    made = train_tokenizer(["text"], vocab_size=MIN_VOCAB_SIZE, cache_dir=folder / "tokenizer")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(made)
    return tokenizer


def _with_quantisation_of_config(recipe: Recipe, own: Values | None) -> tuple[Recipe, list[str]]:
    """Move the quantisation in a model's config to the recipe: small weights are made unquantised."""
    if own is None or recipe.quantization is not None:
        return recipe, []
    if own.get("quant_method") != "bitsandbytes":
        return recipe, [f"weights as before their own quantisation ({own.get('quant_method')})"]
    section = {key: value for key, value in own.items() if not key.startswith("_") and key != "quant_method"}
    return replace(recipe, quantization=section), []


def _seed(recipe: Recipe) -> int:
    return int(recipe.training.get("seed", 42))


# --- A recipe made for GPUs, as it can be tried on this machine. ---


def adapt_to_machine(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return a recipe that runs on this machine, on the CPU where there is no GPU, and a phrase for each change."""
    notes: list[str] = []
    training = {key: value for key, value in recipe.training.items() if key not in _DROPPED}
    training |= {"push_to_hub": False, "report_to": "none", "save_strategy": "no"}
    training["per_device_train_batch_size"] = min(_MAX_ROWS, int(training.get("per_device_train_batch_size", 8)))
    notes.extend(_without_engine(training))
    model, quantization = dict(recipe.model), dict(recipe.quantization or {})
    if not torch.accelerator.is_available():
        notes.extend(_on_cpu(training))
        notes.extend(_attention_on_cpu(model))
        if recipe.training.get("fp16"):
            # Autocast to one half type fails on tensors of the other.
            notes.extend(_without_float16(model, quantization))
    return replace(recipe, training=training, model=model, quantization=quantization or None), notes


def _without_engine(training: dict[str, Any]) -> Iterator[str]:
    # DeepSpeed keeps gradients, flags and files elsewhere than a model does.
    if training.pop("deepspeed", None):
        yield "training.deepspeed left out (DDP and FSDP are what verify runs)"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    training.pop("fsdp_config", None)
    if training.pop("fsdp", None):
        yield "training.fsdp left out on one process (--processes 2 runs it)"


def _on_cpu(training: dict[str, Any]) -> Iterator[str]:
    training["use_cpu"] = True
    for key in _NEEDS_GPU:
        training.pop(key, None)
    if training.get("fp16"):
        training |= {"fp16": False, "bf16": True}
        yield "training.bf16 in place of training.fp16, whose scaled gradients need a GPU"


def _without_float16(*sections: dict[str, Any]) -> Iterator[str]:
    for section in sections:
        for key in [key for key, value in section.items() if value == "float16"]:
            section[key] = "bfloat16"
            yield f"{key} bfloat16 in place of float16"


def _attention_on_cpu(model: dict[str, Any]) -> Iterator[str]:
    wanted = model.get("attn_implementation")
    if wanted not in (None, "eager", "sdpa"):
        model["attn_implementation"] = "sdpa"
        yield f"attention sdpa in place of {wanted}, which needs a GPU"
