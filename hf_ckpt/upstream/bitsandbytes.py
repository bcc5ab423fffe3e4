"""Private and version-dependent names of bitsandbytes (0.50)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.upstream import Feature

_OPTIMIZERS = Feature(
    "Simulating the optimizers of bitsandbytes",
    seen="bitsandbytes 0.50",
    instead="Use another optimizer, such as optim=adamw_torch_fused, or a fixed policy.",
    of="bitsandbytes.optim.optimizer bitsandbytes.optim.ademamix",
)
HAS_WARNED_OF_CPU = _OPTIMIZERS.attribute("_cpu_paged_warned")
"""Whether a paged optimizer has warned of parameters on the CPU."""
STATE_BUFFERS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("get_state_buffer", ()),
    (_OPTIMIZERS.attribute("_get_state_double_buffer"), (2,)),
)
"""The methods of an optimizer that make state, with the leading dimensions: AdEMAMix makes two tensors in one."""

_PRODUCTS = Feature(
    "Letting go of the inputs that 8-bit layers keep where a layer is recomputed",
    seen="bitsandbytes 0.50",
    instead="Recomputed layers hold the inputs of their 8-bit layers besides.",
    of="bitsandbytes.autograd._functions",
)
HELD_INPUTS: dict[str, tuple[str, tuple[None, ...] | None]] = {
    f"{_PRODUCTS.attribute('MatMul8bitFp')}Backward": ("A", None),
    f"{_PRODUCTS.attribute('MatMul8bitLt')}Backward": ("tensors", (None, None, None)),
}
"""By the node of a product with 8-bit weights, on a CPU and on CUDA: where it keeps its input, for the gradient of the
weight, and what stands for none."""


def quantized_tensors(module: nn.Module, parameter: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold a quantised parameter, or belong to it: its bytes by other names, its statistics."""
    # Of 4-bit weights: the scales of blocks, and those that the scales are quantised with.
    state: Any = getattr(parameter, "quant_state", None)
    nested = getattr(state, "state2", None)
    # Of 8-bit weights, on the parameter until the first forward, then on the layer's state, which the backward reads.
    its_layer = getattr(module, "state", None) if type(module).__name__ == "Linear8bitLt" else None
    found = (
        *(getattr(each, "absmax", None) for each in (state, nested)),
        *(getattr(each, "CB", None) for each in (parameter, its_layer)),
    )
    yield from (each for each in found if isinstance(each, Tensor))


def move_statistics(module: nn.Module, parameter: Tensor, device: torch.device) -> None:
    """Move what belongs to a quantised parameter to a device, and leave the parameter where it is."""
    state: Any = getattr(parameter, "quant_state", None)
    if state is not None:
        state.to(device)
    holders: tuple[Any, ...] = (parameter, getattr(module, "state", None))
    for holder in holders if type(module).__name__ == "Linear8bitLt" else ():
        if isinstance(scales := getattr(holder, "SCB", None), Tensor):
            holder.SCB = scales.to(device)


def quantized_4bit(values: Tensor, **options: Any) -> tuple[Tensor, Any]:
    """Return values in 4 bits, packed, with their `QuantState`. `options`: of `quantize_4bit`."""
    from bitsandbytes.functional import quantize_4bit

    packed, quant_state = quantize_4bit(values, **options)
    return packed, quant_state


def dequantized_4bit(packed: Tensor, quant_state: Any) -> Tensor:
    """Return packed values as a new tensor of the shape and dtype that the state says."""
    from bitsandbytes.functional import dequantize_4bit

    # Block by block: on a CPU it takes the scales of other blocks for rows that are no whole number of blocks (0.50).
    size, block = math.prod(quant_state.shape), quant_state.blocksize
    flat = copy.copy(quant_state)
    flat.shape = torch.Size((size,) if size % block else (size // block, block))
    values: Tensor = dequantize_4bit(packed, flat)
    return values.view(quant_state.shape)


def scales_of(quant_state: Any) -> Tensor:
    """Return the scales of the blocks of packed values, in float32."""
    from bitsandbytes.functional import dequantize_blockwise

    scales: Tensor = quant_state.absmax
    if quant_state.nested:
        scales = dequantize_blockwise(scales, quant_state.state2)
        scales += quant_state.offset
    return scales
