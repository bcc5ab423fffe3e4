"""What is estimated: a recipe's model on `meta`, as fine-tuning would build it, with its step and its plan.

recipe -> config -> model on `meta`, in the dtype that weights are loaded in -> quantised -> with adapters
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import yaml
from torch import nn
from transformers import PreTrainedConfig

from hf_ckpt.auto.batch_of_forward import without_adapter
from hf_ckpt.auto.live_step import NOT_SIMULATED, OPTIMIZER_FIELDS, step_from
from hf_ckpt.errors import RecipeError
from hf_ckpt.estimate.launch_config import Launch
from hf_ckpt.estimate.launch_sharding import describe_sharding, sharding_of
from hf_ckpt.estimate.weights import Weights, weights_of
from hf_ckpt.loading.model import (
    EXPERTS_EVERYWHERE,
    Found,
    bits_and_bytes,
    find_config,
    is_mxfp4,
    made,
    own_quantization,
    prepared_for_kbit,
    with_empty_adapter,
)
from hf_ckpt.loading.model_kinds import is_encoder, num_positions, sequence_to_sequence_class
from hf_ckpt.loading.trainer import arguments_class, implied
from hf_ckpt.patch.apply import check_plan
from hf_ckpt.patch.checks import check_exact
from hf_ckpt.patch.frozen_weights import with_embedding
from hf_ckpt.policy.allowances import Allowed, allowed_in
from hf_ckpt.policy.options import HeadMode
from hf_ckpt.policy.plan import Plan, parse
from hf_ckpt.policy.resolve_rules import resolve
from hf_ckpt.recipe.checkpointing import NO_CHECKPOINTING
from hf_ckpt.recipe.recipe import Recipe, recipe_of
from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH
from hf_ckpt.recipe.shipped import shown
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Sharding, Step
from hf_ckpt.structure.layers import Stack, find_layers
from hf_ckpt.structure.lm_head import find_head
from hf_ckpt.trainer.batch import Batch
from hf_ckpt.trainer.input_gradients import choose_input_gradients, switch_input_gradients
from hf_ckpt.upstream.transformers import attention_of, experts_of, missing_kernels

_SDPA = "sdpa"
_EVERYWHERE = ("eager", _SDPA)  # The attention that needs no GPU.
_OTHER_ATTENTION = f"attention {_SDPA} in place of {{}}: both keep the output and one number a token and head"
_HALF = ("bfloat16", "float16")
_NOT_COUNTED = "not counted", "the time that takes, what functions take that reward completions, and evaluation"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is estimated."""

    title: str  # The recipe's file, or the model's class.
    model: Any  # On `meta`, with quantised weights and adapters as the recipe says.
    step: Step
    stacks: tuple[Stack, ...]
    plan: Plan | None = None  # What the recipe's policy means for them; None without a policy.
    facts: tuple[tuple[str, str], ...] = ()  # What was taken for what, as (name, text) rows.
    weights: Weights | None = None  # None of a model that is taken as it is.
    structure: Mapping[str, Any] = field(default_factory=dict)
    """`layers`, `attention` and `ffn` of the recipe's policy, where they are not found by structure."""
    allowed: Allowed = field(default_factory=Allowed)  # What a plan that is chosen for a budget may hold besides modes.
    longest: int | None = None  # Tokens that the model has positions for; None where its config does not say.
    recipe: Recipe | None = None
    command_options: Mapping[str, str] = field(default_factory=dict)
    """Options of the command that were given in place of keys of `checkpointing`, by the key."""

    @property
    def class_name(self) -> str:
        """Name of the model's own class, whatever adapters stand around it."""
        return _class_name(self.model)

    @property
    def computes_in(self) -> str:
        """The dtype of most matrix products: that of autocast, or else that of the weights."""
        return self.step.autocast or str(getattr(self.model, "dtype", "")).removeprefix("torch.")

    def simulator(self, device: Device) -> StepSimulator:
        """Return what simulates the step on a device."""
        return StepSimulator(self.model, self.step, device.running(self.attention), self.structure)

    @property
    def attention(self) -> str | None:
        """What the recipe says of the attention; None where it says nothing."""
        return None if self.recipe is None else self.recipe.model.get("attn_implementation")

    def resolve(self, policy: object, **options: Any) -> Plan:
        """Return what a policy, as `Policy.parse` reads it, or a plan means for this model.

        Raises PolicyError where it cannot be read or does not suit the model, UnsupportedError where it is not exact.
        """
        parsed = parse(policy, **options)
        if isinstance(parsed, Plan):
            check_plan(parsed, self.stacks, self.model)
            plan = parsed
        else:
            plan = resolve(parsed, self.stacks, self.class_name)
        check_exact(plan, self.stacks, self.model)
        if plan.head is HeadMode.CHUNKED:
            find_head(self.model)
        return with_embedding(plan, parsed, self.model, self.stacks)


