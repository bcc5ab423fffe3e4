"""What is in force from `on_train_begin` to `on_train_end`: a plan, the same one in all processes, and what it needs.

The parts that every run has see to it in each step: the cache is off, the plan is in force and proven, offloads know
the length of a batch.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.distributed import watchdog
from hf_ckpt.distributed.store import gather_results, num_processes
from hf_ckpt.errors import PlanMismatchError
from hf_ckpt.patch.apply import Applied, apply, apply_plan, make_plan, offloaders_of
from hf_ckpt.patch.interrupted_run import train_call
from hf_ckpt.patch.use_cache import UseCache
from hf_ckpt.policy.options import Prove
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import Policy
from hf_ckpt.regions import execution_state
from hf_ckpt.regions.module_state import STATE, ModuleState
from hf_ckpt.trainer.batch import Batch, batch_of
from hf_ckpt.trainer.device_peak import DevicePeak
from hf_ckpt.trainer.first_step import FirstStep
from hf_ckpt.trainer.metrics import StepClock
from hf_ckpt.trainer.part import ChangePlan, Part, ProvenPlans

logger = logging.getLogger(__name__)


class TrainingRun:
    """The plan of one run on its model. `structure` holds the `StructureOptions`."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | Plan,
        structure: dict[str, Any],
        prove: Prove,
        watch: watchdog.Watchdog | None,
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
        self.clock = StepClock()

    def change_plan(self, plan: Plan, *, is_alone: bool = False) -> None:
        """Put another plan in force, before a forward. What the old one's removal would undo, the new one's undoes."""
        # With `is_alone` other processes know nothing of it, and it is known to suit the model.
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
        if self.watch is not None:
            self.watch.fail(str(error))

    def _note_removal(self) -> None:
        self.is_removed = True
        self.applied.pending_errors.clear()


