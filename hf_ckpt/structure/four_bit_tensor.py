"""A frozen weight of more than two dimensions in 4 bits: the stacked experts of a layer, which bitsandbytes skips.

To everybody who looks it is a tensor of its shape and dtype. Whatever computes with it gets its values, which are made
from the packed ones for that operation only. Autograd keeps the tensor itself, that is the packed values, so that
backward makes them again: a layer that keeps its activations does not hold its experts a second time.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.upstream.bitsandbytes import dequantized_4bit, quantized_4bit, scales_of
from hf_ckpt.upstream.torch import (
    DisableTorchFunction,
    hidden_from_modes,
    make_wrapper_subclass,
    schema_of,
    tree_leaves,
    tree_map_only,
)

_aten = torch.ops.aten
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a property
_TRAINS = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]  # a property
_TO_HOST = (Tensor.numpy, Tensor.tolist)
_OF_MEMORY = (Tensor.share_memory_, Tensor.__dlpack__)


@dataclass(frozen=True, slots=True)
class _View:
    """An operator on one tensor: that of a view, a cast, or another layout."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: int | None = None  # Which one it is, of an operator that returns several.

    def of(self, tensor: Tensor) -> Tensor:
        outputs = self.function(tensor, *self.args, **self.kwargs)
        shown: Tensor = outputs if self.output is None else outputs[self.output]
        return shown

    def expert(self, shape: Sequence[int]) -> int | None:
        """Return which one of all experts, of this shape, it shows; None if it is another view."""
        if self.function is not _aten.select.int or self.args[0] % len(shape):
            return None
        index: int = self.args[1] % shape[0]
        return index


