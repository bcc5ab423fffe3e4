"""The recipe on a small model of the same structure: its own model class with few layers and small widths.

    found config -> model at full size on `meta`, with adapters and plan -> fewer layers -> small widths -> weights

Each step builds what it proposes and falls back to a smaller change where that does not hold: depth is tried on `meta`
until every kept layer is what it stands for, widths until the model trains one step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ckpt.errors import HFCkptError, RecipeError, StructureError
from hf_ckpt.estimate.auto_plan import with_auto_plan
from hf_ckpt.loading.model import rehearse
from hf_ckpt.loading.model_config import Found, find_config
from hf_ckpt.loading.tokenizer import MIN_VOCAB_SIZE, load_tokenizer, train_tokenizer
from hf_ckpt.patch.apply import apply
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recipe.recipe import Recipe, Values
from hf_ckpt.recipe.schema import POLICY_OPTIONS
from hf_ckpt.structure.layers import Stack, find_layers
from hf_ckpt.verify import adapters, processes, reduce_depth, reduce_widths
from hf_ckpt.verify.reduce_depth import KeptStack
from hf_ckpt.verify.special_tokens import with_tokens
from hf_ckpt.verify.this_machine import on_this_machine
from hf_ckpt.verify.weights import make_weights

VOCAB_SIZE = 320
"""Tokens of a reduced model: 256 bytes, three that frame a text, and room for those of images and the like."""

_STRUCTURE = ("layers", "attention", "ffn")
_KEPT_KEYS = ("trust_remote_code", "attn_implementation", "dtype")

_MOST_PARAMETERS = 300_000_000
"""Of a reduced model; it is trained several times, on a CPU."""

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Reduced:
    """What is tried in place of a recipe.

    Args:
        recipe: the recipe on the small model; `model.name_or_path` is a folder with its weights.
        tokenizer: the model's, with padding and EOS.
        facts: what was made of what, as (name, text) rows for the report.
    """

    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    facts: Facts


@dataclass(frozen=True)
class FullSize:
    """A recipe's model at its full size, on `meta`, as fine-tuning would build it.

    Args:
        model: with adapters, without weights.
        stacks: its layers.
        plan: what the recipe's policy means for it, or nothing without a policy.
    """

    model: Any
    stacks: tuple[Stack, ...]
    plan: Plan | None

    @property
    def class_name(self) -> str:
        """Name of the model's own class, whatever adapters stand around it."""
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return type(base).__name__

    @property
    def num_parameters(self) -> int:
        """Parameters, adapters included."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def reduced(recipe: Recipe, folder: Path, *, is_full: bool) -> Reduced:
    """Make what is tried in place of a recipe: its own model class, small, with weights in a folder.

    Args:
        recipe: the recipe.
        folder: where the weights go, for this process by itself.
        is_full: keep the real size, and the real weights where they are there.

    Raises:
        RecipeError: the config cannot be had, a section does not suit the model, or it cannot be made smaller.
        PolicyError: the policy does not suit the model at its full size; so do StructureError and UnsupportedError.
    """
    folder = folder / f"process-{os.environ.get('RANK', '0')}"
    planned, chosen = with_auto_plan(recipe)
    wanted, notes = on_this_machine(planned)
    notes.extend(chosen)
    found = find_config(wanted)
    fields = fields_of(found.config)
    wanted, unpacked = _with_own_quantisation(wanted, fields.pop("quantization_config", None))
    full = at_full_size(wanted, written_section(fields, wanted, found, folder / "full"))
    make = _at_full_size if is_full else _small
    made = _of_first_process(make(wanted, found, fields, full, folder))
    rows = (("model", f"{full.class_name}, config from {found.source}"), *made.facts)
    notes.extend(unpacked)
    return replace(made, facts=(*rows, ("changed", "; ".join(notes))) if notes else rows)


def at_full_size(recipe: Recipe, section: Values) -> FullSize:
    """Build a recipe's model on `meta` and resolve its policy, with everything that fine-tuning would refuse.

    Args:
        recipe: the recipe.
        section: the `model` section that tells the shape.

    Raises:
        RecipeError: a section does not suit the model.
        PolicyError: the policy does not suit the model; so do StructureError and UnsupportedError.
    """
    model: Any = rehearse(recipe, section)
    checkpointing = recipe.checkpointing or {}
    structure = {key: checkpointing[key] for key in _STRUCTURE if key in checkpointing}
    if recipe.checkpointing is None:
        return FullSize(model, _layers_if_any(model), None)
    stacks = find_layers(model, **structure)
    options = {key: checkpointing[key] for key in ("policy", *POLICY_OPTIONS) if key in checkpointing}
    applied = apply(model, **options, **structure)
    applied.remove()
    return FullSize(model, stacks, applied.plan)


def fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return every field of a config and its parts, as JSON types."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


# --- The two ways. ---


def _at_full_size(recipe: Recipe, found: Found, fields: Values, full: FullSize, folder: Path) -> Reduced:
    if found.has_weights:
        tokenizer = load_tokenizer(recipe.model, recipe.data, cache_dir=folder / "tokenizer")
        return Reduced(recipe, tokenizer, (("size", f"full, {full.num_parameters:,} parameters, its own weights"),))
    tokenizer = _byte_tokenizer(folder)
    section = written_section(with_tokens(fields, tokenizer, _vocab_size(full)), recipe, found, folder / "model")
    num_parameters = make_weights(section, tokenizer, _seed(recipe))
    facts = (("size", f"full, {num_parameters:,} parameters, random weights"),)
    return Reduced(replace(recipe, model=section), tokenizer, facts)


def _small(recipe: Recipe, found: Found, fields: Values, full: FullSize, folder: Path) -> Reduced:
    shallow, shallow_fields, kept = _shallow(recipe, found, fields, full, folder)
    tokenizer = _byte_tokenizer(folder)
    reasons: list[str] = []
    for number, (narrow, what) in enumerate(_widths(shallow_fields)):
        section = written_section(
            with_tokens(narrow, tokenizer, VOCAB_SIZE), shallow, found, folder / f"widths-{number}"
        )
        try:
            small = _checked(shallow, section, full, kept)
            _check_size(small)
            num_parameters = make_weights(section, tokenizer, _seed(recipe))
        except HFCkptError as error:
            reasons.append(str(error))
            continue
        facts = (*_layer_facts(kept), ("size", f"{num_parameters:,} of {full.num_parameters:,} parameters: {what}"))
        return Reduced(replace(shallow, model=section), tokenizer, facts)
    raise RecipeError(
        f"{full.class_name} cannot be tried at a reduced size: {reasons[0]} Try it at its real size with --full."
    )


def _of_first_process(made: Reduced) -> Reduced:
    """Return what every process takes: the first one's weights, as transformers lets no other process save any."""
    name = processes.gathered(made.recipe.model["name_or_path"])[0]
    return replace(made, recipe=replace(made.recipe, model={**made.recipe.model, "name_or_path": name}))


