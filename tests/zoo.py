"""Tiny models of every architecture in the installed transformers, built from shrunk default configs.

Sizes are chosen by field name (`RULES`); what one architecture needs beyond that stands in `tests/zoo_tables.py`.
This file knows transformers and torch, and nothing of the package under test. Models with an audio tower are
stepped on text alone. `python -m tests.zoo --sweep` (`tests/zoo_sweep.py`) builds and steps everything.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

from tests.zoo_tables import (
    BATCH,
    CANNOT,
    FIRST_TOKEN,
    GRID,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    INPUTS,
    KV_HEADS,
    LAST_TOKEN,
    LENGTH,
    OVERRIDES,
    PADDING,
    PARTS,
    PATCH,
    VOCAB,
)

# In the order in which `build` looks for a model type when it is told no task.
TASKS = {
    "image-text": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "AutoModelForImageTextToText"),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
}


def names(task: str) -> list[str]:
    return [name for name in getattr(modeling_auto, TASKS[task][0], {}) if name in CONFIG_MAPPING]


# Each is called, and returns the model types that the installed transformers has for the task.
CAUSAL, SEQ2SEQ = partial(names, "causal"), partial(names, "seq2seq")
ENCODERS, VISION_LANGUAGE = partial(names, "masked"), partial(names, "image-text")

CORE = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "bloom"]
CORE += ["falcon", "olmo2", "granite", "starcoder2", "mixtral", "qwen2_moe", "bamba", "jamba", "t5", "bert", "qwen2_vl"]

# Field name -> tiny value, first match wins; a callable is given the number of layers.
# Counts never grow, lists shrink element by element, and what matches nothing keeps its default.
RULES: list[tuple[str, Any]] = [
    (r"(?!.*type_).*vocab_size(_per_layer_input)?", VOCAB),
    (r"mamba_(n|num)_heads|n_mamba_heads", 8),
    (r".*num_key_value_heads|num_kv_heads|kv_n_heads|linear_num_key_heads|index_n_heads", KV_HEADS),
    (r".*heads|n_head|num_query_groups", HEADS),
    (r"(q|kv|o)_lora_rank|qk_head_dim|hc_lowrank", 2 * HEAD_DIM),
    (r"d_kv|d_head|.*head_dim|.*head_size|kv_channels|rotary_dim|mamba_d_head|hidden_size_per_layer_input", HEAD_DIM),
    (r"mamba_d_ssm|attention_hidden_size", 2 * HIDDEN),
    (r".*hidden_size(_global|s)?|d_model|n_embd|dim|emb(ed|edding)?_dim|.*embedding_size|word_embed_proj_dim", HIDDEN),
    (r"vision_output_dim|projector_(input|output)_dim|projection_dim|intra_bottleneck_size", HIDDEN),
    (r"adapter_(in|out)_dim|adapter_input_size", HIDDEN),
    (r"n_inner|d_inner|dff|dim_ff|d_ff|mlp_dim|.*ffn_dim|.*(ffn_hidden|intermediate)_size", INNER),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|zero_expert_num", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r".*max_position_embeddings|n_positions|max_seq_len|max_(img|image)_size", 64),
    (r"num_kv_shared_layers", lambda count: count // 2 if count > 3 else 0),
    (r"sliding_window|index_topk|mamba_d_state|state_size|ssm_state_size|(mamba_)?chunk_size", 8),
    (r"image_size", GRID * PATCH),
    (r"image_grid_pinpoints", [[GRID * PATCH, GRID * PATCH]]),
    (r"patch_size", PATCH),
    (r"initializer_range", 0.02),  # the defaults of some towers are so small that gradients vanish
    (r"mm_tokens_per_image|num_query_tokens|latent_query_num|mamba_dt_rank", 4),
]
LAYER_COUNT = r"num_(hidden_)?layers|n_layers?|depth|(encoder|decoder)_layers|num_(encoder|decoder)_layers"
LAYER_INDICES = r".*(_indexes|_indices|_idxs|_layer_ids|attention_layers)"
LAYER_LIST = "layers_block_type"  # where the number of layers is the length of this list
TOKEN_IDS = r".*(token_id|token_index|_id)"
# No cache, as Trainer has it; nothing frozen, so that every layer has gradients.
SETTINGS = dict.fromkeys(["use_cache", "freeze_text_layers", "freeze_vision_layers"], False)
if transformers.__version__.startswith("5.0."):  # later versions fall back by themselves, and deprecate the field
    SETTINGS["use_mamba_kernels"] = False
# Set even where the default is None: some models then cannot be built, or find no image.
IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_index")
FILLED = {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS} | dict.fromkeys(IMAGE_TOKENS, VOCAB)


class CannotBuild(Exception):  # noqa: N818 (the name says what a caller skips on)
    """The architecture is not there, or cannot be built or stepped on a CPU with what is installed."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny model in train mode and one batch for it, labels included where the model takes them."""

    model_type: str
    model: nn.Module
    inputs: dict[str, torch.Tensor]


