"""Runs operators on fake tensors, and remembers what their outputs look like: a simulation repeats itself.

`FakeTensorMode` remembers it too, but takes longer to look it up than everything else in a simulated step together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.upstream.torch import (
    IS_PARAMETER,
    DisableTorchFunction,
    DispatchModeKey,
    FakeTensor,
    FakeTensorMode,
    dispatch_mode,
    hidden_from_dispatch,
    make_subclass,
    schema_of,
    set_throw_on_mutable_data_ptr,
    storage_id,
)

MAX_ENTRIES = 2**16
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _NotKnownError(Exception):
    """The outputs depend on more than shapes, strides, dtypes and plain values."""


@dataclass(frozen=True, slots=True)
class _Made:
    """An output with a storage of its own, or, with `base`, of the argument with that index."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    base: int | None = None

    def make(self, args: Any, mode: FakeTensorMode) -> FakeTensor:
        with hidden_from_dispatch():
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            if self.base is not None:
                made.set_(args[self.base].untyped_storage(), self.offset, self.shape, self.stride)
        return _fake_of(made, self.device, mode)


_CPU = torch.device("cpu")
# By device: what a new fake tensor has in its `__dict__`, but for its mode.
_attributes: dict[torch.device, dict[str, Any]] = {}


def _fake_of(made: Tensor, device: torch.device, mode: FakeTensorMode) -> FakeTensor:
    """Return a tensor on `meta` as a fake one. `FakeTensor(mode, made, device)` takes four times as long."""
    if device not in _attributes:
        fake = FakeTensor(mode, made, device)
        _attributes[device] = {name: value for name, value in vars(fake).items() if value is not mode}
        return fake
    fake = make_subclass(FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device)
    set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(_attributes[device])
    fake.fake_mode = mode
    return fake


def fake_mode() -> FakeTensorMode:
    """Return a mode for fake tensors. A constant that a module has cached is real in it, and harmless."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # What is remembered here need not be remembered there as well, which takes longer than to find it out.
    mode.cache_enabled = False
    return mode


def fake_empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, mode: FakeTensorMode) -> FakeTensor:
    """Return what `torch.empty_strided` makes on the CPU where the mode is entered, which takes ten times as long."""
    return _Made(tuple(shape), tuple(stride), 0, dtype, _CPU).make((), mode)


def fake_parameter(made: FakeTensor, *, requires_grad: bool = True) -> nn.Parameter:
    """Return a new fake tensor as a parameter: what `nn.Parameter` returns, which runs an operator for it."""
    parameter: Any = made.requires_grad_(requires_grad)
    setattr(parameter, IS_PARAMETER, True)
    found: nn.Parameter = parameter
    return found


# Makes an output, from an operator's arguments and the mode of its tensors.
_Make = Callable[[Any, FakeTensorMode], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What an operator returns. There is one such object for all calls that look the same."""

    outputs: tuple[_Make, ...]
    container: type | None  # `tuple` or `list` of several; None of a single one.
    has_one_cost: bool
    """Whether those calls read and write the same bytes: an expanded tensor has fewer than its shape says."""

    def make(self, args: Any, mode: FakeTensorMode) -> Any:
        if self.container is None:
            return self.outputs[0](args, mode)
        return self.container(make(args, mode) for make in self.outputs)


_known: dict[Hashable, Outputs] = {}


Run = Callable[[Callable[..., Any], Any, dict[str, Any]], tuple[Any, Outputs | None]]
"""Runs an operator, from it, its arguments and its named arguments; returns with its output what is known of it."""


def call(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, None]:
    """Run an operator as it is."""
    return function(*args, **kwargs), None


