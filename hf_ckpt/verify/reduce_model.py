"""The recipe on a small model of the same structure: its own model class with few layers and small widths.

    found config -> model at full size on `meta`, with adapters and plan -> fewer layers, small widths -> weights

Configs describe layers and widths in many ways, so a smaller config is a proposal. The first one is taken that makes a
model whose every layer is of the kind that it stands for, with its plan and its adapters, and that trains one step.

A recipe made for GPUs is first adapted to this machine; what decides over loss and gradients stays the recipe's own.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from hf_ckpt.auto.batch_of_forward import without_adapter
from hf_ckpt.errors import HFCkptError, RecipeError, StructureError, shortened
from hf_ckpt.estimate.recipe_plan import with_auto_plan
from hf_ckpt.loading.model import EXPERTS_EVERYWHERE, Found, OwnQuantization, find_config, own_quantization, rehearse
from hf_ckpt.loading.tokenizer import MIN_VOCAB_SIZE, load_tokenizer, train_tokenizer
from hf_ckpt.patch.apply import apply
from hf_ckpt.policy.plan import LayerPlan, Plan
from hf_ckpt.recipe.recipe import Recipe, Values
from hf_ckpt.structure.layers import Stack, nearest_config
from hf_ckpt.verify import processes
from hf_ckpt.verify.reduce_config import ConfigReducer, hidden_for
from hf_ckpt.verify.reduce_layers import KeptLayers, LoraSizes, adapters_of, modules_of, policy_rules, two_of_each_kind

VOCAB_SIZE = 320
"""Tokens of a reduced model: 256 bytes, three that frame a text, and room for those of images and the like."""
_KEPT_KEYS = ("trust_remote_code", "attn_implementation", "experts_implementation", "dtype", "num_labels")
_MAX_PARAMETERS = 300_000_000  # Of a reduced model; it is trained several times, on a CPU.
_MAX_ROWS = 2
_TEXT_SHAPE = 2, 24
_STD_FOR_ZEROS = 0.02
# Reporting, resuming, evaluation, data loading and schedules: nothing that a trial does. A warm-up is longer than the
# trial, and its first step has a learning rate of zero.
_DROPPED = re.compile(
    r"(hub|eval|logging|save|warmup|trackio)_.*|resume_from_checkpoint|run_name|project|do_eval|load_best_model_at_end|"
    r"metric_for_best_model|greater_is_better|auto_find_batch_size|num_train_epochs|max_steps|"
    r"dataloader_(num_workers|prefetch_factor|persistent_workers)"
)
_LORA_BY_NUMBER = ("layers_to_transform", "layers_pattern", "exclude_modules")


@dataclass(frozen=True)
class ReducedRecipe:
    """What trials run in place of a recipe."""

    recipe: Recipe  # on the small model; `model.name_or_path` is a folder with its weights
    tokenizer: PreTrainedTokenizerBase  # with padding and EOS
    facts: tuple[tuple[str, str], ...]  # what was changed, as (name, text) rows for the report


@dataclass(frozen=True)
class MetaModel:
    """A recipe's model on `meta`, as fine-tuning would build it, and its plan."""

    model: Any  # with adapters, without weights
    stacks: tuple[Stack, ...]  # none without a policy
    plan: Plan | None

    @property
    def class_name(self) -> str:
        """Name of the model's own class, without adapters around it."""
        return type(without_adapter(self.model)).__name__

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
    found = find_config(wanted)
    fields = config_fields(found.config)
    wanted, unpacked = _with_quantisation_of_config(wanted, own_quantization(fields.pop("quantization_config", None)))
    full = build_on_meta(wanted, write_config(fields, wanted, found, folder / "full"))
    make = _make_full_size if is_full else _make_reduced
    made = make(wanted, found, fields, full, folder)
    # Every process loads the first one's weights: transformers lets no other process save any.
    model = {**made.recipe.model, "name_or_path": processes.gather(made.recipe.model["name_or_path"])[0]}
    facts = (("model", f"{full.class_name}, config from {found.source}"), *made.facts)
    if changes := "; ".join([*notes, *chosen, *unpacked]):
        facts = (*facts, ("changed", changes))
    return replace(made, recipe=replace(made.recipe, model=model), facts=facts)


