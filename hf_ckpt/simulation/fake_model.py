"""Copies of a model for simulation: its own modules and code, its weights without data. The model is not touched.

A fake copy's tensors are fake ones on the CPU. `meta` itself would pick other attention kernels, and a fake GPU cannot
exist where torch was built without one. A copy on `meta` is what is kept of a model until it is simulated.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.module_state import is_ours
from hf_ckpt.simulation import quantized, shared_tensors
from hf_ckpt.simulation.isolation import note_original
from hf_ckpt.simulation.operator_memo import fake_empty, fake_mode, fake_parameter
from hf_ckpt.structure.four_bit_tensor import FourBitTensor
from hf_ckpt.structure.layers import Layer, Stack, modules_of
from hf_ckpt.structure.stored import stored
from hf_ckpt.upstream.accelerate import FORWARD_BEFORE_AUTOCAST
from hf_ckpt.upstream.torch import FakeTensor, FakeTensorMode
from hf_ckpt.upstream.transformers import FLAG


@dataclass(frozen=True)
class FakeCopy:
    """A copy of a model whose tensors are fake."""

    model: nn.Module
    mode: FakeTensorMode  # It has to run in this mode.
    _memo: Mapping[int, Any]

    def copy_of(self, original: Any) -> Any:
        """Return the copy of a module or tensor of the model."""
        return self._memo[id(original)]

    def has_copy_of(self, original: object) -> bool:
        """Whether a module or tensor was copied."""
        return id(original) in self._memo

    def stacks(self, stacks: Sequence[Stack]) -> tuple[Stack, ...]:
        """Return the stacks of the copy, for those of the model. What stands in for a layer has no parts."""
        return tuple(
            replace(
                stack,
                home=self.copy_of(stack.home),
                owner=self.copy_of(stack.owner),
                layers=tuple(map(self._layer, stack.layers)),
            )
            for stack in stacks
        )

    def _layer(self, layer: Layer) -> Layer:
        outer = self.copy_of(layer.outer)
        if self.has_copy_of(layer.module) and self.copy_of(layer.module) is not outer:
            return replace(layer, module=self.copy_of(layer.module), outer=outer)
        made = replace(layer, module=outer, outer=outer)
        return made if any(outer.children()) else replace(made, attention=(), ffn=())


def fake_copy(
    model: nn.Module,
    dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype"),
    *,
    is_cuda: bool = True,
    stand_ins: Mapping[nn.Module, nn.Module] = MappingProxyType({}),
    mode: FakeTensorMode | None = None,
) -> FakeCopy:
    """Return a copy of a model whose tensors are fake, in a new mode or in that of another copy.

    `dtype_of` gives the dtype that a parameter is computed with, where it is not stored in that. With `is_cuda`
    quantised layers compute as on CUDA. Modules that are keys of `stand_ins` are not copied, nor is what only they
    hold: in their place stands what looks like the copy of the module that they are mapped to, but has no parameters,
    buffers or submodules of its own, and is not to be run.
    """
    entered = mode or fake_mode()

    def fake(tensor: Tensor) -> Tensor:
        dtype = dtype_of(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype
        return fake_empty(tensor.shape, tensor.stride(), dtype, entered)

    with entered:
        copied, memo = _deep_copy(model, fake, is_cuda=is_cuda, stand_ins=stand_ins)
    return FakeCopy(copied, entered, memo)


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on `meta`, without what accelerate has put around its forward.

    The model's own checkpointing is off: a plan governs, also one that keeps everything. To be made before FSDP shards
    the model. It weighs next to nothing, and nothing that happens to the model later changes it. What ZeRO-3 has
    partitioned gets its whole shape.
    """
    copied, _ = _deep_copy(model, _on_meta, is_cuda=False)
    module: Any
    for module in copied.modules():
        state: Any = stored(module, "state")
        if type(module).__module__.startswith("bitsandbytes.") and getattr(state, "SCB", None) is not None:
            # Another copy looks for an 8-bit layer's scales where they are before its first forward.
            module.weight.SCB = state.SCB
            state.CB = state.SCB = None
        # The forward that accelerate has put autocast around. accelerate itself follows `__wrapped__` to find it, past
        # the one that trl puts on the model: to that of the class.
        if (original := vars(module).pop(FORWARD_BEFORE_AUTOCAST, None)) is not None:
            module.forward = original
        # A wrapper shows the attributes of what it wraps.
        if vars(module).get(FLAG):
            setattr(module, FLAG, False)
    # Mixed precision is the step's: it is simulated for a CUDA device too where there is none.
    bare: nn.Module = extract_model_from_parallel(copied, keep_fp32_wrapper=False)
    note_original(bare, model)
    return bare


