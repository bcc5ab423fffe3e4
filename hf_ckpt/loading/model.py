"""The model that a recipe describes: where its config is found; loaded or built from it, quantised, with adapters.

`rehearse` builds it without weights first, so that what does not suit it is refused before anything large is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_ckpt.errors import RecipeError
from hf_ckpt.loading.adapter_targets import check_matches, check_parameters, unmatched_untold
from hf_ckpt.loading.config_files import (
    is_path,
    is_reachable,
    known_configs,
    not_to_be_had,
    shaping_recipes,
    source_options,
)
from hf_ckpt.loading.model_kinds import (
    auto_class,
    check_trainable,
    fitting_attention,
    fitting_config,
    needs_images,
    task_type,
)
from hf_ckpt.patch.apply import apply
from hf_ckpt.patch.frozen_weights import let_wait_until_planned
from hf_ckpt.policy.options import parse_offload
from hf_ckpt.policy.policy import Mode
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.schema import PREPARE_FOR_KBIT, QUANTIZE_EXPERTS
from hf_ckpt.regions.offload.disk import check_path
from hf_ckpt.structure.layers import find_layers
from hf_ckpt.structure.quantized_experts import (
    ExpertsBitsAndBytesConfig,
    experts_in_4_bits,
    without_experts_in_4_bits,
)
from hf_ckpt.upstream import old_names_untold
from hf_ckpt.upstream.torch import DDP_IGNORES

logger = logging.getLogger(__name__)

# Initial values made from the weights, or by a tokenizer, need these, and change no size.
_NEEDS_WEIGHTS = (
    *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"),
)
_KERNELS = ("attn_implementation", "experts_implementation")
"""Keys that say what computes attention and experts. Left out, transformers chooses."""
EXPERTS_EVERYWHERE = ("eager", "grouped_mm", "batched_mm")
"""What can compute experts without a GPU."""
# No tokenizer is there yet, and the shape of the layers does not depend on it.
_NO_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def rehearse(recipe: Recipe, shape: Mapping[str, Any]) -> torch.nn.Module:
    """Build the model on the `meta` device, and see that adapters and policy suit it.

    Takes a second; loading large weights, or training a base, takes minutes.

    The model on `meta`, with adapters and without a plan.
    """
    config = _config_of(shape)
    check_trainable(config, recipe.kind)
    with torch.device("meta"):
        model: torch.nn.Module = made(config, shape, recipe)
    model = with_empty_adapter(model, recipe)
    if recipe.checkpointing is not None:
        # A folder to offload to that cannot be written, of the policy or of one of its rules, is refused now.
        policy = recipe.checkpointing.policy
        rules = (recipe.checkpointing, *(policy if isinstance(policy, list) else [policy]))
        written = [rule.get("offload") for rule in rules if isinstance(rule, Mapping)]
        for offload in filter(None, map(parse_offload, written)):
            if offload.path is not None:
                check_path(offload.path)
        # Policy `auto` plans when the step is known; what any plan would be refused for is refused now.
        checked = recipe.checkpointing.with_plan(Mode.NONE.value) if recipe.is_auto else recipe.checkpointing
        apply(model, **checked.apply_options).remove()
    return model


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> torch.nn.Module:
    """Build what the recipe's `model`, `quantization` and `lora` or `adapter` sections describe.

    `tokenizer`: tells the vocabulary size and special tokens of a model that is built from a config.
    """
    model = _with_adapter(base_model(recipe, tokenizer), recipe)
    if experts := [name for name, _ in experts_in_4_bits(model)]:
        # DDP sends the first process's weights to the others, which each have read the same.
        setattr(model, DDP_IGNORES, [*getattr(model, DDP_IGNORES, ()), *experts])
    return model


def load_base(recipe: Recipe, *, is_quantized: bool) -> PreTrainedModel:
    """Load the weights that `model.name_or_path` names."""
    name = recipe.model["name_or_path"]
    options = source_options(recipe.model, "revision", *_KERNELS)
    section = recipe.quantization if is_quantized else None
    if section is not None:
        options["quantization_config"] = bits_and_bytes(section)
    waits = is_quantized and recipe.checkpointing is not None and recipe.checkpointing.lets_weights_wait
    if waits:
        # There may be no room for all of it on the device. Each weight is quantised as it is read.
        options["device_map"] = {"": "cpu"}
    try:
        auto, config = _auto_and_config(name, recipe)
        if is_mxfp4(config):
            logger.info("%s: its experts are stored in MXFP4, which does not train. They are dequantised.", name)
            options |= _dequantized_on_loading(config, section)
        options["attn_implementation"] = fitting_attention(auto, config, options.get("attn_implementation"))
        model: PreTrainedModel = auto.from_pretrained(
            name, dtype=recipe.model.get("dtype", "auto"), use_safetensors=True, **options, **_labels(recipe)
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise RecipeError(_loading_advice(name, error)) from error
    if section is not None:
        model = prepared_for_kbit(model, section)
    return _on_device_but_weights(model, recipe) if waits else model


def _on_device_but_weights(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """Move a model to the device of its training, but for the frozen weights that a plan may let wait on the host."""
    if recipe.adapter_section is not None:
        # They are frozen once the adapter is there, and are named by where it is put: the layers stay the same.
        model.requires_grad_(False)
    device = PartialState().device
    let_wait_until_planned(model, find_layers(model), device)
    # Accelerate leaves a quantised model where this says that it is.
    loaded: Any = model
    loaded.hf_device_map = {"": device.type if device.index is None else device.index}
    return model


def is_mxfp4(config: PreTrainedConfig) -> bool:
    """Tell whether a model's experts are stored in MXFP4, as those of gpt-oss. The adapter's gradient needs others."""
    own = own_quantization(getattr(config, "quantization_config", None))
    return own is not None and own.method == "mxfp4"


class OwnQuantization(NamedTuple):
    """How the weights that a model's config names are quantised: `quantization_config` in it."""

    method: object  # As transformers names it: `bitsandbytes`, `mxfp4`. None where the config names none.
    fields: dict[str, Any]  # All others: with `bitsandbytes` those of `BitsAndBytesConfig`.


