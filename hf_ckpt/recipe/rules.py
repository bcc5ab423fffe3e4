"""Limits and contradictions: what is of the right type, and still cannot be trained.

Each rule notes what is wrong and what to do. Upstream would refuse most of these too, but later: after the imports,
the download or the first step.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from hf_ckpt.errors import PolicyError, did_you_mean
from hf_ckpt.policy.allowances import ALLOWANCES, allowed_by
from hf_ckpt.policy.options import POLICY_OPTIONS, READERS, is_whole, parse_prove
from hf_ckpt.policy.plan import PLAN_SUFFIX, parse
from hf_ckpt.policy.policy import AUTO, MODES_WITH_TRAINED_CACHE, TRAINED_CACHES, Mode, Policy
from hf_ckpt.recipe import upstream_fields
from hf_ckpt.recipe.checkpointing import OF_AUTO
from hf_ckpt.recipe.document import resolve_path
from hf_ckpt.recipe.field_types import show
from hf_ckpt.recipe.schema import COUNT, DEFAULT_MAX_LENGTH, LIMITS, Bounds, Draft, Refusal
from hf_ckpt.recipe.trainer_kinds import DEFAULT_COMPLETION, IMAGES, REWARDS, TEXT, TrainerKind
from hf_ckpt.units import parse_budget

# Clipping at infinity is how a gradient's norm is logged and left as it is.
_MAY_BE_INFINITE = ("training.max_grad_norm",)


def check_rules(draft: Draft) -> None:
    """Check the bounds of values, and the values against each other."""
    for rule in _RULES:
        for path, text in rule(draft):
            draft.refuse(path, text)


def _values_are_in_bounds(draft: Draft) -> Iterator[Refusal]:
    for path, limit in LIMITS.items():
        yield from _check_limit(draft, path, limit)


def _check_limit(draft: Draft, path: str, limit: Bounds) -> Iterator[Refusal]:
    value = draft.get(path)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not limit.accepts(value) and not (value == math.inf and path in _MAY_BE_INFINITE):
        yield path, f"expected {limit.describe()}."


def _names_are_not_empty(draft: Draft) -> Iterator[Refusal]:
    for path in ("model.name_or_path", "model.tokenizer", "data.path", "data.eval_path", "training.output_dir"):
        if draft.get(path) in ("", []):
            yield path, "is empty. Write a name or a path."


# --- Model. ---


def _model_has_one_source(draft: Draft) -> Iterator[Refusal]:
    if draft.has("model.name_or_path") and draft.has("model.config"):
        yield (
            "model.config",
            "given with model.name_or_path. Weights are either loaded or made: set one of the two to null.",
        )
    elif "model" in draft.sections and not draft.has("model.name_or_path") and not draft.has("model.config"):
        yield "model", "has neither name_or_path (weights to load) nor config (weights to make). Add one."


_ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def _attention_is_known(draft: Draft) -> Iterator[Refusal]:
    name = draft.get("model.attn_implementation")
    # With a slash it is a kernel on the hub.
    if isinstance(name, str) and "/" not in name and name not in _ATTENTIONS:
        known = ", ".join(map(show, _ATTENTIONS))
        yield (
            "model.attn_implementation",
            f"expected one of {known}, or a kernel's repository.{did_you_mean(name, _ATTENTIONS)}",
        )


def _made_weights_stand_alone(draft: Draft) -> Iterator[Refusal]:
    if not draft.has("model.config") or draft.has("model.name_or_path"):
        return
    for path in ("model.revision", "model.base_recipe"):
        if draft.has(path):
            yield path, "belongs to model.name_or_path, but the weights are made from model.config. Remove it."
    if draft.has("quantization"):
        yield "quantization", "weights are quantised as they are loaded, and model.config makes new ones. Remove it."
    if draft.get("model.dtype") == "auto":
        yield "model.dtype", "is the dtype of saved weights, and model.config makes new ones. Write float32."
    if not draft.has("model.tokenizer"):
        yield "model.tokenizer", "missing, and model.config brings none. Add a hub id or {train: {vocab_size: 4096}}."


def _loaded_weights_keep_their_tokenizer(draft: Draft) -> Iterator[Refusal]:
    if draft.has("model.name_or_path") and draft.get("model.tokenizer.train") is not None:
        yield "model.tokenizer", "a new tokenizer would not fit the weights of model.name_or_path. Remove it."


def _config_fits_itself(draft: Draft) -> Iterator[Refusal]:
    hidden, heads = draft.get("model.config.hidden_size"), draft.get("model.config.num_attention_heads")
    if _are_counts(hidden, heads) and hidden % heads and not draft.has("model.config.head_dim"):
        yield "model.config.hidden_size", f"is not a multiple of num_attention_heads = {heads}."
    yield from _check_order(draft, "model.tokenizer.train.vocab_size", "model.config.vocab_size")
    yield from _check_order(draft, "data.max_length", "model.config.max_position_embeddings")


def _check_order(draft: Draft, small: str, large: str) -> Iterator[Refusal]:
    value, bound = draft.get(small), draft.get(large)
    if _are_counts(value, bound) and value > bound:
        yield small, f"is more than {large} = {bound}. Lower it, or raise {large}."


# --- Adapters and quantisation. ---


_ADAPTERS = ("lora", "adapter")

_CANNOT_TRAIN = {
    "adalora": "moves its ranks in update_and_allocate, which the Trainer does not call. Use lora",
    "cpt": "needs input_type_mask in each batch, which a recipe's data does not have. Use prompt_tuning",
    "poly": "needs task_ids in each batch, which a recipe's data does not have",
    "multitask_prompt_tuning": "needs task_ids in each batch, which a recipe's data does not have. Use prompt_tuning",
    "xlora": "mixes adapters that are trained already, and needs them as files. Train each by a recipe of its own",
}
"""Kinds of adapters that a recipe cannot train, and why."""


def _adapter_is_one(draft: Draft) -> Iterator[Refusal]:
    if draft.has("lora") and draft.has("adapter"):
        yield "adapter", "given with a lora section, which is short for adapter: {type: lora}. Set one of them to null."


def _adapter_trains(draft: Draft) -> Iterator[Refusal]:
    for name in _ADAPTERS:
        kind = draft.get(f"{name}.type", name)
        if kind in _CANNOT_TRAIN:
            yield f"{name}.type", f"{_CANNOT_TRAIN[kind]}."
        if kind == "lora":
            yield from _check_limit(draft, f"{name}.r", COUNT)
        if draft.get(f"{name}.inference_mode"):
            yield f"{name}.inference_mode", "the adapter would be frozen, and nothing trained. Remove it."
        kind_of_run = draft.trainer or TEXT
        if draft.get(f"{name}.task_type") not in (None, kind_of_run.task_type):
            what = f"trainer {kind_of_run.name} trains" if kind_of_run.name else "recipes train"
            models = "models that score sequences" if kind_of_run.scores_rows else "causal language models"
            yield f"{name}.task_type", f"{what} {models}. Write {kind_of_run.task_type}, or leave it out."
        if draft.get(f"{name}.peft_type") not in (None, kind.upper()):
            text = "the lora section is a LoraConfig" if name == "lora" else f"adapter.type is {show(kind)}"
            yield f"{name}.peft_type", f"{text}. Leave it out."


_NOT_ON_PARAMETERS = ("lora_dropout", "use_dora", "lora_bias", "fan_in_fan_out", "velora_config", "kasa_config")
"""What PEFT adds to a linear layer alone."""
_NEED_A_MODULE = ("pissa", "corda", "olora", "loftq", "lora_ga", "eva")
"""How values of `init_lora_weights` begin for which PEFT reads the weight, or the inputs, of a linear layer."""


def _adapter_of_parameters_is_plain(draft: Draft) -> Iterator[Refusal]:
    """Refuse what PEFT cannot do where it adapts parameters, such as experts, by adding to them as a whole."""
    for name in _ADAPTERS:
        if not draft.get(f"{name}.target_parameters"):
            continue
        why = f"an adapter on parameters ({name}.target_parameters) is added to the weights, not to a layer's output"
        for path in (f"{name}.{key}" for key in _NOT_ON_PARAMETERS):
            if draft.get(path):
                yield path, f"{why}, where PEFT cannot do this. Leave it out."
        for path in (f"{name}.{key}" for key in ("layers_to_transform", "exclude_modules")):
            if draft.get(path):
                layer = "Name each parameter with its layer there, such as layers.5.mlp.experts.down_proj"
                yield path, f"PEFT does not look at it for {name}.target_parameters. {layer}, and leave this out."
        init = draft.get(f"{name}.init_lora_weights")
        if isinstance(init, str) and init.startswith(_NEED_A_MODULE):
            yield f"{name}.init_lora_weights", f"{why}, and starts with random numbers. Leave it out."


def _adapter_targets_are_named(draft: Draft) -> Iterator[Refusal]:
    for name in _ADAPTERS:
        path = f"{name}.target_modules"
        target = draft.get(path)
        if target == [] and draft.get(f"{name}.target_parameters"):
            # PEFT adapts these alone. Left out, it would add the layers that it takes by default.
            continue
        if target == [] or (isinstance(target, list) and "all-linear" in target):
            yield path, "expected names of modules, or all-linear by itself (not in a list)."
        elif isinstance(target, str) and target != "all-linear":
            if difflib.SequenceMatcher(None, target.lower(), "all-linear").ratio() > 0.8:
                yield path, 'would be read as a regular expression. Did you mean "all-linear"?'
            elif "," in target:
                names = [name.strip() for name in target.split(",")]
                yield path, f"text is one name or a regular expression. Write {show(names)}."


def _virtual_tokens_are_trained(draft: Draft) -> Iterator[Refusal]:
    """Refuse what PEFT leaves out, without an error, where an adapter has tokens of its own."""
    kind = draft.get("adapter.type")
    if kind is None or not upstream_fields.has_virtual_tokens(kind):
        return
    if not draft.has("adapter.num_virtual_tokens"):
        yield "adapter.num_virtual_tokens", "missing. Write how many tokens to train, such as 20."
    if draft.get("data.packing"):
        yield "data.packing", f"with {kind} PEFT drops the positions that keep documents apart. Remove it."
    if draft.get("training.load_best_model_at_end"):
        yield "training.load_best_model_at_end", f"PEFT cannot go on from {kind} that was saved. Remove it."
    if kind in TRAINED_CACHES:
        yield from _check_no_recomputation(draft, kind)


def _check_no_recomputation(draft: Draft, kind: str) -> Iterator[Refusal]:
    why = f"recomputed layers can neither read nor fill the key/value cache of {kind}"
    # Rules are lists, which no set can look up. They are checked layer by layer when they are resolved.
    if draft.get("checkpointing.policy") in [mode for mode in Mode if mode not in MODES_WITH_TRAINED_CACHE]:
        yield "checkpointing.policy", f"{why}. Use none or ffn, or an adapter of type prompt_tuning."
    for path in ("training.activation_checkpointing", "training.gradient_checkpointing"):
        if draft.get(path):
            yield path, f"{why}. Remove it, or use an adapter of type prompt_tuning."


def _quantization_is_one_kind(draft: Draft) -> Iterator[Refusal]:
    kinds = ["quantization.load_in_4bit", "quantization.load_in_8bit"]
    if not draft.has("quantization"):
        return
    if all(draft.get(kind) for kind in kinds):
        yield kinds[1], "load_in_4bit is true as well. Keep one."
    elif all(draft.get(kind) is False or not draft.has(kind) for kind in kinds):
        yield "quantization", "quantises nothing. Set load_in_4bit or load_in_8bit to true, or remove it."
    if draft.get("quantization.quantize_experts") and not draft.get(kinds[0]):
        yield "quantization.quantize_experts", "experts are quantised in 4 bits only. Set load_in_4bit, or remove it."
    if not any(map(draft.has, _ADAPTERS)):
        yield "quantization", "quantised weights cannot be trained by themselves. Add a lora section, or remove it."


# --- Data. ---


def _loss_suits_format(draft: Draft) -> Iterator[Refusal]:
    loss, form = draft.get("data.loss_on"), draft.get("data.format")
    impossible = {
        ("completion", "text"): "plain text has no completion",
        ("assistant", "text"): "plain text has no turns",
        ("assistant", "prompt_completion"): "prompt and completion are no turns; use completion",
        ("completion", "messages"): "messages have turns; use assistant",
    }
    if (loss, form) in impossible:
        yield "data.loss_on", f"with data.format = {show(form)}: {impossible[loss, form]}. Use all for every token."


def _evaluation_data_has_one_source(draft: Draft) -> Iterator[Refusal]:
    for path in ("data.eval_path", "data.eval_split"):
        if draft.has("data.eval_fraction") and draft.has(path):
            yield "data.eval_fraction", f"given with {path}. Evaluate on one of the two: set the other to null."


def _evaluation_has_data(draft: Draft) -> Iterator[Refusal]:
    if any(draft.has(f"data.{key}") for key in ("eval_path", "eval_split", "eval_fraction")):
        return
    for path, is_asked in (
        ("training.eval_strategy", draft.get("training.eval_strategy", "no") != "no"),
        ("training.do_eval", draft.get("training.do_eval")),
        ("training.eval_on_start", draft.get("training.eval_on_start")),
    ):
        if is_asked:
            yield path, "there is nothing to evaluate on. Add data.eval_fraction, data.eval_split or data.eval_path."


# --- Training. ---


def _precision_is_one(draft: Draft) -> Iterator[Refusal]:
    for first, second in (("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")):
        if draft.get(f"training.{first}") and draft.get(f"training.{second}"):
            yield f"training.{second}", f"training.{first} is true as well. Keep one."
    dtype = draft.get("model.dtype")
    if draft.get("training.fp16") and dtype in ("float16", "bfloat16") and not any(map(draft.has, _ADAPTERS)):
        yield "training.fp16", f"needs float32 weights to scale gradients, and model.dtype is {dtype}. Use float32."


def _steps_are_whole(draft: Draft) -> Iterator[Refusal]:
    for path in ("training.logging_steps", "training.eval_steps", "training.save_steps"):
        value = draft.get(path)
        if isinstance(value, float) and value > 1 and not value.is_integer():
            yield path, "expected a whole number of steps, or a share of all steps below 1."
    limit = draft.get("training.max_steps")
    if isinstance(limit, int) and limit < 1 and limit != -1:
        yield "training.max_steps", "expected a whole number of at least 1, or -1 for no limit."


def _best_model_can_be_known(draft: Draft) -> Iterator[Refusal]:
    evaluation, saving = (_training(draft, f"{kind}_strategy") for kind in ("eval", "save"))
    is_wanted = draft.get("training.load_best_model_at_end")
    if evaluation == "no":
        if is_wanted:
            yield "training.load_best_model_at_end", "needs training.eval_strategy: steps or epoch."
        elif saving == "best":
            yield "training.save_strategy", "needs training.eval_strategy: steps or epoch."
        elif _training(draft, "lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy"):
            yield "training.lr_scheduler_type", "needs training.eval_strategy: steps or epoch."
    elif is_wanted and saving not in (evaluation, "best"):
        yield (
            "training.load_best_model_at_end",
            f"needs equal strategies, but eval_strategy is {show(evaluation)} and save_strategy {show(saving)}.",
        )
    elif is_wanted and evaluation == saving == "steps":
        yield from _check_saved_steps_are_evaluated(draft)


def _check_saved_steps_are_evaluated(draft: Draft) -> Iterator[Refusal]:
    save = _training(draft, "save_steps")
    evaluate = _training(draft, "eval_steps") or _training(draft, "logging_steps")
    if not (0 < save < math.inf and 0 < evaluate < math.inf):
        return
    ratio = save / evaluate
    if (save < 1) != (evaluate < 1) or not math.isclose(ratio, round(ratio), abs_tol=1e-6):
        yield (
            "training.load_best_model_at_end",
            f"needs save_steps = {save:g} to be a multiple of eval_steps = {evaluate:g}, in the same unit.",
        )


def _prefetching_has_workers(draft: Draft) -> Iterator[Refusal]:
    if draft.has("training.dataloader_prefetch_factor") and not _training(draft, "dataloader_num_workers"):
        yield "training.dataloader_prefetch_factor", "needs training.dataloader_num_workers of at least 1."


# --- What a trainer makes of the sections. ---


_SAID_ELSEWHERE = {
    "max_length": "data.max_length",
    "dataset_num_proc": "data.num_proc",
    "dataset_text_field": "data.columns",
    "completion_only_loss": "data.loss_on",
    "assistant_only_loss": "data.loss_on",
    "packing": "data.packing",
    "eval_packing": "data.packing",
    "packing_strategy": "data.packing",
    "padding_free": "data.packing",
    "truncation_mode": "data.max_length",
    "chat_template_path": "data.chat_template",
    "trust_remote_code": "model.trust_remote_code",
    "model_init_kwargs": "model",
    "eos_token": "model.tokenizer",
    "pad_token": "model.tokenizer",
    "dataset_kwargs": "data",
}
"""Arguments of trl's trainers that a recipe says in a section of its own."""
_OF_TEXT = ("format", "loss_on", "packing")


