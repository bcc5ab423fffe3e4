"""The recovery of one run: on its Trainer while `train()` goes on, and not a moment longer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from hf_ckpt.distributed import store
from hf_ckpt.errors import OutOfMemoryError, PolicyError
from hf_ckpt.patch.instance_methods import method_before, run_all, set_method, take_off
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.text_file import read_text
from hf_ckpt.recovery.accumulation_window import TrainerCall
from hf_ckpt.recovery.escalation import Escalation, rung_after
from hf_ckpt.recovery.evaluation import EvaluationRecovery
from hf_ckpt.recovery.failed_run import CleanEnd, EndingPart, newest_checkpoint
from hf_ckpt.recovery.ladder import Ladder, Room, Rung
from hf_ckpt.recovery.optimizer_recovery import OptimizerSteps
from hf_ckpt.recovery.training_step import DataParallel, TrainingSteps
from hf_ckpt.trainer.part import ChangePlan, Part, Planning
from hf_ckpt.trainer.training_run import TrainingRun
from hf_ckpt.upstream.transformers import BETWEEN_STEPS

if TYPE_CHECKING:
    from hf_ckpt.auto.replan import RunPlanner

logger = logging.getLogger(__name__)

# In a checkpoint: the plans that the run has gone down to, and for which sizes.
RUNGS_FILE = "hf_ckpt_rungs.json"

_BEFORE_WEIGHTS_CHANGE = ("training_step", "clip_grad_norm_")
# Accelerate's method, which gets the loss once a forward has ended.
_BEGINS_BACKWARD = "backward"
# Trainers of trl whose inputs are generations, which are not made again.
_GENERATING = ("GRPOTrainer", "RLOOTrainer")


def check_asked(args: TrainingArguments) -> None:
    """Refuse to recover next to another recovery: `auto_find_batch_size`."""
    if args.auto_find_batch_size:
        raise PolicyError(
            'on_oom="escalate" was asked for, but auto_find_batch_size answers the same errors: it starts over with '
            "smaller batches, which changes the training. Leave one of them out."
        )


def why_not(trainer: Any, args: TrainingArguments, planning: RunPlanner | None = None) -> str | None:
    """Return why a run cannot go on after it has run out of memory; None if it can."""
    if trainer is None:
        return "the Trainer was not found among the callers of on_train_begin: callback.attach(trainer)"
    if getattr(trainer, "optimizer", None) is None:
        return "the Trainer has no optimizer yet"
    if args.auto_find_batch_size:
        return "auto_find_batch_size answers such errors itself"
    if getattr(args, "deepspeed", None) or trainer.is_fsdp_enabled:
        return "the model is sharded by an engine"
    if args.torch_compile:
        return "the model is compiled, and a plan is not changed inside of it"
    names = {each.__name__ for each in type(trainer).__mro__}
    generating = next((name for name in _GENERATING if name in names), None)
    if generating is not None:
        return f"{generating} generates its inputs, which are not made again"
    return _why_not_alone(trainer, planning) if store.num_processes() > 1 else None


def _why_not_alone(trainer: Any, planning: RunPlanner | None) -> str | None:
    """Return why no window of a run of several processes is run again by one of them; None if it is."""
    wrapper = getattr(trainer, "model_wrapped", None)
    if not isinstance(wrapper, DistributedDataParallel):
        return "several processes share the model, and no step is repeated in one of them alone"
    if wrapper.static_graph:
        return "DistributedDataParallel has a static graph, which is recorded from the steps that run"
    own = [f"{type(trainer).__name__}.{name}" for name in ("training_step", "compute_loss") if _has_own(trainer, name)]
    if getattr(trainer, "compute_loss_func", None) is not None and not own:
        own = ["compute_loss_func"]
    if own:
        return f"{' and '.join(own)} may send something of its own to the other processes"
    if planning is not None and planning.compares_batches:
        return "the processes compare their batches before each forward, for no bound of them is known"
    return None


def _has_own(trainer: Any, name: str) -> bool:
    """Whether a method is not that of transformers' Trainer."""
    return getattr(type(trainer), name) is not getattr(Trainer, name)


