"""What CUDA does differently from the CPU: the one place where a simulated step on fake CPU tensors is corrected.

- Attention (`attention`): CUDA's own kernels, chosen as torch chooses them, with the memory that they need inside; and
  flash attention of other packages, also where the package is not installed.
- Dropout: CUDA keeps a mask of one byte per element, the CPU one in the dtype of its input.
- Root-mean-square norms: `torch.rms_norm` is one kernel on CUDA, and several operators on the CPU.
- Softmax of float16 into float32 is one kernel on CUDA: no float32 copy of its input, and none of its gradient.
- Autocast (`autocast`): CUDA's runs more operators in float32.
- Memory that kernels allocate for themselves: no operator returns it, and so the tracker does not see it.
- cuBLAS workspaces (`add_workspaces`).

What needs nothing: python code of transformers (its norms, rotary embeddings and activations, eager attention, the
loss) runs the same operators on both; `gelu`, `silu`, layer norms and the cross entropy keep the same tensors. Left
out, as small compared with activations: the statistics per row that CUDA's layer norm keeps in float32, what sorting
needs in the backward of embeddings and of indexing, and the partial sums of `foreach` norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hf_ckpt.simulation import quantized
from hf_ckpt.simulation.caching_allocator import BLOCK_BYTES
from hf_ckpt.simulation.cuda import attention, autocast
from hf_ckpt.simulation.cuda.attention import attention_to_build, restore_attention
from hf_ckpt.simulation.devices import Device, workspace_bytes
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import Storage, Tape
from hf_ckpt.simulation.tracker import Tracker
from hf_ckpt.upstream.torch import softmax

__all__ = ["add_workspaces", "attention_to_build", "emulate_cuda", "restore_attention"]

_OLDEST = (8, 0)  # The compute capability that is assumed where that of a device is not known.


@contextmanager
def emulate_cuda(step: Step, device: Device, tracker: Tracker) -> Iterator[None]:
    """Let what runs inside keep and need the memory that it would on a CUDA device.

    To be entered around forward and backward on fake CPU tensors, inside of the fake mode and of the tracker, so that
    both see what is done here. For a CPU, where it may be entered with real tensors too, it only shows the memory that
    operators of bitsandbytes hide. The `tracker` asks for the memory that kernels allocate for themselves.
    """
    with ExitStack() as stack:
        stack.enter_context(attention.registered_flash_attention(is_padded=step.is_padded))
        stack.callback(setattr, tracker, "holds", tracker.holds)
        tracker.holds = partial(_held, tracker, _WORKSPACES if device.is_cuda else {})
        if device.is_cuda:
            stack.enter_context(autocast.found_by_libraries())
            stack.enter_context(_FunctionReplacements(device.capability or _OLDEST, device.tries_cudnn_first))
        elif device.shares_host_memory:
            # An Apple chip: torch's fused attention for MPS has no backward, so that a step that trains runs the plain
            # one (`scaled_dot_product_attention` in `aten/src/ATen/native/transformers/attention.cpp`).
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def _masked_scatter(target: Tensor, mask: Tensor, source: Tensor) -> list[quantized.Workspace]:
    # The places that the mask selects are counted up over the whole target.
    return [(tuple(target.shape), torch.int64), (tuple(target.shape), torch.bool)]


def _masked_scatter_backward(gradient: Tensor, mask: Tensor, sizes: Sequence[int]) -> list[quantized.Workspace]:
    # It selects by index: one for each dimension of each selected element.
    return [((prod(sizes), gradient.dim()), torch.int64), (tuple(gradient.shape), torch.bool)]


# Of images that are put into a text, too: `masked_scatter__cuda` and `masked_select_cuda` in
# `aten/src/ATen/native/cuda/IndexKernel.cpp`.
_WORKSPACES: dict[Callable[..., Any], Callable[..., list[quantized.Workspace]]] = {
    **attention.WORKSPACES,
    torch.ops.aten.masked_scatter.default: _masked_scatter,
    torch.ops.aten.masked_scatter_backward.default: _masked_scatter_backward,
}


class _FunctionReplacements(TorchFunctionMode):
    """Replaces functions of torch before autograd sees them, which decides there what is kept for backward."""

    def __init__(self, capability: tuple[int, int], prefers_cudnn: bool) -> None:
        super().__init__()
        self._replacements: dict[Callable[..., Any], Callable[..., Any]] = {
            functional.scaled_dot_product_attention: partial(_scaled_dot_product_attention, capability, prefers_cudnn),
            functional.dropout: _dropout,
            torch.dropout: lambda input, p, train: _dropout(input, p, train),
            functional.rms_norm: partial(_rms_norm, functional.rms_norm),
            torch.rms_norm: partial(_rms_norm, torch.rms_norm),
            **{softmax: partial(_softmax, softmax) for softmax in (functional.softmax, torch.softmax, Tensor.softmax)},
        }

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = self._replacements.get(function, function)
        name = getattr(function, "__name__", "")
        if autocast.changes(name) and autocast.is_on():
            return autocast.call_with_autocast(run, name, args, kwargs or {})
        return run(*args, **(kwargs or {}))


_CPU = torch.device("cpu")


def _held(
    tracker: Tracker,
    known: Mapping[Callable[..., Any], Callable[..., list[quantized.Workspace]]],
    function: Any,
    args: Any,
    kwargs: dict[str, Any],
    is_after: bool,
) -> list[Tensor]:
    """Make the memory for a call of an operator."""
    # Kernels of torch make their outputs first; bitsandbytes makes a weight, and then the output.
    is_of_bitsandbytes = function.namespace == "bitsandbytes"
    if is_after is is_of_bitsandbytes:
        return []
    of_operator = known.get(function)
    if of_operator is not None:
        needed = of_operator(*args)
    else:
        needed = quantized.workspace(function, args, kwargs) if is_of_bitsandbytes else []
    # A tracker that runs an operator does not see others by itself.
    return [
        tracker.__torch_dispatch__(
            torch.ops.aten.empty.memory_format, (), (shape,), {"dtype": dtype, "device": _CPU, "pin_memory": False}
        )
        for shape, dtype in needed
    ]


def _scaled_dot_product_attention(
    capability: tuple[int, int], prefers_cudnn: bool, *args: Any, **kwargs: Any
) -> Tensor:
    if not autocast.is_on():
        return attention.attend(capability, prefers_cudnn, *args, **kwargs)
    args, kwargs = autocast.in_lower_precision((args, kwargs))
    with torch.autocast("cpu", enabled=False):
        return attention.attend(capability, prefers_cudnn, *args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1 or inplace:
        # CUDA has no kernel of its own for these.
        return functional.dropout(input, p, training, inplace)
    output: Tensor = torch.native_dropout(input, p, True)[0]
    return output


def _softmax(function: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the softmax. Source: `softmax` in `aten/src/ATen/native/SoftMax.cpp`."""
    dim = args[0] if args else kwargs.get("dim")
    if input.dtype is torch.float16 and kwargs.get("dtype") is torch.float32 and dim is not None:
        output: Tensor = softmax(input, dim, True)
        return output
    return function(input, *args, **kwargs)