def _trainer_suits(draft: Draft) -> Iterator[Refusal]:
    """Check what a trainer makes of the sections; of one that cannot be had nothing is known."""
    if draft.trainer is not None:
        for rule in _OF_TRAINERS:
            yield from rule(draft, draft.trainer)


def _trainer_reads_its_sections(draft: Draft, kind: TrainerKind) -> Iterator[Refusal]:
    for name, home in _SAID_ELSEWHERE.items() if kind.of_trl else ():
        if draft.has(f"training.{name}"):
            yield f"training.{name}", f"a recipe says this in {home}. Write it there."
    for name in () if kind.is_text else ("packing",) if kind.reads_images else _OF_TEXT:
        if draft.has(f"data.{name}"):
            what = f"trainer {kind.name} reads the columns {', '.join(kind.columns)}"
            yield f"data.{name}", f"belongs to plain text, and {what}. Remove it."
    if not kind.is_text and draft.get("checkpointing.micro_batch"):
        yield "checkpointing.micro_batch", f"is chosen for plain text, not for trainer {kind.name}. Remove it."


def _images_are_read(draft: Draft, kind: TrainerKind) -> Iterator[Refusal]:
    if draft.get("data.format") != IMAGES:
        for name in ("max_pixels", "max_images"):
            if draft.has(f"data.{name}"):
                yield f"data.{name}", "belongs to data.format: images. Remove it, or write that."
        return
    if kind.is_text:
        yield "data.format", "images are read by trl's SFTTrainer. Write trainer: sft."
    if kind.reads_images and draft.has("model.config"):
        yield "model.config", "images are read by the processor of trained weights. Write model.name_or_path."
    if kind.reads_images and draft.get("data.loss_on") == "completion":
        yield "data.loss_on", "messages have turns. Use assistant, or all."


