"""How long steps of a contender take, phase by phase, and on an accelerator the memory that they need."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.side_by_side.step import TrainingStep
from hf_ckpt.measure.profile import Clock, LayerRanges, MemoryReader
from hf_ckpt.structure.layers import find_layers

PHASES = ("forward", "backward", "optimizer")


def figures_of(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians and spread over turns in milliseconds; the medians of phases need not add up to that of steps.

    Args:
        turns: of one contender, as `turn` returns them; one of them at least.
    """
    phases = {phase: [1e3 * second for one in turns for second in one["seconds"][phase]] for phase in PHASES}
    steps = [sum(step) for step in zip(*phases.values(), strict=True)]
    recomputation = [1e3 * one["recomputation"] for one in turns if "recomputation" in one]
    figures = {
        "step_time_ms": {
            "median": statistics.median(steps),
            "min": min(steps),
            "max": max(steps),
            "quartiles": statistics.quantiles(steps, n=4) if len(steps) > 1 else steps * 3,
        },
        **{f"{phase}_ms": statistics.median(each) for phase, each in phases.items()},
        "loss": turns[-1]["loss"],
        "grad_norm": turns[-1]["grad_norm"],
    }
    if recomputation:
        figures["recomputation_ms"] = statistics.median(recomputation)
    for most in ("peak_bytes", "peak_reserved_bytes"):
        if most in turns[0]:
            figures[most] = max(one[most] for one in turns)
    return figures


def empty(place: torch.device) -> None:
    """Let go what nobody holds, the allocator's blocks too.

    Args:
        place: the device.
    """
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()


def turn(step: TrainingStep, called: nn.Module, *, num_warmup: int, num_steps: int, is_split: bool) -> dict[str, Any]:
    """Let a contender run a few steps; return what they took as JSON types, in the order in which they ran.

    Args:
        step: what runs.
        called: what the contender made of the model.
        num_warmup: steps before, which are not timed.
        num_steps: timed steps.
        is_split: whether one more step tells recomputation from the rest of backward.
    """
    place = next(step.model.parameters()).device
    for _ in range(num_warmup):
        step.run(called)
    clock, memory = Clock(place), MemoryReader(place)
    clock.synchronize()
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    timed = [_timed(step, called, clock) for _ in range(num_steps)]
    found: dict[str, Any] = {
        "seconds": {phase: [seconds[phase] for seconds, _, _ in timed] for phase in PHASES},
        "num_warmup": num_warmup,
        "loss": timed[-1][1],
        "grad_norm": timed[-1][2],
    }
    if place.type == "cuda":
        found |= {"peak_bytes": memory.peak(), "peak_reserved_bytes": torch.cuda.max_memory_reserved(place)}
    if is_split:
        found["recomputation"] = _recomputation(step, called, clock)
    return found


def _timed(step: TrainingStep, called: nn.Module, clock: Clock) -> tuple[dict[str, float], float, float]:
    """Return the seconds of each phase of a step, its loss and its gradient norm."""
    stamps = [clock.stamp()]
    loss = step.forward(called)
    stamps.append(clock.stamp())
    step.backward(loss)
    stamps.append(clock.stamp())
    norm = step.update()
    stamps.append(clock.stamp())
    clock.synchronize()
    seconds = map(clock.seconds, stamps, stamps[1:])
    return dict(zip(PHASES, seconds, strict=True)), float(loss.detach()), float(norm)


def _recomputation(step: TrainingStep, called: nn.Module, clock: Clock) -> float:
    """Return the seconds of forwards that run again in a step; hooks on modules tell, so it is a step of its own."""
    with LayerRanges(called, find_layers(called), stamp=clock.stamp) as ranges:
        step.run(called)
        clock.synchronize()
    return sum(clock.seconds(found.start, found.end) for found in ranges.recomputation)
