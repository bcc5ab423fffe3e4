"""A micro-batch: of text, by its sizes, else by all of its tensors. And the largest one of text that can come.

That looks at lengths, and never draws a batch: drawing from the data loader would move its random state, and the run
would see other batches than without a plan. `largest_multimodal_batch_in_data` finds it where there is more than text.
"""

from __future__ import annotations

import functools
import heapq
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset

from hf_ckpt.simulation.step import InputTensor, Settings, outline, with_values
from hf_ckpt.structure.attention_and_ffn import unwrapped

_TOKENS, _LENGTH, _MASK = "input_ids", "length", "attention_mask"
_POSITIONS, _LABELS = "position_ids", "labels"
_ROWS_AT_A_TIME = 1000


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
        of_text = (*((_MASK,) if self.is_padded else ()), *((_POSITIONS,) if self.is_packed else ()))
        return {*self.more, *of_text, *(tensor.name for tensor in self.tensors)}

    def to_json(self) -> list[Any]:
        """Return it as JSON holds it; see `from_json`."""
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
        """Bytes of the tensors; 0 of text."""
        return sum(each.num_bytes for each in self.tensors)

    def describe(self) -> str:
        """Return rows, length and further inputs, such as `2 rows of 2,048 tokens`."""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        length = f" of {self.length:,} tokens" if self.length else ""
        further = [each.describe() for each in self.tensors if each.shape != (self.rows, self.length)]
        further = [*(name for name in self.more if name not in (_MASK, _POSITIONS)), *further]
        more = f" with {', '.join(further)}" if further else ""
        return f"{rows}{length}{' of several documents' if self.is_packed else ''}{more}"


@dataclass(frozen=True, slots=True)
class Lengths:
    """What is known of the rows of a data set."""

    largest: tuple[int, ...]
    """Tokens of the longest rows, longest first."""
    shortest: int
    """Tokens of the shortest row."""
    has_padding: bool = False
    """Whether rows come with padding in them."""


def batch_of(args: Any, kwargs: Mapping[str, Any]) -> Batch | None:
    """Return the batch that a model's forward is called with, or None where it gets no token ids [B, S]."""
    ids = kwargs.get(_TOKENS, args[0] if args else None)
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return None
    # A mask may have nothing to mask; reading it would wait for the device.
    has_mask = kwargs.get(_MASK) is not None
    is_packed = kwargs.get(_POSITIONS) is not None and not has_mask
    known = (_TOKENS, _MASK, _LABELS, *((_POSITIONS,) if is_packed else ()))
    more = (name for name, value in kwargs.items() if name not in known and is_like_tokens(value, ids))
    return Batch(ids.shape[0], ids.shape[1], has_mask, is_packed, tuple(sorted(more)))


def batch_of_forward(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any],
    *,
    reads: bool = True,
    may_pad: bool = True,
    has_settings: bool = True,
) -> Batch | None:
    """Return the batch that a model's forward is called with; None where there is none that could be simulated.

    Args:
        model: may be an adapter around one.
        args: of the call.
        kwargs: of the call.
        reads: read the values of whole numbers too, which waits for the device. Without them the batch can be held
            against others, and not be simulated.
        may_pad: rows of another batch may hold padding, for code that checks whether there is any.
        has_settings: what else the call is given comes with the batch, and not from a loss that is simulated itself.
    """
    batch = batch_of(args, kwargs)
    if batch is not None and reads_text(model) and all(_is_of_text(model, batch, *each) for each in kwargs.items()):
        return batch
    named = {**dict(zip(forward_names(model), args, strict=False)), **kwargs}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor) and value.dim()}
    if not tensors:
        return None
    if batch is None:
        first = tensors.get(main_input(model), next(iter(tensors.values())))
        batch = Batch(first.shape[0], 0)
    if may_pad and reads:
        tensors = {name: _with_padding(value) if name.endswith(_MASK) else value for name, value in tensors.items()}
    found = [(with_values if reads else outline)(name, value) for name, value in tensors.items()]
    settings = ((name, value) for name, value in named.items() if isinstance(value, bool | str))
    return replace(batch, tensors=tuple(found), settings=tuple(settings) if has_settings else ())