def _labels_are_counted(draft: Draft, kind: TrainerKind) -> Iterator[Refusal]:
    if kind.name == "classification" and not draft.has("model.num_labels"):
        yield "model.num_labels", "missing. Write how many classes there are; 1 for a number to predict."
    elif kind.name != "classification" and draft.has("model.num_labels"):
        yield "model.num_labels", "belongs to trainer: classification. Remove it, or use that."


def _reference_is_one(draft: Draft, kind: TrainerKind) -> Iterator[Refusal]:
    if draft.get("training.sync_ref_model") and (draft.has("lora") or draft.has("adapter")):
        yield "training.sync_ref_model", "with an adapter the reference is the model without it. Remove one of the two."


def written_rewards(draft: Draft) -> list[str]:
    """Return the names of what rewards completions; none where they are not a list of names."""
    found = draft.written(REWARDS)
    return found if isinstance(found, list) and all(isinstance(name, str) and name for name in found) else []


def _completions_are_rewarded(draft: Draft, kind: TrainerKind) -> Iterator[Refusal]:
    if not kind.generates:
        if draft.has(REWARDS):
            yield REWARDS, "belongs to trainer: grpo. Remove it, or use that."
        return
    if not written_rewards(draft):
        yield (
            REWARDS,
            "expected a list of names. Write reward_funcs: [think_format_reward], another function of trl's, or where "
            "one of your own lies, as module:function.",
        )
    completion = draft.get("training.max_completion_length", DEFAULT_COMPLETION)
    length = draft.get("data.max_length", DEFAULT_MAX_LENGTH)
    if completion is None:
        yield "training.max_completion_length", "expected tokens, which bound what is generated."
    elif length <= completion:
        yield (
            "data.max_length",
            f"is of a prompt with its completion, and training.max_completion_length = {completion} leaves none for "
            "the prompt. Raise it.",
        )
    if draft.get("training.beta") and not (draft.has("lora") or draft.has("adapter")):
        yield (
            "training.beta",
            "without an adapter trl loads the reference by its name, without what the recipe says of it. Write "
            "beta: 0, or train an adapter.",
        )


