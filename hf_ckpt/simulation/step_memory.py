"""What a training step needs, moment by moment: the result of a simulation, or of a step that was followed. Pure data.

Bytes are of one rank. GiB is 2**30.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from hf_ckpt import html_svg
from hf_ckpt.errors import did_you_mean
from hf_ckpt.policy.plan import Plan
from hf_ckpt.units import format_bytes


class Category(StrEnum):
    """What bytes are for. A storage belongs to one category for as long as it lives."""

    PARAMETERS = "parameters"
    """Weights and buffers, with the constants of 4-bit weights; under FSDP and ZeRO-3 this rank's share."""
    GATHERED = "gathered parameters"
    """Whole weights that FSDP or ZeRO-3 gathers for a layer, and what travels between ranks."""
    REFERENCE = "reference model"
    """Weights of models that are asked besides the trained one, such as trl's reference, and what forwards without
    gradients make in a training step: theirs, and those of the trained model with its adapters disabled."""
    OTHER = "other tensors"
    """What a run keeps besides its models, such as averaged weights."""
    GRADIENTS = "gradients"
    """Gradients of trainable parameters."""
    OPTIMIZER = "optimizer state"
    """What the optimizer keeps from step to step, on the device."""
    WORKSPACES = "cuBLAS workspaces"
    """What torch gives cuBLAS on CUDA, for the forward's thread and for that of backward; it stays between steps."""
    SAVED = "saved activations"
    """Made in forward and held for backward."""
    RECOMPUTED = "recomputation"
    """Made while a region runs forward again, in backward."""
    LOSS = "logits and loss"
    """Made after the last layer, forward and backward: the head, its logits, the loss."""
    TEMPORARY = "temporary"
    """The rest: what operators allocate and free, gradients of activations, the inputs of the step."""


# Pixels across a picture: more moments than that cannot be seen.
_STRETCHES = 500
COLOURS: Mapping[Category, str] = {
    Category.PARAMETERS: "#999999",
    Category.GATHERED: "#000000",
    Category.REFERENCE: "#882255",
    Category.OTHER: "#117733",
    Category.OPTIMIZER: "#0072B2",
    Category.GRADIENTS: "#009E73",
    Category.WORKSPACES: "#332288",
    Category.SAVED: "#56B4E9",
    Category.RECOMPUTED: "#D55E00",
    Category.LOSS: "#CC79A7",
    Category.TEMPORARY: "#F0E442",
}
"""Of each category, in the order in which they are stacked: what lasts longest lies lowest."""


class Phase(StrEnum):
    """Which part of the step runs."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTATION = "recomputation"
    OPTIMIZER = "optimizer"
    """Clipping of gradients and the step of the optimizer."""


class Place(NamedTuple):
    """Where in the step something happened. A tuple: there are tens of thousands of them.

    Args:
        phase: which part of the step.
        micro_batch: counted from 0.
        stack: path of the stack of layers, empty outside the layers.
        layer_idx: the layer, or None outside the layers.
        part: `attention` or `ffn`, or empty outside both.
        module: dotted path of the innermost module that ran, empty outside all.
        operator: name of the operator, such as `aten.mm.default`.
    """

    phase: Phase
    micro_batch: int = 0
    stack: str = ""
    layer_idx: int | None = None
    part: str = ""
    module: str = ""
    operator: str = ""

    def describe(self) -> str:
        """Return the place in words, such as `backward of layer 3 (ffn), aten.mm`."""
        where = f"{self.phase}" if self.layer_idx is None else f"{self.phase} of layer {self.layer_idx}"
        part = f" ({self.part})" if self.part else ""
        operator = f", {self.operator.removesuffix('.default')}" if self.operator else ""
        return f"{where}{part}{operator}"


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A storage that lives from a forward to its backward.

    Args:
        place: which operator made it, in which layer and part.
        num_bytes: size of the storage on the device.
        shape: of the tensor that the operator returned.
        dtype: such as `bfloat16`.
        why: the operators, and the modules below the layer, whose backward needs it, such as `mul of mlp`; empty where
            that was not recorded, or where autograd is not what holds it.
    """

    place: Place
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    why: str = ""


