"""Runs for real what a model computes of its inputs and of constants alone, while the rest of the step is fake.

Positions, lengths and masks of padding depend on no weight. Models read their values to decide what to do: without
padding, transformers leaves the causal mask to the attention kernel, which it cannot decide of fake tensors.

Operators that fake CPU tensors lack are replaced here too. Knows operators, and nothing of models.
"""

from __future__ import annotations

import linecache
import os
import traceback
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.errors import HFCkptError, UnsupportedError
from hf_ckpt.simulation.operator_memo import MAX_ENTRIES, Outputs, look, run_once
from hf_ckpt.upstream.torch import (
    CTC_LOSS,
    CTC_LOSS_OF_TENSORS,
    FUSED_OPTIMIZERS,
    GROUPED_MM,
    INDEX_PUT,
    WAIT,
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    FakeTensor,
    FakeWork,
    disable_current_modes,
    schema_of,
    storage_id,
    tree_leaves,
)

_MAX_ELEMENTS = 2**22  # Larger tensors, such as a mask [S, S], stay fake.
# The same for floating-point numbers: a padding mask may be one, a table of positions needs no values.
_MAX_FLOATS = 2**18


def fold(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Outputs | None]:
    """Run an operator in a `FakeTensorMode`: inputs and constants have values, everything else has a shape only.

    Random numbers are drawn for real too: restore the state of the generator afterwards. See `operator_memo.Run`.
    """
    return run_once(_fold, function, args, kwargs)


def fold_known(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Outputs | None]:
    """See `fold`. Inputs have the values of a real batch, so that what masks made of them select is known too."""
    return run_once(_fold_known, function, args, kwargs)