class Recovery(Part):
    """Runs the steps of a Trainer so that they go on after they have run out of memory."""

    changes_plans = is_alone = True

    def __init__(
        self,
        trainer: Any,
        run: TrainingRun,
        change_plan: ChangePlan,
        planning: RunPlanner | None,
        *,
        # Forbid plans that add sums in another order.
        is_exact: bool,
        # See `Ladder`.
        quiet_steps: int,
        # No step is run again, but what ends the run ends all of its processes.
        why_not: str | None,
    ) -> None:
        self._trainer = trainer
        self._run = run
        self._change_plan = change_plan
        self._new_ladder = partial(Ladder, quiet_steps=quiet_steps, room=Room(planning, run.peak))
        # Where micro-batches run under several plans, all have to give the same bits.
        is_exact |= store.num_processes() > 1
        self._escalation = Escalation(
            self._new_ladder(run.applied.plan),
            lambda plan, failure, rerun: rung_after(
                *(plan, failure, run.applied, run.model, planning), is_exact=is_exact, rerun=rerun
            ),
            self._put_in_force,
        )
        # Whether each process has the whole model and the optimizer's whole state.
        is_whole = isinstance(getattr(trainer, "model_wrapped", None), DistributedDataParallel)
        self._end: CleanEnd | None = None
        data_parallel = None
        if store.num_processes() > 1:
            self._end = CleanEnd(trainer, run, self.save, is_whole=is_whole)
            data_parallel = DataParallel(trainer.model_wrapped) if why_not is None else None
        self._steps = TrainingSteps(trainer, run.model, self._escalation, planning, (run.clock,), data_parallel)
        self._optimizer_steps = OptimizerSteps(trainer)
        self._evaluation = EvaluationRecovery(trainer)
        ends = partial(EndingPart, trainer)
        self._parts: dict[str, TrainingSteps | EvaluationRecovery | OptimizerSteps | EndingPart] = {
            "training_step": self._steps,
            "prediction_step": self._evaluation,
            "clip_grad_norm_": ends("Some of them may be clipped: it is not run again.", "clipping of gradients"),
            "step": self._optimizer_steps,
            BETWEEN_STEPS: ends("It is not run again.", "logging, evaluation or saving"),
        }
        if why_not is not None:
            # Each process notes what a step began with where it can save that.
            run_step = self._steps.run_once if is_whole else TrainerCall.__call__
            self._parts["training_step"] = ends(f"The step is not run again: {why_not}.", run_step=run_step)
            half = "Weights may be half-way through it: it is not run again."
            self._parts["step"] = ends(half, "optimizer step")
        why = why_not
        if data_parallel is not None and _has_own(trainer, "prediction_step"):
            why = f"{type(trainer).__name__}.prediction_step may send something of its own to the other processes"
        if why is not None:
            self._parts["prediction_step"] = ends(f"It is not run again: {why}.", "evaluation")
        owners = {"clip_grad_norm_": trainer.accelerator, "step": trainer.optimizer}
        # The removal of the plan, by whomever and after whatever error, takes these off too.
        run.applied.on_remove(self.stop)
        owned = [(owners.get(name, trainer), name) for name in self._parts]
        owned += [(trainer.accelerator, _BEGINS_BACKWARD)] if why_not is None else []
        self._undos: list[Callable[[], None]] = [
            partial(take_off, owner, name, set_method(owner, name, partial(_call, self, owner, name)))
            for owner, name in owned
        ]
        if data_parallel is not None:
            self._undos.append(data_parallel.remove)

    # --- What the methods of the Trainer find. ---

    def is_over(self) -> bool:
        """Whether the call of `train()` that this belongs to has ended, in an error of somebody else's."""
        is_ours = bool(self._undos) and not self._run.is_removed
        return not is_ours or self._run.call.is_over()

    def __reduce__(self) -> tuple[Callable[[], Recovery], tuple[()]]:
        # A copy of the model leads here by its hooks, and one of the Trainer by its methods: that one runs them alone.
        return _stopped, ()

    def stop(self) -> None:
        """Take all methods back; a second call does nothing."""
        undos, self._undos = self._undos, []
        run_all(reversed(undos))

    def run(self, name: str, call: TrainerCall) -> Any:
        if name == _BEGINS_BACKWARD:
            self._steps.note_loss(call.args[0] if call.args else call.kwargs.get("loss"))
            return call()
        try:
            return self._parts[name].run(call)
        except BaseException as error:
            # An evaluation's may be caught by whoever asked for it. One from a method within is as it is to be.
            if not self._undos or (name == "prediction_step" and self._end is None):
                raise
            # It ends training, and no event tells of that.
            self.stop()
            if not isinstance(error, OutOfMemoryError):
                raise
            # It says what to go on from.
            if self._end is None:
                ended = OutOfMemoryError(f"{error} {newest_checkpoint(self._trainer)}")
            else:
                is_as_before = name in _BEFORE_WEIGHTS_CHANGE and self._steps.undo()
                ended = self._end.ended(error, is_as_before_step=is_as_before)
            raise ended from error.__cause__

    # --- Events. ---

    def begin_step(self) -> None:
        self._steps.begin_step()

    def end_optimizer_step(self) -> None:
        self._steps.end_step()

    def change_plan(self, plan: Plan) -> None:
        """Policy `auto` has put another plan in force, for batches that are larger than before."""
        self._escalation.ladder = self._new_ladder(plan)
        self._escalation.num_switches += 1

    def figures(self) -> dict[str, float]:
        parts = (self._escalation, self._optimizer_steps, self._evaluation)
        num_recovered = sum(part.num_recovered for part in parts)
        return {"ckpt/oom_recovered": num_recovered, "ckpt/plan_switches": self._escalation.num_switches}

    # --- Plans. ---

    def _put_in_force(self, rung: Rung) -> None:
        self._change_plan(self, rung.plan)
        # What is proven of a plan is so in the first step under it, which is this one.
        self._run.applied.value_proof.begin_step()

    # --- Checkpoints. ---

    def save(self, folder: Path) -> None:
        """Write into a checkpoint where the ladder stands, whole or not at all."""
        if len(self._escalation.ladder.rungs) == 1:
            return
        half = folder / f"{RUNGS_FILE}.part"
        half.write_text(json.dumps(self._escalation.ladder.to_json()) + "\n")
        half.replace(folder / RUNGS_FILE)

    def resume(self, folder: Path) -> None:
        """Begin where the run stood that wrote a checkpoint, if it did so under the plan that this one begins with."""
        path = folder / RUNGS_FILE
        if not path.is_file():
            return
        try:
            is_same = self._escalation.ladder.resume(json.loads(read_text(path)))
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("%s cannot be read: %s It is left aside.", path, error)
            return
        if not is_same:
            logger.info("%s is of a run under another plan, and is left aside.", path)
            return
        self._change_plan(self, self._escalation.ladder.rung.plan)
        logger.info("The run that is resumed had run out of memory: its leaner plan is in force from the beginning.")


