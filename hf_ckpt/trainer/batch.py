"""A micro-batch, as the model is given it: of text by its sizes, else by all of its tensors; and the largest one.

Whole numbers come with their values, which a model may compute shapes of, all other tensors as shapes. The largest
batch of text is read off the lengths of a data set. No batch is drawn for that: it would move the data loader's random
state, and the run would see other batches than without a plan.
"""

from __future__ import annotations

import base64
import heapq
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import le
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from hf_ckpt.upstream.torch import disable_current_modes

TOKENS, MASK, POSITIONS, LABELS = "input_ids", "attention_mask", "position_ids", "labels"

# Of whole numbers with so many elements the values are kept: tokens, their types and positions, sizes of images.
_MAX_VALUES = 2**20
# Numbers in a row of a table of sizes, such as time, height and width of an image.
_MAX_SIZES = 4


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor that a forward is called with."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: bytes | None = None
    """None where they are not known, or are none that a model would compute shapes of."""
    sizes: tuple[int, ...] = ()
    """Of a table of sizes, such as `image_grid_thw` [images, 3]: the product of each row, largest first."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def holds(self, other: InputTensor) -> bool:
        """Whether the other one is of the same kind and in no way larger."""
        return (
            self.dtype == other.dtype
            and _is_within(other.shape, self.shape)
            and len(other.shape) == len(self.shape)
            and _is_within(other.sizes, self.sizes)
        )

    def describe(self) -> str:
        return f"{self.name} {[*self.shape]}"

    def to_json(self) -> list[Any]:
        values = None if self.values is None else base64.b64encode(self.values).decode()
        return [self.name, [*self.shape], str(self.dtype).removeprefix("torch."), values, [*self.sizes]]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> InputTensor:
        """Return what `to_json` was called of."""
        name, shape, dtype, values, sizes = fields
        content = None if values is None else base64.b64decode(values)
        return cls(name, tuple(shape), getattr(torch, dtype), content, tuple(sizes))

    def make(self, like: Tensor) -> Tensor:
        """Return the tensor: real where its values are known, else as fake as `like`."""
        if self.values is None:
            return like.new_empty(self.shape, dtype=self.dtype)
        with disable_current_modes():
            return torch.frombuffer(bytearray(self.values), dtype=self.dtype).view(self.shape)


def outline(name: str, tensor: Tensor) -> InputTensor:
    """Return a tensor without its values. Those of a table of sizes are read, as the model itself will do."""
    return InputTensor(name, tuple(tensor.shape), tensor.dtype, sizes=_sizes(tensor))


def with_values(name: str, tensor: Tensor) -> InputTensor:
    """Return a tensor with its values, where it holds whole numbers, and not too many. Waits for the device."""
    values = None
    if _is_whole(tensor) and 0 < tensor.numel() <= _MAX_VALUES:
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return InputTensor(name, tuple(tensor.shape), tensor.dtype, values, _sizes(tensor))


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    is_table = tensor.dim() == 2 and 1 < tensor.shape[1] <= _MAX_SIZES and tensor.dtype is not torch.bool
    if not is_table or not _is_whole(tensor):
        return ()
    return tuple(sorted(map(prod, tensor.tolist()), reverse=True))


def _is_within(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    return len(small) <= len(large) and all(map(le, small, large))


# Plain values that a forward is called with besides tensors, by name, such as `return_loss`.
Settings = tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch."""

    rows: int
    """1 where documents are packed into one."""
    length: int
    """Tokens of a row, padding included; 0 where the model reads none."""
    is_padded: bool = False
    """Whether rows may hold padding, so that the model gets a mask."""
    is_packed: bool = False
    """Whether a row holds several documents."""
    more: tuple[str, ...] = ()
    """Names of further inputs [B, S], such as `token_type_ids`, and a mask that comes without padding too."""
    tensors: tuple[InputTensor, ...] = ()
    """Everything that the forward gets, where it is more than text, such as images."""
    settings: Settings = ()
    """What it gets besides them, such as `return_loss`."""

    def holds(self, other: Batch) -> bool:
        """Whether the other one has no more rows, no longer ones, and no further or larger inputs."""
        # Whether a mask has anything to mask is not compared: reading it would wait for the device in each step.
        mine, its = self._inputs, other._inputs
        is_text_held = self.rows >= other.rows and self.length >= other.length and mine >= its
        tensors = {tensor.name: tensor for tensor in self.tensors}
        are_tensors_held = all(each.name in tensors and tensors[each.name].holds(each) for each in other.tensors)
        return is_text_held and are_tensors_held and set(self.settings) >= set(other.settings)

    @property
    def _inputs(self) -> set[str]:
        """What the forward is given; tokens and labels come with every text."""
        of_text = (*((MASK,) if self.is_padded else ()), *((POSITIONS,) if self.is_packed else ()))
        return {*self.more, *of_text, *(tensor.name for tensor in self.tensors)}

    def to_json(self) -> list[Any]:
        sizes = [self.rows, self.length, self.is_padded, self.is_packed, [*self.more]]
        return [*sizes, [each.to_json() for each in self.tensors], [*self.settings]]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Batch:
        """Return what `to_json` was called of."""
        rows, length, is_padded, is_packed, more, tensors, settings = fields
        made = tuple(map(InputTensor.from_json, tensors)), tuple((name, value) for name, value in settings)
        return cls(rows, length, is_padded, is_packed, tuple(more), *made)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of everything that the forward gets, where it is more than text."""
        return (*(each.name for each in self.tensors), *(name for name, _ in self.settings))

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.tensors)

    def describe(self) -> str:
        """Return rows, length and further inputs, such as `2 sequences of 2,048 tokens`."""
        rows = "1 sequence" if self.rows == 1 else f"{self.rows} sequences"
        length = f" of {self.length:,} tokens" if self.length else ""
        further = [each.describe() for each in self.tensors if each.shape != (self.rows, self.length)]
        further = [*(name for name in self.more if name not in (MASK, POSITIONS)), *further]
        more = f" with {', '.join(further)}" if further else ""
        return f"{rows}{length}{' of several documents' if self.is_packed else ''}{more}"


def batch_of(args: Any, kwargs: Mapping[str, Any]) -> Batch | None:
    """Return the batch that a model's forward is called with, or None where it gets no token ids [B, S]."""
    ids = kwargs.get(TOKENS, args[0] if args else None)
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return None
    # A mask may have nothing to mask; reading it would wait for the device.
    has_mask = kwargs.get(MASK) is not None
    is_packed = kwargs.get(POSITIONS) is not None and not has_mask
    known = (TOKENS, MASK, LABELS, *((POSITIONS,) if is_packed else ()))
    more = (name for name, value in kwargs.items() if name not in known and is_like_tokens(value, ids))
    return Batch(ids.shape[0], ids.shape[1], has_mask, is_packed, tuple(sorted(more)))


def is_like_tokens(value: Any, ids: Tensor) -> bool:
    """Whether a value holds a whole number, or a yes or no, for each token."""
    return isinstance(value, Tensor) and value.shape == ids.shape and not value.is_floating_point()


# --- The largest batch of text that can come. ---


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
