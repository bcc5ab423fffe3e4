"""Rows for the trainers that read columns of their own: pairs, judged completions, and texts with a label.

trl tokenises what its trainers read. What is here are the rows under the names that those expect.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset, Image, List
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from hf_ckpt.errors import DataError, did_you_mean, shortened
from hf_ckpt.loading.dataset import NUM_PROMPTS_LOOKED_AT, check_chat_template, shortest_prompt
from hf_ckpt.loading.images import check_number_of_images
from hf_ckpt.loading.sources import BUILT_IN, RawSplits, load_splits
from hf_ckpt.loading.tokenizer import complete_tokenizer
from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH
from hf_ckpt.recipe.trainer_kinds import Columns, TrainerKind

_LONGEST_SHOWN = 200
_MANY = 0.5


@dataclass(frozen=True)
class PreparedColumns:
    """What a trainer needs that reads columns of its own."""

    kind: TrainerKind
    train: Dataset  # For trl as text, else as token ids with labels.
    evaluation: Dataset | None
    collator: Any | None  # None for trl's own.
    example: Mapping[str, Any]  # The first row, as text.
    num_rows: int  # To train on, before those are left out that are too long.

    def describe(self) -> str:
        """Return the first training example, a line for each column."""
        width = max(map(len, self.example))
        lines = (f"  {name:<{width}}| {_shown(value)}" for name, value in self.example.items())
        return "\n".join([f"First of {len(self.train):,} training examples:", *lines])


def load_columns(section: Mapping[str, Any], kind: TrainerKind) -> RawSplits:
    """Load the rows that a `data` section names, with the columns of a trainer under its names."""
    return load_splits(section).map(partial(_renamed, section=section, kind=kind))


def prepare_columns(
    section: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    kind: TrainerKind,
    *,
    num_labels: int = 1,
    max_prompt: int = 0,
) -> PreparedColumns:
    """Load what a trainer reads of a `data` section, and tokenise it where trl does not.

    The tokenizer gets a padding token and `data.chat_template`, in place, where it has none. `num_labels`: that a row
    may have. `max_prompt`: tokens of the longest prompt that is kept, where the trainer generates.
    """
    if not kind.reads_images:
        complete_tokenizer(tokenizer, section)
    raw = load_columns(section, kind)
    splits, collator = raw, None
    if not kind.of_trl:
        collator = DataCollatorWithPadding(tokenizer)
        splits = raw.map(partial(with_label, section=section, tokenizer=tokenizer, num_labels=num_labels))
    if kind.generates:
        splits = splits.map(partial(_with_short_prompts, section=section, tokenizer=tokenizer, most=max_prompt))
        if not splits.train:
            raise DataError(
                f"None of the {len(raw.train):,} prompts has {max_prompt} tokens or fewer, which is what "
                "data.max_length leaves before training.max_completion_length. Raise data.max_length."
            )
    return PreparedColumns(kind, splits.train, splits.evaluation, collator, raw.train[0], len(raw.train))


def prompt_ids(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a prompt, a text or a conversation, as a completion is asked for."""
    if isinstance(prompt, str):
        encoded: Any = tokenizer(prompt)
    else:
        encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def _with_short_prompts(
    rows: Dataset, section: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, most: int
) -> Dataset:
    """Leave out rows whose prompts are longer: cut, they would ask for something else."""
    if not isinstance(rows[0]["prompt"], str):
        check_chat_template(tokenizer)

    def is_short(prompt: Any) -> bool:
        return len(prompt_ids(prompt, tokenizer)) <= most

    return rows.filter(is_short, input_columns="prompt", num_proc=section.get("num_proc"))


def texts_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is text in a row: of conversations, what is said."""
    for value in row.values():
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (message["content"] for message in value if isinstance(message.get("content"), str))


def tokens_of(rows: Dataset, kind: TrainerKind) -> list[int]:
    """Return the tokens of each row that a model sees of tokenised examples."""
    lengths = {name: [len(ids) for ids in rows.with_format(None)[name]] for row in kind.token_columns for name in row}
    return [sum(each) for row in kind.token_columns for each in zip(*(lengths[name] for name in row), strict=True)]


def describe_lengths(rows: Dataset, num_rows: int, kind: TrainerKind, max_length: int) -> Iterator[str]:
    """Yield what became of the training rows, and a warning where much of them is not seen.

    `rows`: as the trainer has tokenised them; `num_rows`: how many it was given.
    """
    left_out = num_rows - len(rows)
    if kind.generates:
        more = f"; left out: {left_out:,} that are longer than data.max_length allows" if left_out else ""
        yield f"Training data: {len(rows):,} prompts{more}"
        return
    if not kind.token_columns:
        yield f"Training data: {len(rows):,} examples, whose images are read when a batch is made"
        return
    lengths = tokens_of(rows, kind)
    share = sum(length > max_length for length in lengths) / max(1, len(lengths))
    more = f"; examples left out: {left_out:,} longer than data.max_length {max_length}" if left_out else ""
    yield (
        f"Training data: {len(rows):,} examples, {sum(lengths):,} tokens, "
        f"longest sequence {max(lengths, default=0):,}, truncated {share:.1%}{more}"
    )
    if max(share, left_out / max(1, num_rows)) > _MANY:
        yield (
            f"Warning: more than half of the examples are longer than data.max_length {max_length}, and are cut there "
            "or left out. Raise data.max_length (hf-ckpt estimate says what fits)."
        )


def prompt_of(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a short prompt, to try a model on that has learned to prefer, or for rewards."""
    few = rows.with_format(None)[:NUM_PROMPTS_LOOKED_AT]
    if "prompt_ids" in few:
        prompts = [list(ids) for ids in few["prompt_ids"]]
    else:
        prompts = [prompt_ids(prompt, tokenizer) for prompt in few["prompt"]]
    return shortest_prompt(prompts)


