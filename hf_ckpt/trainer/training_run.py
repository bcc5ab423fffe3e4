"""What is in force from `on_train_begin` to `on_train_end`: the plan, the checks of its steps, and what is measured."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_ckpt.distributed import watchdog
from hf_ckpt.distributed.store import gather_results, num_processes
from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.patch.apply import Applied, apply, apply_plan, make_plan
from hf_ckpt.patch.interrupted_run import train_call
from hf_ckpt.patch.use_cache import UseCache
from hf_ckpt.policy.options import Prove
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy
from hf_ckpt.regions import execution_state
from hf_ckpt.regions.module_state import STATE, ModuleState
from hf_ckpt.trainer.device_peak import DevicePeak
from hf_ckpt.trainer.first_step import FirstStep
from hf_ckpt.trainer.input_gradients import InputGradients, choose_input_gradients
from hf_ckpt.trainer.metrics import StepClock

logger = logging.getLogger(__name__)


class TrainingRun:
    """The plan of one run on its model, and what watches it. `structure` holds the `StructureOptions`."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | Plan,
        structure: dict[str, Any],
        prove: Prove,
        input_require_grads: bool | None,
        watch: watchdog.Watchdog | None = None,
        *,
        use_cache: bool = False,
    ) -> None:
        self.model = model
        self._structure = structure
        self._prove = prove
        self.is_reported = False
        self.is_removed = False
        self.peak = DevicePeak(next(model.parameters()).device)
        self._watchdog = watch
        self._call = train_call()
        self.applied: Applied = _apply_on_all_ranks(model, policy, structure, prove)
        if self._call is not None:
            # At once: an exception from here on leaves the plan to whoever uses the model next.
            self.applied.belongs_to(self._call)
        self._first_step: FirstStep | None = None
        self._checks_next_step = True
        self._proven: list[Plan] = []
        self._states: tuple[Applied, list[ModuleState]] | None = None
        self._use_cache = UseCache(model)
        self._use_cache_of_trainer = use_cache
        self._is_use_cache_ours = True
        self.clock = StepClock(model)
        # The plan's own removal, which needs no handle, undoes all of it.
        for undo in (self._note_removal, self._restore_use_cache, self.clock.restore):
            self.applied.on_remove(undo)
        is_on = choose_input_gradients(model, self.applied.stacks, input_require_grads)
        self.applied.on_remove(InputGradients(model, is_on).restore)

    def is_under_way(self) -> bool:
        """Whether the call of `train()` that this belongs to goes on, further out than the innermost one."""
        return self._call is not None and self._call.is_running() and not self._call.is_innermost()

    def remove_when_interrupted(self) -> None:
        """Have the plan taken off at the next use of the model, should an exception end this call of `train()`."""
        if self._call is not None:
            self.applied.remove_on_use_after(self._call, self.model, self._leave_use_cache)

    def change_plan(self, plan: Plan, *, is_alone: bool = False) -> None:
        """Put another plan in force, before a forward. What the old one's removal would undo, the new one's undoes.

        With `is_alone` other processes know nothing of it, and it is known to suit the model. A plan under which a step
        of this run has been proven is not proven again, unless each n-th step is.
        """
        is_proven = self._prove == "first_step" and plan in self._proven
        prove: Prove = "off" if is_proven else self._prove

        def put() -> Applied:
            if is_alone:
                # Batches of different lengths may change it in each step: nothing is looked for again.
                return apply_plan(self.model, plan, self.applied.stacks, prove=prove)
            return _apply_on_all_ranks(self.model, plan, self._structure, prove)

        errors = self.applied.pending_errors
        self.applied = self.applied.exchange(put)
        errors.hand_over(self.applied.pending_errors)
        if self._use_cache.is_set:
            self._set_use_cache()
        if self._call is not None:
            self.applied.belongs_to(self._call)
        if self._first_step is not None:
            # Part of the step may have run under the old plan: the next one is held against the new plan.
            self._first_step.stop()
            self._first_step = None
            self._checks_next_step = True

    def _set_use_cache(self) -> None:
        """Switch the cache off, unless the plan leaves all as it is."""
        values = self._use_cache.without_plan(self._use_cache_of_trainer)
        self._use_cache.set(values if self.applied.leaves_cache else {})
        self.applied.note_use_cache(values)

    def report_failures(self, is_handled: Callable[[BaseException], bool] | None = None) -> None:
        """Let the other processes know when a forward raises in this one, but for what is handled here."""
        if self._watchdog is not None:
            self.applied.on_remove(watchdog.report_failures(self._watchdog, self.model, is_handled))

    def report_error(self, error: BaseException) -> None:
        """Let the other processes know that this one stops, and why."""
        if self._watchdog is not None:
            self._watchdog.fail(str(error))

    def end_watch(self) -> None:
        """Let the other processes know that training has come to its end here, not before it."""
        if self._watchdog is not None:
            self._watchdog.end()

    def start_step(self, *, is_told_before_update: bool) -> None:
        """Switch the cache off, and see that the plan is in force.

        Args:
            is_told_before_update: whether `raise_pending_errors` is called when the step's gradients are there and the
                weights are still those of before.

        Raises:
            PlanMismatchError: the plan cannot be brought back.
            UnsupportedError: as `raise_pending_errors`, where nobody called that in the last step.
        """
        self._set_use_cache()
        self.applied.assert_in_force()
        self.raise_pending_errors()
        if is_told_before_update:
            self.applied.pending_errors.hold()
        for offloader in self.applied.offloaders:
            offloader.begin_step()
        if self._checks_next_step:
            self._checks_next_step = False
            self._first_step = FirstStep(self.model, self.applied.plan, self.applied.stacks)
            self.applied.on_remove(self._first_step.stop)
        if self._first_step is not None:
            self._first_step.start()
        self.applied.value_proof.begin_step()
        self.clock.start_step()

    def raise_pending_errors(self) -> None:
        """Wait for the device, and raise what regions have found in the backwards of this step.

        Raises:
            UnsupportedError: a region was recomputed with other weights or buffers than its forward ran with.
        """
        self.applied.pending_errors.read()

    def faults_of_step(self, *, is_compiled: bool) -> list[str]:
        """Return what ran otherwise than planned, and what a recomputation gave otherwise than the forward."""
        if self.applied.plan not in self._proven:
            self._proven.append(self.applied.plan)
        for offloader in self.applied.offloaders:
            offloader.end_step()
        first_step, self._first_step = self._first_step, None
        if first_step is None:
            return self.applied.value_proof.take_faults()
        if self._prove != "off":
            self._log_unproven(is_compiled=is_compiled)
        for offloader in self.applied.offloaders:
            for fault in offloader.faults():
                # Short rows may be all there is in the first step: nothing is wrong, but for the memory.
                warnings.warn(fault, stacklevel=2)
        return [*first_step.finish(), *self.applied.value_proof.take_faults()]

    def _log_unproven(self, *, is_compiled: bool) -> None:
        unseen = self.applied.value_proof.unseen
        if unseen and (is_compiled or any(map(execution_state.is_compiled, self.model.modules()))):
            logger.info(
                "%s%s: compiled, so that the first step does not prove what is recomputed there. A first step without "
                "torch.compile, or hf-ckpt verify, does.",
                unseen[0],
                _and_more(unseen),
            )
        if without_original := self.applied.value_proof.without_original:
            logger.info(
                "%s%s: not held against the forward that the module had before the plan: compiled inside, sharded, "
                "under ZeRO-3, or reached by no backward.",
                without_original[0],
                _and_more(without_original),
            )

    def note_optimizer_step(self) -> None:
        """Note on each region that the weights have changed."""
        # Walking all modules of a model with adapters takes milliseconds. A plan sets the states, and nobody else.
        if self._states is None or self._states[0] is not self.applied:
            found = (vars(module).get(STATE) for module in self.model.modules())
            self._states = self.applied, [state for state in found if isinstance(state, ModuleState)]
        for state in self._states[1]:
            state.num_steps += 1

    def end_step(self) -> None:
        """Give the cache back for what comes between steps."""
        self.clock.end_step()
        self._use_cache.restore()

    def _restore_use_cache(self) -> None:
        if self._is_use_cache_ours:
            self._use_cache.restore()

    def _leave_use_cache(self) -> None:
        self._is_use_cache_ours = False

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


def _and_more(paths: Sequence[str]) -> str:
    return f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
