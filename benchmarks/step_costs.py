"""What a training step costs, timed or counted: seconds, floating-point operations, and bytes held for backward."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hf_ckpt.simulation.step_memory import Category
from hf_ckpt.simulation.tape import MemoryChange
from hf_ckpt.simulation.tracker import Tracker, parameters_and_buffers

Built = TypeVar("Built")


class Bench(Generic[Built]):
    """What contenders take turns on, built when the first one needs it: a measurement that goes on may need none."""

    def __init__(self, build: Callable[[], Built]) -> None:
        self._build = build

    @cached_property
    def built(self) -> Built:
        """The model, with what it is called with."""
        gc.collect()
        return self._build()

    def drop(self) -> None:
        """Forget what was built; the next contender gets a new one."""
        del self.built


# --- Timed. ---


def step(model: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Run forward and backward; return the loss."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach())


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(model: nn.Module, inputs: dict[str, Tensor], device: str) -> tuple[float, float]:
    """Run one step; return its loss and its seconds."""
    synchronize(device)
    start = time.perf_counter()
    loss = step(model, inputs)
    synchronize(device)
    return loss, time.perf_counter() - start


# --- Counted. ---

_SIGN = {MemoryChange.ALLOCATE: 1, MemoryChange.FREE: -1}

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
    tracker.record_existing(parameters_and_buffers(model), Category.PARAMETERS)
    tracker.record_existing(inputs.items(), Category.TEMPORARY)
    with tracker:
        loss = model(**inputs)["loss"]
        held = sum(_SIGN[event.change] * event.storage.num_bytes for event in tracker.tape.events if event.storage)
    del loss
    return held
