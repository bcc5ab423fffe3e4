"""How long steps of a contender take, phase by phase, and on an accelerator the memory that they need."""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.side_by_side.step import TrainingStep
from hf_ckpt.layers import find_layers
from hf_ckpt.memory.gauges import Clock, Memory
from hf_ckpt.memory.layer_ranges import LayerRanges

PHASES = ("forward", "backward", "optimizer")


@dataclass
class Times:
    """Seconds of steps, in the order in which they ran.

    Args:
        phases: of each phase.
        recomputation: of the steps that were split further.
        peaks: the most allocated in each turn, on an accelerator.
        reserved: the most that the allocator held in each turn.
        loss: of the last step.
        grad_norm: likewise.
    """

    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    recomputation: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    loss: float = float("nan")
    grad_norm: float = float("nan")

    @property
    def steps(self) -> list[float]:
        """Seconds of whole steps."""
        return [sum(step) for step in zip(*self.phases.values(), strict=True)]

    def as_json(self) -> dict[str, Any]:
        """Return medians and spread in milliseconds; the medians of phases need not add up to that of steps."""
        steps = [1e3 * second for second in self.steps]
        medians = {f"{phase}_ms": 1e3 * statistics.median(seconds) for phase, seconds in self.phases.items()}
        figures = {
            "step_time_ms": {
                "median": statistics.median(steps),
                "min": min(steps),
                "max": max(steps),
                "quartiles": statistics.quantiles(steps, n=4) if len(steps) > 1 else steps * 3,
            },
            **medians,
            "recomputation_ms": 1e3 * statistics.median(self.recomputation),
            "loss": self.loss,
            "grad_norm": self.grad_norm,
        }
        if self.peaks:
            figures |= {"peak_bytes": max(self.peaks), "peak_reserved_bytes": max(self.reserved)}
        return figures


def empty(place: torch.device) -> None:
    """Let go what nobody holds, the allocator's blocks too.

    Args:
        place: the device.
    """
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()


def turn(
    step: TrainingStep, called: nn.Module, times: Times, *, num_warmup: int, num_steps: int, is_split: bool
) -> None:
    """Let a contender run a few steps, and take their times.

    Args:
        step: what runs.
        called: what the contender made of the model.
        times: is added to.
        num_warmup: steps before, which are not timed.
        num_steps: timed steps.
        is_split: whether one more step tells recomputation from the rest of backward.
    """
    place = next(step.model.parameters()).device
    for _ in range(num_warmup):
        step.run(called)
    clock, memory = Clock(place), Memory(place)
    clock.synchronize()
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    for _ in range(num_steps):
        _timed(step, called, times, clock)
    if place.type == "cuda":
        times.peaks.append(memory.peak())
        times.reserved.append(torch.cuda.max_memory_reserved(place))
    if is_split:
        times.recomputation.append(_recomputation(step, called, clock))


def _timed(step: TrainingStep, called: nn.Module, times: Times, clock: Clock) -> None:
    stamps = [clock.stamp()]
    loss = step.forward(called)
    stamps.append(clock.stamp())
    step.backward(loss)
    stamps.append(clock.stamp())
    norm = step.update()
    stamps.append(clock.stamp())
    clock.synchronize()
    for phase, start, end in zip(PHASES, stamps, stamps[1:], strict=False):
        times.phases[phase].append(clock.seconds(start, end))
    times.loss, times.grad_norm = float(loss.detach()), float(norm)


def _recomputation(step: TrainingStep, called: nn.Module, clock: Clock) -> float:
    """Return the seconds of forwards that run again in a step; hooks on modules tell, so it is a step of its own."""
    with LayerRanges(called, find_layers(called), stamp=clock.stamp) as ranges:
        step.run(called)
        clock.synchronize()
    return sum(clock.seconds(found.start, found.end) for found in ranges.recomputation)
