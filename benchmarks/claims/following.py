"""A forward and a backward that really run on the CPU, followed: operations by phase, bytes held, live peak. Exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hf_ckpt.simulation.module_hooks import track_modules
from hf_ckpt.simulation.op_costs import operator_cost
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory
from hf_ckpt.simulation.tape import MemoryChange, Tape, read_tape
from hf_ckpt.simulation.tracker import Tracker, parameters_and_buffers
from hf_ckpt.structure.layers import find_layers

_SIGN = {MemoryChange.ALLOCATE: 1, MemoryChange.FREE: -1}
_NOT_ACTIVATIONS = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER, Category.WORKSPACES)


@dataclass(frozen=True, kw_only=True)
class Followed:
    """What a forward and a backward did.

    Args:
        num_flops: floating-point operations of matrix products and attention, by phase.
        held_bytes: alive at the end of forward beyond weights and inputs, whoever holds them.
        peak_bytes: the most that was alive at any moment beyond weights and their gradients, the inputs among it.
        held_by_layer: bytes that were made in each layer and held for backward; the first layer's input is not in it.
        held_by_module: the same of all layers together, by the innermost module of the layer that made them.
    """

    num_flops: dict[str, int]
    held_bytes: int
    peak_bytes: int
    held_by_layer: dict[int, int]
    held_by_module: dict[str, int]

    @property
    def total_flops(self) -> int:
        """Operations of forward, recomputation and backward."""
        return sum(self.num_flops.values())

    @property
    def backward_flops(self) -> int:
        """Operations from the loss back: those of backward, and those that run again in it."""
        return self.total_flops - self.num_flops["forward"]

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        return {
            "num_flops": self.num_flops,
            "total_flops": self.total_flops,
            "held_bytes": self.held_bytes,
            "peak_bytes": self.peak_bytes,
        }


def follow(model: nn.Module, loss_of: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Followed:
    """Run forward and backward once, and return what they did.

    Args:
        model: on the CPU, in training mode: one of transformers, whose steps are attributed to layers, or one without
            parameters.
        loss_of: runs the forward.
        inputs: what it is given; they are there before the step.
    """
    stacks = find_layers(model) if hasattr(model, "config") else ()
    tracker = Tracker(costs=_operations)
    tracker.record_existing(parameters_and_buffers(model), Category.PARAMETERS)
    tracker.record_existing((("", tensor) for tensor in inputs), Category.TEMPORARY)
    model.zero_grad(set_to_none=True)
    with tracker, track_modules(model, stacks, tracker) if stacks else nullcontext():
        loss = loss_of()
        held = _alive_bytes(tracker.tape)
        loss.backward()  # type: ignore[no-untyped-call]  # upstream
    del loss
    return _followed(read_tape(tracker.tape, device="cpu", plan=None, tokens=0), held)


def _operations(function: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, int]:
    return 0.0, operator_cost(function, args, kwargs, output).num_flops


def _alive_bytes(tape: Tape) -> int:
    return sum(_SIGN[event.change] * event.storage.num_bytes for event in tape.events if event.storage)


def _followed(memory: StepMemory, held_bytes: int) -> Followed:
    by_layer: Counter[int] = Counter()
    by_module: Counter[str] = Counter()
    for tensor in memory.ledger:
        place = tensor.place
        if place.layer_idx is not None:
            by_layer[place.layer_idx] += tensor.num_bytes
            by_module[place.module.removeprefix(f"{place.stack}.{place.layer_idx}").lstrip(".")] += tensor.num_bytes
    return Followed(
        num_flops={str(phase): memory.num_flops.get(phase, 0) for phase in Phase if phase is not Phase.OPTIMIZER},
        held_bytes=held_bytes,
        peak_bytes=activation_peak(memory),
        held_by_layer=dict(by_layer),
        held_by_module=dict(by_module),
    )


def activation_peak(memory: StepMemory, *without: Category) -> int:
    """Return the most that is alive at any moment of a step beyond weights, gradients and the optimizer's state.

    Args:
        memory: of the step.
        without: what is left out too.
    """
    columns = [
        column
        for category, column in memory.timeline.bytes_by_category.items()
        if category not in (*_NOT_ACTIVATIONS, *without)
    ]
    return max(map(sum, zip(*columns, strict=True)))
