"""Small widths: a config with the same structure and small dimensions, its special tokens, and seeded weights for it.

Kept: how many query heads share a key/value head, whether heads fill the hidden size or not, that fewer experts are
chosen than there are, windows that are shorter than the rows. Fields are known by the names that configs use for them;
a field that no rule matches keeps its value. `make_weights` builds the result and runs it once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe.recipe import Values

HEAD_SIZE = 16
WINDOW = 16
"""Positions of a sliding window or a chunk; shorter than the rows of a trial, so that its mask matters."""
# 4-bit weights come in blocks of 64 numbers, and 8-bit optimizers keep what has fewer than 4,096 in 32 bits: LoRA of
# rank 16 reaches that with an input of 256.
_HIDDEN = 64
_INNER_FACTOR = 4
_NUM_EXPERTS = 4
_MAX_HEADS = 8
_HEADS: tuple[str, ...] = (
    *("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads", "num_query_groups"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "n_head_kv", "multi_query_group_num")
_MIXER_HEAD_SIZES = ("mamba_d_head", "mamba_head_dim")
_HIDDEN_NAMES = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim")
_VOCABULARY = r"(?!.*type_).*vocab_size(_per_layer_input)?"
_RULES: tuple[tuple[str, str | int], ...] = (
    (_VOCABULARY, "vocabulary"),
    (r"mamba_(n|num)_heads|n_mamba_heads|mamba_num_heads", "mixer heads"),
    (r"(mamba_)?n_groups|mamba_ngroups", 2),
    (r"linear_num_key_heads|index_n_heads|indexer_kv_heads", 2),
    (r"linear_num_value_heads|indexer_n_heads|indexer_num_heads", 4),
    (r"(q|kv|o)_lora_rank|hc_lowrank", 2 * HEAD_SIZE),
    (r"qk_head_dim", 2 * HEAD_SIZE),
    (r"qk_(nope|rope)_head_dim|v_head_dim|d_kv|linear_(key|value)_head_dim|mamba_d_head|mamba_head_dim", HEAD_SIZE),
    (
        r"hidden_size_per_layer_input|laurel_rank|index_head_dim|indexer_head_dim|mamba_dt_rank|time_step_rank",
        HEAD_SIZE,
    ),
    (r"(attention_|global_|swa_)?head_dim|d_head|head_size|kv_channels|attention_head_size", "head"),
    (r"rotary_dim", "head"),
    (r"mamba_d_ssm|attention_hidden_size|lru_width|ssm_inner_size", "mixer"),
    (
        r".*hidden_size(_global|s)?|d_model|n_embd|dim|emb(ed|edding)?_dim|.*embedding_size|word_embed_proj_dim",
        "hidden",
    ),
    (r"(vision_)?output_dim|projector_(in|out)put_dim|projection_dim|out_hidden_size|mm_embed_dim", "hidden"),
    (r"moe_(.*_)?intermediate_size|moe_ffn_hidden_size|expert_intermediate_size", "hidden"),
    (r"n_inner|d_inner|dff|dim_ff|d_ff|mlp_dim|.*ffn_dim|.*(ffn_hidden|intermediate)_size(_mlp)?", "inner"),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_expert", _NUM_EXPERTS),
    (
        r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts|zero_expert_num",
        _NUM_EXPERTS // 2,
    ),
    (r"n_group|topk_group|num_expert_group|topk_groups?", 1),
    (r"(local_|attention_)?(sliding_)?window(_size)?|attention_chunk_size|index_topk", WINDOW),
    (r"mamba_d_state|state_size|ssm_state_size|(mamba_)?chunk_size", WINDOW),
)
"""The size of each field, or which of a part's sizes it is, by its name; the first pattern that matches decides."""
_TOKEN_ID = re.compile(r".*(token_id|token_index|token_ids|_id)")
_FRAMES = ("bos", "eos", "pad")
_ROWS, _TOKENS = 2, 24
_STD_FOR_ZEROS = 0.02


