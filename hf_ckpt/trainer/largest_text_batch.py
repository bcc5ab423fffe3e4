"""The largest micro-batch of text that can come: read off the lengths of a data set.

It never draws a batch: drawing from the data loader would move its random state, and the run would see other batches
than without a plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from hf_ckpt.trainer.batch import MASK, POSITIONS, TOKENS, Batch

_LENGTH = "length"
_ROWS_AT_A_TIME = 1000


@dataclass(frozen=True, slots=True)
class Lengths:
    """What is known of the rows of a data set."""

    largest: tuple[int, ...]
    """Tokens of the longest rows, longest first."""
    shortest: int
    """Tokens of the shortest row."""
    has_padding: bool = False
    """Whether rows come with padding in them."""


def largest_text_batch(dataset: Any, collator: Any, num_rows: int, max_length: int | None = None) -> Batch | None:
    """Return the largest micro-batch that can come, or None where no bound is known.

    Args:
        dataset: of the data loader. Lists of examples and data sets of `datasets` are read, by their token ids or
            their column `length`; what computes its examples, or has no end, is not.
        collator: of the data loader; pads or packs.
        num_rows: examples of a micro-batch.
        max_length: tokens that no example exceeds, where the user says so.
    """
    lengths = read_lengths(dataset, num_rows)
    if max_length is not None:
        varies = lengths is None or lengths.has_padding or lengths.shortest != lengths.largest[0]
        lengths = Lengths((max_length,) * num_rows, 0 if varies else max_length)
    return None if lengths is None else _collated(lengths, innermost_collator(collator), num_rows)


def _collated(lengths: Lengths, collator: Any, num_rows: int) -> Batch:
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    if is_packing(collator):
        # One document has positions as well, of which no mask is made.
        more = () if num_rows > 1 else (POSITIONS,)
        return Batch(1, rounded(sum(lengths.largest), multiple), is_packed=num_rows > 1, more=more)
    longest, padding = lengths.largest[0], getattr(collator, "padding", None)
    is_to_limit = str(getattr(padding, "value", padding)) == "max_length"
    length = rounded(max(longest, getattr(collator, "max_length", None) or 0) if is_to_limit else longest, multiple)
    varies = num_rows > 1 and lengths.shortest != longest
    return Batch(num_rows, length, is_padded=lengths.has_padding or varies or length > longest)


def is_packing(collator: Any) -> bool:
    """Whether a collator joins examples to one row (`DataCollatorWithFlattening`, trl's `padding_free`)."""
    inner = innermost_collator(collator)
    return bool(getattr(inner, "padding_free", False)) or any(
        kind.__name__ == "DataCollatorWithFlattening" for kind in type(inner).__mro__
    )


def innermost_collator(collator: Any) -> Any:
    # The Trainer puts one around it that removes columns.
    while hasattr(collator, "data_collator"):
        collator = collator.data_collator
    return collator


def rounded(length: int, multiple: int) -> int:
    """Return the least multiple of a number that is no less than a length."""
    return -(-length // multiple) * multiple


# --- Data sets. ---


def read_lengths(dataset: Any, num_rows: int) -> Lengths | None:
    """Return what is known of a data set's rows, with so many of the longest ones; None where that is nothing."""
    parts = [
        (_of_examples if isinstance(part, list | tuple) and part else _of_columns)(part, num_rows)
        for part in parts_of(dataset)
    ]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    largest = heapq.nlargest(num_rows, (length for part in known for length in part.largest))
    return Lengths(tuple(largest), min(part.shortest for part in known), any(part.has_padding for part in known))


def parts_of(dataset: Any) -> list[Any]:
    """Return the data sets that one is made of. What is in the whole of one bounds what is in a part of it."""
    if isinstance(dataset, Subset):
        return parts_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [part for each in dataset.datasets for part in parts_of(each)]
    return [dataset]


def stored_columns(dataset: Any) -> Sequence[str]:
    """Return the columns of a data set of `datasets`; none of one without end, or whose transform computes its rows."""
    is_finite = all(hasattr(dataset, name) for name in ("column_names", "with_format", "__len__"))
    return dataset.column_names if is_finite and len(dataset) and dataset.format["type"] != "custom" else ()


def _of_examples(examples: Iterable[Any], num_rows: int) -> Lengths | None:
    if not all(isinstance(example, Mapping) and TOKENS in example for example in examples):
        return None
    lengths = [_num_tokens(example[TOKENS]) for example in examples]
    has_padding = any(not all(map(int, example[MASK])) for example in examples if MASK in example)
    return Lengths(tuple(heapq.nlargest(num_rows, lengths)), min(lengths), has_padding)


def _num_tokens(ids: Any) -> int:
    return int(ids.shape[-1]) if hasattr(ids, "shape") else len(ids)


def _of_columns(dataset: Any, num_rows: int) -> Lengths | None:
    """Read a data set of `datasets`, column by column and without decoding."""
    names = stored_columns(dataset)
    column = next((name for name in (TOKENS, _LENGTH) if name in names), None)
    if column is None:
        return None
    largest: list[int] = []
    shortest, has_padding = 2**62, False
    for table in tables(dataset, [name for name in (column, MASK) if name in names]):
        lengths = list(lengths_in(table[column], is_length=column == _LENGTH))
        largest = heapq.nlargest(num_rows, (*largest, *lengths))
        shortest = min(shortest, *lengths)
        if MASK in table.column_names and not has_padding:
            has_padding = not all(chunk.flatten().to_numpy(zero_copy_only=False).all() for chunk in table[MASK].chunks)
    return Lengths(tuple(largest), shortest, has_padding)


def tables(dataset: Any, columns: list[str]) -> Iterator[Any]:
    """Yield columns of a data set of `datasets` as tables of some rows, without decoding."""
    yield from dataset.select_columns(columns).with_format("arrow").iter(batch_size=_ROWS_AT_A_TIME)


def lengths_in(column: Any, *, is_length: bool = False) -> Iterator[int]:
    """Yield the tokens of each row of a table's column, which holds them, or their number."""
    for chunk in column.chunks:
        if is_length:
            yield from chunk.to_pylist()
        elif hasattr(chunk, "value_lengths"):
            yield from chunk.value_lengths().to_pylist()
        else:
            # All rows of a fixed-size list have one length.
            yield from [chunk.type.list_size] * len(chunk)
