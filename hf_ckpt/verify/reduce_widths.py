"""Small widths: a config with the same structure and few numbers in each dimension.

Kept: how many query heads share a key/value head, whether heads fill the hidden size or not, that fewer experts are
chosen than there are, windows that are shorter than the rows. Fields are known by the names that configs have for them;
a field that no rule knows keeps its value. Whoever takes the result builds it and runs it once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

HEAD_SIZE = 16
WINDOW = 16
"""Positions that a sliding window or a chunk spans; shorter than the rows of a trial, so that its mask matters."""

# 4-bit weights come in blocks of 64 numbers, and 8-bit optimizers keep what has fewer than 4,096 in 32 bits: LoRA of
# rank 16 reaches that beside an input of 256.
_HIDDEN = 64
_INNER_FACTOR = 4
_NUM_EXPERTS = 4
_MOST_HEADS = 8

_HEADS: tuple[str, ...] = (
    *("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads", "num_query_groups"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "n_head_kv", "multi_query_group_num")
_MIXER_HEAD_SIZES = ("mamba_d_head", "mamba_head_dim")
_HIDDEN_NAMES = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")

_VOCABULARY = r"(?!.*type_).*vocab_size(_per_layer_input)?"

_RULES: tuple[tuple[str, str], ...] = (
    (_VOCABULARY, "vocabulary"),
    (r"mamba_(n|num)_heads|n_mamba_heads|mamba_num_heads", "mixer heads"),
    (r"(mamba_)?n_groups|mamba_ngroups", "two"),
    (r"linear_num_key_heads|index_n_heads|indexer_kv_heads", "two"),
    (r"linear_num_value_heads|indexer_n_heads|indexer_num_heads", "four"),
    (r"(q|kv|o)_lora_rank|hc_lowrank", "two heads"),
    (r"qk_head_dim", "two heads"),
    (r"qk_(nope|rope)_head_dim|v_head_dim|d_kv|linear_(key|value)_head_dim|mamba_d_head|mamba_head_dim", "one head"),
    (
        r"hidden_size_per_layer_input|laurel_rank|index_head_dim|indexer_head_dim|mamba_dt_rank|time_step_rank",
        "one head",
    ),
    (r"(attention_|global_|swa_)?head_dim|d_head|head_size|kv_channels|attention_head_size", "head"),
    (r"rotary_dim", "head"),
    (r"mamba_d_ssm|attention_hidden_size|lru_width|ssm_inner_size", "mixer"),
    (
        r".*hidden_size(_global|s)?|d_model|n_embd|dim|emb(ed|edding)?_dim|.*embedding_size|word_embed_proj_dim",
        "hidden",
    ),
    (r"(vision_)?output_dim|projector_(in|out)put_dim|projection_dim|out_hidden_size|mm_embed_dim", "hidden"),
    (r"moe_(.*_)?intermediate_size|moe_ffn_hidden_size|expert_intermediate_size", "expert"),
    (r"n_inner|d_inner|dff|dim_ff|d_ff|mlp_dim|.*ffn_dim|.*(ffn_hidden|intermediate)_size(_mlp)?", "inner"),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_expert", "experts"),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts|zero_expert_num", "chosen experts"),
    (r"n_group|topk_group|num_expert_group|topk_groups?", "one"),
    (r"(local_|attention_)?(sliding_)?window(_size)?|attention_chunk_size|index_topk", "window"),
    (r"mamba_d_state|state_size|ssm_state_size|(mamba_)?chunk_size", "window"),
)
"""What each field is, by its name; the first that fits decides."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that a reduced model is made of.

    Args:
        hidden: hidden size, the same in every part of the model.
        vocab_size: of the text.
        keeps_ratios: give each part heads in its own ratio; otherwise four heads, two of them for keys and values.
    """

    hidden: int
    vocab_size: int
    keeps_ratios: bool = True

    @property
    def inner(self) -> int:
        """Width of a feed-forward network."""
        return _INNER_FACTOR * self.hidden


def sizes_for(fields: Mapping[str, Any], vocab_size: int, *, keeps_ratios: bool) -> Sizes:
    """Return sizes in which the heads of every part of a config find room."""
    heads = [_heads(part)[0] for part in _parts(fields) if keeps_ratios and _heads(part)[0]]
    return Sizes(max(_HIDDEN, HEAD_SIZE * max(heads, default=0)), vocab_size, keeps_ratios)


def narrowed(fields: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the fields of a config, its parts included, with small widths.

    Args:
        fields: as JSON types.
        sizes: what the model is made of.
    """
    part = _Part(fields, sizes)
    return {name: _narrowed_field(name, value, part) for name, value in fields.items()}


