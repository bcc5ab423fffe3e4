"""A frozen weight of more than two dimensions in 4 bits: the stacked experts of a layer, which bitsandbytes skips.

To everybody who looks it is a tensor of its shape and dtype. Whatever computes with it gets its values, which are made
from the packed ones for that operation only. Autograd keeps the tensor itself, that is the packed values, so that
backward makes them again: a layer that keeps its activations does not hold its experts a second time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.upstream.bitsandbytes import dequantized_4bit, quantized_4bit, scales_of
from hf_ckpt.upstream.torch import DisableTorchFunction, make_wrapper_subclass, schema_of, tree_leaves, tree_map_only

_aten = torch.ops.aten
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a property


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a tensor shows of the packed values."""

    expert: int | None = None  # Of all.
    is_transposed: bool = False  # Whether rows and columns are exchanged.
    dtype: torch.dtype | None = None  # Another one than that in which they were quantised.


_WHOLE = _Seen()


class FourBitTensor(Tensor):
    """A tensor whose values lie packed in 4 bits, with the state of quantisation of bitsandbytes beside them.

    `packed` and `quant_state` are those of the whole weight, (experts, rows, columns), which its views share: those of
    one expert, and those with rows and columns exchanged. Writes into the whole quantise anew.
    """

    packed: Tensor
    quant_state: Any  # Of bitsandbytes, as on its own 4-bit weights.
    _seen: _Seen

    @staticmethod
    def __new__(cls, packed: Tensor, quant_state: Any, seen: _Seen = _WHOLE) -> FourBitTensor:
        """Make a tensor over packed values; `seen`: what of them it shows, and how."""
        shape = list(quant_state.shape)
        strides = list(torch.empty(shape, device="meta").stride())
        if seen.expert is not None:
            del shape[0], strides[0]
        if seen.is_transposed:
            shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
        made: FourBitTensor = make_wrapper_subclass(
            cls, shape, strides=strides, dtype=seen.dtype or quant_state.dtype, device=packed.device
        )
        made.packed, made.quant_state, made._seen = packed, quant_state, seen
        return made

    @classmethod
    def quantized(cls, values: Tensor, **options: Any) -> FourBitTensor:
        """Return the values in 4 bits. `options` are those of bitsandbytes' `quantize_4bit`."""
        return cls(*quantized_4bit(values.contiguous(), **options))

    def values(self) -> Tensor:
        """Return the values, dequantised: a new tensor of this one's shape and dtype."""
        values = dequantized_4bit(self.packed, self.quant_state) if self._seen.expert is None else self._of_one_expert()
        values = values if self._seen.dtype is None else values.to(self._seen.dtype)
        return values.transpose(-2, -1) if self._seen.is_transposed else values

    def _of_one_expert(self) -> Tensor:
        state = self.quant_state
        num_experts, *shape = state.shape
        if math.prod(shape) % state.blocksize:
            # A block holds the end of one expert and the beginning of the next.
            return dequantized_4bit(self.packed, state)[self._seen.expert].clone()
        of_one = copy.copy(state)
        of_one.absmax, of_one.shape = scales_of(state).view(num_experts, -1)[self._seen.expert], torch.Size(shape)
        of_one.nested = False
        return dequantized_4bit(self.packed.view(num_experts, -1, 1)[self._seen.expert], of_one)

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
        return FourBitTensor(change(self.packed), state, self._seen)

    def requantized(self, values: Tensor) -> FourBitTensor:
        """Return other values in 4 bits, as these are."""
        return FourBitTensor.quantized(
            values,
            blocksize=self.quant_state.blocksize,
            quant_type=self.quant_state.quant_type,
            compress_statistics=self.quant_state.nested,
            quant_storage=self.packed.dtype,
        )

    def _view(self, **changes: Any) -> FourBitTensor:
        return FourBitTensor(self.packed, self.quant_state, replace(self._seen, **changes))

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a property there too
        """Where the packed values are."""
        return self.packed.device

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let `tensor.data = other`, by which modules move to a device, take what lies packed there."""
        with DisableTorchFunction():
            if function == _SET_DATA:
                args[0]._check_data(args[1])
                args[0].packed, args[0].quant_state = args[1].packed, args[1].quant_state
            return function(*args, **(kwargs or {}))

    def _check_data(self, data: Tensor) -> None:
        if not isinstance(data, FourBitTensor) or data.shape != self.shape or data.dtype != self.dtype:
            raise UnsupportedError(
                f"A weight in 4 bits of shape {tuple(self.shape)} cannot be exchanged for a {type(data).__name__} of "
                f"shape {tuple(data.shape)} in {data.dtype}. Copy values into it (copy_), which are quantised, or "
                "assign another parameter to its module."
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # upstream's types leave the class out
        cls, function: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer views and copies with the packed values; let all else compute with the values."""
        kwargs = kwargs or {}
        if (answer := _ANSWERS.get(function)) is not None:
            answered = answer(*args, **kwargs)
            if answered is not None:
                return answered
        if schema_of(function).is_mutable:
            return _write(function, args, kwargs)
        return function(*_dequantized(args), **_dequantized(kwargs))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return what it is, without its values."""
        return f"FourBitTensor({self.quant_state.quant_type}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the packed values and their state."""
        return _restored, (self.packed, self.quant_state, self._seen, isinstance(self, nn.Parameter))