def _rms_norm(
    function: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Return a tensor like the norm's output."""
    if weight is not None and weight.dtype != input.dtype:
        # Several operators on CUDA too.
        return function(input, normalized_shape, weight, eps)
    # CUDA has one kernel for it, which keeps its input, and a number per row.
    output: Tensor = _RMSNorm.apply(input, tuple(normalized_shape), weight)  # type: ignore[no-untyped-call]
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, normalized_shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        rows = input.shape[: input.dim() - len(normalized_shape)]
        ctx.save_for_backward(input, weight, torch.empty(rows, dtype=torch.float32))
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, _ = ctx.saved_tensors
        of_input = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        return of_input, None, of_weight


# --- cuBLAS. ---

_PRODUCTS = frozenset("mm addmm bmm baddbmm mv addmv dot vdot addbmm _addmm_activation _scaled_mm _int_mm".split())
_OF_AUTOGRAD = (Phase.BACKWARD, Phase.RECOMPUTATION)


def add_workspaces(tape: Tape, device: Device, *, has_trained: bool = False) -> None:
    """Add to the tape the workspaces that torch gives cuBLAS, as existing before the step: it is not the first one.

    They come from the caching allocator, so that `torch.cuda.max_memory_allocated` counts them, and no operator returns
    them. With `has_trained` a backward of the same model ran before the tape.

    Source: `setWorkspaceForHandle` and `getCUDABlasLtWorkspace` in `aten/src/ATen/cuda/CublasHandlePool.cpp`.
    """
    num_bytes = -(-workspace_bytes(device) // BLOCK_BYTES) * BLOCK_BYTES
    if not num_bytes:
        return
    # There is one for each thread that has run a matrix product on its stream, for good: the one that calls forward and
    # the optimizer, and autograd's own, which runs backward and recomputes. cuBLASLt shares the workspace of its thread
    # (`TORCH_CUBLASLT_UNIFIED_WORKSPACE`, on by default).
    columns = tape.columns
    places = (columns.places.all[number] for number in np.unique(columns.place).tolist())
    threads = {place.phase in _OF_AUTOGRAD for place in places if _is_product(place.operator)}
    num_threads = 2 if has_trained and threads else len(threads)
    tape.before += [Storage(num_bytes, category=Category.WORKSPACES) for _ in range(num_threads)]


@cache
def _is_product(operator: str) -> bool:
    namespace, _, name = operator.partition(".")
    return namespace == "aten" and name.partition(".")[0].rstrip("_") in _PRODUCTS
