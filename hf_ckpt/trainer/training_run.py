"""What is in force from `on_train_begin` to `on_train_end`: a plan, the same one in all processes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from hf_ckpt.distributed import watchdog
from hf_ckpt.distributed.store import gather_results, num_processes
from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.patch.apply import Applied, apply, apply_plan, make_plan
from hf_ckpt.patch.interrupted_run import train_call
from hf_ckpt.policy.options import Prove
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy
from hf_ckpt.trainer.device_peak import DevicePeak
from hf_ckpt.trainer.metrics import StepClock


class ProvenPlans:
    """Under which plans a step has been proven: under these none is again, unless each n-th step is."""

    def __init__(self, prove: Prove) -> None:
        self._prove = prove
        self._plans: list[Plan] = []

    def note(self, plan: Plan) -> None:
        """A step has run under a plan."""
        if plan not in self._plans:
            self._plans.append(plan)

    def prove_under(self, plan: Plan) -> Prove:
        """Return which steps under a plan are to be proven."""
        return "off" if self._prove == "first_step" and plan in self._plans else self._prove


class TrainingRun:
    """The plan of one run on its model. `structure` holds the `StructureOptions`."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | Plan,
        structure: dict[str, Any],
        prove: Prove,
        watch: watchdog.Watchdog | watchdog.NoWatchdog,
    ) -> None:
        self.model = model
        self.is_reported = False
        self.is_removed = False
        self.peak = DevicePeak(next(model.parameters()).device)
        self.watch = watch
        self.call = train_call()
        self.proven = ProvenPlans(prove)
        self._structure = structure
        self.applied: Applied = _apply_on_all_ranks(model, policy, structure, prove)
        # At once: an exception from here on leaves the plan to whoever uses the model next.
        self.applied.belongs_to(self.call)
        # The plan's own removal, which needs no handle, undoes all that parts do to the model.
        self.applied.on_remove(self._note_removal)
        self.clock = StepClock(model)
        self.applied.on_remove(self.clock.restore)

    def change_plan(self, plan: Plan, *, is_alone: bool = False) -> None:
        """Put another plan in force, before a forward. What the old one's removal would undo, the new one's undoes.

        With `is_alone` other processes know nothing of it, and it is known to suit the model.
        """
        prove = self.proven.prove_under(plan)

        def put() -> Applied:
            if is_alone:
                # Batches of different lengths may change it in each step: nothing is looked for again.
                return apply_plan(self.model, plan, self.applied.stacks, prove=prove)
            return _apply_on_all_ranks(self.model, plan, self._structure, prove)

        errors = self.applied.pending_errors
        self.applied = self.applied.exchange(put)
        errors.hand_over(self.applied.pending_errors)
        self.applied.belongs_to(self.call)

    def report_error(self, error: BaseException) -> None:
        """Let the other processes know that this one stops, and why."""
        self.watch.fail(str(error))

    def _note_removal(self) -> None:
        self.is_removed = True
        self.applied.pending_errors.clear()


def _apply_on_all_ranks(model: nn.Module, policy: Policy | Plan, structure: dict[str, Any], prove: Prove) -> Applied:
    """Put a policy in force on every rank's model: rank 0 makes the plan, all apply it, and compare what is in force.

    A rank that went on with another plan, or alone, would leave the others waiting in a collective for as long as the
    engine's timeout, or train with gradients of something else.

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
