"""Figures that are counted and not timed: floating-point operations, and bytes held for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchmarks.cases import step
from hf_ckpt.simulation.step_memory import Category
from hf_ckpt.simulation.tape import Change
from hf_ckpt.simulation.tracker import Tracker, parameters_and_buffers

_SIGN = {Change.ALLOCATE: 1, Change.FREE: -1}

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
    """Return the bytes that a forward leaves for its backward, whoever holds them: autograd, a region, or the loss."""
    tracker = Tracker()
    tracker.know(parameters_and_buffers(model), Category.PARAMETERS)
    tracker.know(inputs.items(), Category.TEMPORARY)
    with tracker:
        loss = model(**inputs)["loss"]
        held = sum(_SIGN[event.change] * event.storage.num_bytes for event in tracker.tape.events if event.storage)
    del loss
    return held