def with_vocabulary(fields: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the fields of a config, its parts included, with a small vocabulary and nothing else changed."""
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            changed[name] = with_vocabulary(value, vocab_size)
        else:
            changed[name] = _at_most(value, vocab_size) if re.fullmatch(_VOCABULARY, name) else value
    return changed


def describe(sizes: Sizes) -> str:
    """Return the sizes on one line."""
    return f"hidden size {sizes.hidden}, feed-forward {sizes.inner}, vocabulary {sizes.vocab_size}"


@dataclass(frozen=True)
class _Part:
    """One config, or one part of a composite one."""

    fields: Mapping[str, Any]
    sizes: Sizes
    heads: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", _heads(self.fields) if self.sizes.keeps_ratios else (4, 2))

    @property
    def is_mixer(self) -> bool:
        """Whether the heads are those of a state space, which share what the mixer expands the hidden size to."""
        return "num_heads" in self.fields and "state_size" in self.fields

    @property
    def head_size(self) -> int:
        """Numbers in a head: those that fill the hidden size, unless the config says that heads are larger."""
        hidden, heads = _first(self.fields, _HIDDEN_NAMES), _first(self.fields, _HEADS)
        explicit = self.fields.get("head_dim")
        if self.is_mixer or explicit == self.fields.get("qk_rope_head_dim", -1):
            return HEAD_SIZE
        if not heads or (isinstance(explicit, int) and hidden and explicit * heads != hidden):
            return 2 * HEAD_SIZE
        return self.sizes.hidden // (self.heads[0] or 1)

    def size(self, what: str) -> int:
        """Return the size that a rule's word stands for."""
        mixer = int(self.fields.get("mamba_expand") or self.fields.get("expand") or 2) * self.sizes.hidden
        return {
            "vocabulary": self.sizes.vocab_size,
            "hidden": self.sizes.hidden,
            "inner": self.sizes.inner,
            "expert": self.sizes.hidden,
            "experts": _NUM_EXPERTS,
            "chosen experts": _NUM_EXPERTS // 2,
            "head": self.head_size,
            "one head": HEAD_SIZE,
            "two heads": 2 * HEAD_SIZE,
            "mixer": mixer,
            "mixer heads": mixer // min(_first(self.fields, _MIXER_HEAD_SIZES) or HEAD_SIZE, HEAD_SIZE),
            "window": WINDOW,
            "one": 1,
            "two": 2,
            "four": 4,
        }[what]


def _narrowed_field(name: str, value: Any, part: _Part) -> Any:
    if isinstance(value, Mapping):
        return _rope(value, part) if name.startswith("rope_") else narrowed(value, part.sizes)
    if name in _HEADS and isinstance(value, int):
        return min(value, part.size("mixer heads") if part.is_mixer else part.heads[0])
    if name in _KV_HEADS and isinstance(value, int):
        return min(value, part.heads[1])
    what = next((what for pattern, what in _RULES if re.fullmatch(pattern, name)), None)
    return value if what is None else _at_most(value, part.size(what))


def _at_most(value: Any, size: int) -> Any:
    if isinstance(value, list | tuple):
        return [_at_most(item, size) for item in value]
    return min(value, size) if type(value) is int else value


def _heads(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many query and how many key/value heads are left of those of a config; 0 where it has none."""
    heads, kv_heads = _first(fields, _HEADS), _first(fields, _KV_HEADS)
    if not heads:
        return 0, 0
    if not kv_heads or "kv_lora_rank" in fields:
        few = 4 if heads >= 4 else 1
        return few, few
    ratio = max(1, min(heads // kv_heads, _MOST_HEADS))
    kept = min(kv_heads, 2 if ratio < _MOST_HEADS else 1)
    while ratio & (ratio - 1):
        # Hidden sizes are powers of two, which heads have to divide: a ratio of 7 becomes 4.
        ratio &= ratio - 1
    return kept * ratio, kept


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((value for name in names if type(value := fields.get(name)) is int), 0)


def _parts(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield fields
    for value in fields.values():
        if isinstance(value, Mapping):
            yield from _parts(value)


def _rope(rope: Mapping[str, Any], part: _Part) -> dict[str, Any]:
    """Return rotary settings whose sections share half a head as before."""
    kept = {name: _rope(value, part) if isinstance(value, Mapping) else value for name, value in rope.items()}
    sections = rope.get("mrope_section")
    if isinstance(sections, list) and sum(sections):
        half = int(part.head_size * float(rope.get("partial_rotary_factor") or 1)) // 2
        small = [section * half // sum(sections) for section in sections]
        kept["mrope_section"] = [half - sum(small[1:]), *small[1:]]
    return kept