def _renamed(rows: Dataset, section: Mapping[str, Any], kind: TrainerKind) -> Dataset:
    if section["path"] == BUILT_IN:
        return Dataset.from_list([_judged(row, number, kind.columns) for number, row in enumerate(rows)])
    mapped: Mapping[str, str] = section.get("columns", {})
    wanted = {name: mapped.get(name, name) for name in (*kind.more_columns, *kind.columns)}
    found = rows.column_names
    missing = [name for name in wanted if wanted[name] not in found and (name in kind.columns or name in mapped)]
    if missing:
        near = did_you_mean(wanted[missing[0]], found)
        raise DataError(
            f"trainer {kind.name} reads the columns {', '.join(kind.columns)}, and the data set has {', '.join(found)}."
            f"{near} Map what is missing in data.columns: {{{', '.join(f'{name}: NAME' for name in missing)}}}."
        )
    chosen = {name: column for name, column in wanted.items() if column in found}
    # What rewards completions reads what else there is.
    kept = rows if kind.generates else rows.select_columns(list(dict.fromkeys(chosen.values())))
    kept = kept.rename_columns({column: name for name, column in chosen.items() if name != column})
    if not kind.reads_images:
        return kept
    # Files are named by text, and read when a batch is made.
    return check_number_of_images(kept.cast_column("images", List(Image())), section)


def _judged(row: Mapping[str, str], number: int, columns: Columns) -> dict[str, Any]:
    """Return a row of the built-in data for a trainer: what is written there is better than its words in disorder."""
    words = row["completion"].split()
    random.Random(number).shuffle(words)
    good, bad = row["completion"], f" {' '.join(words)}"
    is_good = number % 2 == 0
    completion = good if is_good else bad
    label = is_good if "completion" in columns else int(is_good)
    every: dict[str, Any] = {"prompt": row["prompt"], "chosen": good, "rejected": bad, "completion": completion}
    every |= {"text": row["prompt"] + completion, "label": label}
    return {name: every[name] for name in (*(["prompt"] if "chosen" in columns else []), *columns)}


def with_label(
    rows: Dataset, section: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, num_labels: int
) -> Dataset:
    """Return texts as token ids, each with its label as the model's loss takes it."""
    _check_labels(rows["label"][:], num_labels)
    as_label: Any = float if num_labels == 1 else int
    max_length = section.get("max_length", DEFAULT_MAX_LENGTH)

    def encode(row: Mapping[str, Any]) -> dict[str, Any]:
        ids = tokenizer(row["text"], truncation=True, max_length=max_length)["input_ids"]
        return {"input_ids": ids, "labels": as_label(row["label"])}

    return rows.map(encode, remove_columns=rows.column_names, num_proc=section.get("num_proc"))


def _check_labels(labels: Sequence[Any], num_labels: int) -> None:
    if num_labels == 1:
        wrong = [label for label in labels if isinstance(label, bool) or not isinstance(label, int | float)]
        what = "a number"
    else:
        wrong = [label for label in labels if not isinstance(label, int) or not 0 <= label < num_labels]
        what = f"a whole number from 0 to {num_labels - 1}, for model.num_labels {num_labels}"
    if wrong:
        raise DataError(
            f"{len(wrong):,} of {len(labels):,} examples have no label that can be learned, such as {wrong[0]!r}: "
            f"expected {what}. Change the column that data.columns.label names, or model.num_labels."
        )


def _shown(value: Any) -> str:
    is_images = isinstance(value, list) and all(hasattr(each, "size") for each in value)
    text = ", ".join(f"{each.width} x {each.height} pixels" for each in value) if is_images else str(value)
    return shortened(text.replace("\n", "\\n"), _LONGEST_SHOWN)