def own_quantization(found: Any) -> OwnQuantization | None:
    """Read `quantization_config` of a config, as a dict or an object of transformers; None where it has none."""
    if found is None:
        return None
    fields = found if isinstance(found, dict) else found.to_dict()
    method = fields.get("quant_method")
    others = {key: value for key, value in fields.items() if not key.startswith("_") and key != "quant_method"}
    return OwnQuantization(getattr(method, "value", method), others)


def _dequantized_on_loading(config: PreTrainedConfig, section: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options of `from_pretrained` by which experts in MXFP4 are loaded for training."""
    if section is None:
        from transformers.utils.quantization_config import Mxfp4Config

        return {"quantization_config": Mxfp4Config(dequantize=True)}
    # transformers takes one quantisation: that of the recipe, which reads the other.
    del config.quantization_config
    kind: Any = partial(ExpertsBitsAndBytesConfig, quantizes_experts=bool(section.get(QUANTIZE_EXPERTS)))
    return {"config": config, "quantization_config": kind(reads_mxfp4=True, **_fields_of_bits_and_bytes(section))}


def _auto_and_config(name: str, recipe: Recipe) -> tuple[Any, PreTrainedConfig]:
    config = AutoConfig.from_pretrained(name, **source_options(recipe.model, "revision"))
    return auto_class(recipe.kind, config), config


def _labels(recipe: Recipe) -> dict[str, int]:
    """Return what a config says of the numbers that a row has as labels; a reward is one."""
    return {"num_labels": recipe.model.get("num_labels", 1)} if recipe.kind.scores_rows else {}


def bits_and_bytes(section: Mapping[str, Any]) -> BitsAndBytesConfig:
    """Return what a `quantization` section says to bitsandbytes."""
    kind = ExpertsBitsAndBytesConfig if section.get(QUANTIZE_EXPERTS) else BitsAndBytesConfig
    return kind(**_fields_of_bits_and_bytes(section))


def _fields_of_bits_and_bytes(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in (PREPARE_FOR_KBIT, QUANTIZE_EXPERTS)}


def prepared_for_kbit(model: PreTrainedModel, section: Mapping[str, Any]) -> PreTrainedModel:
    """Return a quantised model, with all other weights in float32 where the section asks for it."""
    if section.get(PREPARE_FOR_KBIT):
        from peft import prepare_model_for_kbit_training

        with without_experts_in_4_bits(model):
            # Checkpointing is the policy's.
            prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]  # upstream
    return model


def holds_weights(folder: Path) -> bool:
    """Tell whether a folder holds a model that can be loaded."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _config_of(section: Mapping[str, Any]) -> PreTrainedConfig:
    if "config" in section:
        return _config(section["config"], _NO_TOKENS)
    name = section["name_or_path"]
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, **source_options(section, "revision"))
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(_loading_advice(name, error)) from error
    return config