# --- Fewer layers. ---


def _shallow(
    recipe: Recipe, found: Found, fields: Values, full: FullSize, folder: Path
) -> tuple[Recipe, Values, tuple[KeptStack, ...]]:
    """Return the recipe, the fields of its config and the layers that are left, with as few layers as hold."""
    for number, kept in enumerate(_proposals(recipe, full)):
        fewer = _with_layers(fields, full, kept)
        planned = replace(recipe, checkpointing=_carried_policy(recipe.checkpointing, kept, full, folder))
        section = written_section(fewer, recipe, found, folder / f"layers-{number}")
        try:
            for candidate in _with_adapters(planned, full, kept):
                if _holds(candidate, section, full, kept):
                    return candidate, fewer, kept
        except HFCkptError:
            continue
    kept = tuple(reduce_depth.whole(stack, plan) for stack, plan in _pairs(full))
    return replace(recipe, checkpointing=_carried_policy(recipe.checkpointing, kept, full, folder)), fields, kept


def _proposals(recipe: Recipe, full: FullSize) -> Iterator[tuple[KeptStack, ...]]:
    if not adapters.lets_layers_go(recipe.lora):
        return
    pairs = list(_pairs(full))
    few = [reduce_depth.two_of_each(stack, plan) for stack, plan in pairs]
    first = [reduce_depth.beginning(stack, plan) for stack, plan in pairs]
    whole = [reduce_depth.whole(stack, plan) for stack, plan in pairs]
    is_language = ["language" in stack.roles for stack in full.stacks]
    for language, others in ((few, few), (few, whole), (first, few), (first, whole)):
        yield tuple(
            ours if is_ours else theirs for ours, theirs, is_ours in zip(language, others, is_language, strict=True)
        )