def build_on_meta(recipe: Recipe, section: Values) -> MetaModel:
    """Build a recipe's model on `meta`, in the shape of a `model` section, and resolve its policy.

    Refuses all that fine-tuning would refuse: RecipeError where a section does not suit the model; PolicyError,
    StructureError or UnsupportedError where the policy does not.
    """
    model: Any = rehearse(recipe, section)
    if recipe.checkpointing is None:
        return MetaModel(model, (), None)
    applied = apply(model, **recipe.checkpointing.apply_options)
    applied.remove()
    return MetaModel(model, applied.stacks, applied.plan)


def config_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Return every field of a config and its sub-configs, as JSON types."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return fields


# --- At full size, and reduced. ---


def _make_full_size(recipe: Recipe, found: Found, fields: Values, full: MetaModel, folder: Path) -> ReducedRecipe:
    if found.has_weights:
        tokenizer = load_tokenizer(recipe.model, recipe.data, cache_dir=folder / "tokenizer")
        size = f"full, {full.num_parameters:,} parameters, its own weights"
        return ReducedRecipe(recipe, tokenizer, (("size", size),))
    tokenizer = _byte_tokenizer(folder)
    reducer = ConfigReducer(tokenizer, full.model.config.get_text_config().vocab_size)
    section = write_config(reducer.reduce(fields), recipe, found, folder / "model")
    size = f"full, {make_weights(recipe, section, tokenizer):,} parameters, random weights"
    return ReducedRecipe(replace(recipe, model=section), tokenizer, (("size", size),))


def _make_reduced(recipe: Recipe, found: Found, fields: Values, full: MetaModel, folder: Path) -> ReducedRecipe:
    tokenizer, hidden = _byte_tokenizer(folder), hidden_for(fields)
    reasons: list[str] = []
    # Where a model cannot be made narrow, as for names that nobody knows, it keeps its widths.
    for number, (width, kept) in enumerate(itertools.product((hidden, None), _proposals(recipe, full))):
        reduced = ConfigReducer(tokenizer, VOCAB_SIZE, kept, width).reduce(fields)
        section = write_config(reduced, recipe, found, folder / f"model-{number}")
        for candidate in _carried_over(recipe, full, kept, folder):
            try:
                _check(candidate, section, full, kept)
                num_parameters = make_weights(candidate, section, tokenizer)
            except HFCkptError as error:
                reasons.append(str(error))
                continue
            widths = f"hidden size {width}, feed-forward {4 * width}" if width else "widths as they are"
            size = f"{num_parameters:,} of {full.num_parameters:,} parameters: {widths}, vocabulary {VOCAB_SIZE}"
            layers = [(each.stack.path.removeprefix("base_model.model."), each.describe()) for each in kept]
            return ReducedRecipe(replace(candidate, model=section), tokenizer, (*layers, ("size", size)))
    raise RecipeError(
        f"{full.class_name} cannot be tried at a reduced size: {reasons[0]} Try it at its real size with --full."
    )


def _proposals(recipe: Recipe, full: MetaModel) -> list[list[KeptLayers]]:
    """Return the layers to keep of each stack, from few to all."""
    assert full.plan is not None  # without a policy there is nothing to verify
    few: list[KeptLayers] = []
    for stack, planned in zip(full.stacks, full.plan.stacks, strict=True):
        config = nearest_config(full.model, stack.path.rpartition(".")[0])
        few.append(two_of_each_kind(stack, planned.layers, config.model_type))
    # Some configs give the kinds of layers as a period, which only the first layers keep.
    first = [replace(each, indices=range(max(each.indices) + 1)) for each in few]
    whole = [replace(each, indices=range(len(each.entries))) for each in few]
    # LoRA may repeat layers by number: none can be left out.
    return [whole] if (recipe.adapter_section or {}).get("layer_replication") else [few, first, whole]


