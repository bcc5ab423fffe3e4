"""The parts that every run has: what watches the plan, and what is told of it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.patch.apply import Applied, offloaders_of
from hf_ckpt.patch.use_cache import UseCache
from hf_ckpt.policy.plan import Plan
from hf_ckpt.regions import execution_state
from hf_ckpt.regions.module_state import STATE, ModuleState
from hf_ckpt.trainer.batch import Batch, batch_of
from hf_ckpt.trainer.first_step import FirstStep
from hf_ckpt.trainer.part import ChangePlan, Part
from hf_ckpt.trainer.saved_files import write_plan
from hf_ckpt.trainer.training_run import TrainingRun

logger = logging.getLogger(__name__)


class CacheOff(Part):
    """The key/value cache, off in steps and as the user has it between them.

    Args:
        run: whose model it is.
        of_trainer: what the Trainer would set `use_cache` to.
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

    Args:
        run: what is in force.
        is_told_before_update: whether `faults_of_step` is asked while the weights are still those of before.
    """

    def __init__(self, run: TrainingRun, *, is_told_before_update: bool) -> None:
        self._run = run
        self._is_told_before_update = is_told_before_update
        self._states: tuple[Applied, list[ModuleState]] | None = None

    def begin_step(self) -> None:
        """See that the plan is in force.

        Raises:
            PlanMismatchError: it cannot be brought back.
            UnsupportedError: as `faults_of_step`, where nobody asked in the last step.
        """
        applied = self._run.applied
        applied.assert_in_force()
        applied.pending_errors.read()
        if self._is_told_before_update:
            applied.pending_errors.hold()
        for offloader in applied.offloaders:
            offloader.begin_step()

    def faults_of_step(self) -> Iterable[str]:
        """Wait for the device, and raise what regions have found.

        Raises:
            UnsupportedError: a region was recomputed with other weights or buffers than its forward ran with.
        """
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
    """Holds the first step against its plan, and what steps recompute against what their forwards gave.

    Args:
        run: what is in force.
        is_proven: whether recomputed values are proven at all.
        is_compiled: whether the Trainer compiles the model.
    """

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


class BatchLengths(Part):
    """Tells what offloads, before each forward, how long the batch is and how long the longest one will be.

    Args:
        longest: the largest batch that can come; nothing is told where that is not known.
    """

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


class PlanFile(Part):
    """The file that says which plan is in force: where the run writes, and in each checkpoint."""

    def __init__(self, plan: Plan, folder: Path, *, is_written: bool) -> None:
        self._folder = folder
        self._is_written = is_written
        self.change_plan(plan)

    def change_plan(self, plan: Plan) -> None:
        self._plan = plan
        if self._is_written:
            write_plan(plan, self._folder)

    def save(self, folder: Path) -> None:
        write_plan(self._plan, folder)


def _first_of(paths: Sequence[str]) -> tuple[str, str]:
    return paths[0], f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
