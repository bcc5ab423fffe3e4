"""Rows to try a recipe on, drawn from a seed, so that no data need be there.

They have what the recipe's own batches have: prompts without loss where it learns completions or turns only, rows of
unequal lengths where it pads, several documents in a row where it packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments

from hf_ckpt.loading.dataset import padding_collator
from hf_ckpt.loading.examples import IGNORED
from hf_ckpt.loading.packing import packing_collator
from hf_ckpt.recipe.recipe import Recipe

NUM_TOKENS = 32
"""Tokens of a row; each second row of a recipe that pads is shorter."""

_SHORTENED = 3
_SHARE_WITHOUT_LOSS = 4


@dataclass(frozen=True)
class Batches:
    """What a Trainer needs in place of data.

    Args:
        rows: `input_ids` and `labels`, -100 where nothing is learned.
        collator: turns a list of rows into a batch, as the recipe's own does.
    """

    rows: list[dict[str, list[int]]]
    collator: Callable[[list[Any]], dict[str, Any]]


def dataset(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, args: TrainingArguments, *, num_steps: int) -> Batches:
    """Draw rows for so many optimizer steps of all processes.

    Args:
        recipe: tells the layout of its batches, and the seed.
        tokenizer: tells which tokens are text.
        args: tell rows per batch, accumulation and processes.
        num_steps: optimizer steps.
    """
    num_rows = num_steps * args.gradient_accumulation_steps * args.per_device_train_batch_size * args.world_size
    length = min(NUM_TOKENS, int(recipe.data.get("max_length") or NUM_TOKENS))
    rows = list(_rows(num_rows, length, _text_tokens(tokenizer), int(recipe.training.get("seed", 42))))
    if recipe.data.get("loss_on") != "all":
        rows = [_without_prompt(row) for row in rows]
    is_packed = recipe.data.get("packing", False)
    return Batches(rows, packing_collator() if is_packed else padding_collator(tokenizer))


def _rows(num_rows: int, length: int, tokens: list[int], seed: int) -> Iterator[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    for number in range(num_rows):
        # Pairs of rows are of one length or of two, so that batches with and without padding come up.
        is_shorter = number % 4 == 3
        drawn = torch.randint(len(tokens), (max(2, length - _SHORTENED * is_shorter),), generator=generator)
        ids = [tokens[at] for at in drawn.tolist()]
        # No position predicts the first token.
        yield {"input_ids": ids, "labels": [IGNORED, *ids[1:]]}


def _without_prompt(row: dict[str, list[int]]) -> dict[str, list[int]]:
    num_given = max(1, len(row["labels"]) // _SHARE_WITHOUT_LOSS)
    return {**row, "labels": [IGNORED] * num_given + row["labels"][num_given:]}


def _text_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    special = set(tokenizer.all_special_ids)
    return [token for token in range(len(tokenizer)) if token not in special]
