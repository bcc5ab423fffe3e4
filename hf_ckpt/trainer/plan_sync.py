"""One plan on all ranks: rank 0 makes it, all apply it, and compare what is in force.

A rank that went on with another plan, or alone, would leave the others waiting in a collective for as long as the
engine's timeout, or train with gradients of something else.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from hf_ckpt.distributed.store import gather_results, num_processes
from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.patch.apply import Applied, apply, make_plan
from hf_ckpt.policy.options import Prove
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy


def apply_on_all_ranks(
    model: nn.Module, policy: Policy | Plan, structure: dict[str, Any], prove: Prove = "first_step"
) -> Applied:
    """Put a policy in force on every rank's model. `structure` holds `layers`, `attention` and `ffn` of `apply`.

    Raises what `apply` raises on the rank where it does, and `OtherProcessError` on the others; `PlanMismatchError` on
    all where ranks were given different policies, or different plans are in force.
    """
    if num_processes() == 1:
        return apply(model, policy, prove=prove, **structure)
    plan = _plan_of_rank_0(model, policy, structure)
    applied: list[Applied] = []

    def apply_mine() -> str:
        applied.append(apply(model, plan, prove=prove, **structure))
        return applied[0].plan.digest()

    try:
        _check_equal(gather_results(apply_mine, "applying the policy"), "plan is in force")
    except BaseException:
        for handle in applied:
            handle.remove()
        raise
    return applied[0]


def _plan_of_rank_0(model: nn.Module, policy: Policy | Plan, structure: dict[str, Any]) -> Plan:
    def plan_here() -> tuple[str, str | None]:
        plan = make_plan(model, policy, **structure).to_json() if dist.get_rank() == 0 else None
        return _describe(policy, structure), plan

    gathered = gather_results(plan_here, "making the plan")
    _check_equal([description for description, _ in gathered], "policy was asked for")
    return Plan.from_json(gathered[0][1] or "")


def _check_equal(values: list[str], what: str) -> None:
    if len(set(values)) == 1:
        return
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    raise PlanMismatchError(
        f"Another {what} in process {other} than in process 0: {values[other]}, and not {values[0]}. All processes of "
        "a run train under one plan. Give all of them the same policy and the same model."
    )


def _describe(policy: Policy | Plan, structure: dict[str, Any]) -> str:
    given = {name: value for name, value in structure.items() if value is not None}
    what = f"plan {policy.digest()}" if isinstance(policy, Plan) else policy.describe()
    return f"{what} with {given}" if given else what