def _deep_copy(
    model: nn.Module,
    empty: Callable[[Tensor], Tensor],
    *,
    is_cuda: bool,
    stand_ins: Mapping[nn.Module, nn.Module] = MappingProxyType({}),
) -> tuple[nn.Module, dict[int, Any]]:
    """Copy a model, with the outputs of `empty` in the place of its tensors; return the memo of the copy as well."""
    modules = list(modules_of(model, without=stand_ins))
    memo: dict[int, Any] = {id(original): object.__new__(type(original)) for original in stand_ins}
    held = (each for module in modules for each in (*quantized.constants_of(module), *module._parameters.values()))
    for tensor in held:
        if tensor is not None and id(tensor) not in memo:
            if isinstance(tensor, FourBitTensor):
                memo[id(tensor.packed)] = empty(tensor.packed)
            made = _empty_like(tensor, empty, memo)
            memo[id(tensor)] = _as_parameter(made, tensor) if isinstance(tensor, nn.Parameter) else made
    own = [value for module in modules for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    # A deep copy would make their states of empty tensors.
    generators = {id(generator): generator.clone_state() for generator in _generators_in(own, set())}
    memo |= generators
    with EmptyCopies(empty):
        try:
            copied: nn.Module = copy.deepcopy(model, memo)
        # Whatever an attribute of the user's raises that cannot be copied.
        except Exception as error:
            raise _cannot_copy(model, error, generators) from error
    _Rebinding(memo).run()
    quantized.restore_states(modules, memo, is_cuda=is_cuda)
    for original, like in stand_ins.items():
        _fill_stand_in(memo[id(original)], original, memo[id(like)])
    return copied, memo


def _empty_like(tensor: Tensor, empty: Callable[[Tensor], Tensor], memo: Mapping[int, Any]) -> Tensor:
    if isinstance(tensor, FourBitTensor):
        return tensor.with_inner(lambda inner: memo[id(inner)])
    return shared_tensors.like(tensor, empty) if isinstance(tensor, DTensor) else empty(tensor)


def _generators_in(value: Any, seen: set[int]) -> Iterator[torch.Generator]:
    """Yield torch's generators in containers, partial functions and plain objects, however deep."""
    if isinstance(value, torch.Generator):
        yield value
    elif type(value) not in _ATOMS and id(value) not in seen and not isinstance(value, nn.Module | Tensor | type):
        seen.add(id(value))
        held = [*value.values()] if isinstance(value, dict) else []
        held += value if isinstance(value, list | tuple | set | deque) else []
        held += [value.args, value.keywords] if isinstance(value, functools.partial) else []
        for each in (*held, *getattr(value, "__dict__", {}).values()):
            yield from _generators_in(each, seen)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _cannot_copy(model: nn.Module, error: Exception, copies: Mapping[int, Any]) -> Exception:
    """Return the refusal that names the attribute which cannot be copied; the error itself where none is found."""
    known: dict[int, Any] = {**{id(module): module for module in modules_of(model)}, **copies}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _HELD:
                try:
                    copy.deepcopy(value, dict(known))
                except Exception as raised:  # noqa: BLE001  # see where this is called
                    return UnsupportedError(
                        "The step cannot be simulated: that runs on a copy of the model, and "
                        f'"{f"{path}.{name}".lstrip(".")}" ({type(value).__name__}) cannot be copied '
                        f'({type(raised).__name__} "{raised}"). Keep it outside of the model, or use a fixed policy, '
                        'such as "full".'
                    )
    return error


def _as_parameter(made: Tensor, like: nn.Parameter) -> nn.Parameter:
    if type(made) is FakeTensor:
        return fake_parameter(made, requires_grad=like.requires_grad)
    return nn.Parameter(made, requires_grad=like.requires_grad)


class EmptyCopies(TorchFunctionMode):
    """Lets a deep copy put the output of `empty` in the place of each tensor, wherever a module holds it."""

    def __init__(self, empty: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._empty = empty

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make an empty tensor where Python would copy one."""
        # PEFT keeps some in dictionaries, such as the numbers of virtual tokens.
        if function is Tensor.__deepcopy__:
            return self._empty(args[0])
        return function(*args, **(kwargs or {}))


_HELD = ("_parameters", "_buffers", "_modules")
_COLLECTS_STATES = "transformers.utils.output_capturing"  # Not in every supported version.


def _fill_stand_in(made: nn.Module, original: nn.Module, like: nn.Module) -> None:
    """Let a stand-in have the settings of its original, and show what `like` holds without holding it."""
    nn.Module.__init__(made)
    hooks = vars(made).copy()
    # It has those by which transformers collects hidden states, which it puts on when they are first asked for: models
    # such as LLaVA pick one by its number.
    collecting = {key: hook for key, hook in original._forward_hooks.items() if hook.__module__ == _COLLECTS_STATES}
    hooks["_forward_hooks"] = OrderedDict(collecting)
    held = {name: value for kind in _HELD for name, value in vars(like)[kind].items()}
    own = {name: value for name, value in vars(original).items() if isinstance(value, bool | int | float | str)}
    vars(made).update({**vars(like), **hooks, **held, **own})


def _on_meta(tensor: Tensor) -> Tensor:
    # ZeRO-3 notes the shape on the parameter that it has emptied.
    shape = getattr(tensor, "ds_shape", None)
    if shape is not None:
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# --- Functions that a model holds: forwards on instances, hooks, settings. ---


_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_SIZED = (tuple, list, dict)
_MAX_ENTRIES = 500  # Of a container that functions close over and that is looked into.


class _Rebinding:
    """Makes the functions that a copy holds anew, over the copied modules and tensors."""

    # Python does not copy functions: a forward that closes over the one before it, as those of monkey patches do, and a
    # hook over a module would run the model itself, and leave gradients there.
    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._cells: dict[int, types.CellType] = {}
        # Each copy is looked at by itself, but for what cannot be changed in place; and a container may hold itself.
        fixed = (types.MethodType, functools.partial, tuple)
        self._done = {id(made) for made in memo.values() if not isinstance(made, fixed)}

    def run(self) -> None:
        """Replace functions wherever the copy holds them: in modules, other objects, and containers of these."""
        for key, made in list(self._memo.items()):
            # Under its own address the memo keeps the originals alive. Attributes of a method are its function's, which
            # is not copied.
            if key == id(self._memo) or isinstance(made, Tensor | type | types.FunctionType | types.MethodType):
                continue
            self._rebind_items(made)
            if isinstance(held := getattr(made, "__dict__", None), dict):
                self._rebind_items(held)

    def _rebind_items(self, container: Any) -> None:
        if isinstance(container, dict):
            values = [(key, value) for key, value in container.items() if type(value) not in _ATOMS]
            for key, value in values:
                if (made := self._rebound(value)) is not value:
                    container[key] = made
        elif isinstance(container, list | deque | set):
            found = list(map(self._rebound, container))
            if any(made is not value for made, value in zip(found, container, strict=True)):
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(found)

    def _rebound(self, value: Any) -> Any:
        """Return a value that holds copies where it holds what was copied; itself where it holds nothing of it."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if id(value) in self._done or (isinstance(value, _SIZED) and len(value) > _MAX_ENTRIES):
            return value
        self._done.add(id(value))
        made = self._container(value)
        self._done.discard(id(value))
        return made

    def _container(self, value: Any) -> Any:
        if type(value) is weakref.ref:
            made: Any = self._rebound(value())
            return value if made is value() else weakref.ref(made)
        if isinstance(value, RemovableHandle):
            # A hook may take itself off.
            state: Any = value.__getstate__()  # type: ignore[no-untyped-call]  # upstream
            made = self._all_rebound(state)
            if made is not state:
                value = RemovableHandle.__new__(RemovableHandle)
                value.__setstate__(tuple(made))
            return value
        if isinstance(value, types.MethodType):
            parts: Sequence[Any] = (value.__func__, value.__self__)
            made = self._all_rebound(parts)
            return value if made is parts else types.MethodType(*made)
        if isinstance(value, functools.partial):
            parts = (value.func, *value.args, *value.keywords.values())
            made = self._all_rebound(parts)
            end = 1 + len(value.args)
            named = dict(zip(value.keywords, made[end:], strict=True))
            return value if made is parts else functools.partial(made[0], *made[1:end], **named)
        if type(value) in (tuple, list):
            made = self._all_rebound(value)
            return made if made is value else self._kept(value, type(value)(made))
        if type(value) in (dict, OrderedDict):
            held = tuple(value.values())
            made = self._all_rebound(held)
            return value if made is held else self._kept(value, type(value)(zip(value, made, strict=True)))
        return value

    def _all_rebound(self, values: Sequence[Any]) -> Sequence[Any]:
        made = list(map(self._rebound, values))
        return values if all(new is old for new, old in zip(made, values, strict=True)) else made

    def _kept(self, original: Any, made: Any) -> Any:
        # Two functions may close over one container.
        return self._memo.setdefault(id(original), made)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        olds = function.__closure__ or ()
        if is_ours(function) or not (olds or function.__defaults__ or function.__kwdefaults__ or vars(function)):
            return function
        # What two functions share, such as a counter, the copies share too.
        cells = tuple(self._cells.setdefault(id(old), types.CellType()) for old in olds)
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        functools.update_wrapper(made, function, updated=())
        made.__kwdefaults__ = function.__kwdefaults__
        # Before its cells are filled: it may close over itself.
        self._memo[id(function)] = made
        for cell, old in zip(cells, olds, strict=True):
            try:
                cell.cell_contents = self._rebound(old.cell_contents)
            except ValueError:
                # Not assigned yet.
                continue
        made.__defaults__ = self._rebound(function.__defaults__)
        made.__kwdefaults__ = self._rebound(function.__kwdefaults__)
        # Accelerate follows `__wrapped__` to take its own wrappers off again.
        vars(made).update({name: self._rebound(value) for name, value in vars(function).items()})
        return made