def subject_of(recipe: Recipe, launch: Launch | None = None, structure: Mapping[str, str] | None = None) -> Subject:
    """Make a recipe's model on `meta`, and read its step.

    `launch`: the engine, where the recipe itself does not name it. `structure`: `layers`, `attention` and `ffn`, in
    place of the recipe's. Raises RecipeError where the config cannot be had, a section does not suit the model, or the
    recipe cannot be simulated; PolicyError, StructureError or UnsupportedError where the policy does not suit it.
    """
    # Before the model is built: what is wrong here takes no time to find.
    sharding = sharding_of(recipe, launch or Launch())
    step_of(recipe, sharding)
    found = find_config(recipe)
    recipe, words = _suited(recipe, found.config)
    step = step_of(recipe, sharding)
    base = _quantised(_base(recipe, found, torch.device("meta")), recipe, found)
    if (most := num_positions(base)) is not None and step.seq_length > most:
        words.append(("positions", f"{step.seq_length:,} tokens are more than the model has: predicted for {most:,}"))
        step = replace(step, seq_length=most)
    if recipe.kind.of_trl:
        # trl, and the datasets that it needs, are loaded for recipes that ask for it.
        from hf_ckpt.estimate.own_loss import own_step

        model: Any
        model, loss, what = own_step(recipe, base, step.sharding)
        is_padded = step.is_padded or loss.rows_per_example > 1 or recipe.kind.generates
        step = replace(step, loss=loss, is_padded=is_padded)
        words.append(("loss", what))
    else:
        model = with_empty_adapter(base, recipe)
    model.train()
    checkpointing = recipe.checkpointing or NO_CHECKPOINTING
    names = checkpointing.structure | dict(structure or {})
    stacks = find_layers(model, **names)
    if recipe.checkpointing is not None:
        # As the callback does: where the embeddings' output needs gradients, the first layer holds more.
        switch_input_gradients(model, choose_input_gradients(model, stacks, checkpointing.input_require_grads))
    weights = weights_of(model)
    subject = Subject(
        title=shown(recipe.path),
        model=model,
        step=step,
        stacks=stacks,
        facts=(
            *_facts(found, recipe, model, step, weights),
            *words,
            *((("before", f"{step.prepares}, scoring"), _NOT_COUNTED) if step.prepares else ()),
            *_fallbacks(base),
            *_changed(recipe),
        ),
        weights=weights,
        structure=names,
        allowed=checkpointing.allowed,
        longest=num_positions(base) or getattr(model.config.get_text_config(), "max_position_embeddings", None),
        recipe=recipe,
    )
    # For `auto` one is planned.
    if recipe.checkpointing is None:
        own = training_value(recipe, "gradient_checkpointing") or recipe.training.get("activation_checkpointing")
        plan = subject.resolve("full") if own else None
    else:
        plan = None if recipe.is_auto else subject.resolve(checkpointing.policy, **checkpointing.policy_options)
    return replace(subject, plan=plan, allowed=subject.allowed if plan is None else allowed_in(plan))


def subject_of_model(model: nn.Module, step: Step) -> Subject:
    """Take a model as it is: on `meta`, on the CPU or on a device. It is not changed."""
    return Subject(title=_class_name(model), model=model, step=step, stacks=find_layers(model))


def is_auto(recipe: Recipe | None) -> bool:
    """Whether a recipe leaves its plan to the planner."""
    return recipe is not None and recipe.is_auto


# --- The model. ---


def random_model(recipe: Recipe, place: torch.device) -> nn.Module:
    """Make a recipe's model with random weights on a device, with adapters and without quantisation."""
    return with_empty_adapter(random_base(recipe, place), recipe, low_cpu_mem_usage=False).to(place)


def random_base(recipe: Recipe, place: torch.device) -> Any:
    """Return the same without adapters."""
    return _base(recipe, find_config(recipe), place)


