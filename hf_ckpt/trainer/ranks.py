"""One plan on all ranks, and an error on one of them raised on all.

A rank is a process of the default process group. A rank that went on with another plan, or alone, would leave the
others waiting in a collective for as long as the engine's timeout, or train with gradients of something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from hf_ckpt.distributed.store import exchange, num_processes
from hf_ckpt.errors import OtherProcessError, PlanMismatchError, in_words
from hf_ckpt.patch.apply import Applied, apply, make_plan
from hf_ckpt.policy.modifiers import Prove
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy

Told = TypeVar("Told")


def apply_on_all(
    model: nn.Module, policy: Policy | Plan, structure: dict[str, Any], prove: Prove = "first_step"
) -> Applied:
    """Put a policy in force on every rank's model: rank 0 makes the plan, all apply it, and compare what is in force.

    Args:
        model: this rank's model.
        policy: the same on all ranks.
        structure: `layers`, `attention` and `ffn` of `apply`.
        prove: see `apply`.

    Raises:
        OtherProcessError: it failed on another rank.
        PlanMismatchError: ranks were given different policies, or different plans are in force.
        HFCkptError: what `apply` raises, on the rank where it does.
    """
    if num_processes() == 1:
        return apply(model, policy, prove=prove, **structure)
    plan = _plan_of_rank_0(model, policy, structure)
    applied: Applied | None = None
    error: Exception | None = None
    try:
        applied = apply(model, plan, prove=prove, **structure)
    # Whatever it is, the others would wait for this rank.
    except Exception as raised:  # noqa: BLE001
        error = raised
    try:
        in_force = _exchange(error, "" if applied is None else applied.plan.digest(), "applying the policy")
        _check_equal(in_force, "plan is in force")
    except BaseException:
        if applied is not None:
            applied.remove()
        raise
    assert applied is not None, "an error on this rank was raised by the exchange"
    return applied


def told_by_each(work: Callable[[], Told], doing: str) -> list[Told]:
    """Let every rank work, and return on all ranks what each of them tells, by rank.

    Args:
        work: gives what JSON can hold; tuples come as lists.
        doing: what that is, for messages.

    Raises:
        OtherProcessError: `work` raised on another rank; on the rank itself, what it raised.
    """
    if num_processes() == 1:
        return [work()]
    told: Told | None = None
    error: Exception | None = None
    try:
        told = work()
    except Exception as raised:  # noqa: BLE001  # the others wait for the result
        error = raised
    said: list[Any] = _exchange(error, told, doing)
    return said


def told_by_rank_0(work: Callable[[], Told], timeout_s: float, doing: str = "looking at what was saved") -> Told:
    """Let rank 0 work, and return its result on all ranks: what it finds in files that only it writes, or plans.

    Args:
        work: gives what JSON can hold; tuples come as lists.
        timeout_s: how long the others wait for rank 0, which may still be writing, in seconds.
        doing: what that is, for messages.

    Raises:
        OtherProcessError: `work` raised; on rank 0, what it raised.
    """
    if num_processes() == 1:
        return work()
    told: Told | None = None
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            told = work()
        except Exception as raised:  # noqa: BLE001  # the others wait for the result
            error = raised
    told_by_all: list[Any] = _exchange(error, told, doing, timeout_s)
    result: Told = told_by_all[0]
    return result


def _plan_of_rank_0(model: nn.Module, policy: Policy | Plan, structure: dict[str, Any]) -> Plan:
    plan: Plan | None = None
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            plan = make_plan(model, policy, **structure)
        except Exception as raised:  # noqa: BLE001  # as above
            error = raised
    told = (_described(policy, structure), None if plan is None else plan.to_json())
    said = _exchange(error, told, "making the plan")
    _check_equal([asked for asked, _ in said], "policy was asked for")
    return Plan.from_json(said[0][1] or "")


def _exchange(error: Exception | None, told: Told, doing: str, timeout_s: float | None = None) -> list[Told]:
    """Return what each rank tells; raise on all ranks if one of them has an error."""
    said = exchange((None if error is None else in_words(error), told), doing, timeout_s)
    if error is not None:
        raise error
    failed = {rank: text for rank, (text, _) in enumerate(said) if text is not None}
    if failed:
        rank, text = min(failed.items())
        raise OtherProcessError(f"Process {rank} failed while {doing}: {text}")
    return [value for _, value in said]


def _check_equal(said: list[str], what: str) -> None:
    if len(set(said)) == 1:
        return
    other = next(rank for rank, value in enumerate(said) if value != said[0])
    raise PlanMismatchError(
        f"Another {what} in process {other} than in process 0: {said[other]}, and not {said[0]}. All processes of a "
        "run train under one plan. Give all of them the same policy and the same model."
    )


def _described(policy: Policy | Plan, structure: dict[str, Any]) -> str:
    given = {name: value for name, value in structure.items() if value is not None}
    what = f"plan {policy.digest()}" if isinstance(policy, Plan) else policy.describe()
    return f"{what} with {given}" if given else what
