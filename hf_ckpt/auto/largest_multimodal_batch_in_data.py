"""The largest batches of a data set with more than text: what its collator makes of copies of the largest examples.

Examples are ranked by what is cheap to read: the lengths of texts and lists, the sizes of images and arrays. Nothing is
drawn from the data loader, and random states are put back: a run sees the batches that it would see without a plan.
"""

from __future__ import annotations

import copy
import heapq
import importlib
import io
import logging
import time
from collections.abc import Container, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Subset

from hf_ckpt.auto.batch_of_forward import batch_of_forward, forward_names, knows_labels, reads_text
from hf_ckpt.auto.simulation_coverage import check_no_tensors_inside
from hf_ckpt.simulation.isolation import random_states_kept
from hf_ckpt.trainer.batch import Batch, stored_columns

logger = logging.getLogger(__name__)

MAX_EXAMPLES = 2000
"""That are looked at, evenly spaced."""
MAX_SECONDS = 10.0
"""For looking at them."""
_MAX_BATCHES = 4  # Of the columns that differ most: each has largest examples of its own.


def collated_batches(model: nn.Module, dataset: Any, collator: Any, num_rows: int) -> list[Batch]:
    """Return the largest batches of a data set with more than text, largest first."""
    # One has the largest example of each column. Others have the largest ones of a single column: of what is joined
    # instead of padded, they may have more.
    # The data set is a list of examples, or one of `datasets` without a transform. A copy of the collator is called, on
    # copies of examples. Nothing comes where text alone describes the batches, or where no bound is known.
    rows, headers = _readable(dataset), _readable(dataset, as_files=True)
    if rows is None or (
        reads_text(model)
        and _has_text_alone(headers, {*forward_names(model)} - {"labels"})
        and (knows_labels(model) or _has_labels_of_tokens(headers))
    ):
        return []
    sizes = _read_sizes(headers)
    may_pad = num_rows > 1 and len(set(map(tuple, sizes.values()))) > 1
    found = []
    for places in _choices(sizes, num_rows):
        batch = _collated(model, [rows[place] for place in places], collator, may_pad=may_pad)
        if batch is None:
            return []
        found.append(batch)
    return sorted((batch for batch in found if batch.tensors), key=lambda batch: -batch.num_bytes)


def _collated(model: nn.Module, examples: list[Any], collator: Any, *, may_pad: bool) -> Batch | None:
    with random_states_kept():
        try:
            made = copy.deepcopy(collator)(copy.deepcopy(examples))
        except Exception as error:  # noqa: BLE001
            # Whatever a user's collator raises; where it is to blame, it will again.
            logger.info("The largest examples could not be collated, so no bound is known: %s", error)
            return None
    if not isinstance(made, Mapping):
        return None
    for name in forward_names(model):
        check_no_tensors_inside(name, made.get(name))
    return batch_of_forward(model, (), made, may_pad=may_pad)


# --- Which examples. ---


def _choices(sizes: Mapping[int, list[int]], num_rows: int) -> list[tuple[int, ...]]:
    """Return the places of the examples of each batch."""
    columns = [column for column in zip(*sizes.values(), strict=True) if len(set(column)) > 1]
    most = [max(column) for column in columns]
    of_each = dict(zip(sizes, zip(*columns, strict=True), strict=True)) if columns else dict.fromkeys(sizes, ())
    share = {place: sum(size / of for size, of in zip(each, most, strict=True)) for place, each in of_each.items()}
    ranked = heapq.nlargest(num_rows, share, key=share.__getitem__)
    singles = [
        heapq.nlargest(num_rows, of_each, key=lambda place: (of_each[place][column], share[place]))
        for column in range(len(columns))
    ]
    mixed = list(dict.fromkeys((*(single[0] for single in singles), *ranked)))[:num_rows]
    choices = dict.fromkeys(tuple(sorted(each)) for each in (mixed, ranked, *singles))
    return list(choices)[:_MAX_BATCHES]