_OF_TRAINERS: tuple[Callable[[Draft, TrainerKind], Iterator[Refusal]], ...] = (
    _trainer_reads_its_sections,
    _images_are_read,
    _labels_are_counted,
    _reference_is_one,
    _completions_are_rewarded,
)


# --- Engines. What the launcher asks for is held against the recipe when it runs (`sharding_engine`). ---


def _one_engine_shards(draft: Draft) -> Iterator[Refusal]:
    if draft.get("training.fsdp") and draft.get("training.deepspeed"):
        yield "training.deepspeed", "training.fsdp is given as well, and both shard the model. Keep one."
    if draft.get("training.fsdp_config") and not draft.get("training.fsdp"):
        yield "training.fsdp_config", "has no effect without training.fsdp=true. Add that, or remove this."


# --- The `checkpointing` section. ---


def _policy_can_be_read(draft: Draft) -> Iterator[Refusal]:
    policy = draft.get("checkpointing.policy")
    if policy is None:
        return
    options = {name: value for name in POLICY_OPTIONS if (value := draft.get(f"checkpointing.{name}")) is not None}
    # Each by itself, so that a mistake is reported at its key.
    unreadable = {
        name: found
        for name, value in options.items()
        if name in READERS and (found := _unreadable(name, READERS[name], value))
    }
    yield from itertools.chain(*unreadable.values())
    readable = {name: value for name, value in options.items() if name not in unreadable}
    if policy == AUTO:
        yield from _auto_can_be_read(draft, options, readable)
        return
    for name in OF_AUTO:
        if draft.has(f"checkpointing.{name}"):
            yield f"checkpointing.{name}", "belongs to policy: auto, which plans for a budget. Remove it, or use that."
    yield from _unreadable("policy", partial(parse, **readable), _with_whole_path(draft, policy))


