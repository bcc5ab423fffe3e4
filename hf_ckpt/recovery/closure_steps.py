"""The steps of a loop of one's own: closures that are undone and run again where memory runs out.

A closure holds the whole window of a step: gradients set to None, and forward and backward of each micro-batch. It is
undone as a whole and runs again as a whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_ckpt.distributed import deepspeed, store
from hf_ckpt.patch.apply import Applied
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recovery.accumulation_window import Window, describe_inputs, nested_named_tensors
from hf_ckpt.recovery.escalation import Escalation, Failed, rung_after
from hf_ckpt.recovery.ladder import Ladder, Room, Size
from hf_ckpt.recovery.replay_proof import ReplayProof
from hf_ckpt.regions.execution_state import is_compiled
from hf_ckpt.structure.layers import is_sharded
from hf_ckpt.trainer.batch import batch_of
from hf_ckpt.trainer.device_peak import DevicePeak
from hf_ckpt.trainer.other_models import trained_beside
from hf_ckpt.trainer.part import Planning

logger = logging.getLogger(__name__)

_TO_DO = (
    "Keep it as an attribute of a module of the model, or name its owner in `undo`; draw batches before the closure."
)


class ClosureSteps:
    """Runs the steps of one loop."""

    def __init__(
        self,
        model: nn.Module,
        # The plan that is in force on it, by one handle for all plans.
        applied: Applied,
        # With policy `auto` it knows leaner plans.
        planning: Planning,
        change_plan: Callable[[Plan], None],
        *,
        # Forbid plans that add sums in another order.
        is_exact: bool,
        # See `Ladder`.
        quiet_steps: int,
    ) -> None:
        planner: Any = planning if planning.changes_plans else None
        ladder = Ladder(applied.plan, quiet_steps, Room(planner, DevicePeak(next(model.parameters()).device)))
        next_rung = partial(rung_after, applied=applied, model=model, planning=planner, is_exact=is_exact)
        self._escalation = Escalation(ladder, next_rung, lambda rung: change_plan(rung.plan))
        why = _why_not(model)
        self._is_undone = why is None
        if why is None:
            applied.join_ladder()
        else:
            logger.warning("applied.step() calls its closure once: %s. Running out of memory is an error.", why)
        self._model = model
        self._num_steps = 0
        self._window = Window(model, [("", model)])

    @property
    def num_recovered(self) -> int:
        return self._escalation.num_recovered

    def run(self, closure: Callable[[], Any], batch: Any, undo: Sequence[object]) -> Any:
        """See `AppliedInLoop.step`."""
        if not self._is_undone:
            return closure()
        escalation, ladder = self._escalation, self._escalation.ladder
        escalation.begin_step()
        self._num_steps += 1
        inputs = list(nested_named_tensors(batch))
        size = Size.of(inputs)
        shapes = describe_inputs(batch) if inputs else "a batch that applied.step() was not given"
        # The planner of a loop sees no forward.
        planned = batch_of((), batch) if isinstance(batch, Mapping) else None
        if inputs:
            escalation.stand_on(ladder.level_for(size))
        named = [(f"undo[{number}]", each) for number, each in enumerate(undo)]
        self._window.look_beside([*named, *trained_beside(closure)])
        proof = ReplayProof(f"Step {self._num_steps}", "forward", self._model.parameters, _TO_DO)
        self._window.clear(proof)
        self._window.begin(inputs)

        def attempt() -> tuple[Any, Failed | None]:
            with _forwards_noted(self._model, proof, ladder):
                returned, failure = escalation.attempt(closure)
            return returned, None if failure is None else Failed(failure, self._num_steps, size, shapes, planned)

        def run_again() -> tuple[Any, Failed | None]:
            self._window.undo_and_check()
            proof.begin_replay()
            returned, failed = attempt()
            if failed is None:
                proof.end_replay()
            return returned, failed

        try:
            returned, failed = attempt()
            if failed is not None:
                returned = escalation.recover(failed, self._window.fault, run_again)
        finally:
            # It holds the batch.
            self._window.clear()
        ladder.passed(size, planned)
        ladder.end_step()
        return returned


@contextmanager
def _forwards_noted(model: nn.Module, proof: ReplayProof, ladder: Ladder) -> Iterator[None]:
    """Let a proof see the forwards of a model while the block runs: a closure shows nothing else of its losses."""

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            proof.begin_micro_batch(nested_named_tensors([args, kwargs]), ladder.rung.plan)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            proof.note_loss(output)

    hooks = model.register_forward_pre_hook(begin, with_kwargs=True), model.register_forward_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _why_not(model: nn.Module) -> str | None:
    """Return why no step of a model is repeated; None if steps are."""
    if store.num_processes() > 1:
        return "there is more than one process, and no step is repeated in one of them alone"
    modules = list(model.modules())
    if is_sharded(model) or deepspeed.is_sharded(model):
        return "the model is sharded by an engine"
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        return "DistributedDataParallel is around the model, which cannot stop a step half-way"
    if any(map(is_compiled, modules)):
        return "the model is compiled, and a plan is not changed inside of it"
    return None