def _read_sizes(headers: Any) -> dict[int, list[int]]:
    """Return the sizes of the columns of examples, by their places."""
    until = time.monotonic() + MAX_SECONDS
    found: dict[int, Mapping[str, int]] = {}
    for place in range(0, len(headers), -(-len(headers) // MAX_EXAMPLES)):
        found[place] = {str(name): _size(value) for name, value in _header(headers, place).items()}
        if time.monotonic() > until:
            break
    if len(found) < len(headers):
        logger.info(
            "Looked at %s of %s examples for the largest batch; a larger one is planned for before it runs.",
            *(f"{len(found):,}", f"{len(headers):,}"),
        )
    names = sorted({name for each in found.values() for name in each})
    return {place: [each.get(name, 0) for name in names] for place, each in found.items()}


def _size(value: Any) -> int:
    """Return the numbers of an array, the characters of a text, the pixels of an image; of more, their sum."""
    size = getattr(value, "shape", None) or getattr(value, "size", None)
    if isinstance(size, tuple):
        return prod(size)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return _file_size(value) if {"bytes", "path"} >= set(value) else sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        is_flat = bool(value) and isinstance(value[0], int | float)
        return len(value) if is_flat else sum(map(_size, value))
    return int(value is not None)


def _file_size(file: Mapping[str, Any]) -> int:
    """Return the pixels of an image in a file, as its header says; of other files, the bytes."""
    content = file.get("bytes")
    with suppress(ImportError, OSError):
        opener = importlib.import_module("PIL.Image")
        with opener.open(io.BytesIO(content) if content else file.get("path")) as image:
            return prod(image.size)
    if content:
        return len(content)
    with suppress(OSError, TypeError, ValueError):
        return Path(str(file.get("path"))).stat().st_size
    return 0


# --- Data sets. ---


def _readable(dataset: Any, *, as_files: bool = False) -> Any:
    """Return a data set to read examples of as the data loader gets them, or with images and sound as files.

    None where they are computed or without end.
    """
    if isinstance(dataset, Subset):
        part = _readable(dataset.dataset, as_files=as_files)
        return None if part is None or not len(dataset.indices) else Subset(part, [*map(int, dataset.indices)])
    if isinstance(dataset, ConcatDataset):
        parts = [_readable(part, as_files=as_files) for part in dataset.datasets]
        return None if any(part is None for part in parts) else ConcatDataset(parts)
    if stored_columns(dataset):
        return dataset.with_format("arrow") if as_files else dataset
    is_list = isinstance(dataset, list | tuple) and dataset and all(isinstance(each, Mapping) for each in dataset)
    return dataset if is_list else None


def _header(headers: Any, place: int) -> Mapping[str, Any]:
    found = headers[place]
    header: Mapping[str, Any] = found if isinstance(found, Mapping) else found.to_pylist()[0]
    return header


_FEW = 8


def _has_text_alone(headers: Any, names: Container[str]) -> bool:
    """Whether a few examples hold token ids, and nothing but what has a place in a text."""
    # A number of an example has none where it is one of the `names` that the forward takes, such as a second label.
    few = [_header(headers, place) for place in range(0, len(headers), -(-len(headers) // _FEW))]
    return all(
        "input_ids" in each and all(_is_of_text(value, name in names) for name, value in each.items()) for each in few
    )


def _has_labels_of_tokens(headers: Any) -> bool:
    """Whether the first example has a label for each token, where it has labels."""
    first = _header(headers, 0)
    label = first.get("labels", first.get("label"))
    return label is None or torch.as_tensor(label).shape == torch.as_tensor(first["input_ids"]).shape


def _is_of_text(value: Any, is_taken: bool) -> bool:
    if isinstance(value, Tensor):
        # Several texts of one example are choices among them.
        return (not value.dim() and not is_taken) or (value.dim() == 1 and not value.is_floating_point())
    is_row = isinstance(value, list) and all(isinstance(each, int) for each in value)
    return is_row or isinstance(value, str) or (isinstance(value, int | float) and not is_taken)