def loss(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run one forward; return the model's own loss, or the mean square of its output if it has none."""
    output = model(**inputs)
    own = getattr(output, "loss", None)
    return own if own is not None else output[0].float().square().mean()


@dataclasses.dataclass
class _Shrinker:
    """Makes config fields tiny. Equal names of special tokens get equal ids in all parts of one config."""

    num_layers: int
    dropout: float
    special: dict[str, int] = dataclasses.field(default_factory=dict)

    def fields(self, default: PretrainedConfig) -> dict[str, Any]:
        """Keyword arguments for a tiny config of this class; the fields left out keep or recompute their default."""
        found = {name: value for name, value in vars(default).items() if not name.startswith("_")}
        default_count = next((value for name, value in found.items() if re.fullmatch(LAYER_COUNT, name)), None)
        # A composite config may give its parts other defaults than their own class does.
        unset = vars(_default(type(default)))
        changed: dict[str, Any] = {}
        for name, value in found.items():
            if isinstance(value, PretrainedConfig):
                changed[name] = {"model_type": value.model_type, **self.fields(value)}
            elif (tiny := self.value(name, value, default_count)) != unset.get(name):
                changed[name] = tiny
        return self._overridden(default, changed | _derived(default))

    def value(self, name: str, value: Any, default_count: int | None) -> Any:
        if isinstance(value, list) and (len(value) == default_count or name == LAYER_LIST):
            value = self._per_layer(value)
        value = FILLED.get(name) if value is None else value
        if name in SETTINGS:
            return SETTINGS[name]
        if value is None or isinstance(value, (str, bool)):
            return value
        if re.fullmatch(TOKEN_IDS, name):
            return self._token(name, value)
        if re.fullmatch(r".*(dropout|pdrop).*", name):
            return self.dropout if isinstance(value, float) else value
        if re.fullmatch(LAYER_COUNT, name):
            return self.num_layers
        if re.fullmatch(LAYER_INDICES, name) and default_count and _first_type(value) is int:
            return type(value)(dict.fromkeys(index * self.num_layers // default_count for index in value))
        return self._by_rule(name, value)

    def _per_layer(self, values: list[Any]) -> list[Any]:
        """A list with one entry a layer, cut; kinds of layers take turns, so that none is lost."""
        kinds = dict.fromkeys(values) if _first_type(values) is str else None
        return list(islice(cycle(kinds), self.num_layers)) if kinds else values[: self.num_layers]

    def _token(self, name: str, value: Any) -> Any:
        first = value[0] if isinstance(value, (list, tuple)) else value
        return self.special.setdefault(name, VOCAB - 1 - len(self.special)) if first >= FIRST_TOKEN else value

    def _by_rule(self, name: str, value: Any) -> Any:
        tiny = next((tiny for pattern, tiny in RULES if re.fullmatch(pattern, name)), value)
        if callable(tiny):
            return tiny(self.num_layers)
        if isinstance(value, (list, tuple)) and isinstance(tiny, int):
            return type(value)(min(old, tiny) for old in value)
        return min(value, tiny) if type(value) is int else tiny

    def _overridden(self, default: PretrainedConfig, changed: dict[str, Any]) -> dict[str, Any]:
        for name, value in OVERRIDES.get(default.model_type, {}).items():
            value = value(self.num_layers) if callable(value) else value
            changed[name] = {**changed[name], **value} if isinstance(changed.get(name), dict) else value
        return changed


def _first_type(values: Any) -> type | None:
    return type(values[0]) if isinstance(values, (list, tuple)) and values else None


def _derived(default: PretrainedConfig) -> dict[str, Any]:
    """Fields that follow from several others."""
    changed: dict[str, Any] = {}
    rope = getattr(default, "rope_parameters", None) or {}
    if "rope_type" in rope and "mrope_section" in (getattr(default, "ignore_keys_at_rope_validation", None) or ()):
        half = int(HEAD_DIM // 2 * rope.get("partial_rotary_factor", 1))
        side = 3 * half // 8
        changed["rope_parameters"] = {**rope, "mrope_section": [half - 2 * side, side, side]}
    if "kv_lora_rank" in vars(default):  # latent attention has no grouped heads
        changed["num_key_value_heads"] = HEADS
    if default.model_type and not hasattr(default, "pad_token_id"):
        changed["pad_token_id"] = 0  # transformers 5.0 reads it from configs that lack it
    if getattr(default, "is_encoder_decoder", False):
        missing = [name for name in ("decoder_start_token_id", "pad_token_id") if getattr(default, name, None) is None]
        changed |= dict.fromkeys(missing, 0)
    return changed


def _default(cls: type[PretrainedConfig]) -> PretrainedConfig:
    # A copy: some take the model types out of what they are given.
    return cls(**copy.deepcopy(PARTS.get(cls.model_type, {})))


def config(model_type: str, task: str, *, num_layers: int | None = None, dropout: float = 0.1) -> PretrainedConfig:
    """The default config of an architecture, made tiny."""
    if model_type not in CONFIG_MAPPING:
        raise CannotBuild(f"{model_type} is not in transformers {transformers.__version__}")
    cls = CONFIG_MAPPING[model_type]
    default = _default(cls)
    decoder = {"is_decoder": True} if task == "causal" and "is_decoder" in vars(default) else {}
    return cls(**_Shrinker(num_layers or 4, dropout).fields(default) | decoder)


def _model(shrunk: PretrainedConfig, task: str, attn_implementation: str) -> nn.Module:
    model_class = getattr(transformers, TASKS[task][1])._model_mapping[type(shrunk)]
    if not isinstance(shrunk, model_class.config_class):  # a composite config, and a model of one of its parts
        shrunk = next((part for part in vars(shrunk).values() if isinstance(part, model_class.config_class)), shrunk)
    try:
        return model_class._from_config(shrunk, attn_implementation=attn_implementation)
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        return model_class._from_config(shrunk, attn_implementation="eager")


def _fill_zeros(model: nn.Module) -> None:
    """Give parameters that start at zero a value: behind a closed gate no gradient would flow."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)


def _text() -> dict[str, torch.Tensor]:
    """Random tokens; the second row ends in padding, so that masks matter."""
    input_ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, (BATCH, LENGTH))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, -PADDING:] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Values for an input of a single model, by the kind that its name tells."""
    if name == "pixel_attention_mask":
        return torch.ones(shape, dtype=torch.bool)
    if name.endswith(("_ids", "_mask", "_sizes")):
        return torch.ones(shape, dtype=torch.long)
    if name.endswith("_hw"):
        return torch.full(shape, GRID)
    return torch.rand(shape) if name == "bbox" else torch.randn(shape)


def _own_inputs(model_type: str) -> dict[str, Any]:
    table = INPUTS.get(model_type, {})
    return {name: _drawn(name, how) if isinstance(how, tuple) else how and how() for name, how in table.items()}


def _images(model: nn.Module, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """One random image of 16 patches a row, in the form that the model's forward asks for."""
    vision = next((part for name, part in vars(model.config).items() if "vision" in name), model.config)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    depth = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
    grids, row, flat = torch.full((BATCH, 2), GRID), (BATCH, GRID**2), channels * PATCH**2
    if "image_grid_thw" in wanted:
        grids = torch.nn.functional.pad(grids, (1, 0), value=1)
        return {"pixel_values": torch.randn(BATCH * GRID**2, flat * depth), "image_grid_thw": grids}
    if "spatial_shapes" in wanted:
        mask = torch.ones(row, dtype=torch.long)
        return {"pixel_values": torch.randn(*row, flat), "spatial_shapes": grids, "pixel_attention_mask": mask}
    if "target_sizes" in wanted:
        return {"pixel_values": torch.randn(1, channels, PATCH, BATCH * GRID**2 * PATCH), "target_sizes": grids}
    if "flattened_patches" in wanted:  # row and column come first
        return {"flattened_patches": torch.cat([torch.ones(*row, 2), torch.randn(*row, flat)], dim=2)}
    if "pixel_values_images" in wanted and "pixel_values" not in wanted:  # Video-LLaVA before transformers 5.23
        return {"pixel_values_images": torch.randn(BATCH, channels, GRID * PATCH, GRID * PATCH)}
    images = {"pixel_values": torch.randn(BATCH, channels, GRID * PATCH, GRID * PATCH)}
    if "pixel_attention_mask" in wanted:
        return {"pixel_values": images["pixel_values"][:, None]}
    return images | ({"image_sizes": grids * PATCH} if "image_sizes" in wanted else {})


def _featurizer(model: nn.Module) -> Callable[..., Any] | None:
    owners = (model, getattr(model, "model", None))
    methods = ("get_image_features", "get_video_features")
    found = (getattr(owner, method, None) for owner in owners for method in methods)
    return next((featurizer for featurizer in found if featurizer), None)


def _num_image_tokens(model: nn.Module, images: dict[str, Any]) -> int:
    """How many embeddings a row the model makes of its image, asked from the model itself."""
    featurizer = _featurizer(model)
    strategy = inspect.signature(featurizer).parameters.get("vision_feature_select_strategy")
    if strategy and strategy.default is strategy.empty:  # Llama 4 before transformers 5.23
        featurizer = partial(featurizer, vision_feature_select_strategy="default")
    with torch.no_grad():
        found = featurizer(**images)
    if getattr(found, "pooler_output", None) is not None:
        found = found.pooler_output
    elif getattr(found, "last_hidden_state", None) is not None:
        found = found.last_hidden_state
    elif hasattr(found, "deepstack_features"):  # Granite 4 Vision: for several decoder layers, as many for each
        found = found.deepstack_features[0][1]
    return sum(part.numel() for part in found) // model.get_input_embeddings().weight.shape[-1] // BATCH


def _with_images(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch with images, and with their placeholders after the first token where the model wants those."""
    wanted = inspect.signature(model.forward).parameters
    images = _images(model, wanted) | _own_inputs(model.config.model_type)
    token = next((token for name in IMAGE_TOKENS if (token := getattr(model.config, name, None))), None)
    if token and _featurizer(model):
        count = _num_image_tokens(model, images)
        for name, fill in {"input_ids": token, "attention_mask": 1, "labels": -100}.items():
            old = batch[name]
            batch[name] = torch.cat([old[:, :1], old.new_full((BATCH, count), fill), old[:, 1:]], dim=1)
        types = (batch["input_ids"] == token).long()
        batch |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in wanted}
    return {name: value for name, value in (batch | images).items() if value is not None}


def build(
    model_type: str,
    *,
    task: str | None = None,
    attn_implementation: str = "sdpa",
    num_layers: int | None = None,
    dropout: float = 0.1,
    num_key_value_heads: int | None = None,
) -> Case:
    """Build a tiny random model in train mode with a batch; the same after the same `torch.manual_seed`.

    Args:
        model_type: a name of transformers, such as those of `CAUSAL()`.
        task: one of `TASKS`; the first of them that has the model type when left out ("masked" for bert, "causal" only
            for what is nothing else).
        attn_implementation: replaced by "eager" where the model does not support it.
        num_layers: layers of each stack, 4 by default.
        dropout: value of every dropout field of the config, attention dropout included.
        num_key_value_heads: half of the heads by default.

    Raises:
        CannotBuild: with the reason.
    """
    if model_type in CANNOT:
        raise CannotBuild(f"{model_type}: {CANNOT[model_type]}")
    task = task or next((name for name in TASKS if model_type in names(name)), "causal")
    shrunk = config(model_type, task, num_layers=num_layers, dropout=dropout)
    if num_key_value_heads is not None:
        shrunk.num_key_value_heads = num_key_value_heads
    try:
        model = _model(shrunk, task, attn_implementation)
    except ImportError as error:
        raise CannotBuild(f"{model_type}: {str(error).strip().splitlines()[0]}") from error
    _fill_zeros(model)
    inputs = _text()
    if task == "image-text" or model_type == "git":  # GIT has no logits for text without an image
        inputs = _with_images(model, inputs)
    if model_type.startswith("musicgen"):  # one label a codebook
        inputs["labels"] = inputs["labels"][..., None]
    return Case(model_type, model.float().train(), inputs)


if __name__ == "__main__":
    from tests.zoo_sweep import main

    main()