def _pairs(full: FullSize) -> Iterator[tuple[Stack, Any]]:
    plans = [None] * len(full.stacks) if full.plan is None else full.plan.stacks
    yield from zip(full.stacks, plans, strict=True)


def _with_layers(fields: Values, full: FullSize, kept: Sequence[KeptStack]) -> dict[str, Any]:
    changed: dict[str, Any] = dict(fields)
    for stack, left in zip(full.stacks, kept, strict=True):
        place = _place_of(full.model.config, _config_of(full.model, stack))
        changed = _changed_at(changed, place, left)
    return changed


def _changed_at(fields: Values, place: tuple[str, ...], kept: KeptStack) -> dict[str, Any]:
    if not place:
        return reduce_depth.with_layers(fields, kept)
    return {**fields, place[0]: _changed_at(fields[place[0]], place[1:], kept)}


def _config_of(model: nn.Module, stack: Stack) -> Any:
    """Return the config of the module that runs a stack, or of the nearest one around it."""
    names = stack.path.split(".")
    modules = (model.get_submodule(".".join(names[:length])) for length in range(len(names) - 1, -1, -1))
    return next(config for module in modules if (config := getattr(module, "config", None)) is not None)


def _place_of(config: PreTrainedConfig, part: PreTrainedConfig) -> tuple[str, ...]:
    """Return the names that lead from a config to a part of it; models copy the configs of their parts."""
    places = list(_places(config))
    same = [place for place, other in places if other is part]
    return (same or [place for place, other in places if type(other) is type(part)] or [()])[0]


def _places(
    config: PreTrainedConfig, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], PreTrainedConfig]]:
    yield above, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _places(value, (*above, name))


def _carried_policy(
    checkpointing: Values | None, kept: Sequence[KeptStack], full: FullSize, folder: Path
) -> Values | None:
    if checkpointing is None or full.plan is None:
        return checkpointing
    if all(stack.is_whole for stack in kept) and not reduce_depth.offloads(kept):
        return checkpointing
    others = {key: value for key, value in checkpointing.items() if key not in POLICY_OPTIONS}
    # One folder for all processes: they must be given the same policy.
    return {**others, "policy": reduce_depth.rules(kept, folder.parent), "head": full.plan.head.value}


def _with_adapters(recipe: Recipe, full: FullSize, kept: Sequence[KeptStack]) -> Iterator[Recipe]:
    """Yield the recipe with its own `lora` section, and with that section written out for the kept layers."""
    yield recipe
    if recipe.lora is not None:
        wanted = adapters.carried_over(adapters.adapters_of(full.model), kept)
        yield replace(recipe, lora=adapters.written_out(recipe.lora, wanted))


def _holds(recipe: Recipe, section: Values, full: FullSize, kept: Sequence[KeptStack]) -> bool:
    try:
        _checked(recipe, section, full, kept)
    except HFCkptError:
        return False
    return True