def _base(recipe: Recipe, found: Found, place: torch.device) -> Any:
    section = {key: found.section[key] for key in ("trust_remote_code",) if key in found.section}
    if (experts := recipe.model.get("experts_implementation")) in EXPERTS_EVERYWHERE:
        section["experts_implementation"] = experts
    wanted = recipe.model.get("attn_implementation")
    if wanted is not None:
        # Kernels that are installed only where there is a GPU have a stand-in.
        section["attn_implementation"] = wanted if wanted in _EVERYWHERE else _SDPA
    fields, tokenizer = (found.section.get(name) for name in ("config", "tokenizer"))
    if fields is not None and "vocab_size" not in fields and isinstance(tokenizer, Mapping):
        # The vocabulary is the tokenizer's, which is trained to this size.
        found.config.vocab_size = int(tokenizer["train"]["vocab_size"])
    with place:
        # Quantising writes into the model's config.
        return made(copy.deepcopy(found.config), section, recipe, dtype=_dtype(recipe, found))


def _dtype(recipe: Recipe, found: Found) -> torch.dtype:
    """Return the dtype that weights are loaded in, or made in."""
    written = recipe.model.get("dtype", "auto" if "name_or_path" in recipe.model else "float32")
    if written == "auto":
        # A folder that another recipe makes holds what that one trains.
        is_loaded = "name_or_path" in found.section
        written = found.config.dtype if is_loaded else found.section.get("dtype", "float32")
    dtype = getattr(torch, written) if isinstance(written, str) else written
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _quantised(model: Any, recipe: Recipe, found: Found) -> Any:
    section = recipe.quantization if recipe.quantization is not None else _own_quantisation(found.config)
    if section is None:
        return model
    from hf_ckpt.simulation.quantized import quantize_on_meta

    quantize_on_meta(model, bits_and_bytes(section))
    return prepared_for_kbit(model, section)


