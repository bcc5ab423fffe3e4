"""Figures that are counted and not timed: floating-point operations, and bytes held for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.cases import step

_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def flops(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Return the floating-point operations of one step: matrix products and attention."""
    # torch counts the attention kernels of CUDA only.
    formulas = {_CPU_ATTENTION: _attention, _CPU_ATTENTION_BACKWARD: _attention_backward}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        step(model, inputs)
    return int(counter.get_total_flops())


def held_bytes(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Return the bytes that autograd holds after a forward: storages counted once, parameters left out."""
    held: dict[int, int] = {}
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # The output is kept until the end, so that no address is used twice.
        output = model(**inputs)
    del output
    return sum(held.values())
