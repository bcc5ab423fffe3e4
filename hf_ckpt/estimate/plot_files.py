"""Pictures of an estimate: memory over the step, the frontier of peak against time, memory against checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from hf_ckpt.errors import HFCkptError
from hf_ckpt.estimate.estimate import RECIPE, Estimate, Say
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, describe_rows
from hf_ckpt.planner.chain import FULL, NONE, Chain
from hf_ckpt.planner.dynamic_programming import ChainPlanner
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.plots import Curve, draw_checkpoints, draw_frontier, draw_steps
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.structure.layers import Stack

_POINTS = 60
_PANELS = (RECIPE, "none", "full", "selective", "segments", AUTO)
"""The rows whose memory is drawn over the step; the others are in the frontier."""


def draw_all(found: Estimate, path: Path, say: Say) -> Iterator[Path]:
    """Draw three pictures and yield their files: `path`, and the same with `-frontier` and `-checkpoints`."""
    subject, device = found.subject, found.devices[0]
    steps, predictor = found.steps(), found.predictor
    title = _title(subject, device)
    shown = {name: steps[name] for name in _PANELS if name in steps}
    draw_steps(shown, path, title=title, limit_bytes=device.memory_bytes)
    yield path
    chain = predictor.chain
    yield draw_planned(chain, steps, _beside(path, "frontier"), subject=subject, device=device)
    say("Simulating segments of several sizes ...")
    stack = _main_stack(subject)
    pairs = [
        (Curve("nested segments" if nested else "segments", simulated), _formula(chain, len(stack.layers), nested))
        for nested in (False, True)
        if (simulated := _simulated(predictor, len(stack.layers), nested))
    ]
    if pairs:
        written = _beside(path, "checkpoints")
        optimum = math.sqrt(len(stack.layers))
        draw_checkpoints(pairs, written, title=title, optimum=optimum)
        yield written


def draw_planned(chain: Chain, steps: dict[str, StepMemory], path: Path, *, subject: Subject, device: Device) -> Path:
    """Draw the frontier of a chain, with steps as marks, and return the file."""
    draw_frontier(
        steps, Curve("planner", frontier(chain)), path, title=_title(subject, device), limit_bytes=device.memory_bytes
    )
    return path


def frontier(chain: Chain) -> list[tuple[float, float]]:
    """Return what the planner chooses as the budget changes: the time of a step, and its peak."""
    return [(point.seconds, float(point.peak_bytes)) for point in ChainPlanner(chain).frontier(_POINTS)]


def _simulated(predictor: Predictor, num_layers: int, nested: bool) -> list[tuple[float, float]]:
    """Return peaks by the number of segments."""
    points = []
    for size in _sizes(num_layers):
        try:
            plan = predictor.subject.resolve("full", segment_size=size, nested=nested)
        except HFCkptError:
            return []
        points.append((float(math.ceil(num_layers / size)), float(predictor.memory(plan).peak_bytes)))
    return points


def _sizes(num_layers: int) -> list[int]:
    """Return sizes of segments, in powers of two and with the square root, from one layer to all of them."""
    powers = {1 << power for power in range(num_layers.bit_length())}
    return sorted({size for size in powers if size < num_layers} | {math.ceil(math.sqrt(num_layers)), num_layers})


def _formula(chain: Chain, num_layers: int, nested: bool) -> Curve:
    """Return what k segments of L layers need: k inputs, and what is brought back at a time, with the last layer."""
    costs = chain.layers[len(chain.layers) // 2].costs
    layer, last = costs[NONE].kept_bytes, costs[FULL].backward_bytes
    each = chain.input_bytes if nested else layer

    def peak(number: float) -> float:
        kept = number * chain.input_bytes
        brought_back = (num_layers / number - 1) * each
        return chain.base_bytes + max(kept + brought_back + last, kept + chain.head_bytes)

    name = "k + L/k inputs" if nested else "k inputs + L/k layers"
    return Curve(name, [(float(number), peak(number)) for number in range(1, num_layers + 1)])


def _main_stack(subject: Subject) -> Stack:
    """Return the stack of the language model, or the longest one."""
    return max(subject.stacks, key=lambda stack: ("language" in stack.roles, len(stack.layers)))


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f"{path.stem}-{what}{path.suffix}")


def _title(subject: Subject, device: Device) -> str:
    name = Path(subject.title).name
    return f"{name}, {describe_rows(subject.step)}, {device.title}"