class FourBitTensor(Tensor):
    """A tensor whose values lie packed in 4 bits, with the state of quantisation of bitsandbytes beside them.

    `packed` and `quant_state` are those of the whole weight, (experts, rows, columns), which its views share. A view
    is made of the values each time that something computes with it. Writes into the whole quantise anew; those into
    a view are refused.
    """

    packed: Tensor
    quant_state: Any  # Of bitsandbytes, as on its own 4-bit weights.
    _views: tuple[_View, ...]  # One of the other; of the whole: none.

    @staticmethod
    def __new__(
        cls, packed: Tensor, quant_state: Any, views: tuple[_View, ...] = (), like: Tensor | None = None
    ) -> FourBitTensor:
        """Make a tensor over packed values. `views`: what of them it shows; `like` has its shape, strides and dtype."""
        shape = quant_state.shape if like is None else like.shape
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))] if like is None else like.stride()
        dtype = quant_state.dtype if like is None else like.dtype
        made: FourBitTensor = make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=packed.device)
        made.packed, made.quant_state, made._views = packed, quant_state, views
        return made

    @classmethod
    def quantized(cls, values: Tensor, **options: Any) -> FourBitTensor:
        """Return the values in 4 bits. `options` are those of bitsandbytes' `quantize_4bit`."""
        return cls(*quantized_4bit(values.contiguous(), **options))

    def values(self) -> Tensor:
        """Return the values, dequantised: a new tensor of this one's shape, strides and dtype."""
        views, expert = self._views, None
        if views and (expert := views[0].expert(self.quant_state.shape)) is not None:
            views = views[1:]
        values = dequantized_4bit(self.packed, self.quant_state) if expert is None else self._of_one(expert)
        for view in views:
            values = view.of(values)
        return values

    def _of_one(self, expert: int) -> Tensor:
        state = self.quant_state
        num_experts, *shape = state.shape
        if math.prod(shape) % state.blocksize:
            # A block holds the end of one expert and the beginning of the next.
            return dequantized_4bit(self.packed, state)[expert].clone()
        of_one = copy.copy(state)
        of_one.absmax, of_one.shape = scales_of(state).view(num_experts, -1)[expert], torch.Size(shape)
        of_one.nested = False
        return dequantized_4bit(self.packed.view(num_experts, -1, 1)[expert], of_one)

    def seen(self, function: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return what an operator of a view, or of a copy, makes of this one: the same packed values, seen so."""
        with hidden_from_modes():
            # Whoever follows memory, or simulates, is not to see it.
            shape = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
            made = function(shape, *args, **(kwargs or {}))
        if isinstance(made, Tensor):
            return self._viewed(_View(function, args, kwargs or {}), made)
        return [self._viewed(_View(function, args, kwargs or {}, index), each) for index, each in enumerate(made)]

    def _viewed(self, view: _View, like: Tensor) -> FourBitTensor:
        return FourBitTensor(self.packed, self.quant_state, (*self._views, view), like)

    def statistics(self) -> Iterator[Tensor]:
        """Yield the tensors that belong to the packed values."""
        yield from state_tensors(self.quant_state)

    def with_inner(self, change: Callable[[Tensor], Tensor]) -> FourBitTensor:
        """Return a tensor like this one over the outputs of `change` for the tensors that hold the values."""
        state = copy.copy(self.quant_state)
        state.state2 = copy.copy(state.state2)
        for each in (state, state.state2):
            for name, value in () if each is None else [*vars(each).items()]:
                if isinstance(value, Tensor):
                    setattr(each, name, change(value))
        return FourBitTensor(change(self.packed), state, self._views, self)

    def requantized(self, values: Tensor) -> FourBitTensor:
        """Return other values in 4 bits, as these are."""
        return FourBitTensor.quantized(
            values,
            blocksize=self.quant_state.blocksize,
            quant_type=self.quant_state.quant_type,
            compress_statistics=self.quant_state.nested,
            quant_storage=self.packed.dtype,
        )

    def is_packed_as(self, other: Tensor) -> bool:
        """Tell whether another holds values of the same shape in the same form."""
        if not isinstance(other, FourBitTensor) or self._views or other._views:
            return False
        forms = [
            (each.shape, each.dtype, each.quant_type, each.blocksize, each.nested, packed.dtype)
            for each, packed in ((self.quant_state, self.packed), (other.quant_state, other.packed))
        ]
        return forms[0] == forms[1]

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a property there too
        """Where the packed values are."""
        return self.packed.device

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let `tensor.data = other`, by which modules move to a device, take what lies packed there."""
        given = kwargs or {}
        with DisableTorchFunction():
            if function == _SET_DATA:
                _check_data(*args)
                args[0].packed, args[0].quant_state = args[1].packed, args[1].quant_state
            if function in _TRAINS and all((*args[1:], *given.values())):
                raise UnsupportedError(
                    f"A weight in 4 bits of shape {tuple(args[0].shape)} cannot be trained (requires_grad): a step "
                    "would be lost where it is quantised anew. Train an adapter on it, or load it without quantisation."
                )
            if function in _TO_HOST:
                array = function(args[0].values(), *args[1:], **given)
                if function == Tensor.numpy:
                    # What is written into it would be lost.
                    array.flags.writeable = False
                return array
            if function in _OF_MEMORY:
                raise UnsupportedError(
                    f"{function.__name__} asks for the memory of a weight in 4 bits, which does not hold its values. "
                    "Take those: weight.values()."
                )
            return function(*args, **given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # upstream's types leave the class out
        cls, function: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer views and copies with the packed values; let all else compute with the values."""
        kwargs = kwargs or {}
        if (answer := _ANSWERS.get(function)) is not None:
            return answer(*args, **kwargs)
        if schema_of(function).is_mutable:
            return _write(function, args, kwargs)
        if _is_view(function) and isinstance(args[0], FourBitTensor):
            return args[0].seen(function, args[1:], kwargs)
        return function(*_dequantized(args), **_dequantized(kwargs))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return what it is, without its values."""
        return f"FourBitTensor({self.quant_state.quant_type}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the packed values and their state; of a view the values, since operators cannot be pickled."""
        if self._views:
            return self.values().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's
        return _restored, (self.packed, self.quant_state, isinstance(self, nn.Parameter))


def holder_of(parameter: Tensor) -> Tensor:
    """Return the tensor that has a parameter's memory: the parameter itself, or its packed values."""
    return parameter.packed if isinstance(parameter, FourBitTensor) else parameter


def state_tensors(quant_state: Any) -> Iterator[Tensor]:
    """Yield the tensors of a state of quantisation: scales, their scales, and tables."""
    for each in (quant_state, quant_state.state2):
        if each is not None:
            yield from (value for value in vars(each).values() if isinstance(value, Tensor))


def _restored(packed: Tensor, quant_state: Any, is_parameter: bool) -> Tensor:
    made = FourBitTensor(packed, quant_state)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


def _check_data(tensor: Tensor, data: Tensor) -> None:
    are_whole = all(isinstance(each, FourBitTensor) and not each._views for each in (tensor, data))
    if not are_whole or data.shape != tensor.shape or data.dtype != tensor.dtype:
        raise UnsupportedError(
            f"A weight in 4 bits stays one, and of its dtype: `data` of a {type(tensor).__name__} of shape "
            f"{tuple(tensor.shape)} in {tensor.dtype} cannot become a {type(data).__name__} of shape "
            f"{tuple(data.shape)} in {data.dtype}. Copy values into it (copy_), which are quantised, or assign "
            "another parameter to its module."
        )


@cache
def _is_view(function: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema_of(function).returns)


def _dequantized(tree: Any) -> Any:
    return tree_map_only(FourBitTensor, FourBitTensor.values, tree)


def _write(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operator that writes: into the values, which are quantised anew, or into tensors of other kinds."""
    if function is _aten.set_.source_Tensor and args[0] is args[1]:
        # A parametrization registers itself so.
        return args[0]
    arguments = schema_of(function).arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    written = [given[argument.name] for argument in arguments if _is_written(argument) and argument.name in given]
    if not any(isinstance(each, FourBitTensor) for each in tree_leaves(written)):
        return function(*_dequantized(args), **_dequantized(kwargs))
    tensor = args[0]
    if len(written) > 1 or written[0] is not tensor or not isinstance(tensor, FourBitTensor) or tensor._views:
        raise UnsupportedError(
            f"{function} writes into a weight in 4 bits by a view, or together with other tensors, which cannot be "
            "done. Write into the whole weight."
        )
    if function is _aten.copy_.default and tensor.is_packed_as(args[1]):
        # Values that were quantised twice may be others.
        made = args[1]
    else:
        values = tensor.values()
        function(values, *_dequantized(args[1:]), **_dequantized(kwargs))
        if (values.shape, values.stride()) != (tensor.shape, tensor.stride()):
            raise UnsupportedError(
                f"{function} changes the shape of a weight in 4 bits in place, which cannot be done."
            )
        warnings.warn(
            f"{function} writes into a weight in 4 bits, which is quantised anew. What is less than a step of 4 bits "
            "is lost, as most of what a merged adapter adds, and the old values do not come back where it is unmerged.",
            stacklevel=2,
        )
        made = tensor.requantized(values)
    tensor.packed.copy_(made.packed)
    for old, new in zip(tensor.statistics(), made.statistics(), strict=True):
        old.copy_(new)
    return tensor


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _clone(tensor: FourBitTensor, **kwargs: Any) -> FourBitTensor:
    cloned = tensor.with_inner(Tensor.clone)
    # In which order the values of a view lie depends on what was asked for.
    copied: FourBitTensor = cloned.seen(_aten.clone.default, (), kwargs) if tensor._views else cloned
    return copied


def _to_copy(tensor: FourBitTensor, *, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> FourBitTensor:
    is_cast = kwargs.get("dtype") not in (None, tensor.dtype)
    # Autocast would keep what it casts.
    if device is not None or not is_cast:
        tensor = tensor.with_inner(partial(Tensor.to, device=device, non_blocking=non_blocking, copy=True))
    copied: FourBitTensor = tensor.seen(_aten._to_copy.default, (), kwargs) if is_cast or tensor._views else tensor
    return copied


def _same(tensor: FourBitTensor) -> FourBitTensor:
    return FourBitTensor(tensor.packed, tensor.quant_state, tensor._views, tensor)


_ANSWERS: Mapping[Any, Callable[..., FourBitTensor]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
}