def base_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Build what the recipe's `model` and `quantization` sections describe. See `build_model`."""
    if "name_or_path" in recipe.model:
        return load_base(recipe, is_quantized=True)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = _config(recipe.model["config"], {"vocab_size": len(tokenizer), **special})
    vocab_size: int = config.get_text_config().vocab_size
    if vocab_size < len(tokenizer):
        raise RecipeError(
            f"model.config.vocab_size is {vocab_size}, but the tokenizer has {len(tokenizer)} tokens. Raise it, "
            "or leave it out to take the tokenizer's."
        )
    name = recipe.model.get("dtype", "float32")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RecipeError(f'model.dtype is "{name}", which a model built from a config cannot have. Use "float32".')
    return made(config, recipe.model, recipe, dtype=dtype)


def made(config: PreTrainedConfig, section: Mapping[str, Any], recipe: Recipe, **options: Any) -> PreTrainedModel:
    """Return a model with new weights, built as a `model` section says, with the head that a recipe's trainer needs."""
    auto = auto_class(recipe.kind, config)
    if auto is AutoModelForCausalLM and needs_images(config):
        raise RecipeError(
            f"model: a model of type {config.model_type} reads images. Give --images 1, or write trainer: sft with "
            "data.format: images, as the recipe qwen3_vl_8b_lora does."
        )
    config = fitting_config(auto, config)
    options |= source_options(section, *_KERNELS)
    options["attn_implementation"] = fitting_attention(auto, config, options.get("attn_implementation"))
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        # A released config may leave it to that of generation; labels are shifted to the right behind it.
        config.decoder_start_token_id = config.pad_token_id or 0
    for name, number in _labels(recipe).items():
        setattr(config, name, number)
        if config.get_text_config().pad_token_id is None:
            # Rows of which the last token is scored cannot be batched without one.
            config.get_text_config().pad_token_id = 0
    try:
        model: PreTrainedModel = auto.from_config(config, **options)
    except (ValueError, ImportError, AttributeError) as error:
        what = "model that scores sequences" if recipe.kind.scores_rows else "causal language model"
        what = "model that reads images" if recipe.kind.reads_images else what
        # What follows is a list of all classes that there are.
        said = str(error).partition("\n")[0].rstrip(".")
        if said.startswith("Unrecognized configuration class"):
            said = f"transformers has none of type {config.model_type}"
        raise RecipeError(f"model: no {what} can be made: {said}.") from error
    return model


def _config(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**{**defaults, **section})
    except (ValueError, TypeError) as error:
        raise RecipeError(f"model.config is not a config of transformers: {error}") from error
    return config


def with_empty_adapter(model: torch.nn.Module, recipe: Recipe, **options: Any) -> torch.nn.Module:
    """Return a model, on `meta` or with random weights, with an adapter of the recipe's sizes, if it has one."""
    return _with_adapter(model, recipe, is_empty=True, **{"low_cpu_mem_usage": True, **options})