def _apply_on_all_ranks(model: nn.Module, policy: Policy | Plan, structure: dict[str, Any], prove: Prove) -> Applied:
    """Put a policy in force on every rank's model: rank 0 makes the plan, all apply it, and compare what is in force.

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
        # A rank that went on with another plan, or alone, would leave the others waiting in a collective for as long as
        # the engine's timeout, or train with gradients of something else.
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


# --- Parts. ---


class CacheOff(Part):
    """The key/value cache, off in steps and as the user has it between them.

    `of_trainer` is what the Trainer would set `use_cache` to.
    """

    def __init__(self, run: TrainingRun, *, of_trainer: bool) -> None:
        self._run = run
        self._of_trainer = of_trainer
        self._values = UseCache(run.model)
        self._is_ours = True
        run.applied.on_remove(self._restore)

    def begin_step(self) -> None:
        applied = self._run.applied
        values = self._values.without_plan(self._of_trainer)
        self._values.set(values if applied.leaves_cache else {})
        applied.note_use_cache(values)

    def change_plan(self, plan: Plan) -> None:
        if self._values.is_set:
            self.begin_step()

    def end_step(self) -> None:
        self._values.restore()

    def _restore(self) -> None:
        if self._is_ours:
            self._values.restore()

    def leave(self) -> None:
        """Leave the configs alone from here on: another Trainer has set what it wants."""
        self._is_ours = False


class Regions(Part):
    """What regions find in their backwards, and what they need to know of the step.

    `is_told_before_update`: whether `faults_of_step` is asked while the weights are still those of before.
    """

    def __init__(self, run: TrainingRun, *, is_told_before_update: bool) -> None:
        self._run = run
        self._is_told_before_update = is_told_before_update
        self._states: tuple[Applied, list[ModuleState]] | None = None

    def begin_step(self) -> None:
        applied = self._run.applied
        applied.assert_in_force()
        # Where nobody asked in the last step.
        applied.pending_errors.read()
        if self._is_told_before_update:
            applied.pending_errors.hold()
        for offloader in applied.offloaders:
            offloader.begin_step()

    def faults_of_step(self) -> Iterable[str]:
        """Wait for the device, and raise what regions have found: other weights or buffers than in the forward."""
        self._run.applied.pending_errors.read()
        return ()

    def end_optimizer_step(self) -> None:
        """Note on each region that the weights have changed."""
        applied = self._run.applied
        # Walking all modules of a model with adapters takes milliseconds. A plan sets the states, and nobody else.
        if self._states is None or self._states[0] is not applied:
            found = (vars(module).get(STATE) for module in self._run.model.modules())
            self._states = applied, [state for state in found if isinstance(state, ModuleState)]
        for state in self._states[1]:
            state.num_steps += 1


class StepProof(Part):
    """Holds the first step against its plan, and what steps recompute against what their forwards gave."""

    def __init__(self, run: TrainingRun, *, is_proven: bool, is_compiled: bool) -> None:
        self._run = run
        self._is_proven = is_proven
        self._is_compiled = is_compiled
        self._is_first = True
        self._first_step: FirstStep | None = None

    def begin_step(self) -> None:
        run = self._run
        if self._is_first:
            self._is_first = False
            self._first_step = FirstStep(run.model, run.applied.plan, run.applied.stacks)
            run.applied.on_remove(self._first_step.stop)
        if self._first_step is not None:
            self._first_step.start()
        run.applied.value_proof.begin_step()

    def change_plan(self, plan: Plan) -> None:
        if self._first_step is not None:
            # Part of the step may have run under the old plan: the next one is held against the new plan.
            self._first_step.stop()
            self._first_step = None
            self._is_first = True

    def faults_of_step(self) -> Iterable[str]:
        """Return what ran otherwise than planned, and what a recomputation gave otherwise than the forward."""
        applied = self._run.applied
        self._run.proven.note(applied.plan)
        for offloader in applied.offloaders:
            offloader.end_step()
        first_step, self._first_step = self._first_step, None
        if first_step is None:
            return applied.value_proof.take_faults()
        if self._is_proven:
            self._log_unproven()
        for offloader in applied.offloaders:
            for fault in offloader.faults():
                # Short rows may be all there is in the first step: nothing is wrong, but for the memory.
                warnings.warn(fault, stacklevel=2)
        return [*first_step.finish(), *applied.value_proof.take_faults()]

    def _log_unproven(self) -> None:
        proof = self._run.applied.value_proof
        unseen = proof.unseen
        if unseen and (self._is_compiled or any(map(execution_state.is_compiled, self._run.model.modules()))):
            logger.info(
                "%s%s: compiled, so that the first step does not prove what is recomputed there. A first step without "
                "torch.compile, or hf-ckpt verify, does.",
                *_first_of(unseen),
            )
        if without_original := proof.without_original:
            logger.info(
                "%s%s: not held against the forward that the module had before the plan: compiled inside, sharded, "
                "under ZeRO-3, or reached by no backward.",
                *_first_of(without_original),
            )


def _first_of(paths: Sequence[str]) -> tuple[str, str]:
    return paths[0], f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""


class BatchLengths(Part):
    """Tells what offloads, before each forward, how long the batch is, and the longest one if that is known."""

    def __init__(self, longest: Batch | None) -> None:
        self._longest = longest

    def place_hooks(self, model: nn.Module, change_plan: ChangePlan) -> Iterable[RemovableHandle]:
        if self._longest is None:
            return ()
        # Of a module-level function: copies and pickles of the model carry the hook.
        hook = partial(_announce_length, self._longest.rows * self._longest.length)
        return [model.register_forward_pre_hook(hook, with_kwargs=True)]


def _announce_length(most_tokens: int, model: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
    # torch calls a hook without keywords that another hook of the same call has just removed.
    if kwargs is None or torch.compiler.is_compiling() or not model.training:
        return
    batch = batch_of(args, kwargs)
    num_tokens = most_tokens if batch is None else batch.rows * batch.length
    # Asked each time: another plan may be in force, or this may be a copy of the model.
    for offloader in offloaders_of(model):
        # A batch without token ids is taken for one of which nothing is known.
        offloader.expect_batch(num_tokens, most_tokens)
