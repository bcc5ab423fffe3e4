"""What CUDA does differently from the CPU: the one place where a simulated step on fake CPU tensors is corrected.

- Attention (`attention`): CUDA's own kernels, chosen as torch chooses them, with the memory that they need inside.
- Flash attention of other packages (`flash`): stands in where the package is not installed.
- Dropout: CUDA keeps a mask of one byte per element, the CPU one in the dtype of its input.
- Root-mean-square norms: `torch.rms_norm` is one kernel on CUDA, and several operators on the CPU.
- Autocast (`autocast`): CUDA's runs more operators in float32.
- Memory that kernels allocate for themselves: no operator returns it, and so nobody who follows storages sees it.

What needs nothing: python code of transformers (its norms, rotary embeddings and activations, eager attention, the
loss) runs the same operators on both; `gelu`, `silu`, layer norms and the cross entropy keep the same tensors. Left
out, since they are small beside activations: the statistics per row that CUDA's layer norm keeps in float32, what
sorting needs in the backward of embeddings and of indexing, and the partial sums of `foreach` norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ckpt.simulation import quantized
from hf_ckpt.simulation.cuda import attention, autocast, flash, norms
from hf_ckpt.simulation.cuda.flash import attention_to_build, restore_attention
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.step import Step

__all__ = ["as_on_cuda", "attention_to_build", "restore_attention"]

_OLDEST = (8, 0)
"""The compute capability that is assumed where a device's is not known."""


@contextmanager
def as_on_cuda(step: Step, device: Device) -> Iterator[None]:
    """Let what runs inside keep and need the memory that it would on a CUDA device.

    To be entered around forward and backward on fake CPU tensors, inside of the fake mode and of whoever follows
    storages, so that both see what is done here. For a CPU, where it may be entered with real tensors too, it only
    shows what operators of bitsandbytes hide.

    Args:
        step: the step that runs.
        device: what it is simulated for.
    """
    with ExitStack() as stack:
        stack.enter_context(flash.stand_in(is_padded=step.is_padded))
        stack.enter_context(_Workspaces(attention.WORKSPACES if device.is_cuda else {}))
        if device.is_cuda:
            stack.enter_context(_Functions(device.capability or _OLDEST, device.tries_cudnn_first))
        yield


class _Functions(TorchFunctionMode):
    """Replaces functions of torch before autograd sees them: what is kept for backward is decided there."""

    def __init__(self, capability: tuple[int, int], prefers_cudnn: bool) -> None:
        super().__init__()
        self._replacements: dict[Callable[..., Any], Callable[..., Any]] = {
            functional.scaled_dot_product_attention: partial(_attend, capability, prefers_cudnn),
            functional.dropout: _dropout,
            torch.dropout: _dropout_of_torch,
            functional.rms_norm: partial(_rms_norm, functional.rms_norm),
            torch.rms_norm: partial(_rms_norm, torch.rms_norm),
        }

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        run = self._replacements.get(function, function)
        if autocast.is_on():
            return autocast.call(run, getattr(function, "__name__", ""), args, kwargs or {})
        return run(*args, **(kwargs or {}))


class _Workspaces(TorchDispatchMode):  # type: ignore[no-untyped-call]  # upstream
    """Allocates what kernels allocate for themselves, for as long as they run."""

    def __init__(self, known: Mapping[Callable[..., Any], Callable[..., list[attention.Block]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # upstream
        self._known = known

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        held = [torch.empty(shape, dtype=dtype) for shape, dtype in self._needed(function, args, kwargs or {})]
        output = function(*args, **(kwargs or {}))
        del held
        return output

    def _needed(self, function: Any, args: Any, kwargs: dict[str, Any]) -> list[attention.Block]:
        known = self._known.get(function)
        if known is not None:
            return known(*args)
        return quantized.workspace(function, args, kwargs) if function.namespace == "bitsandbytes" else []


def _attend(capability: tuple[int, int], prefers_cudnn: bool, *args: Any, **kwargs: Any) -> Tensor:
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


def _dropout_of_torch(input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(input, p, train)


def _rms_norm(
    function: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        # Several operators on CUDA too.
        return function(input, normalized_shape, weight, eps)
    return norms.rms_norm(input, tuple(normalized_shape), weight)