def can_be_merged(section: Mapping[str, Any]) -> bool:
    """Whether PEFT can add an adapter to the weights of its base: not where it has tokens or layers of its own."""
    from peft import PEFT_TYPE_TO_TUNER_MAPPING

    return hasattr(PEFT_TYPE_TO_TUNER_MAPPING[section["type"].upper()], "merge_and_unload")


def adapter_config(recipe: Recipe, *, is_empty: bool = False, model: Any = None) -> Any:
    """Return the recipe's adapter as PEFT's config; None without one.

    `is_empty`: for a model without weights. `model`: that gets the adapter, where it may have an encoder and a decoder.
    """
    section = recipe.adapter_section
    if section is None:
        return None
    from peft import get_peft_config

    left_out = ("type", *_NEEDS_WEIGHTS) if is_empty else ("type",)
    fields = {key: value for key, value in section.items() if key not in left_out}
    task = recipe.kind.task_type if model is None else task_type(recipe.kind, model.config)
    return get_peft_config({"task_type": task, **fields, "peft_type": section["type"].upper()})


def _with_adapter(model: torch.nn.Module, recipe: Recipe, *, is_empty: bool = False, **options: Any) -> torch.nn.Module:
    """Return a model with the recipe's adapter, if it has one."""
    if recipe.adapter_section is None:
        return model
    from peft import get_peft_model

    kind: str = recipe.adapter_section["type"]
    name = "lora" if recipe.adapter is None else "adapter"
    check_parameters(model, recipe.adapter_section, name)
    routers = {name.rpartition(".")[2]: part for name, part in model.named_modules() if _returns_more(part)}
    try:
        config = adapter_config(recipe, is_empty=is_empty, model=model)
        with old_names_untold(), unmatched_untold():
            adapted: torch.nn.Module = get_peft_model(cast(PreTrainedModel, model), config, **options)
    except (ValueError, TypeError, ImportError) as error:
        linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        raise RecipeError(
            f"{kind} does not suit {type(model).__name__}: {error} Its linear layers are {', '.join(sorted(linear))}."
        ) from error
    check_matches(adapted, recipe.adapter_section, name)
    reached = [router for router in routers if _is_wrapped(adapted, router)]
    if reached:
        raise RecipeError(
            f"{kind}: target_modules reach {reached[0]}, a {type(routers[reached[0]]).__name__}, which returns more "
            "than one tensor, and PEFT cannot add to that. Name the layers, such as "
            "lora.target_modules=[q_proj,k_proj,v_proj,o_proj]."
        )
    return adapted


def _returns_more(part: torch.nn.Module) -> bool:
    """Whether a linear layer of transformers has a forward of its own, as the router of Llama 4."""
    own = type(part)
    is_theirs = own.__module__.startswith("transformers.models.")
    return is_theirs and isinstance(part, torch.nn.Linear) and own.forward is not torch.nn.Linear.forward


def _is_wrapped(adapted: torch.nn.Module, name: str) -> bool:
    return any(path.endswith(f".{name}.base_layer") for path, _ in adapted.named_modules())


def _loading_advice(name: str, error: Exception) -> str:
    """Say what to do about weights that did not load."""
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, ImportError):
        return f"model.name_or_path: {name} needs a package that is not installed: {reason}."
    if "trust_remote_code" in str(error):
        return (
            f"model.name_or_path: {name} brings code of its own, which would run here. Read it, and set "
            "model.trust_remote_code=true if you trust it."
        )
    if is_path(name):
        there = Path(name).is_dir()
        what = f"{name} cannot be loaded: {reason}" if there else f"there is no folder {name}"
        return f"model.name_or_path: {what}. Check the path, or give a hub id."
    text = f"{type(error.__cause__).__name__} {reason}".lower()
    if "gated" in text or "401" in text or "403" in text:
        return (
            f"model.name_or_path: {name} is gated. Accept its licence on its page, log in with `hf auth login`, or "
            "give the path of a local copy."
        )
    if isinstance(error, ValueError):
        return f"model.name_or_path: {name} cannot be loaded: {reason}."
    return (
        f"model.name_or_path: {name} is neither a local folder with a model nor found on the hub ({reason}). "
        "Check the name, log in with `hf auth login` if it is gated or private, or give the path of a local copy."
    )


