"""The config of a reduced model: fewer layers, small widths, special tokens inside a small vocabulary.

`FIELDS` says what a field is, by the names that configs give it; what it does not know stays. One rule holds for
widths: fields that are the same thing get the same size, a power of two, and none grows. So what was equal stays equal,
what divided still divides, and a model is built as at full size: query heads share keys and values in the same ratio,
heads fill the hidden size where they did, fewer experts are chosen than there are, windows are shorter than the rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_ckpt.verify.reduce_layers import KeptLayers

_HEAD_SIZE = 16
# 4-bit weights come in blocks of 64 numbers, and 8-bit optimizers keep what has fewer than 4,096 in 32 bits: LoRA of
# rank 16 reaches that with the input of 256 that a feed-forward network has inside.
_HIDDEN = 64
_MAX_SHARING = 8
What = str | int | None
Sizes = Mapping[What, int]

FIELDS: tuple[tuple[str | int, str], ...] = (
    ("vocabulary", r"(?!.*type_).*vocab_size(_per_layer_input)?"),
    ("token", r".*_(token_id|token_index|token_ids|id)"),
    # Layers: how many there are, how many of them from the first or to the last, which ones, and what each is.
    ("layers", r"num_(hidden_)?layers|n_layers?|depth|num_blocks|(num_)?(en|de)coder_layers"),
    ("first layers", r"first_k_dense_replace|n(um)?_dense_layers|max_window_layers|moe_layer_start_index"),
    ("last layers", r"num_kv_shared_layers"),
    ("numbers of layers", r".*_(indices|indexes|idxs?|ids|layers)"),
    ("letters of layers", r".*pattern"),
    # Sizes that differ from model to model: see `_sizes`.
    ("heads", r"(num_)?((en|de)coder_)?(attention_)?heads|n_heads?|num_query_groups"),
    ("kv heads", r"num_key_value_heads|num_kv_heads|kv_n_heads|n_head_kv|multi_query_group_num"),
    ("head size", r"(attention_|global_|swa_)?head_dim|d_head|(attention_)?head_size|kv_channels|rotary_dim"),
    ("rotary sections", r"mrope_section"),
    ("mixer heads", r"mamba_n(um)?_heads|n_mamba_heads"),
    ("mixer head size", r"mamba_(d_head|head_?dim)"),
    ("mixer", r"mamba_d_ssm|attention_hidden_size|lru_width|ssm_inner_size"),
    ("hidden", r"(moe|expert)_(.*_)?(hidden|intermediate)_size"),  # of one expert, of which there are several
    ("inner", r"n_inner|d_inner|dff|dim_ff|d_ff|mlp_dim|.*ffn_dim|.*(ffn_hidden|intermediate)_size(_mlp)?"),
    ("hidden", r".*hidden_size(_global|s)?|d_model|n_embd|dim|emb(ed|edding)?_dim|.*embedding_size|mm_embed_dim"),
    ("hidden", r"word_embed_proj_dim|projection_dim|projector_(in|out)put_dim|(vision_)?output_dim"),
    # Sizes that are the same in every model.
    (1, r"n_group|topk_groups?|num_expert_group"),
    (2, r"(mamba_)?n_groups|mamba_ngroups|linear_num_key_heads|index_n_heads|indexer_kv_heads"),
    (2, r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts|zero_expert_num"),
    (4, r"num_(local_|routed_)?experts?|n_routed_experts|moe_num_experts"),
    (4, r"linear_num_(value_)?heads|indexer_n(um)?_heads"),
    (_HEAD_SIZE, r"(qk_nope|qk_rope|v|linear|linear_key|linear_value|index|indexer)_head_dim|d_kv"),
    (_HEAD_SIZE, r"mamba_d_state|(ssm_)?state_size|mamba_dt_rank|time_step_rank"),
    (_HEAD_SIZE, r"hidden_size_per_layer_input|laurel_rank"),
    (2 * _HEAD_SIZE, r"qk_head_dim|(q|kv|o)_lora_rank|hc_lowrank"),
    # Shorter than the rows of a trial, so that masks matter.
    (_HEAD_SIZE, r"(local_|attention_)?(sliding_)?window(_size)?|(attention_|mamba_)?chunk_size|index_topk"),
    # Whatever else is named after layers, where it maps their numbers to something.
    ("mapping of layers", r".*layer.*"),
)
"""What a field is, or the size that it gets, and its names; the first pattern that matches decides."""


def hidden_for(fields: Mapping[str, Any]) -> int:
    """Return a hidden size with room for the heads of a config and of every config in it."""
    inside = [hidden_for(value) for value in fields.values() if isinstance(value, Mapping)]
    return max(_HIDDEN, _HEAD_SIZE * _few_heads(fields)[0], *inside)


@dataclass(frozen=True)
class ConfigReducer:
    """Rewrites the fields of a config and of all configs in it, in JSON types."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    kept: Sequence[KeptLayers] = ()  # without any, only special tokens change
    hidden: int | None = None  # in every part of the model; None leaves widths as they are
    _moved: dict[int, int] = field(default_factory=dict)

    def reduce(self, fields: Mapping[str, Any], around: Sizes | None = None) -> dict[str, Any]:
        """Return the fields of a smaller config. `around`: the sizes of the config that these are in."""
        # What has no type of its own, as rotary settings and overrides for one layer, is part of the config around it.
        sizes = self._sizes(fields) if around is None or "model_type" in fields else around
        kept = [each for each in self.kept if each.model_type == fields.get("model_type")]
        reduced = {}
        for name, value in fields.items():
            what = _what(name)
            for each in kept:
                value = _of_kept_layers(what, value, each)
            if isinstance(value, Mapping):
                value = self.reduce(value, sizes)
            elif what == "token":
                value = self._token(name, value)
            elif what == "rotary sections" and "head size" in sizes:
                # Of half a head, for time, height and width, in the same ratios.
                half = int(sizes["head size"] * (fields.get("partial_rotary_factor") or 1)) // 2
                small = [section * half // sum(value) for section in value]
                value = [half - sum(small[1:]), *small[1:]]
            elif what in sizes:
                value = _limited(value, sizes[what])
            reduced[name] = value
        return reduced

    def _sizes(self, fields: Mapping[str, Any]) -> Sizes:
        """Return the sizes of the fields of one config, by what they are."""
        if self.hidden is None:
            return {"vocabulary": self.vocab_size} if self.kept else {}
        heads, kv_heads = _few_heads(fields)
        head_dim, full_heads = fields.get("head_dim"), _number(fields, "heads")
        # The heads of a state-space mixer divide the hidden size that it expands to.
        mixer = self.hidden * int(fields.get("mamba_expand") or fields.get("expand") or 2)
        mixer_head_size = min(_number(fields, "mixer head size") or _HEAD_SIZE, _HEAD_SIZE)
        is_mixer = {"num_heads", "state_size"} <= fields.keys()
        fill = type(head_dim) is not int or fields.get("hidden_size") in (None, head_dim * full_heads)
        if is_mixer or head_dim == fields.get("qk_rope_head_dim", -1):
            head_size = _HEAD_SIZE
        else:
            head_size = self.hidden // heads if heads and fill else 2 * _HEAD_SIZE
        sizes: dict[What, int] = {
            "vocabulary": self.vocab_size,
            "heads": mixer // _HEAD_SIZE if is_mixer else heads,
            "kv heads": kv_heads,
            "head size": head_size,
            "mixer": mixer,
            "mixer heads": mixer // mixer_head_size,
            "mixer head size": mixer_head_size,
            "hidden": self.hidden,
            "inner": 4 * self.hidden,
            **{size: size for size, _ in FIELDS if isinstance(size, int)},
        }
        return {what: size for what, size in sizes.items() if size}

    def _token(self, name: str, value: Any) -> Any:
        """Return the id of a special token."""
        if name in ("bos_token_id", "eos_token_id", "pad_token_id") and value is not None:
            return getattr(self.tokenizer, name)
        if isinstance(value, list):
            return [self._token(name, item) for item in value]
        if type(value) is not int or value < 0:
            return value
        # That of an image must not be in a text by chance: from the end of the vocabulary, after the tokenizer's own.
        return self._moved.setdefault(value, max(self.vocab_size - 1 - len(self._moved), len(self.tokenizer)))


@cache
def _what(name: str) -> What:
    """Return what a field of this name is; None where nobody knows."""
    return next((what for what, names in FIELDS if re.fullmatch(names, name)), None)


def _number(fields: Mapping[str, Any], what: str) -> int:
    """Return the first whole number among the fields that are `what`; 0 without one."""
    return next((value for name, value in fields.items() if type(value) is int and _what(name) == what), 0)


def _few_heads(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many query heads and key/value heads are left of a config's; 0 where it has none."""
    heads = _number(fields, "heads")
    if not heads:
        return 0, 0
    # Latent attention shares no keys and values, whatever its config says.
    kv_heads = heads if "kv_lora_rank" in fields else _number(fields, "kv heads") or heads
    # Heads have to divide the hidden size, a power of two: 7 that share become 4.
    sharing = 1 << (max(1, min(heads // kv_heads, _MAX_SHARING)).bit_length() - 1)
    kept = min(kv_heads, 2 if sharing < _MAX_SHARING else 1)
    return kept * sharing, kept


def _of_kept_layers(what: What, value: Any, kept: KeptLayers) -> Any:
    """Return a field's value for the kept layers only; the value itself where it does not speak of layers."""
    num_layers, indices = len(kept.entries), kept.indices
    match what, value:
        case "layers", int() if value == num_layers:
            return len(indices)
        case "first layers", int():
            return sum(idx < value for idx in indices)
        case "last layers", int():
            return sum(idx >= num_layers - value for idx in indices)
        case "letters of layers", str() if len(value) == num_layers:
            return "".join(kept.of(value))
        case _, [_, _, *_] if len(value) == num_layers:
            return kept.of(value)
        case "numbers of layers", [_, *_] if all(item in range(num_layers) for item in value):
            return [at for at, idx in enumerate(indices) if idx in value]
        case "mapping of layers", {} if value and all(str(key).isdecimal() for key in value):
            by_layer = {int(key): item for key, item in value.items()}
            return {str(at): by_layer[idx] for at, idx in enumerate(indices) if idx in by_layer}
    return value


def _limited(value: Any, size: int) -> Any:
    if isinstance(value, list):
        return [_limited(item, size) for item in value]
    return min(value, size) if type(value) is int else value
