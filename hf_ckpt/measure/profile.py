"""A training step that really runs: time of forward, backward and recomputation, memory after each, and a trace.

Works on any accelerator that torch knows, and on the CPU. Knows no recipe.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.measure.gauges import Clock, Memory
from hf_ckpt.measure.layer_ranges import LayerRanges, Range
from hf_ckpt.patch.apply import apply
from hf_ckpt.structure.layers import Stack, find_layers
from hf_ckpt.units import format_bytes


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase of a step.

    Args:
        seconds: median over the measured steps.
        bytes_after: allocated when it ends; of recomputation, the most at the end of one of its regions. Resident
            bytes of the process on a CPU.
        peak_bytes: the most while it runs; of recomputation 0: it runs inside backward.
    """

    seconds: float
    bytes_after: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Seconds of one layer: of its forward, and of running it, or a part of it, again in backward (medians)."""

    stack: str
    layer_idx: int
    forward: float
    recomputation: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What a step was measured to take.

    Args:
        device: where it ran.
        is_resident: whether bytes are resident ones of the process, for want of an allocator that counts.
        num_steps: how many steps were measured.
        phases: `forward`, `recomputation`, `backward` (without recomputation) and, with an optimizer, `optimizer`.
        layers: each layer.
        peak_bytes: the most over the whole step.
        trace_path: the trace that was written, if any.
    """

    device: str
    is_resident: bool
    num_steps: int
    phases: Mapping[str, PhaseFigures]
    layers: tuple[LayerFigures, ...]
    peak_bytes: int
    trace_path: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def recomputation_over_forward(self) -> float:
        """How much of a forward runs again."""
        return self.phases["recomputation"].seconds / self.phases["forward"].seconds

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        figures = asdict(self)
        figures["layers"] = [asdict(layer) for layer in self.layers]
        figures["seconds"] = self.seconds
        figures["recomputation_over_forward"] = self.recomputation_over_forward
        return figures

    def table(self) -> str:
        """Return the phases as text: time, share of the step, and memory after each."""
        kind = "resident" if self.is_resident else "allocated"
        rows = [("", "time", "share", f"{kind} after")]
        for name, phase in self.phases.items():
            time_ms, share = f"{1e3 * phase.seconds:.1f} ms", f"{phase.seconds / self.seconds:.0%}"
            rows.append((name, time_ms, share, format_bytes(phase.bytes_after) if phase.seconds else "-"))
        rows.append(("step", f"{1e3 * self.seconds:.1f} ms", "100%", f"peak {format_bytes(self.peak_bytes)}"))
        forward, backward = self.phases["forward"].seconds, self.phases["backward"].seconds
        lines = [f"{name:<14}{taken:>12}{share:>8}  {memory:>18}".rstrip() for name, taken, share, memory in rows]
        lines.append(
            f"backward takes {backward / forward:.2f} x forward, recomputation {self.recomputation_over_forward:.2f} x"
        )
        if self.trace_path is not None:
            lines.append(f"trace: {self.trace_path} (open it in https://ui.perfetto.dev or chrome://tracing)")
        return "\n".join(lines)


def profile_step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    plan: object = None,
    autocast: torch.dtype | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    num_warmup: int = 2,
    num_steps: int = 5,
    trace_path: Path | str | None = None,
) -> Profile:
    """Run and measure training steps.

    Args:
        model: on its device; gradients are cleared, and weights change if there is an optimizer.
        inputs: what the model takes, labels among it, so that it returns a loss.
        plan: a `Plan` or a policy to put in force meanwhile; None runs the model as it is, with the plan that it may
            already carry.
        autocast: dtype of mixed precision, as the Trainer's bf16 and fp16.
        optimizer: steps after each backward, with its state in memory.
        num_warmup: steps before the first measured one: they load kernels and allocate the optimizer's state.
        num_steps: measured steps.
        trace_path: write the trace of one more step there, for chrome://tracing or Perfetto: one range per layer
            (`hf_ckpt layer 3`) and per recomputation (`recompute layer 3`).

    Raises:
        HFCkptError: the plan does not suit the model.
    """
    place = next(model.parameters()).device
    stacks = find_layers(model)
    was_training = model.training
    model.train()
    in_force: AbstractContextManager[Any] = nullcontext() if plan is None else apply(model, plan, prove="off")
    try:
        with in_force:
            step = _Step(model, inputs, place, autocast, optimizer)
            for _ in range(num_warmup):
                step.run()
            measured = [_measure(step, stacks) for _ in range(num_steps)]
            if trace_path is not None:
                _trace(step, stacks, Path(trace_path))
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    return _together(measured, place, None if trace_path is None else str(trace_path))