def _carried_over(recipe: Recipe, full: MetaModel, kept: Sequence[KeptLayers], folder: Path) -> Iterator[Recipe]:
    """Yield the recipe with its plan on the kept layers; then with LoRA too that names their modules one by one."""
    assert recipe.checkpointing is not None
    assert full.plan is not None
    offloads = any(entry.offload is not None for each in kept for entry in each.entries)
    if offloads or not all(each.is_whole for each in kept):
        # One folder for all processes: they must have the same policy.
        rules = policy_rules(kept, folder.parent)
        beside_layers = {"head": full.plan.head.value, "embedding": full.plan.embedding.value}
        recipe = replace(recipe, checkpointing=recipe.checkpointing.with_policy(rules, **beside_layers))
    yield recipe
    section = recipe.adapter_section
    if section is None or section["type"] != "lora":
        return
    # What names layers by number would reach others than those that the kept ones stand for.
    adapters = {name: on for name, on in adapters_of(full.model, kept).items() if isinstance(on, LoraSizes)}
    own = {key: value for key, value in section.items() if key not in _LORA_BY_NUMBER}
    own["rank_pattern"] = {f"^{re.escape(name)}$": on.rank for name, on in adapters.items()}
    own["alpha_pattern"] = {f"^{re.escape(name)}$": on.alpha for name, on in adapters.items()}
    own["target_modules"] = sorted(name for name, on in adapters.items() if not on.is_on_parameter)
    if parameters := sorted(name for name, on in adapters.items() if on.is_on_parameter):
        own["target_parameters"] = parameters
    yield replace(recipe, lora=None, adapter=own)


def _check(recipe: Recipe, section: Values, full: MetaModel, kept: Sequence[KeptLayers]) -> None:
    """Build a smaller model on `meta`; raise HFCkptError if that fails or it is no small one of the same structure."""
    try:
        small = build_on_meta(recipe, section)
    except HFCkptError:
        raise
    except Exception as error:  # a config of unusual sizes may make a model raise anything
        raise _error_of(error) from error
    assert small.plan is not None
    kinds = [(stack.path, *map(modules_of, stack.layers)) for stack in small.stacks]
    plans = [(stack.path, *map(_in_short, stack.layers)) for stack in small.plan.stacks]
    if kinds != [(each.stack.path, *map(modules_of, each.of(each.stack.layers))) for each in kept]:
        raise StructureError(f"{full.class_name} with fewer layers has other kinds of layers.")
    if plans != [(each.stack.path, *map(_in_short, each.of(each.entries))) for each in kept]:
        raise StructureError(f"{full.class_name} with fewer layers has another plan.")
    if adapters_of(small.model) != adapters_of(full.model, kept):
        raise StructureError(f"{full.class_name} with fewer layers has other adapters.")
    if small.num_parameters > _MAX_PARAMETERS:
        raise RecipeError(f"It has {small.num_parameters:,} parameters where nothing but its layers could be left out.")


def _in_short(entry: LayerPlan) -> tuple[object, ...]:
    # Not whether it offloads: the last layer never does, and may stand for one that did.
    return entry.mode, entry.save, entry.segment is None, entry.nested, entry.tiles is None


def _error_of(error: Exception) -> RecipeError:
    return RecipeError(f"{type(error).__name__}: {shortened(' '.join(str(error).split()), 250)}")


def make_weights(recipe: Recipe, section: Values, tokenizer: PreTrainedTokenizerBase) -> int:
    """Make seeded weights for the config in the folder of a `model` section, and return the number of parameters.

    Runs forward and backward on text once, and saves weights and tokenizer to the folder. Raises RecipeError if the
    model cannot be built, or cannot be trained on text.
    """
    folder, is_trusted = Path(section["name_or_path"]), section.get("trust_remote_code", False)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted)
        torch.manual_seed(int(recipe.training.get("seed", 42)))
        options = {key: section[key] for key in ("attn_implementation",) if key in section}
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=is_trusted, **options)  # type: ignore[no-untyped-call]  # upstream
        for parameter in model.float().train().parameters():
            # Behind a gate that starts as zeros no gradient would flow, and no fault be seen.
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=_STD_FOR_ZEROS)
        ids = torch.randint(len(tokenizer) - 256, len(tokenizer), _TEXT_SHAPE)
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
        loss.backward()
        if not loss.isfinite():
            raise ValueError(f"its loss on text is {loss.item()}")
    except Exception as error:  # a model of unusual sizes may raise anything
        raise _error_of(error) from error
    dtype = section.get("dtype", "auto")
    model.to((config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)).save_pretrained(folder)
    if type(model.config) is not type(config):
        # A model of one part of its config, as Emu3's text model is, saves that part only, which no auto class knows.
        config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