def begin(
    trainer: Any,
    args: TrainingArguments,
    run: TrainingRun,
    change_plan: ChangePlan,
    planning: Planning,
    *,
    is_exact: bool,
    quiet_steps: int,
) -> Recovery | None:
    """Return the recovery of a run that begins, or None where there is none, and say so.

    `trainer` is None where it was not found.
    """
    # A given policy knows no other plans.
    planner: Any = planning if planning.changes_plans else None
    why = why_not(trainer, args, planner)
    if why is not None and args.process_index == 0:
        then = "Running out of memory ends the run."
        if args.auto_find_batch_size:
            then = "Where memory runs out, the Trainer begins again at its first step, with fewer sequences."
        logger.info('on_oom="escalate" is not in force here: %s. %s', why, then)
    ends_others = store.num_processes() > 1 and getattr(trainer, "optimizer", None) is not None
    if why is None or (ends_others and not args.auto_find_batch_size):
        return Recovery(trainer, run, change_plan, planner, is_exact=is_exact, quiet_steps=quiet_steps, why_not=why)
    return None


# --- Methods that run through a recovery. ---

# Only instance attributes are set, each a `partial` of a module-level function: what a subclass has written runs
# inside, and copies and pickles of the object run it alone.


def _stopped() -> Recovery:
    made = object.__new__(Recovery)
    made._undos = []
    return made


def _call(
    recovery: Recovery, owner: object, name: str, found: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    call = TrainerCall(method_before(owner, name, found), args, kwargs)
    if recovery.is_over():
        recovery.stop()
        return call()
    return recovery.run(name, call)