def _own_quantisation(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    """Return the quantisation that a model's own config brings, as fields of `BitsAndBytesConfig`."""
    own = own_quantization(getattr(config, "quantization_config", None))
    if own is None or is_mxfp4(config):
        return None
    if own.method != "bitsandbytes":
        raise RecipeError(
            f"model.name_or_path names weights that are quantised by {own.method}, which cannot be simulated. What can "
            "is bitsandbytes, and weights that are not quantised."
        )
    return own.fields


# --- Words. ---


def _facts(found: Found, recipe: Recipe, model: Any, step: Step, weights: Weights) -> Iterator[tuple[str, str]]:
    yield "model", f"{_class_name(model)}; config from {found.source}"
    yield from weights.rows()
    if is_mxfp4(found.config):
        yield "stored", "experts in MXFP4, which does not train: they are dequantised as they are loaded"
    times = step.gradient_accumulation_steps
    yield "batch", f"{describe_rows(step)}; {times} micro-batch{'es' if times > 1 else ''} in each step"
    precision = f"{step.autocast} autocast" if step.autocast else "no autocast"
    yield "training", f"{precision}, {_optimizer_words(step, weights)}"
    yield "engine", describe_sharding(step.sharding)
    yield "versions", _version_words(recipe, model, weights)


def _suited(recipe: Recipe, config: PreTrainedConfig) -> tuple[Recipe, list[tuple[str, str]]]:
    """Return a recipe as a model of this config can be trained, with what that is, in words.

    An encoder writes no text: its sequences get a class. Of a model with an encoder and a decoder both get a sequence.
    """
    if not recipe.kind.is_text:
        return recipe, []
    if is_encoder(config):
        values = yaml.safe_load(recipe.to_yaml())
        values["trainer"] = "classification"
        values["model"]["num_labels"] = config.num_labels
        values["data"] = {name: value for name, value in values["data"].items() if name in ("path", "max_length")}
        changed = recipe_of(values, str(recipe.path))
        return changed, [("task", f"an encoder writes no text: a class of {config.num_labels} for each sequence")]
    if sequence_to_sequence_class(config) is None:
        return recipe, []
    read = "all the sound that it has positions for" if hasattr(config, "num_mel_bins") else "a sequence"
    return recipe, [("task", f"an encoder and a decoder: {read} in, and a sequence as long as is said below out")]


def _fallbacks(model: Any) -> Iterator[tuple[str, str]]:
    """Yield what torch's own code stands in for, where a package of kernels is not installed."""
    if packages := missing_kernels(model):
        yield (
            "kernels",
            f"{' and '.join(packages)}, which {_class_name(model)} runs with on a GPU, are not installed here: what is "
            "predicted is transformers' own code in their place, which takes longer and keeps more",
        )


def _changed(recipe: Recipe) -> Iterator[tuple[str, str]]:
    wanted = recipe.model.get("attn_implementation")
    if wanted not in (None, *_EVERYWHERE):
        yield "changed", f"attention {_SDPA} in place of {wanted}: both keep the output and one number a token and head"
    experts = recipe.model.get("experts_implementation")
    if experts not in (None, *EXPERTS_EVERYWHERE):
        yield "changed", f"experts as transformers computes them without {experts}, which needs a GPU"


def describe_rows(step: Step) -> str:
    """Return a micro-batch in words, such as `2 sequences of 2,048 tokens, padded`."""
    rows = "1 sequence" if step.rows == 1 else f"{step.rows} sequences"
    how = ", packed" if step.is_packed else ", padded" if step.is_padded else ""
    return f"{rows} of {step.seq_length:,} tokens{how}"


def _optimizer_words(step: Step, weights: Weights) -> str:
    """Return the optimizer, and where its state is in less than float32 as the weights are that it steps."""
    # FSDP with mixed precision and ZeRO step weights of their own, in float32.
    is_master = step.sharding.engine.startswith(("fsdp", "zero")) and step.autocast is not None
    kinds = [] if is_master else [kind for kind in weights.trained_by_dtype if kind in _HALF]
    return f"{step.optim}{f' in {kinds[0]}: neither weights nor state in float32' if kinds else ''}"


def _version_words(recipe: Recipe, model: Any, weights: Weights) -> str:
    """Return the versions that the step is that of, and what computes attention and experts."""
    used = {"trl": recipe.kind.of_trl, "peft": weights.adapter is not None, "bitsandbytes": weights.is_quantised}
    names = ["transformers", *(name for name, is_used in used.items() if is_used), "torch"]
    chosen = {"attention": attention_of(model.config)}
    if weights.experts is not None:
        chosen["experts"] = experts_of(model.config)
    kernels = "".join(f", {what} by {name}" for what, name in chosen.items() if name)
    # Not for which devices torch was built.
    return ", ".join(f"{name} {version(name).partition('+')[0]}" for name in names) + kernels


def _class_name(model: Any) -> str:
    return type(without_adapter(model)).__name__


def step_of(recipe: Recipe, sharding: Sharding) -> Step:
    """Return the step of a recipe, with rows of `data.max_length` tokens; refuse what is not simulated."""
    for name, (without, reason) in NOT_SIMULATED.items():
        if recipe.training.get(name):
            raise RecipeError(
                f"training.{name} = {recipe.training[name]} cannot be simulated: {reason}. Simulate without it "
                f"(training.{name}={without})."
            )
    batch_size = training_value(recipe, "per_device_train_batch_size")
    length = int(recipe.data.get("max_length", DEFAULT_MAX_LENGTH))
    is_packed = bool(recipe.data.get("packing", False))
    batch = Batch(
        # The examples of a packed micro-batch are one row.
        rows=1 if is_packed else batch_size,
        length=length * batch_size if is_packed else length,
        is_padded=not is_packed and batch_size > 1,
        is_packed=is_packed,
    )
    optim_arguments = {name: recipe.training[name] for name in OPTIMIZER_FIELDS if name in recipe.training}
    is_proven = (recipe.checkpointing or NO_CHECKPOINTING).is_proven
    return step_from(partial(training_value, recipe), batch, sharding, optim_arguments, is_proven=is_proven)


def evaluation_step_of(recipe: Recipe, step: Step) -> Step | None:
    """Return a batch of the recipe's evaluation, by its training step, or None where it does not evaluate."""
    training = recipe.training
    if recipe.kind.generates:
        # It generates, too.
        return None
    is_asked = training.get("eval_strategy", "no") != "no" or training.get("do_eval") or training.get("eval_on_start")
    if not is_asked:
        return None
    rows = training_value(recipe, "per_device_eval_batch_size")
    length = int(recipe.data.get("max_length", DEFAULT_MAX_LENGTH))
    if step.is_packed:
        return replace(step, seq_length=length * rows)
    step = replace(step, batch_size=rows)
    return replace(step, is_padded=step.rows > 1)


def training_value(recipe: Recipe, name: str) -> Any:
    """Return a field of the `training` section, or the default of the trainer's arguments."""
    value = recipe.training.get(name)
    if value is not None:
        return value
    return implied(recipe).get(name, arguments_class(recipe).__dataclass_fields__[name].default)
