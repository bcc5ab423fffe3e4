"""A decoder as a chain of layers with the cost of each choice: what the planner needs to know of a step. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_ckpt.policy.modifiers import HeadMode
from hf_ckpt.policy.plan import LayerPlan
from hf_ckpt.policy.policy import Mode

NONE = LayerPlan()
"""The option of doing nothing: every layer has it."""
FULL = LayerPlan(Mode.FULL)
"""The option that segments are made of."""


def rank(option: LayerPlan) -> tuple[object, ...]:
    """Return a key that sorts options: by mode as in `Mode`, those without modifiers first."""
    return (
        list(Mode).index(option.mode),
        option.offload is not None,
        option.tiles is not None,
        len(option.save),
        option.save,
        str(option.tiles),
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """What one layer costs under one option. Bytes are relative to what is allocated just before its forward.

    Args:
        kept_bytes: held after its forward, until its backward.
        forward_bytes: the most while its forward runs.
        backward_bytes: the most while its backward (with its recomputation) runs, what earlier layers hold and what
            later layers left behind (`left_bytes`) not counted.
        left_bytes: what its backward leaves behind: its gradients. The same under every option; where options differ,
            the largest counts.
        seconds: of forward, backward and recomputation, in all micro-batches together.
        cast_bytes: held after its forward besides `kept_bytes`, and let go when the model's forward ends: weights that
            autocast has cast and no backward needs.
        host_bytes: what waits on the host or on disk, beside `kept_bytes`, from its forward to its backward.
    """

    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    left_bytes: int
    seconds: float
    cast_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """One layer of the chain.

    Args:
        stack: number of its stack in the plan.
        layer_idx: its place in the stack.
        costs: by option, an entry of a plan without a segment; what would not be exact on it, or what it has no part
            for, is missing. `NONE` is there.
        can_join: whether it may share a segment with the layer before it.
        forward_seconds: of one whole forward in all micro-batches. A layer under `FULL` stops early when it is
            recomputed, most layers of a segment do not. None takes what `FULL` costs over `NONE`.
    """

    stack: int
    layer_idx: int
    costs: Mapping[LayerPlan, Cost]
    can_join: bool = True
    forward_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """A training step as the planner sees it.

    Args:
        layers: in the order in which they run.
        base_bytes: allocated before the first layer runs: states, inputs, embeddings.
        head_bytes: the most between the last layer's forward and its backward, relative to what is allocated after
            the last layer's forward: logits and loss.
        fixed_peak_bytes: the most at moments that no choice changes, such as the optimizer step.
        other_seconds: predicted time outside the layers.
        input_bytes: of a layer's input: what a segment saves.
        num_micro_batches: `left_bytes` are only left behind anew in the first of them.
        head_left_bytes: what the head's backward leaves behind: its gradients, there while the layers' backward runs.
        head_backward_bytes: the part of `head_bytes` that lies in backward, where `cast_bytes` are let go. Needed only
            where that is more than `head_bytes`, which then are those of the forward.
        head: how the head runs, for which these figures are.
        head_seconds: of `other_seconds`, those of embeddings, head and loss.
    """

    layers: tuple[ChainLayer, ...]
    base_bytes: int
    head_bytes: int
    fixed_peak_bytes: int
    other_seconds: float
    input_bytes: int
    num_micro_batches: int = 1
    head_left_bytes: int = 0
    head_backward_bytes: int = 0
    head: HeadMode = HeadMode.PLAIN
    head_seconds: float = 0.0
