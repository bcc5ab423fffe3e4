"""Copies of a model for simulation: its own modules and code, its weights without data. The model is not touched.

A fake copy's tensors are fake ones on the CPU. `meta` itself would pick other attention kernels, and a fake GPU cannot
exist where torch was built without one. A copy on `meta` is what is kept of a model until it is simulated.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_ckpt.simulation import quantized


def fake_copy(
    model: nn.Module, dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype"), *, is_cuda: bool = True
) -> tuple[nn.Module, FakeTensorMode]:
    """Return a copy of a model whose tensors are fake, and the mode that it has to run in.

    `dtype_of` gives the dtype that a parameter is computed with, where it is not stored in that. With `is_cuda`
    quantised layers compute as on CUDA.
    """

    def fake(tensor: Tensor) -> Tensor:
        dtype = dtype_of(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")

    # A constant that a module has cached is real, and harmless.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        return _deep_copy(model, fake, is_cuda=is_cuda), mode


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on `meta`, without what accelerate has put around its forward.

    To be made before FSDP shards the model. It weighs next to nothing, and nothing that happens to the model later
    changes it. What ZeRO-3 has partitioned gets its whole shape.
    """
    copied = _deep_copy(model, _on_meta, is_cuda=False)
    for module in copied.modules():
        _move_scales_to_weight(module)
    # Mixed precision is the step's: it is simulated for a CUDA device too where there is none.
    bare: nn.Module = extract_model_from_parallel(copied, keep_fp32_wrapper=False)
    return bare


def _deep_copy(model: nn.Module, empty: Callable[[Tensor], Tensor], *, is_cuda: bool) -> nn.Module:
    """Copy a model, with the outputs of `empty` in the place of its tensors."""
    memo: dict[int, Any] = {}
    for tensor in _tensors_of(model):
        if id(tensor) not in memo:
            made = empty(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
    copied: nn.Module = copy.deepcopy(model, memo)
    _rebind_forwards(model, memo)
    quantized.restore_states(model, copied, is_cuda=is_cuda)
    return copied


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        yield from (value for value in held if isinstance(value, Tensor))
    yield from quantized.constants(model)


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


def _rebind_forwards(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let the forwards of a copy's instances run on the copy.

    trl replaces a model's forward by a function that closes over the one before. Python does not copy functions: the
    copy's forward would call that of the model itself, and leave gradients there. So such functions are made anew, over
    the copied modules. `memo` is that of the deep copy.
    """
    modules = {id(module) for module in model.modules()}
    for module in model.modules():
        if "forward" in vars(module) and id(module) in memo:
            memo[id(module)].forward = _rebound(vars(module)["forward"], modules, memo)


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