def _prove_can_be_read(draft: Draft) -> Iterator[Refusal]:
    yield from _unreadable("prove", parse_prove, draft.get("checkpointing.prove", "first_step"))


def _unreadable(name: str, read: Callable[[Any], object], value: object) -> list[Refusal]:
    """Return why the value of an option cannot be read, where it cannot."""
    try:
        read(value)
    except PolicyError as error:
        return [(f"checkpointing.{name}", str(error))]
    return []


def _auto_can_be_read(draft: Draft, options: Mapping[str, object], readable: Mapping[str, object]) -> Iterator[Refusal]:
    for name, value in options.items():
        if name not in ALLOWANCES and value is not False:
            yield f"checkpointing.{name}", "given with policy: auto, which chooses for each layer. Remove it."
    for name, read in (("memory_budget", parse_budget), ("fallback", Policy.parse)):
        if (value := draft.get(f"checkpointing.{name}")) is not None:
            yield from _unreadable(name, read, value)
    for name in ALLOWANCES:
        yield from _unreadable(name, allowed_by, {name: readable.get(name)})


def _with_whole_path(draft: Draft, policy: object) -> object:
    """Return a policy; the file of a plan, which is named from the recipe's folder, as a whole path there too."""
    if not isinstance(policy, str) or not policy.endswith(PLAN_SUFFIX):
        return policy
    path = str(resolve_path(draft.place("checkpointing.policy"), policy).absolute())
    draft.sections["checkpointing"]["policy"] = path
    return path