def run_once(
    run: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Outputs | None]:
    """Run an operator on fake tensors, or make its outputs as they were for arguments that look the same."""
    tensors: list[Tensor] = []
    # In a backward, where no function of torch runs, a function mode would see each attribute of a tensor that is read:
    # most of the time of a step would go there.
    with DisableTorchFunction():
        key = look(function, args, kwargs, tensors)
        mode = _mode_of(tensors)
        is_mixed = any(not isinstance(tensor, FakeTensor) for tensor in tensors)
        if is_mixed and (not _makes_new(function) or _reads_values(function)):
            key = None
        known = None if key is None else _known.get(key)
        if known is not None and mode is not None:
            return known.make(args, mode), known
    output = run(function, args, kwargs)
    if key is None or mode is None or len(_known) >= MAX_ENTRIES:
        return output, None
    try:
        # An operator that changes what its arguments look like has to run each time.
        if key[1] == _look(args, []):
            _known[key] = _outputs(output, args, tensors)
    except _NotKnownError:
        pass
    return output, _known.get(key)


def look(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
) -> tuple[Hashable, ...] | None:
    """Return what a call looks like, as a key, and add its tensors to a list; None where more than that matters."""
    # What is made of real tensors alone, and how large it is, may depend on their values too.
    try:
        return function, _look(args, tensors), _look(tuple(kwargs.items()), tensors) if kwargs else ()
    except _NotKnownError:
        return None


def _mode_of(tensors: list[Tensor]) -> FakeTensorMode | None:
    """Return the mode of what is made of some tensors: the one that is entered where it is made of none."""
    if not tensors:
        entered: FakeTensorMode | None = dispatch_mode(DispatchModeKey.FAKE)
        return entered
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)


@cache
def _makes_new(function: Callable[..., Any]) -> bool:
    """Whether an operator neither changes an argument nor returns a view of one."""
    schema = schema_of(function)
    return schema is not None and all(argument.alias_info is None for argument in schema.arguments)


@cache
def _reads_values(function: Any) -> bool:
    """Whether the shape of an operator's output depends on values, such as those of a mask."""
    return torch.Tag.dynamic_output_shape in getattr(function, "tags", ())


def _look(value: Any, tensors: list[Tensor]) -> Hashable:
    """Return what a fake kernel reads of an argument, as a key; add its tensors to a list."""
    if isinstance(value, FakeTensor):
        if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
            raise _NotKnownError
        tensors.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device.type
    if type(value) is Tensor and value.layout is torch.strided:
        # One with values, such as labels, besides fake ones: what is made of both is fake.
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, tuple | list):
        return type(value), tuple([_look(each, tensors) for each in value])
    if type(value) in _PLAIN:
        # Equal numbers of different types give outputs of different dtypes.
        return type(value), value
    raise _NotKnownError


def _outputs(output: Any, args: Any, tensors: list[Tensor]) -> Outputs:
    several = isinstance(output, tuple | list)
    if several and type(output) not in (tuple, list):
        raise _NotKnownError
    made = set[int]()
    held = {storage_id(tensor.untyped_storage()) for tensor in tensors}
    outputs = output if several else (output,)
    found = tuple(_output(each, args, held, made) for each in outputs)
    seen = [*tensors, *(each for each in outputs if isinstance(each, Tensor))]
    has_one_cost = all(tensor.numel() <= _extent(tensor) for tensor in seen)
    return Outputs(found, type(output) if several else None, has_one_cost)


def _output(output: Any, args: Any, held: set[int], made: set[int]) -> _Make:
    if not isinstance(output, Tensor):
        if type(output) not in _PLAIN:
            raise _NotKnownError
        return lambda args, mode: output
    for index, arg in enumerate(args):
        if arg is output:
            # It works in place.
            return lambda args, mode: args[index]
    if not isinstance(output, FakeTensor):
        raise _NotKnownError
    _look(output, [])
    storage = output.untyped_storage()
    with_storage = (each for each in enumerate(args) if isinstance(each[1], FakeTensor))
    base = next(
        (index for index, arg in with_storage if storage_id(arg.untyped_storage()) == storage_id(storage)), None
    )
    if base is None:
        whole = -(-storage.nbytes() // output.itemsize)
        if storage_id(storage) in held | made or output.storage_offset() or whole != _extent(output):
            raise _NotKnownError
        made.add(storage_id(storage))
    offset, device = int(output.storage_offset()), output.fake_device
    return _Made(tuple(output.shape), output.stride(), offset, output.dtype, device, base).make


def _extent(tensor: Tensor) -> int:
    """Return the elements from a tensor's first to its last one in memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