def holder_of(parameter: Tensor) -> Tensor:
    """Return the tensor that has a parameter's memory: the parameter itself, or its packed values."""
    return parameter.packed if isinstance(parameter, FourBitTensor) else parameter


def state_tensors(quant_state: Any) -> Iterator[Tensor]:
    """Yield the tensors of a state of quantisation: scales, their scales, and tables."""
    for each in (quant_state, quant_state.state2):
        if each is not None:
            yield from (value for value in vars(each).values() if isinstance(value, Tensor))


def _restored(packed: Tensor, quant_state: Any, seen: _Seen, is_parameter: bool) -> Tensor:
    made = FourBitTensor(packed, quant_state, seen)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made


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
    if len(written) > 1 or written[0] is not tensor or not isinstance(tensor, FourBitTensor) or tensor._seen != _WHOLE:
        raise UnsupportedError(
            f"{function} writes into a weight in 4 bits by a view, or together with other tensors, which cannot be "
            "done. Write into the whole weight."
        )
    values = tensor.values()
    function(values, *_dequantized(args[1:]), **_dequantized(kwargs))
    made = tensor.requantized(values)
    tensor.packed.copy_(made.packed)
    for old, new in zip(tensor.statistics(), made.statistics(), strict=True):
        old.copy_(new)
    return tensor


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _transpose(tensor: FourBitTensor, one: int, other: int) -> FourBitTensor | None:
    dims = sorted(dim % tensor.dim() for dim in (one, other))
    if dims != [tensor.dim() - 2, tensor.dim() - 1]:
        return None
    return tensor._view(is_transposed=not tensor._seen.is_transposed)


def _select(tensor: FourBitTensor, dim: int, index: int) -> FourBitTensor | None:
    if dim % tensor.dim() or tensor._seen.expert is not None:
        return None
    return tensor._view(expert=index % tensor.shape[0])


def _to_copy(
    tensor: FourBitTensor, *, dtype: torch.dtype | None = None, device: Any = None, non_blocking: bool = False, **_: Any
) -> FourBitTensor | None:
    # Autocast would keep what it casts.
    cast = tensor if dtype in (None, tensor.dtype) else tensor._view(dtype=dtype)
    if device is None and cast is not tensor:
        return cast
    return cast.with_inner(partial(Tensor.to, device=device, non_blocking=non_blocking, copy=True))


_ANSWERS: Mapping[Any, Callable[..., FourBitTensor | None]] = {
    _aten.detach.default: FourBitTensor._view,
    _aten.alias.default: FourBitTensor._view,
    _aten.t.default: lambda tensor: _transpose(tensor, 0, 1),
    _aten.transpose.int: _transpose,
    _aten.select.int: _select,
    _aten.clone.default: lambda tensor, **_: tensor.with_inner(Tensor.clone),
    _aten._to_copy.default: _to_copy,
}
