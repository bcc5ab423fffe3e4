"""Copies of a model for simulation: its own modules and code, its weights without data. The model is not touched.

A fake copy's tensors are fake ones on the CPU. `meta` itself would pick other attention kernels, and a fake GPU cannot
exist where torch was built without one. A copy on `meta` is what is kept of a model until it is simulated.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from hf_ckpt.patch.stack_patch import FLAG
from hf_ckpt.simulation import quantized, shared_tensors
from hf_ckpt.simulation.operator_memo import fake_empty, fake_mode, fake_parameter
from hf_ckpt.structure.layers import Layer, Stack, modules_of


@dataclass(frozen=True)
class FakeCopy:
    """A copy of a model whose tensors are fake."""

    model: nn.Module
    mode: FakeTensorMode
    """It has to run in this mode."""
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
    for module in copied.modules():
        _move_scales_to_weight(module)
        _take_autocast_off(module)
        # A wrapper shows the attributes of what it wraps.
        if vars(module).get(FLAG):
            setattr(module, FLAG, False)
    # Mixed precision is the step's: it is simulated for a CUDA device too where there is none.
    bare: nn.Module = extract_model_from_parallel(copied, keep_fp32_wrapper=False)
    return bare


def _take_autocast_off(module: nn.Module) -> None:
    """Put back the forward that accelerate has put autocast around.

    accelerate itself follows `__wrapped__` to find it, past the one that trl puts on the model: to that of the class.
    """
    original = vars(module).pop("_original_forward", None)
    if original is not None:
        module.forward = original


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
    held = (each for module in modules for each in (*module._parameters.values(), *quantized.constants_of(module)))
    for tensor in held:
        if tensor is not None and id(tensor) not in memo:
            made = shared_tensors.like(tensor, empty) if isinstance(tensor, DTensor) else empty(tensor)
            memo[id(tensor)] = _as_parameter(made, tensor) if isinstance(tensor, nn.Parameter) else made
    with EmptyCopies(empty):
        copied: nn.Module = copy.deepcopy(model, memo)
    _rebind_forwards(modules, memo)
    quantized.restore_states(modules, memo, is_cuda=is_cuda)
    for original, like in stand_ins.items():
        _fill_stand_in(memo[id(original)], original, memo[id(like)])
    return copied, memo


def _as_parameter(made: Tensor, like: nn.Parameter) -> nn.Parameter:
    if type(made) is FakeTensor:
        return fake_parameter(made, requires_grad=like.requires_grad)
    return nn.Parameter(made, requires_grad=like.requires_grad)


class EmptyCopies(TorchFunctionMode):
    """Lets a deep copy put the output of `empty` in the place of each tensor, wherever a module holds it.

    PEFT keeps some in dictionaries, such as the numbers of virtual tokens.
    """

    def __init__(self, empty: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._empty = empty

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make an empty tensor where Python would copy one."""
        if function is Tensor.__deepcopy__:
            return self._empty(args[0])
        return function(*args, **(kwargs or {}))


_HELD = ("_parameters", "_buffers", "_modules")
_COLLECTS_STATES = "transformers.utils.output_capturing"  # Not in every supported version.


def _fill_stand_in(made: nn.Module, original: nn.Module, like: nn.Module) -> None:
    """Let a stand-in have the settings of its original, and show what `like` holds without holding it.

    Of the hooks it has those by which transformers collects hidden states, which it puts on when they are first asked
    for: models such as LLaVA pick one by its number.
    """
    nn.Module.__init__(made)
    hooks = vars(made).copy()
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


def _move_scales_to_weight(module: Any) -> None:
    """Put an 8-bit layer's scales where they are before its first forward: another copy looks for them there."""
    state: Any = getattr(module, "state", None)
    if type(module).__module__.startswith("bitsandbytes.") and getattr(state, "SCB", None) is not None:
        module.weight.SCB = state.SCB
        state.CB = state.SCB = None


# --- Forwards that other libraries put on instances. ---


_FORWARDS = frozenset(("forward", "_original_forward"))
"""Of an instance: its own, and the one that accelerate has replaced."""


def _rebind_forwards(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Let the forwards of a copy's instances run on the copy.

    trl replaces a model's forward by a function that closes over the one before. Python does not copy functions: the
    copy's forward would call that of the model itself, and leave gradients there. So such functions are made anew, over
    the copied modules. `memo` is that of the deep copy.
    """
    ids = set(map(id, modules))
    for module in modules:
        for name in _FORWARDS & vars(module).keys():
            if id(module) in memo:
                setattr(memo[id(module)], name, _rebound(vars(module)[name], ids, memo))


def _rebound(found: Any, modules: set[int], memo: dict[int, Any]) -> Any:
    """Return a callable that holds copies where `found` holds modules of the model, whose ids are `modules`."""
    if id(found) in modules:
        return memo.get(id(found), found)
    within = functools.partial(_rebound, modules=modules, memo=memo)
    if isinstance(found, types.MethodType):
        return types.MethodType(within(found.__func__), within(found.__self__))
    if isinstance(found, functools.partial):
        keywords = {name: within(value) for name, value in found.keywords.items()}
        return functools.partial(within(found.func), *map(within, found.args), **keywords)
    if isinstance(found, types.FunctionType) and found.__closure__:
        return _with_closure(found, within, memo)
    return found


def _with_closure(function: types.FunctionType, within: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Return a function whose closure holds copies; the function itself where it holds no module of the model."""
    if id(function) in memo:
        return memo[id(function)]
    olds = function.__closure__ or ()
    cells = tuple(types.CellType() for _ in olds)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    functools.update_wrapper(made, function)
    made.__kwdefaults__ = function.__kwdefaults__
    # Accelerate follows `__wrapped__` to take its own wrappers off again.
    made.__dict__ = dict(vars(function))
    # Before its cells are filled: it may close over itself.
    memo[id(function)] = made
    is_new = False
    for cell, old in zip(cells, olds, strict=True):
        try:
            content = old.cell_contents
        except ValueError:
            # Not assigned yet.
            continue
        cell.cell_contents = within(content)
        is_new = is_new or cell.cell_contents is not content
    if not is_new:
        memo[id(function)] = function
    return memo[id(function)]