def _checked(recipe: Recipe, section: Values, full: FullSize, kept: Sequence[KeptStack]) -> FullSize:
    """Build a smaller model on `meta`, and see that it is what it stands for.

    Raises:
        HFCkptError: it cannot be built, or differs in its layers, its plan or its adapters.
    """
    try:
        small = at_full_size(recipe, section)
    except HFCkptError:
        raise
    except Exception as error:  # a config of unusual sizes may make a model raise anything
        raise RecipeError(f"{type(error).__name__}: {str(error).strip()}") from error
    if not reduce_depth.represents(kept, full.stacks, small.stacks):
        raise StructureError(f"{full.class_name} with fewer layers has other kinds of layers.")
    if small.plan is not None and not reduce_depth.carries(kept, small.plan):
        raise StructureError(f"{full.class_name} with fewer layers has another plan.")
    if recipe.lora is not None:
        wanted = adapters.carried_over(adapters.adapters_of(full.model), kept)
        if adapters.adapters_of(small.model) != wanted:
            raise StructureError(f"{full.class_name} with fewer layers has other adapters.")
    return small


def _layers_if_any(model: nn.Module) -> tuple[Stack, ...]:
    try:
        return find_layers(model)
    except StructureError:
        return ()


# --- Small widths. ---


def _widths(fields: Values) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the fields of smaller models, and what was done; the one that keeps most of the structure first."""
    for keeps_ratios in (True, False):
        sizes = reduce_widths.sizes_for(fields, VOCAB_SIZE, keeps_ratios=keeps_ratios)
        yield reduce_widths.narrowed(fields, sizes), reduce_widths.describe(sizes)
    yield reduce_widths.with_vocabulary(fields, VOCAB_SIZE), f"widths as they are, vocabulary {VOCAB_SIZE}"


def _check_size(small: FullSize) -> None:
    if small.num_parameters > _MOST_PARAMETERS:
        raise RecipeError(f"It has {small.num_parameters:,} parameters where nothing but its layers could be left out.")


def _vocab_size(full: FullSize) -> int:
    size: int = full.model.config.get_text_config().vocab_size
    return size


# --- Files. ---


def written_section(fields: Values, recipe: Recipe, found: Found, folder: Path) -> dict[str, Any]:
    """Write a config, with the code it brings, and return a `model` section that names its folder.

    Args:
        fields: of the config.
        recipe: tells dtype, attention, and whether code is trusted.
        found: where the config came from, and its code.
        folder: a new folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    kept = {key: recipe.model[key] for key in _KEPT_KEYS if key in recipe.model}
    if kept.get("trust_remote_code"):
        for code in Path(found.section.get("name_or_path", "")).expanduser().glob("*.py"):
            shutil.copy(code, folder)
    # Weights that are made are float32 where nothing is said; those of a folder are what they were saved as.
    default = "auto" if "name_or_path" in found.section else "float32"
    return {"dtype": default, **kept, "name_or_path": str(folder)}


def _byte_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    made = train_tokenizer(["text"], vocab_size=MIN_VOCAB_SIZE, cache_dir=folder / "tokenizer")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(made)
    return tokenizer


def _with_own_quantisation(recipe: Recipe, own: Values | None) -> tuple[Recipe, list[str]]:
    """Move the quantisation that a model's config brings into the recipe: small weights are made unquantised."""
    if own is None or recipe.quantization is not None:
        return recipe, []
    if own.get("quant_method") != "bitsandbytes":
        return recipe, [f"weights as before their own quantisation ({own.get('quant_method')})"]
    section = {key: value for key, value in own.items() if not key.startswith("_") and key != "quant_method"}
    return replace(recipe, quantization=section), []


# --- Words. ---


def _layer_facts(kept: Sequence[KeptStack]) -> Facts:
    return tuple((stack.path.removeprefix("base_model.model."), reduce_depth.describe(stack)) for stack in kept)


def _seed(recipe: Recipe) -> int:
    return int(recipe.training.get("seed", 42))
