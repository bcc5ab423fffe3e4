"""A training step that really runs: time of forward, backward and recomputation, memory after each, and a trace.

Works on any accelerator that torch knows, and on the CPU. `Clock`, `MemoryReader` and `LayerRanges` measure any other
run too. Knows no recipe.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.patch.apply import apply
from hf_ckpt.regions.execution_state import is_extra_run, is_in_backward
from hf_ckpt.simulation.step_memory import Phase
from hf_ckpt.structure.layers import Layer, Stack, find_layers
from hf_ckpt.units import format_bytes

_SELF = Path("/proc/self")  # What Linux tells of this process.


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """One phase of a step. Bytes are allocated ones; on a CPU resident ones of the process."""

    seconds: float  # Median over the measured steps.
    bytes_after: int  # When it ends; of recomputation, the most at the end of one of its regions.
    peak_bytes: int  # The most while it runs; 0 for recomputation, which runs inside backward.


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Seconds of one layer: of its forward, and of running it, or a part of it, again in backward (medians)."""

    stack: str
    layer_idx: int
    forward: float
    recomputation: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What a step was measured to take."""

    device: str
    is_resident: bool  # Whether bytes are resident ones of the process, because no allocator counts them.
    num_steps: int  # Measured steps.
    phases: Mapping[str, PhaseFigures]
    """By `Phase`: forward, recomputation, backward (without recomputation) and, with an optimizer, its step."""
    layers: tuple[LayerFigures, ...]
    peak_bytes: int  # The most over the whole step.
    trace_path: str | None = None  # The trace that was written, if any.

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def recomputation_over_forward(self) -> float:
        """Seconds of recomputation over those of the forward."""
        return self.phases[Phase.RECOMPUTATION].seconds / self.phases[Phase.FORWARD].seconds

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
        forward, backward = self.phases[Phase.FORWARD].seconds, self.phases[Phase.BACKWARD].seconds
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
    loss_of: Callable[[dict[str, Any]], Tensor] | None = None,
    plan: object = None,
    autocast: torch.dtype | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    num_warmup: int = 2,
    num_steps: int = 5,
    trace_path: Path | str | None = None,
) -> Profile:
    """Run and measure training steps.

    The model is on its device; its gradients are cleared, and with an `optimizer`, which steps after each backward, its
    weights change. `inputs` have labels among them, so that the model returns a loss; or `loss_of` computes it of them,
    as a Trainer's own does. `plan` (a `Plan` or a policy) is in force meanwhile; None keeps the plan that the model may
    carry. `autocast` is the dtype of mixed precision, as the Trainer's bf16 and fp16. The warm-up steps load kernels
    and allocate the optimizer's state. With `trace_path` one more step is traced, for chrome://tracing or Perfetto: one
    range per layer (`hf_ckpt layer 3`) and per recomputation (`recompute layer 3`). Raises `HFCkptError` if the plan
    does not suit the model.
    """
    device = next(model.parameters()).device
    stacks = find_layers(model)
    was_training = model.training
    model.train()
    in_force: AbstractContextManager[Any] = nullcontext() if plan is None else apply(model, plan, prove="off")
    try:
        with in_force:
            step = _Step(model, inputs, device, autocast, optimizer, loss_of)
            for _ in range(num_warmup):
                step.run()
            measured = [_measure(step, stacks) for _ in range(num_steps)]
            if trace_path is not None:
                _trace(step, stacks, Path(trace_path))
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    return _summarize(measured, device, None if trace_path is None else str(trace_path))


# --- One step. ---


@dataclass
class _Step:
    model: nn.Module
    inputs: Mapping[str, Any]
    device: torch.device
    autocast: torch.dtype | None
    optimizer: torch.optim.Optimizer | None
    loss_of: Callable[[dict[str, Any]], Tensor] | None = None

    def forward(self) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        mixed = torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)
        with mixed:
            if self.loss_of is not None:
                # Copied: trl's losses add to it.
                return self.loss_of({**self.inputs})
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
    clock = Clock(step.device)
    memory = MemoryReader(step.device)
    with LayerRanges(step.model, stacks, stamp=clock.stamp, measure=memory.now) as ranges:
        clock.synchronize()
        memory.reset_peak()
        marks = [clock.stamp()]
        loss = step.forward()
        marks.append(clock.stamp())
        after = [(memory.now(), memory.peak())]
        memory.reset_peak()
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(clock.stamp())
        after.append((memory.now(), memory.peak()))
        if step.optimizer is not None:
            memory.reset_peak()
            step.optimizer.step()
            marks.append(clock.stamp())
            after.append((memory.now(), memory.peak()))
        clock.synchronize()
    forward, recomputation = (_by_layer(found, clock) for found in (ranges.forward, ranges.recomputation))
    again = sum(recomputation.values())
    phases: dict[str, PhaseFigures] = {
        Phase.FORWARD: PhaseFigures(clock.seconds(marks[0], marks[1]), *after[0]),
        Phase.RECOMPUTATION: PhaseFigures(
            again, max((found.bytes_after for found in ranges.recomputation), default=0), 0
        ),
        Phase.BACKWARD: PhaseFigures(clock.seconds(marks[1], marks[2]) - again, *after[1]),
    }
    if step.optimizer is not None:
        phases[Phase.OPTIMIZER] = PhaseFigures(clock.seconds(marks[2], marks[3]), *after[2])
    return _Measured(phases, forward, recomputation)


def _by_layer(ranges: list[LayerRange], clock: Clock) -> dict[tuple[str, int], float]:
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
        Clock(step.device).synchronize()
    profiler.export_chrome_trace(str(path))


def _summarize(measured: list[_Measured], device: torch.device, trace_path: str | None) -> Profile:
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
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        is_resident=device.type == "cpu",
        num_steps=len(measured),
        phases=phases,
        layers=layers,
        peak_bytes=max(phase.peak_bytes for phase in phases.values()),
        trace_path=trace_path,
    )


# --- Layers. ---


@dataclass(slots=True)
class LayerRange:
    """One forward or recomputation of a layer. `start` and `end` are stamps."""

    stack: str  # Path of its stack.
    layer_idx: int
    start: Any
    end: Any = None
    bytes_after: int = 0  # Memory in use when it ended.


class LayerRanges:
    """Records where the forward and the recomputation of each layer begin and end, while it is entered.

    `stamp` is called at the beginning and the end of each range, `measure` at the end: it returns the bytes in use.
    With `is_named` torch's profiler shows the ranges as `hf_ckpt layer 3` and `recompute layer 3`.
    """

    def __init__(
        self,
        model: nn.Module,
        stacks: Sequence[Stack],
        *,
        stamp: Callable[[], Any] = lambda: None,
        measure: Callable[[], int] = lambda: 0,
        is_named: bool = False,
    ) -> None:
        self.forward: list[LayerRange] = []
        self.recomputation: list[LayerRange] = []
        self._model = model
        self._stacks = stacks
        self._stamp = stamp
        self._measure = measure
        self._is_named = is_named
        self._handles: list[Any] = []
        self._inside: list[nn.Module] = []
        self._last_child: dict[nn.Module, nn.Module] = {}
        self._parent: dict[nn.Module, nn.Module] = {}
        self._open: dict[bool, tuple[LayerRange, Any]] = {}

    def __enter__(self) -> LayerRanges:
        for stack in self._stacks:
            for layer in stack.layers:
                for module in dict.fromkeys((layer.outer, *layer.module.modules())):
                    entered, left = partial(self._enter, stack, layer), partial(self._leave, layer)
                    self._handles.append(module.register_forward_pre_hook(entered, prepend=True))
                    self._handles.append(module.register_forward_hook(left, always_call=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for is_recomputation in list(self._open):
            self._end(is_recomputation)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, stack: Stack, layer: Layer, module: nn.Module, args: Any) -> None:
        if is_extra_run():
            return
        is_recomputation = is_in_backward()
        if not self._inside and (is_recomputation or module is layer.outer):
            self._begin(stack, layer, is_recomputation)
        self._inside.append(module)

    # A recomputed layer does not run through its own hooks again, only through those of the modules inside of it. Its
    # recomputation begins where the first of them is entered in backward, and ends where the last one of its forward is
    # left, or where an exception leaves one of them: recomputation stops as soon as it has what backward needs.
    def _leave(self, layer: Layer, module: nn.Module, args: Any, output: Any) -> None:
        if is_extra_run():
            return
        self._inside.pop()
        if not is_in_backward():
            self._leave_forward(layer, module)
        elif not self._inside:
            parent = self._parent.get(module)
            is_last = parent is None or self._last_child.get(parent) is module
            if module is layer.outer or is_last or sys.exc_info()[0] is not None:
                self._end(is_recomputation=True)

    def _leave_forward(self, layer: Layer, module: nn.Module) -> None:
        if self._inside:
            self._parent[module] = self._inside[-1]
            self._last_child[self._inside[-1]] = module
        elif module is layer.outer:
            self._end(is_recomputation=False)

    def _begin(self, stack: Stack, layer: Layer, is_recomputation: bool) -> None:
        found = self._open.get(is_recomputation)
        if found is not None and (found[0].stack, found[0].layer_idx) == (stack.path, layer.layer_idx):
            return
        self._end(is_recomputation)
        where = "" if len(self._stacks) == 1 else f"{stack.path} "
        title = f"{'recompute' if is_recomputation else 'hf_ckpt'} {where}layer {layer.layer_idx}"
        name: Any = record_function(title) if self._is_named else nullcontext()
        name.__enter__()
        self._open[is_recomputation] = (LayerRange(stack.path, layer.layer_idx, self._stamp()), name)

    def _end(self, is_recomputation: bool) -> None:
        if is_recomputation not in self._open:
            return
        found, name = self._open.pop(is_recomputation)
        found.end, found.bytes_after = self._stamp(), self._measure()
        name.__exit__(None, None, None)
        (self.recomputation if is_recomputation else self.forward).append(found)


# --- Time and memory of a device. ---


class Clock:
    """Takes the time on a device, by events on its stream, so that nothing has to wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._place = device

    def stamp(self) -> Any:
        """Return the moment when the device gets to the end of what was issued to it so far."""
        if self._place.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._place, enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two stamps. Call `synchronize` before."""
        if self._place.type == "cpu":
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._place.type != "cpu":
            torch.accelerator.synchronize(self._place)


class MemoryReader:
    """Reads the bytes in use on a device, and their peak.

    On an accelerator that is what the allocator has given out. On the CPU it is the resident memory of the process,
    since nothing counts what is allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._place = device
        if device.type == "cpu" and not (_SELF / "status").is_file():
            raise UnsupportedError(
                "A step on the CPU is measured by the memory of its process, which this system does not tell "
                f"(there is no {_SELF}/status). Measure on a GPU or on Linux, or predict the step: hf-ckpt estimate."
            )

    def now(self) -> int:
        """Return the bytes in use."""
        if self._place.type == "cpu":
            return _resident_bytes("VmRSS")
        return int(torch.accelerator.memory_allocated(self._place))

    def peak(self) -> int:
        """Return the most that was in use since the last `reset_peak`."""
        if self._place.type == "cpu":
            return _resident_bytes("VmHWM")
        return int(torch.accelerator.max_memory_allocated(self._place))

    def reset_peak(self) -> None:
        """Let the peak be what is in use now."""
        if self._place.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._place)
        else:
            # Resets the highest resident size (man 5 proc).
            (_SELF / "clear_refs").write_text("5")


def _resident_bytes(field: str) -> int:
    lines = (_SELF / "status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
