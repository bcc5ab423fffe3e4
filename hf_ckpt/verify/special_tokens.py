"""Special tokens of a config, moved into a small vocabulary where no text token is.

A text must not hold, by chance, the token that stands for an image.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

_TOKEN_ID = re.compile(r".*(token_id|token_index|token_ids|_id)")
_FRAMES = ("bos", "eos", "pad")


def with_tokens(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, Any]:
    """Return the fields of a config with every special token inside the vocabulary.

    Args:
        fields: of a config and its parts, as JSON types.
        tokenizer: tells which tokens begin, end and pad a text; those of its own vocabulary are text.
        vocab_size: of the model; the tokens behind the tokenizer's are given out from the end.
    """
    frames: dict[str, int | None] = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in _FRAMES}
    others = sorted(set(_other_ids(fields, frames)))
    room = list(range(vocab_size - 1, len(tokenizer) - 1, -1))
    moved = {token: room[min(number, len(room) - 1)] for number, token in enumerate(others)}
    return _moved(fields, frames, moved)


def _moved(fields: Mapping[str, Any], frames: Mapping[str, int | None], moved: Mapping[int, int]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            changed[name] = _moved(value, frames, moved)
        elif name in frames and value is not None:
            changed[name] = frames[name]
        elif _TOKEN_ID.fullmatch(name) and type(value) is int:
            changed[name] = moved.get(value, value)
        elif _TOKEN_ID.fullmatch(name) and isinstance(value, list):
            changed[name] = [moved.get(item, item) if type(item) is int else item for item in value]
        else:
            changed[name] = value
    return changed


def _other_ids(fields: Mapping[str, Any], frames: Mapping[str, int | None]) -> Iterator[int]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _other_ids(value, frames)
        elif _TOKEN_ID.fullmatch(name) and name not in frames:
            yield from (item for item in (value if isinstance(value, list) else [value]) if _is_token(item))


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
