"""A training step as a chain of layers with the cost of each option: all that the planner knows of it. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hf_ckpt.policy.options import HeadMode
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
    """What one layer costs under one option. Bytes are relative to what is allocated just before its forward."""

    kept_bytes: int
    """Held after its forward, until its backward."""
    forward_bytes: int
    """The most while its forward runs."""
    backward_bytes: int
    """The most while its backward (with its recomputation) runs, without what earlier layers hold and what later layers
    left behind (`left_bytes`)."""
    left_bytes: int
    """What its backward leaves behind: its gradients. The same under every option; where options differ, the largest
    counts."""
    seconds: float
    """Of forward, backward and recomputation, in all micro-batches together."""
    cast_bytes: int = 0
    """Held after its forward besides `kept_bytes`, and let go when the model's forward ends: weights that autocast has
    cast and no backward needs."""
    host_bytes: int = 0
    """What waits on the host or on disk from its forward to its backward; not part of `kept_bytes`."""


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """One layer of the chain."""

    stack: int
    """Number of its stack in the plan."""
    layer_idx: int
    costs: Mapping[LayerPlan, Cost]
    """By option, an entry of a plan without a segment. What would not be exact on the layer, or what it has no part
    for, is missing. `NONE` is there."""
    can_join: bool = True
    """Whether it may share a segment with the layer before it."""
    forward_seconds: float | None = None
    """Of one whole forward in all micro-batches. A layer under `FULL` stops early when it is recomputed, most layers of
    a segment do not. None takes what `FULL` costs over `NONE`."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A training step as the planner sees it."""

    layers: tuple[ChainLayer, ...]
    """In the order in which they run."""
    base_bytes: int
    """Allocated before the first layer runs: states, inputs, embeddings."""
    head_bytes: int
    """The most between the last layer's forward and its backward, relative to what is allocated after the last layer's
    forward: logits and loss."""
    fixed_peak_bytes: int
    """The most at moments that no choice changes, such as the optimizer step."""
    other_seconds: float
    """Predicted time outside the layers."""
    input_bytes: int
    """Of a layer's input: what a segment saves."""
    num_micro_batches: int = 1
    """`left_bytes` are only left behind anew in the first of them."""
    head_left_bytes: int = 0
    """What the head's backward leaves behind: its gradients, there while the layers' backward runs."""
    head_backward_bytes: int = 0
    """The part of `head_bytes` that lies in backward, where `cast_bytes` are let go. Needed only where that is more
    than `head_bytes`, which then are those of the forward."""
    head: HeadMode = HeadMode.PLAIN
    """How the head runs in these figures."""
    head_seconds: float = 0.0
    """Of `other_seconds`, those of embeddings, head and loss."""