# --- One step. ---


@dataclass
class _Step:
    model: nn.Module
    inputs: Mapping[str, Any]
    place: torch.device
    autocast: torch.dtype | None
    optimizer: torch.optim.Optimizer | None

    def forward(self) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        mixed = torch.autocast(self.place.type, self.autocast, enabled=self.autocast is not None)
        with mixed:
            loss: Tensor = self.model(**self.inputs)["loss"]
        return loss

    def run(self) -> None:
        loss = self.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.step()


@dataclass
class _Measured:
    phases: dict[str, PhaseFigures]
    forward: dict[tuple[str, int], float]
    recomputation: dict[tuple[str, int], float]


def _measure(step: _Step, stacks: tuple[Stack, ...]) -> _Measured:
    clock = Clock(step.place)
    memory = Memory(step.place)
    with LayerRanges(step.model, stacks, stamp=clock.stamp, measure=memory.now) as ranges:
        clock.synchronize()
        memory.forget_peak()
        marks = [clock.stamp()]
        loss = step.forward()
        marks.append(clock.stamp())
        after = [(memory.now(), memory.peak())]
        memory.forget_peak()
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(clock.stamp())
        after.append((memory.now(), memory.peak()))
        if step.optimizer is not None:
            memory.forget_peak()
            step.optimizer.step()
            marks.append(clock.stamp())
            after.append((memory.now(), memory.peak()))
        clock.synchronize()
    forward, recomputation = (_by_layer(found, clock) for found in (ranges.forward, ranges.recomputation))
    again = sum(recomputation.values())
    phases = {
        "forward": PhaseFigures(clock.seconds(marks[0], marks[1]), *after[0]),
        "recomputation": PhaseFigures(again, max((found.bytes_after for found in ranges.recomputation), default=0), 0),
        "backward": PhaseFigures(clock.seconds(marks[1], marks[2]) - again, *after[1]),
    }
    if step.optimizer is not None:
        phases["optimizer"] = PhaseFigures(clock.seconds(marks[2], marks[3]), *after[2])
    return _Measured(phases, forward, recomputation)


def _by_layer(ranges: list[Range], clock: Clock) -> dict[tuple[str, int], float]:
    seconds: dict[tuple[str, int], float] = {}
    for found in ranges:
        key = (found.stack, found.layer_idx)
        seconds[key] = seconds.get(key, 0.0) + clock.seconds(found.start, found.end)
    return seconds


def _trace(step: _Step, stacks: tuple[Stack, ...], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        with LayerRanges(step.model, stacks, is_named=True):
            step.run()
        Clock(step.place).synchronize()
    profiler.export_chrome_trace(str(path))


def _together(measured: list[_Measured], place: torch.device, trace_path: str | None) -> Profile:
    phases = {
        name: PhaseFigures(
            statistics.median(one.phases[name].seconds for one in measured),
            max(one.phases[name].bytes_after for one in measured),
            max(one.phases[name].peak_bytes for one in measured),
        )
        for name in measured[0].phases
    }
    layers = tuple(
        LayerFigures(
            stack,
            layer_idx,
            statistics.median(one.forward.get((stack, layer_idx), 0.0) for one in measured),
            statistics.median(one.recomputation.get((stack, layer_idx), 0.0) for one in measured),
        )
        for stack, layer_idx in measured[0].forward
    )
    return Profile(
        device=_title(place),
        is_resident=place.type == "cpu",
        num_steps=len(measured),
        phases=phases,
        layers=layers,
        peak_bytes=max(phase.peak_bytes for phase in phases.values()),
        trace_path=trace_path,
    )


def _title(place: torch.device) -> str:
    return torch.cuda.get_device_name(place) if place.type == "cuda" else place.type