def _with_padding(mask: Tensor) -> Tensor:
    """Return a mask [B, S] of rows in which at least one token is padding."""
    if mask.dim() != 2 or mask.is_floating_point() or not mask.numel() or not mask.all():
        return mask
    mask = mask.detach().clone()
    mask[0, -1] = 0
    return mask


def _is_of_text(model: nn.Module, batch: Batch, name: str, value: Any) -> bool:
    """Whether an input is described by the sizes of a text."""
    if not isinstance(value, Tensor) or not value.dim():
        return True
    if name == _LABELS:
        # Other ones are for whoever checks them, where it is known what the model's loss takes.
        return knows_labels(model) or tuple(value.shape) == (batch.rows, batch.length)
    is_whole = not (value.is_floating_point() or value.is_complex())
    # What its forward does not name is settings of a kernel, such as `cu_seq_lens_q`.
    is_few = value.numel() < batch.rows * batch.length and name not in forward_names(model)
    return is_whole and (is_few or tuple(value.shape) == (batch.rows, batch.length))


def reads_text(model: nn.Module) -> bool:
    """Whether a model reads token ids, computes a loss of labels, and writes as many tokens as it reads."""
    bare = without_adapter(model)
    if getattr(getattr(bare, "config", None), "is_encoder_decoder", False):
        return False
    return main_input(bare) == _TOKENS and _LABELS in forward_names(bare)


def knows_labels(model: nn.Module) -> bool:
    """Whether it is known which labels a model's loss takes: one for each token, or for each row."""
    return getattr(without_adapter(model), "loss_type", None) is not None


def main_input(model: nn.Module) -> str:
    """Return the name of what a model reads."""
    return str(getattr(without_adapter(model), "main_input_name", _TOKENS))


def forward_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names that the forward of a model takes, in their order."""
    return _parameters_of(type(without_adapter(model)).forward)


@functools.cache
def _parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def without_adapter(model: nn.Module) -> nn.Module:
    """Return the model that an adapter is around, or FSDP1's wrapper."""
    model = unwrapped(model)
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return base


def is_like_tokens(value: Any, ids: Tensor) -> bool:
    """Whether a value holds a whole number, or a yes or no, for each token."""
    return isinstance(value, Tensor) and value.shape == ids.shape and not value.is_floating_point()


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
    return None if lengths is None else _collated(lengths, _innermost(collator), num_rows)


def _collated(lengths: Lengths, collator: Any, num_rows: int) -> Batch:
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    if is_packing(collator):
        # One document has positions as well, of which no mask is made.
        more = () if num_rows > 1 else (_POSITIONS,)
        return Batch(1, rounded(sum(lengths.largest), multiple), is_packed=num_rows > 1, more=more)
    longest, padding = lengths.largest[0], getattr(collator, "padding", None)
    is_to_limit = str(getattr(padding, "value", padding)) == "max_length"
    length = rounded(max(longest, getattr(collator, "max_length", None) or 0) if is_to_limit else longest, multiple)
    varies = num_rows > 1 and lengths.shortest != longest
    return Batch(num_rows, length, is_padded=lengths.has_padding or varies or length > longest)


def is_packing(collator: Any) -> bool:
    """Whether a collator joins examples to one row (`DataCollatorWithFlattening`, trl's `padding_free`)."""
    inner = _innermost(collator)
    return bool(getattr(inner, "padding_free", False)) or any(
        kind.__name__ == "DataCollatorWithFlattening" for kind in type(inner).__mro__
    )


def _innermost(collator: Any) -> Any:
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
        _of_examples(part, num_rows) if isinstance(part, list | tuple) and part else _of_columns(part, num_rows)
        for part in _parts(dataset)
    ]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    largest = heapq.nlargest(num_rows, (length for part in known for length in part.largest))
    return Lengths(tuple(largest), min(part.shortest for part in known), any(part.has_padding for part in known))


