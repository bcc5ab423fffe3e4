"""What a step of a contender takes, counted: operations by phase, bytes held, the peak and the way to it. On the CPU.

Nothing here is timed, and everything is the same on every machine with the same versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from benchmarks.side_by_side.step import TrainingStep
from benchmarks.side_by_side.theirs.accelerate_fsdp import resizing_followed
from benchmarks.side_by_side.theirs.compiled import GraphTracker
from hf_ckpt.patch.apply import offloaders_of
from hf_ckpt.simulation.cuda import emulate_cuda
from hf_ckpt.simulation.devices import CPU
from hf_ckpt.simulation.module_hooks import track_modules
from hf_ckpt.simulation.offload import SimulatedLink, peak_host_bytes
from hf_ckpt.simulation.op_costs import operator_cost
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, Timeline
from hf_ckpt.simulation.tape import Event, MemoryChange, read_tape
from hf_ckpt.simulation.tracker import Tracker, parameters_and_buffers
from hf_ckpt.structure.layers import find_layers

_MOST_POINTS = 200
_SIGN = {MemoryChange.ALLOCATE: 1, MemoryChange.FREE: -1, MemoryChange.NOTHING: 0}


def count(step: TrainingStep, called: nn.Module, *, is_compiled: bool = False) -> dict[str, Any]:
    """Follow one step, and return what it took as JSON types.

    Args:
        step: has run before, so that the optimizer has its state, and what is compiled is.
        called: what a contender made of the model.
        is_compiled: whether there are graphs to look into. Hooks on modules would keep torch from running them, so that
            nothing tells recomputation from the rest of backward, nor one category of bytes from another.
    """
    tracker = GraphTracker(costs=_operations) if is_compiled else Tracker(costs=_operations)
    tracker.record_existing(parameters_and_buffers(called), Category.PARAMETERS)
    tracker.record_existing(_state_of(step), Category.OPTIMIZER)
    tracker.record_existing(step.batch.items(), Category.TEMPORARY)
    for offloader in offloaders_of(step.model):
        # Else what was moved to the host would be in the memory of the CPU, as before.
        offloader.use_link(SimulatedLink(tracker, has_values=True))
    with tracker, nullcontext() if is_compiled else _watched(called, tracker):
        loss = step.forward(called)
        num_forward = len(tracker.tape.events)
        step.backward(loss)
        with tracker.phase(Phase.OPTIMIZER):
            norm = step.update()
    tape = tracker.tape
    memory = read_tape(tape, device="cpu", plan=None, tokens=step.batch["input_ids"].numel())
    flops = {phase.value: memory.num_flops.get(phase, 0) for phase in Phase}
    return {
        "num_flops": flops,
        "total_flops": sum(flops.values()),
        "held_bytes": sum(map(_bytes_of, tape.events[:num_forward])),
        "peak_bytes": memory.peak_bytes,
        "peak_at": memory.peak_at.describe(),
        "host_bytes": peak_host_bytes(tape),
        "by_category": {category.value: num_bytes for category, num_bytes in memory.by_category.items()},
        "timeline": thinned(memory.timeline),
        "loss": float(loss.detach()),
        "grad_norm": float(norm),
    }


@contextmanager
def _watched(called: nn.Module, tracker: Tracker) -> Iterator[None]:
    tracked = track_modules(called, find_layers(called), tracker)
    with resizing_followed(tracker), tracked, emulate_cuda(Step(), CPU, tracker):
        yield


def thinned(timeline: Timeline) -> list[list[float]]:
    """Return at most 200 points of a timeline: the share of the step that is over, and the most bytes until the next.

    Args:
        timeline: by its events, or by its seconds where it has any.
    """
    totals = timeline.total_bytes()
    seconds = timeline.seconds or tuple(map(float, range(len(totals))))
    end = seconds[-1] or 1.0
    most: dict[int, int] = {}
    for second, total in zip(seconds, totals, strict=True):
        slot = min(int(_MOST_POINTS * second / end), _MOST_POINTS - 1)
        most[slot] = max(most.get(slot, 0), total)
    return [[slot / _MOST_POINTS, total] for slot, total in sorted(most.items())]


def _operations(function: Any, args: Any, kwargs: Any, output: Any) -> tuple[float, int]:
    return 0.0, operator_cost(function, args, kwargs, output).num_flops


def _state_of(step: TrainingStep) -> Any:
    for state in step.optimizer.state.values():
        yield from state.items()


def _bytes_of(event: Event) -> int:
    return 0 if event.storage is None else _SIGN[event.change] * event.storage.num_bytes
