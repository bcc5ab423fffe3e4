"""The longest row that fits under any plan that is allowed: what policy `auto` reaches.

Planning for a length takes a dozen simulations. Which plan needs least hardly depends on the length, so that a few
plans are looked at, and the best of them is searched with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hf_ckpt.errors import HFCkptError
from hf_ckpt.estimate.limits import LENGTH_UNIT, longest_row, with_length
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.subject import Subject
from hf_ckpt.planner.bisect import Limit
from hf_ckpt.planner.layer_costs import may_tile
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.plan import Plan

_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the layers that offload, where there is a cap on host memory."""


@dataclass(frozen=True)
class LongestRow:
    """The longest row that fits under some plan.

    Args:
        limit: the length, and its peak.
        plan: the plan.
    """

    limit: Limit
    plan: Plan


def longest_row_of_all(predictor: Predictor, budget_bytes: int) -> LongestRow:
    """Return the longest row that fits under one of the plans that need least.

    Args:
        predictor: of the recipe's subject, which says what is allowed.
        budget_bytes: that the step may use.
    """
    subject, found = predictor.subject, None
    host_bytes = None if subject.allowed.offload is None else subject.allowed.offload.host_memory
    for plan in least_plans(subject):
        if found is not None and found.limit.number:
            longer = predictor.memory(plan, with_length(subject.step, found.limit.number + LENGTH_UNIT))
            is_more = longer.peak_bytes <= budget_bytes and (host_bytes is None or longer.host_bytes <= host_bytes)
            if found.limit.is_bound or not is_more:
                continue
        limit = longest_row(predictor, plan, budget_bytes, host_bytes=host_bytes)
        if found is None or limit.number > found.limit.number:
            found = LongestRow(limit, plan)
    assert found is not None, "there is always the plan that keeps everything"
    return found


def least_plans(subject: Subject) -> Iterator[Plan]:
    """Yield the plans that may need least: each layer recomputed, with all that is allowed, and nested segments.

    Args:
        subject: says what is allowed.
    """
    subject = replace(subject, allowed=subject.allowed.in_turn[-1])
    plans = [plan for way in _ways(subject.allowed) if (plan := _with_least_head(subject, way)) is not None]
    yield from (_tiled_where_possible(plan, subject) for plan in plans or [subject.resolve("none")])


def _ways(allowed: Allowed) -> Iterator[dict[str, Any]]:
    offload = allowed.offload_option
    if offload is not None:
        shares = _SHARES if offload.host_memory is not None else (1.0,)
        yield from ({"policy": "full", "offload": replace(offload, fraction=share)} for share in shares)
    yield {"policy": "full"}
    yield {"policy": "full", "segment_size": "sqrt", "nested": True}


def _with_least_head(subject: Subject, way: dict[str, Any]) -> Plan | None:
    """Return the plan with a chunked head where that is allowed and the model has one; None where there is no plan."""
    for head in ("chunked", "plain") if subject.allowed.head else ("plain",):
        with suppress(HFCkptError):
            return subject.resolve(**way, head=head)
    return None


def _tiled_where_possible(plan: Plan, subject: Subject) -> Plan:
    stacks = tuple(
        replace(
            planned,
            layers=tuple(
                replace(entry, tiles="auto") if entry.segment is None and may_tile(layer, subject.allowed) else entry
                for entry, layer in zip(planned.layers, stack.layers, strict=True)
            ),
        )
        for planned, stack in zip(plan.stacks, subject.stacks, strict=True)
    )
    return replace(plan, stacks=stacks)