def _parts(dataset: Any) -> list[Any]:
    """Return the data sets that one is made of. What is in the whole of one bounds what is in a part of it."""
    if isinstance(dataset, Subset):
        return _parts(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [part for each in dataset.datasets for part in _parts(each)]
    return [dataset]


def stored_columns(dataset: Any) -> Sequence[str]:
    """Return the columns of a data set of `datasets`; none of one without end, or whose transform computes its rows."""
    is_finite = all(hasattr(dataset, name) for name in ("column_names", "with_format", "__len__"))
    return dataset.column_names if is_finite and len(dataset) and dataset.format["type"] != "custom" else ()


def further_inputs(dataset: Any, names: Container[str]) -> tuple[str, ...]:
    """Return the columns of a data set, of those that a forward takes, which hold a whole number for each token.

    A mask is one: models compute with it where nothing is padded too.
    """
    return tuple(sorted({name for part in _parts(dataset) for name in _further_inputs(part, names)}))


def _further_inputs(part: Any, names: Container[str]) -> Iterator[str]:
    if hasattr(part, "column_names"):
        columns = [name for name in part.column_names if name in names]
        if _TOKENS not in columns:
            return
        first = next(iter(part.select_columns(columns).with_format(None).iter(batch_size=1)))
        example = {name: values[0] for name, values in first.items()}
    elif isinstance(part, list | tuple) and isinstance(part[0], Mapping):
        example = {name: value for name, value in part[0].items() if name in names}
    else:
        return
    ids = torch.as_tensor(example.get(_TOKENS, ()))
    for name, value in example.items():
        is_row = isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(each, int) for each in value))
        if name not in (_TOKENS, _LABELS) and is_row and is_like_tokens(torch.as_tensor(value), ids):
            yield name


def with_inputs(batch: Batch, dataset: Any, collator: Any, model: nn.Module) -> Batch:
    """Return a batch of text with the further inputs that come with it, from columns or made by the collator."""
    names = forward_names(model)
    more = {*further_inputs(dataset, names)}
    pads = [getattr(_innermost(collator), name, None) for name in ("tokenizer", "pad_token_id")]
    if any(each is not None for each in pads) and not is_packing(collator) and _MASK in names:
        # What pads by a tokenizer, or as trl does, gives a mask with every batch.
        more.add(_MASK)
    # Positions without a mask make one of documents, be there one or several in a row.
    is_packed = batch.is_packed or (_MASK not in more and _POSITIONS in more)
    if is_packed:
        more -= {_MASK, _POSITIONS}
    return replace(batch, more=tuple(sorted({*more, *batch.more})), is_packed=is_packed)


def _of_examples(examples: Iterable[Any], num_rows: int) -> Lengths | None:
    if not all(isinstance(example, Mapping) and _TOKENS in example for example in examples):
        return None
    rows = [example[_TOKENS] for example in examples]
    lengths = [int(ids.shape[-1]) if hasattr(ids, "shape") else len(ids) for ids in rows]
    has_padding = any(not all(map(int, example[_MASK])) for example in examples if _MASK in example)
    return Lengths(tuple(heapq.nlargest(num_rows, lengths)), min(lengths), has_padding)


def _of_columns(dataset: Any, num_rows: int) -> Lengths | None:
    """Read a data set of `datasets`, column by column and without decoding."""
    names = stored_columns(dataset)
    column = next((name for name in (_TOKENS, _LENGTH) if name in names), None)
    if column is None:
        return None
    largest: list[int] = []
    shortest, has_padding = 2**62, False
    for table in tables(dataset, [name for name in (column, _MASK) if name in names]):
        lengths = list(lengths_in(table[column], is_length=column == _LENGTH))
        largest = heapq.nlargest(num_rows, (*largest, *lengths))
        shortest = min(shortest, *lengths)
        if _MASK in table.column_names and not has_padding:
            has_padding = not all(chunk.flatten().to_numpy(zero_copy_only=False).all() for chunk in table[_MASK].chunks)
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
