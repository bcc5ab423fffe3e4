"""The longest row and the largest micro-batch of a recipe that fit under a plan."""

from __future__ import annotations

from dataclasses import replace

from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.planner.bisect import Limit, largest
from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.step import Step

LENGTH_UNIT = 64
"""Tokens that lengths are counted in: kernels work on tiles of so many."""

_MOST_TOKENS = 2**22
_MOST_ROWS = 4096


def longest_row(predictor: Predictor, plan: Plan | None, budget_bytes: int, *, host_bytes: int | None = None) -> Limit:
    """Return the longest row that fits, in tokens, in steps of `LENGTH_UNIT`.

    Args:
        predictor: of the recipe's subject.
        plan: what is trained under.
        budget_bytes: that the step may use.
        host_bytes: that may wait on the host; None for any amount.
    """
    step = predictor.subject.step

    def peak(length: int) -> int:
        memory = predictor.memory(plan, with_length(step, length))
        fits_host = host_bytes is None or memory.host_bytes <= host_bytes
        return memory.peak_bytes if fits_host else max(memory.peak_bytes, 2 * budget_bytes)

    most = predictor.subject.longest or _MOST_TOKENS
    return largest(peak, budget_bytes, start=step.seq_length, most=most, multiple=min(LENGTH_UNIT, most))


def largest_batch(predictor: Predictor, plan: Plan | None, budget_bytes: int) -> Limit:
    """Return the largest micro-batch that fits, in rows.

    Args:
        predictor: of the recipe's subject.
        plan: what is trained under.
        budget_bytes: that the step may use.
    """
    step = predictor.subject.step

    def peak(rows: int) -> int:
        return predictor.memory(plan, with_rows(step, rows)).peak_bytes

    return largest(peak, budget_bytes, start=step.batch_size, most=_MOST_ROWS)


def with_length(step: Step, length: int) -> Step:
    """Return the step with rows of another length."""
    return replace(step, seq_length=length)


def with_rows(step: Step, rows: int) -> Step:
    """Return the step with another number of rows, which are padded where there are several."""
    if step.is_packed:
        return replace(step, seq_length=step.seq_length * rows)
    return replace(step, batch_size=rows, is_padded=step.is_padded or rows > 1)