@dataclass(frozen=True)
class Sizes:
    """The sizes of a reduced model."""

    hidden: int  # the same in every part of the model
    vocab_size: int
    keeps_ratios: bool = True
    """Give each part heads in its own ratio; otherwise four heads, two of them for keys and values."""

    @property
    def inner(self) -> int:
        """Width of a feed-forward network."""
        return _INNER_FACTOR * self.hidden


def sizes_for(fields: Mapping[str, Any], vocab_size: int, *, keeps_ratios: bool) -> Sizes:
    """Return sizes that are large enough for the heads of every part of a config."""
    heads = max(_heads(part)[0] for part in _parts(fields)) if keeps_ratios else 0
    return Sizes(max(_HIDDEN, HEAD_SIZE * heads), vocab_size, keeps_ratios)


def with_small_widths(fields: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the fields of a config and its sub-configs, as JSON types, with small widths."""
    part = _SubConfig(fields, sizes, _heads(fields) if sizes.keeps_ratios else (4, 2))
    return {name: _reduced_field(name, value, part) for name, value in fields.items()}


def with_vocabulary(fields: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the fields of a config and its sub-configs with a small vocabulary and nothing else changed."""
    return _changed(
        fields, lambda name, value: _limited(value, vocab_size) if re.fullmatch(_VOCABULARY, name) else value
    )


def _changed(fields: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the fields of a config and its sub-configs, with `change(name, value)` for each value."""
    return {
        name: _changed(value, change) if isinstance(value, Mapping) else change(name, value)
        for name, value in fields.items()
    }


@dataclass(frozen=True)
class _SubConfig:
    """One config, or a sub-config of a composite one."""

    fields: Mapping[str, Any]
    sizes: Sizes
    heads: tuple[int, int]  # of queries, of keys and values

    @property
    def is_mixer(self) -> bool:
        """Whether the heads are those of a state-space mixer, which divide the expanded hidden size."""
        return "num_heads" in self.fields and "state_size" in self.fields

    @property
    def head_size(self) -> int:
        """Such that heads fill the hidden size, unless the config says that heads are larger."""
        hidden, heads = _first(self.fields, _HIDDEN_NAMES), _first(self.fields, _HEADS)
        explicit = self.fields.get("head_dim")
        if self.is_mixer or explicit == self.fields.get("qk_rope_head_dim", -1):
            return HEAD_SIZE
        if not heads or (isinstance(explicit, int) and hidden and explicit * heads != hidden):
            return 2 * HEAD_SIZE
        return self.sizes.hidden // (self.heads[0] or 1)

    def size(self, what: str) -> int:
        """Return the size that a rule names, of those that differ from model to model."""
        mixer = int(self.fields.get("mamba_expand") or self.fields.get("expand") or 2) * self.sizes.hidden
        return {
            "vocabulary": self.sizes.vocab_size,
            "hidden": self.sizes.hidden,
            "inner": self.sizes.inner,
            "head": self.head_size,
            "mixer": mixer,
            "mixer heads": mixer // min(_first(self.fields, _MIXER_HEAD_SIZES) or HEAD_SIZE, HEAD_SIZE),
        }[what]


def _reduced_field(name: str, value: Any, part: _SubConfig) -> Any:
    if isinstance(value, Mapping):
        return _rope(value, part) if name.startswith("rope_") else with_small_widths(value, part.sizes)
    if name in _HEADS and isinstance(value, int):
        return min(value, part.size("mixer heads") if part.is_mixer else part.heads[0])
    if name in _KV_HEADS and isinstance(value, int):
        return min(value, part.heads[1])
    what = next((what for pattern, what in _RULES if re.fullmatch(pattern, name)), None)
    return value if what is None else _limited(value, part.size(what) if isinstance(what, str) else what)


def _limited(value: Any, size: int) -> Any:
    if isinstance(value, list | tuple):
        return [_limited(item, size) for item in value]
    return min(value, size) if type(value) is int else value


def _heads(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of query and of key/value heads to keep of a config's; 0 where it has none."""
    heads, kv_heads = _first(fields, _HEADS), _first(fields, _KV_HEADS)
    if not heads:
        return 0, 0
    if not kv_heads or "kv_lora_rank" in fields:
        few = 4 if heads >= 4 else 1
        return few, few
    ratio = max(1, min(heads // kv_heads, _MAX_HEADS))
    kept = min(kv_heads, 2 if ratio < _MAX_HEADS else 1)
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


def _rope(rope: Mapping[str, Any], part: _SubConfig) -> dict[str, Any]:
    """Return rotary settings whose sections divide half a head in the same ratios."""
    kept = {name: _rope(value, part) if isinstance(value, Mapping) else value for name, value in rope.items()}
    sections = rope.get("mrope_section")
    if isinstance(sections, list) and sum(sections):
        half = int(part.head_size * float(rope.get("partial_rotary_factor") or 1)) // 2
        small = [section * half // sum(sections) for section in sections]
        kept["mrope_section"] = [half - sum(small[1:]), *small[1:]]
    return kept


# --- Special tokens, moved into a small vocabulary. ---


def with_special_tokens(
    fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> dict[str, Any]:
    """Return the fields of a config with every special token inside a vocabulary of that size.

    Tokens that begin, end or pad a text become the tokenizer's. Others, such as that of an image, get ids from the end
    of the vocabulary, after the tokenizer's own: a text must not hold them by chance.
    """
    frames: dict[str, int | None] = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in _FRAMES}
    items = (item for part in _parts(fields) for item in part.items())
    others = sorted({token for name, value in items if name not in frames for token in _tokens(name, value)})
    room = list(range(vocab_size - 1, len(tokenizer) - 1, -1))
    moved = {token: room[min(number, len(room) - 1)] for number, token in enumerate(others)}

    def changed(name: str, value: Any) -> Any:
        if name in frames and value is not None:
            return frames[name]
        if isinstance(value, list) and _TOKEN_ID.fullmatch(name):
            return [moved.get(item, item) if type(item) is int else item for item in value]
        return moved.get(value, value) if type(value) is int and _TOKEN_ID.fullmatch(name) else value

    return _changed(fields, changed)


def _tokens(name: str, value: object) -> list[int]:
    """Return the ids of tokens that a field holds."""
    if not _TOKEN_ID.fullmatch(name):
        return []
    return [item for item in (value if isinstance(value, list) else [value]) if type(item) is int and item >= 0]


# --- Seeded weights. ---


def make_weights(section: Values, tokenizer: PreTrainedTokenizerBase, seed: int) -> int:
    """Make seeded weights for the config in the folder of a `model` section, and return the number of parameters.

    Runs forward and backward on text once, and saves weights and tokenizer to the folder. Weights that a config starts
    as zeros, as gates and biases are, get small values: behind a closed gate no gradient would flow, and no fault be
    seen. Raises RecipeError if the model cannot be built, or cannot be trained on text.
    """
    folder = Path(section["name_or_path"])
    is_trusted = section.get("trust_remote_code", False)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=is_trusted)
        torch.manual_seed(seed)
        options = {key: section[key] for key in ("attn_implementation",) if key in section}
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=is_trusted, **options)  # type: ignore[no-untyped-call]  # upstream
        _fill_zeros(model)
        _check_runs(model, tokenizer)
    except Exception as error:  # a model of unusual sizes may raise anything
        raise RecipeError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
    model.to(_dtype(section.get("dtype", "auto"), config))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def _fill_zeros(model: nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=_STD_FOR_ZEROS)


def _check_runs(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Run forward and backward on text; raise ValueError if the loss is not finite."""
    first = len(tokenizer) - 256
    ids = torch.randint(first, len(tokenizer), (_ROWS, _TOKENS))
    model.float().train()
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    if not loss.isfinite():
        raise ValueError(f"its loss on text is {loss.item()}")


def _dtype(name: str, config: Any) -> torch.dtype:
    wanted = (getattr(config, "dtype", None) or torch.float32) if name == "auto" else getattr(torch, name)
    assert isinstance(wanted, torch.dtype)  # recipes are checked, and configs hold dtypes
    return wanted