class TuplesOnDemand(Mapping[Category, tuple[int, ...]]):
    """Arrays of integers, by category, as tuples that are made where they are asked for: of most steps nobody asks."""

    def __init__(self, arrays: Mapping[Category, Any]) -> None:
        self._arrays = arrays
        self._made: dict[Category, tuple[int, ...]] = {}

    def __getitem__(self, category: Category) -> tuple[int, ...]:
        if category not in self._made:
            self._made[category] = tuple(self._arrays[category].tolist())
        return self._made[category]

    def __iter__(self) -> Iterator[Category]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes on the device after each event of the step; all tuples have one entry per event.

    Args:
        places: where in the step.
        bytes_by_category: for each category, what is alive. Categories that never have any are left out.
        seconds: predicted time since the step began; empty where no time was predicted.
    """

    places: tuple[Place, ...]
    bytes_by_category: Mapping[Category, tuple[int, ...]]
    seconds: tuple[float, ...] = ()

    def total_bytes(self) -> tuple[int, ...]:
        """Return the bytes of all categories after each event."""
        return tuple(map(sum, zip(*self.bytes_by_category.values(), strict=True)))

    def stacked(self) -> tuple[list[float], dict[Category, tuple[list[int], list[int]]]]:
        """Return what pictures show: moments, and the lower and upper edge of each category there, the lowest first.

        Moments are seconds, or numbers of events where no time was predicted.
        """
        totals = self.total_bytes()
        x = self.seconds or tuple(map(float, range(len(totals))))
        end = (x[-1] if x else 0.0) or 1.0
        best: dict[int, int] = {}
        # Of each stretch of time the event with most memory is shown, so that peaks stay.
        for index, total in enumerate(totals):
            stretch = int(x[index] / end * _STRETCHES)
            if stretch not in best or total > totals[best[stretch]]:
                best[stretch] = index
        shown = sorted(best.values())
        below, edges = [0] * len(shown), {}
        for category in COLOURS:
            if (column := self.bytes_by_category.get(category)) is not None:
                above = [low + column[index] for low, index in zip(below, shown, strict=True)]
                edges[category] = below, above
                below = above
        return [x[index] for index in shown], edges


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted seconds of one optimizer step on one rank, all micro-batches together."""

    forward: float = 0.0
    backward: float = 0.0
    recomputation: float = 0.0
    optimizer: float = 0.0
    copies: float = 0.0
    """Between host and device, and between ranks, as far as nothing else runs meanwhile."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.forward + self.backward + self.recomputation + self.optimizer + self.copies


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory and time of one optimizer step under one plan.

    Args:
        device: name of the device.
        plan: the plan in force, or None without one.
        tokens: tokens of the optimizer step on this rank, padding included.
        peak_bytes: the most that is allocated at any moment, as `torch.cuda.max_memory_allocated` counts: blocks.
        peak_at: that moment.
        by_category: bytes of each category at that moment; they add up to `peak_bytes`.
        timeline: the whole step.
        ledger: what is held from forward to backward, in the order in which it was made (first micro-batch).
        time: predicted seconds; all zero where none were predicted.
        num_flops: floating-point operations of the step, by phase.
        host_bytes: what lies on the host instead of the device, such as paged optimizer state.
        tensor_peak_bytes: the most that tensors take at any moment; less than `peak_bytes` where the blocks of the
            device's allocator are larger than what lies in them.
    """

    device: str
    plan: Plan | None
    tokens: int
    peak_bytes: int
    peak_at: Place
    by_category: Mapping[Category, int]
    timeline: Timeline
    ledger: tuple[HeldTensor, ...] = ()
    time: StepTime = StepTime()
    num_flops: Mapping[Phase, int] = field(default_factory=dict)
    host_bytes: int = 0
    tensor_peak_bytes: int = 0

    def peak_of(self, phase: Phase | str) -> int:
        """Return the most that is allocated during one part of the step, in bytes; 0 where it never runs.

        `phase` may be its name. Raises `ValueError` for a name of none.
        """
        if phase not in list(Phase):
            raise ValueError(
                f'No phase is called "{phase}". Phases are {", ".join(Phase)}.{did_you_mean(phase, Phase)}'
            )
        totals = zip(self.timeline.places, self.timeline.total_bytes(), strict=True)
        return max((total for place, total in totals if place.phase == phase), default=0)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: what fills the peak, and memory over the step."""
        head = f"Peak {format_bytes(self.peak_bytes)} on {self.device}, in the {self.peak_at.describe()}"
        if self.time.total:
            head += f"; a step takes {self.time.total:.3g} s as predicted"
        rows = [(str(category), format_bytes(size)) for category, size in self.by_category.items() if size]
        return html_svg.notebook(
            html_svg.element("p", html_svg.escape(f"{head}.")),
            html_svg.html_table(rows, header=("at the peak", "bytes")),
            self.picture(),
        )

    def picture(self) -> str:
        """Return memory over the step as SVG, stacked by category."""
        moments, edges = self.timeline.stacked()
        named = {str(category): each for category, each in edges.items()}
        colours = {str(category): COLOURS[category] for category in edges}
        seconds = self.timeline.seconds
        over, shown = "one step, event by event", seconds[-1] if seconds else 0.0
        if shown:
            # Of many micro-batches only those are simulated that differ.
            is_whole = shown > 0.99 * self.time.total
            over = f"one step: {shown:.3g} s" if is_whole else f"{shown:.3g} s; other micro-batches are like these"
        drawn = html_svg.areas(moments, named, colours, label="memory over the step", over=over)
        return html_svg.element("div", drawn, class_="wide", style="overflow-x:auto") + html_svg.legend(colours)