@dataclass(frozen=True)
class Found:
    """The config of a recipe's model at its full size."""

    config: PreTrainedConfig
    source: str  # Where it was found, in words.
    section: Mapping[str, Any]
    """The `model` section that describes the shape: the recipe's, or that of the recipe which makes its base."""
    has_weights: bool  # Whether `section` also names weights that can be had.


def find_config(recipe: Recipe) -> Found:
    """Find the config of a recipe's model, in the quickest place that has it."""
    section, by = shaping_recipes(recipe)[-1].model, ""
    if section is not recipe.model:
        by = f" of {Path(recipe.model['base_recipe']).name}"
    if "config" in section:
        return Found(_config(section["config"], _NO_TOKENS), f"model.config{by}", section, has_weights=False)
    name = section["name_or_path"]
    folder = Path(name)
    if folder.is_dir():
        return _loaded(section, f"the folder {name}", is_local=True, has_weights=holds_weights(folder))
    refusals = []
    for source, is_cached in (("the cache of the hub", True), ("the hub", False)):
        if is_cached or is_reachable():
            try:
                return _loaded(section, source, is_local=is_cached, has_weights=True)
            except RecipeError as error:
                refusals.append(error)
    if (known := known_config(name)) is not None:
        why = f"{name} is not cached, and cannot be loaded from the hub"
        return Found(known, f"the shapes that hf_ckpt knows ({why})", section, has_weights=False)
    raise refusals[-1]


def _loaded(section: Mapping[str, Any], source: str, *, is_local: bool, has_weights: bool) -> Found:
    name = section["name_or_path"]
    options = {**source_options(section, "revision"), "local_files_only": is_local}
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError) as error:
        raise RecipeError(_advice(name, error)) from error
    return Found(config, _compared_with_known(source, name, config), section, has_weights=has_weights)


def _compared_with_known(source: str, name: str, config: PreTrainedConfig) -> str:
    """Return where a config was found, and in what it differs from the shape that comes with the package, if it does.

    A folder is held against the model whose name it bears.
    """
    ids = [hub_id for hub_id in known_configs() if name == hub_id or Path(name).name == hub_id.rpartition("/")[2]]
    known = known_config(ids[0]) if ids else None
    if known is None:
        return source
    differences = list(_differences(known_configs()[ids[0]], known.to_dict(), config.to_dict()))
    if not differences:
        return source
    return (
        f"{source}, which is taken; the shape of {ids[0]} that hf_ckpt knows has other values: {', '.join(differences)}"
    )


def _differences(
    fields: Mapping[str, Any], known: Mapping[str, Any], found: Mapping[str, Any], above: str = ""
) -> Iterator[str]:
    """Yield what a config has otherwise, as `num_hidden_layers 30, not 32`; `fields` are those that are compared."""
    for name in sorted(fields.keys() - {"dtype"}):
        one, other = known.get(name), found.get(name)
        if isinstance(fields[name], Mapping) and isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(fields[name], one, other, f"{above}{name}.")
        elif one != other:
            yield f"{above}{name} {other}, not {one}"


def known_config(hub_id: str) -> PreTrainedConfig | None:
    """Return the config of a hub model whose shape comes with the package; None where it is not known."""
    fields = known_configs().get(hub_id)
    return None if fields is None else AutoConfig.for_model(**fields)


def _advice(name: str, error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return _loading_advice(name, error)
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    if Path(name).is_dir():
        return f"model.name_or_path: the config in {name} cannot be read: {reason}."
    return not_to_be_had(name, reason)
