"""The micro-batch that a model's forward is called with, or will be: text, or all that it gets.

`largest_text_batch` bounds text by its lengths; here are the inputs that come with it. Nothing draws a batch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.structure.attention_and_ffn import unwrapped
from hf_ckpt.trainer.batch import (
    LABELS,
    MASK,
    POSITIONS,
    TOKENS,
    Batch,
    batch_of,
    innermost_collator,
    is_like_tokens,
    is_packing,
    outline,
    parts_of,
    with_values,
)


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
        tensors = {name: _with_padding(value) if name.endswith(MASK) else value for name, value in tensors.items()}
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
    if name == LABELS:
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
    return main_input(bare) == TOKENS and LABELS in forward_names(bare)


def knows_labels(model: nn.Module) -> bool:
    """Whether it is known which labels a model's loss takes: one for each token, or for each row."""
    return getattr(without_adapter(model), "loss_type", None) is not None


def main_input(model: nn.Module) -> str:
    """Return the name of what a model reads."""
    return str(getattr(without_adapter(model), "main_input_name", TOKENS))


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


def further_inputs(dataset: Any, names: Container[str]) -> tuple[str, ...]:
    """Return the columns of a data set, of those that a forward takes, which hold a whole number for each token."""
    # A mask is one: models compute with it where nothing is padded too.
    return tuple(sorted({name for part in parts_of(dataset) for name in _further_inputs(part, names)}))


def _further_inputs(part: Any, names: Container[str]) -> Iterator[str]:
    if hasattr(part, "column_names"):
        columns = [name for name in part.column_names if name in names]
        if TOKENS not in columns:
            return
        first = next(iter(part.select_columns(columns).with_format(None).iter(batch_size=1)))
        example = {name: values[0] for name, values in first.items()}
    elif isinstance(part, list | tuple) and isinstance(part[0], Mapping):
        example = {name: value for name, value in part[0].items() if name in names}
    else:
        return
    ids = torch.as_tensor(example.get(TOKENS, ()))
    for name, value in example.items():
        if name not in (TOKENS, LABELS) and _is_row(value) and is_like_tokens(torch.as_tensor(value), ids):
            yield name


def with_inputs(batch: Batch, dataset: Any, collator: Any, model: nn.Module) -> Batch:
    """Return a batch of text with the further inputs that come with it, from columns or made by the collator."""
    names = forward_names(model)
    more = {*further_inputs(dataset, names)}
    pads = [getattr(innermost_collator(collator), name, None) for name in ("tokenizer", "pad_token_id")]
    if any(each is not None for each in pads) and not is_packing(collator) and MASK in names:
        # What pads by a tokenizer, or as trl does, gives a mask with every batch.
        more.add(MASK)
    # Positions without a mask make one of documents, be there one or several in a row.
    is_packed = batch.is_packed or (MASK not in more and POSITIONS in more)
    if is_packed:
        more -= {MASK, POSITIONS}
    return replace(batch, more=tuple(sorted({*more, *batch.more})), is_packed=is_packed)


def _is_row(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list) and all(isinstance(each, int) for each in value))
