"""A model's shape, kept for simulating it: its modules and code, with tensors on `meta`.

Taken before an engine shards the model. It weighs next to nothing, and nothing that happens to the model changes it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from hf_ckpt.simulation import quantized
from hf_ckpt.simulation.instance_forwards import follow_forwards


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of a model on `meta`, without what accelerate has put around its forward.

    Args:
        model: not sharded by FSDP; what ZeRO-3 has partitioned gets its whole shape.
    """
    memo: dict[int, Any] = {}
    for tensor in (*_tensors_of(model), *quantized.constants(model)):
        if id(tensor) not in memo:
            memo[id(tensor)] = _on_meta(tensor)
    copied: nn.Module = copy.deepcopy(model, memo)
    follow_forwards(model, memo)
    quantized.restore(model, copied, is_cuda=False)
    for module in copied.modules():
        _hand_back_scales(module)
    # Mixed precision is the step's: it is simulated for a CUDA device too where there is none.
    bare: nn.Module = extract_model_from_parallel(copied, keep_fp32_wrapper=False)
    return bare


def _hand_back_scales(module: Any) -> None:
    """Let an 8-bit layer hold its scales as it does before its first forward, where another copy looks for them."""
    state: Any = getattr(module, "state", None)
    if type(module).__module__.startswith("bitsandbytes.") and getattr(state, "SCB", None) is not None:
        module.weight.SCB = state.SCB
        state.CB = state.SCB = None


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        yield from (value for value in held if isinstance(value, Tensor))


def _on_meta(tensor: Tensor) -> Tensor:
    # ZeRO-3 notes the shape on the parameter that it has emptied.
    shape = getattr(tensor, "ds_shape", None)
    if shape is not None:
        made = torch.empty(shape, dtype=tensor.dtype, device="meta")
    else:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