def _fold_known(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if function in _INDEXING and not has_values(args[0]):
        # What is all real runs for real as it is. In the stead of a mask with values stand the places that it selects:
        # so many elements are known then.
        indices: list[Any] = []
        for each in args[1]:
            is_mask = isinstance(each, Tensor) and each.dtype is torch.bool and has_values(each)
            indices.extend(_run_real(torch.Tensor.nonzero, (each,), {}).unbind(1) if is_mask else (each,))
        args = (args[0], indices, *args[2:])
    return _fold(function, args, kwargs)


def _fold(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not all(map(has_values, tensors)):
        if schema_of(function).is_mutable:
            _note_overwritten(function, args, kwargs)
        return SUBSTITUTES.get(function, function)(*args, **kwargs)
    with DisableTorchFunction():
        key = look(function, args, kwargs, [])
    if key in _run_for_real:
        return _run_real(function, args, kwargs)
    if tensors and (schema_of(function).is_mutable or function.is_view):
        # It changes its arguments: run on fake copies, it would leave no trace. A view takes no memory.
        return _run_real(function, args, kwargs)
    try:
        output = function(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        # It reads values, and these exist.
        pass
    else:
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not made or not all(map(_is_small, made)):
            return output
    if key is not None and len(_run_for_real) < MAX_ENTRIES:
        _run_for_real.add(key)
    return _run_real(function, args, kwargs)


# What calls look like whose output is small, or that read values: they need not be tried on fake tensors first.
_run_for_real = set[Hashable]()


# Read and write at places: the second argument has an index for each dimension, or a mask for several.
_INDEXING = frozenset(
    (
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
        INDEX_PUT,
    )
)


# Storages that are real, and whose values are lost: something without values was written into them.
_overwritten = set[int]()


def has_values(tensor: Tensor) -> bool:
    """Whether the values of a tensor are those of the step."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return False
    return not _overwritten or storage_id(tensor.untyped_storage()) not in _overwritten


def _note_overwritten(function: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Note the tensors with values that an operator writes something without values into."""
    for number, argument in enumerate(schema_of(function).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for tensor in tree_leaves(args[number] if number < len(args) else kwargs.get(argument.name)):
            if isinstance(tensor, Tensor) and has_values(tensor):
                storage = tensor.untyped_storage()
                _overwritten.add(storage_id(storage))
                weakref.finalize(storage, _overwritten.discard, storage_id(storage))


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (_MAX_FLOATS if tensor.is_floating_point() else _MAX_ELEMENTS)


def _run_real(function: Any, args: Any, kwargs: Any) -> Any:
    with disable_current_modes():
        return function(*args, **kwargs)


_ROW_BYTES = 16  # Rows of a grouped product begin at multiples of this.


RAISED_BY_MODELS = (RuntimeError, ValueError, AssertionError, AttributeError, LookupError, TypeError)
"""What code raises that is given tensors without values, or other inputs than it expects."""


def to_unsupported_error(
    error: Exception,
    module: str,
    inputs: Sequence[str] = ("input_ids", "labels"),
    unknown: Sequence[str] = (),
    outside: str = "The model",
) -> UnsupportedError | None:
    """Translate an error of a simulated step for a user; None where the error itself says what is wrong.

    `module` is the innermost one that ran, `outside` is what runs where none does, `inputs` are what the model was
    given, `unknown` those without values.
    """
    where = f'Module "{module}"' if module else outside
    if isinstance(error, NotImplementedError) and "SparseTensorImpl" in str(error):
        return UnsupportedError(
            f"{where} cannot be simulated: it computes with a sparse tensor, whose memory cannot be followed. Measure "
            "a step on the device instead, or use an adapter without sparse weights."
        )
    if isinstance(error, HFCkptError | torch.OutOfMemoryError):
        return None
    line, package = raised_at(error)
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        asked = str(error.func)
    elif ".numpy() is not supported" in str(error) or (
        isinstance(error, TypeError) and FakeTensor.__name__ in str(error)
    ):
        # `numpy`, a text or another function outside of torch was given a tensor without values.
        asked = f'{type(error).__name__} "{error}"'
    else:
        return UnsupportedError(
            f"{where} cannot be simulated: given {_listed(inputs)}, as a simulated step gives them, it raises "
            f'{type(error).__name__} "{error}"{line}. Measure a step on the device instead, with the inputs that it '
            "needs."
        )
    of_inputs = f", of {_listed(unknown)} too" if unknown else ""
    remedy = (
        "Where a value is only noted, keep the detached tensor in place of its number; else measure a step on the "
        "device."
    )
    if package in ("transformers", "peft", "trl"):
        other = "use a fixed policy"
        if "expert" in f"{module}{line}".lower():
            other = 'choose a kernel of fixed shapes where there is one (experts_implementation="grouped_mm")'
        remedy = f"Measure a step on the device instead, or {other}."
    return UnsupportedError(
        f"{where} cannot be simulated: it reads values of tensors to decide what to compute ({asked}{line}), and "
        f"a simulated step has shapes only{of_inputs}. {remedy}"
    )


_MAX_SHOWN = 100


def raised_at(error: BaseException) -> tuple[str, str]:
    """Return the line that an error comes from, in words, and its package: of whatever called torch or us last."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "hf_ckpt"):
            file = frame.f_code.co_filename
            source = linecache.getline(file, line).strip()
            shown = f": {source:.{_MAX_SHOWN}}" if source else ""
            return f", in line {line} of {os.path.basename(file)}{shown}", package
    return "", ""


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _grouped_mm(
    mat1: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Make the output of grouped products, such as those of a mixture's experts."""
    # torch's own fake kernel takes bfloat16 only, and pads rows only in builds for CUDA. The CPU kernel takes all
    # floating types and always pads.
    dtype = out_dtype or mat1.dtype
    rows, columns = mat1.shape[-2], mat2.shape[-1]
    is_batch = mat1.dim() == mat2.dim()
    num_groups = len(offs) if offs is not None and mat1.dim() == 2 else mat1.shape[0]
    per_row = _ROW_BYTES // dtype.itemsize
    stride = -(-columns // per_row) * per_row
    if is_batch:
        return torch.empty_strided((num_groups, rows, columns), (rows * stride, stride, 1), dtype=dtype)
    return torch.empty_strided((rows, columns), (stride, 1), dtype=dtype)


def _dense(function: Callable[..., Any], num_inputs: int, *args: Any, **kwargs: Any) -> Any:
    """Normalise a batch: the kernels return what is dense, where torch's fake ones keep the order of dimensions."""
    # So what is transposed before and after has to be copied for the product that comes next.
    laid = args[num_inputs - 1]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    of_images = formats.get(laid.dim(), torch.contiguous_format)
    if not laid.is_contiguous() and not laid.is_contiguous(memory_format=of_images):
        laid = torch.empty_like(laid, memory_format=torch.contiguous_format)
    given = (
        each if each.stride() == laid.stride() else torch.empty_like(laid, dtype=each.dtype)
        for each in args[:num_inputs]
    )
    return function(*given, *args[num_inputs:], **kwargs)


def _ctc_loss(log_probs: Tensor, targets: Tensor, _: Any, target_lengths: Any, *options: Any) -> Any:
    """Make the loss of each row [B], and a table with a place for each label of the longest text and each gap."""
    if isinstance(target_lengths, Tensor) and not has_values(target_lengths):
        raise DynamicOutputShapeException(CTC_LOSS_OF_TENSORS)
    with disable_current_modes():
        labels = int(torch.as_tensor(target_lengths).max())
    frames, rows = log_probs.shape[0], log_probs.shape[1]
    return log_probs.new_empty(rows), log_probs.new_empty(rows, frames, 2 * labels + 1)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Step an optimizer in place, which returns nothing. The fake mode would make a fake of each counter of steps."""


def _reduced(tensors: list[Tensor], *args: Any) -> tuple[list[Tensor], Any]:
    """Send nothing: tensors are reduced in place."""
    return tensors, FakeWork().boxed()


def _waited_for(tensor: Tensor) -> Tensor:
    """Return what was sent: torch's own fake kernel makes a new one."""
    return tensor


SUBSTITUTES: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        GROUPED_MM: _grouped_mm,
        torch.ops.aten.native_batch_norm.default: partial(_dense, torch.ops.aten.native_batch_norm.default, 1),
        torch.ops.aten.native_batch_norm_backward.default: partial(
            _dense, torch.ops.aten.native_batch_norm_backward.default, 2
        ),
        CTC_LOSS: _ctc_loss,
        CTC_LOSS_OF_TENSORS: _ctc_loss,
        **dict.fromkeys(FUSED_OPTIMIZERS, _nothing),
        WAIT: _waited_for,
        torch.ops.c10d.allreduce_.default: _reduced,
    }
)
"""What to call instead of an operator on fake CPU tensors, with the fake mode on.

A substitute takes the operator's arguments, and its output has the storages that the real CPU and CUDA kernels make. It
makes its output in one operator of its own.
"""