def _one_plan_governs(draft: Draft) -> Iterator[Refusal]:
    if not draft.has("checkpointing"):
        return
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if draft.get(f"training.{name}"):
            yield f"training.{name}", "given with a checkpointing section, which governs. Remove one of the two."
        if draft.get(f"training.{name}_kwargs"):
            yield f"training.{name}_kwargs", "has no effect with a checkpointing section. Remove it."
    for name in ("activation_checkpointing", "fsdp_activation_checkpointing"):
        if draft.get(f"training.fsdp_config.{name}"):
            yield f"training.fsdp_config.{name}", "given with a checkpointing section, which governs. Remove one."


def _training(draft: Draft, name: str) -> Any:
    """Return a value of the training section, or its default."""
    return draft.get(f"training.{name}", upstream_fields.training_keys((draft.trainer or TEXT).of_trl)[name].default)


def _are_counts(*values: object) -> bool:
    return all(is_whole(value, 1) for value in values)


_RULES: tuple[Callable[[Draft], Iterator[Refusal]], ...] = (
    _values_are_in_bounds,
    _names_are_not_empty,
    _model_has_one_source,
    _attention_is_known,
    _made_weights_stand_alone,
    _loaded_weights_keep_their_tokenizer,
    _config_fits_itself,
    _adapter_is_one,
    _adapter_trains,
    _adapter_of_parameters_is_plain,
    _adapter_targets_are_named,
    _virtual_tokens_are_trained,
    _quantization_is_one_kind,
    _loss_suits_format,
    _trainer_suits,
    _evaluation_data_has_one_source,
    _evaluation_has_data,
    _precision_is_one,
    _steps_are_whole,
    _best_model_can_be_known,
    _prefetching_has_workers,
    _one_engine_shards,
    _policy_can_be_read,
    _prove_can_be_read,
    _one_plan_governs,
)