# --- Files. ---


def write_config(fields: Values, recipe: Recipe, found: Found, folder: Path) -> dict[str, Any]:
    """Write a config, with the code that came with it, to a new folder, and return a `model` section for that folder.

    Dtype, attention and trust in the code are those of the recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    kept = {key: recipe.model[key] for key in _KEPT_KEYS if key in recipe.model}
    if kept.get("trust_remote_code"):
        for code in Path(found.section.get("name_or_path", "")).glob("*.py"):
            shutil.copy(code, folder)
    # New weights are float32 by default; those of a folder have the dtype in which they were saved.
    default = "auto" if "name_or_path" in found.section else "float32"
    return {"dtype": default, **kept, "name_or_path": str(folder)}


def _byte_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    made = train_tokenizer(["text"], vocab_size=MIN_VOCAB_SIZE, cache_dir=folder / "tokenizer")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(made)
    return tokenizer


# --- A recipe made for GPUs, as it can be tried on this machine. ---


def _with_quantisation_of_config(recipe: Recipe, own: OwnQuantization | None) -> tuple[Recipe, list[str]]:
    """Move the quantisation in a model's config to the recipe: small weights are made unquantised."""
    if own is None or recipe.quantization is not None:
        return recipe, []
    if own.method != "bitsandbytes":
        return recipe, [f"weights as before their own quantisation ({own.method})"]
    return replace(recipe, quantization=own.fields), []


def _without_kernels(model: dict[str, Any]) -> Iterator[str]:
    """Leave out of a `model` section how experts are computed where that needs a GPU that is not there."""
    experts = model.get("experts_implementation")
    if experts not in (None, *EXPERTS_EVERYWHERE) and not torch.accelerator.is_available():
        del model["experts_implementation"]
        yield f"model.experts_implementation {experts} left out: it needs a GPU"


def adapt_to_machine(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Return a recipe that runs on this machine, on the CPU where there is no GPU, and a phrase for each change."""
    notes: list[str] = []
    training = {key: value for key, value in recipe.training.items() if not _DROPPED.fullmatch(key)}
    training |= {"push_to_hub": False, "report_to": "none", "save_strategy": "no"}
    training["per_device_train_batch_size"] = min(_MAX_ROWS, int(training.get("per_device_train_batch_size", 8)))
    if training.pop("deepspeed", None):
        # It keeps gradients, flags and files elsewhere than a model does.
        notes.append("training.deepspeed left out (DDP and FSDP are what verify runs)")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        training.pop("fsdp_config", None)
        if training.pop("fsdp", None):
            notes.append("training.fsdp left out on one process (--processes 2 runs it)")
    model, quantization = dict(recipe.model), dict(recipe.quantization or {})
    notes += _without_kernels(model)
    if not torch.accelerator.is_available():
        training = {key: value for key, value in training.items() if key not in ("tf32", "torch_empty_cache_steps")}
        training["use_cpu"] = True
        attention = model.get("attn_implementation")
        if training.get("fp16"):
            training |= {"fp16": False, "bf16": True}
            notes.append("training.bf16 in place of training.fp16, whose scaled gradients need a GPU")
        if attention not in (None, "eager", "sdpa"):
            model["attn_implementation"] = "sdpa"
            notes.append(f"attention sdpa in place of {attention}, which needs a GPU")
        if recipe.training.get("fp16"):
            # Autocast to one half type fails on tensors of the other.
            for section in (model, quantization):
                for key in [key for key, value in section.items() if value == "float16"]:
                    section[key] = "bfloat16"
                    notes.append(f"{key} bfloat16 in place of float16")
    return replace(recipe, training=training, model=model, quantization=quantization or None), notes
