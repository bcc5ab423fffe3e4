"""What this library offers, as contenders: each policy that a user writes, and plans that the planner chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

import hf_ckpt
from benchmarks.host_limit import capped, with_capped_offload
from benchmarks.side_by_side.contender import OFFLOAD_WARMUP, SELECTIVE_WARMUP, Contender
from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import SELECTIVE_MODES, Mode

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {"policy": "full"}),
    "attention": ("attention", {"policy": "attention"}),
    "ffn": ("ffn", {"policy": "ffn"}),
    "every_2": ("full, every 2", {"policy": "full", "every_n_layers": 2}),
    "every_4": ("full, every 4", {"policy": "full", "every_n_layers": 4}),
    "segments": ("segments of sqrt(L)", {"policy": "full", "segment_size": "sqrt"}),
    "segments_nested": ("segments, nested", {"policy": "full", "segment_size": "sqrt", "nested": True}),
    "selective": ("selective", {"policy": "selective"}),
    "selective_attention": ("selective_attention", {"policy": "selective_attention"}),
    # In a twin everything is small.
    "full_offload": ("full + offload", {"policy": "full", "offload": {"to": "cpu", "min_bytes": 0}}),
    "full_tiles": ("full + tiles", {"policy": "full", "tiles": 4}),
    "full_head": ("full + chunked head", {"policy": "full", "head": "chunked"}),
    "full_tiles_head": ("full + tiles + chunked head", {"policy": "full", "tiles": 4, "head": "chunked"}),
}
"""By name: its title, and what `apply` takes."""


@contextmanager
def applied(policy: str | Plan, options: dict[str, Any], model: nn.Module) -> Iterator[nn.Module]:
    """Put a policy in force on a model.

    Args:
        policy: what `apply` takes.
        options: of `apply`.
        model: with its weights.
    """
    if isinstance(policy, Plan):
        policy = with_capped_offload(policy)
    elif "offload" in options:
        options = {**options, "offload": capped(Offload(**options["offload"]))}
    # What is compared are later steps than the one that is proven.
    with hf_ckpt.apply(model, policy, prove="off", **options):
        yield model


def _contender(name: str, title: str, options: dict[str, Any]) -> Contender:
    policy, further = options["policy"], {key: value for key, value in options.items() if key != "policy"}
    num_warmup = _warmup("offload" in options, Mode(policy) in SELECTIVE_MODES)
    enter = partial(applied, policy, further)
    return Contender(name=name, title=title, group="ours", enter=enter, num_warmup=num_warmup)


def planned(number: int, budget: str, plan: Plan) -> Contender:
    """Return a plan that was made for a budget as a contender.

    Args:
        number: counted from 1, by rising budgets.
        budget: in words.
        plan: for the model.
    """
    return Contender(
        name=f"auto_{number}",
        title=f"auto, {budget}",
        group="auto",
        enter=partial(applied, plan, {}),
        num_warmup=warmup_of(plan),
    )


def warmup_of(plan: Plan) -> int:
    """Return how many steps a plan runs before its step is as all later ones are."""
    entries = [entry for stack in plan.stacks for entry in stack.layers]
    return _warmup(
        any(entry.offload is not None for entry in entries), any(entry.mode in SELECTIVE_MODES for entry in entries)
    )


def _warmup(offloads: bool, is_selective: bool) -> int:
    return OFFLOAD_WARMUP if offloads else SELECTIVE_WARMUP if is_selective else 1


NONE = Contender(name="none", title="none", group="none", enter=nullcontext)
CONTENDERS = tuple(_contender(name, title, options) for name, (title, options) in POLICIES.items())
