"""Training steps of a Trainer that go on after their forward or backward has run out of memory.

The window of micro-batches is undone, a leaner plan put in force, and the window run again from its first micro-batch,
with the same inputs and the same random numbers: to the bit what that plan would have given at once. `ReplayProof`
holds it against the attempt that failed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_ckpt.recovery.accumulation_window import (
    Gradients,
    TrainerCall,
    Window,
    describe_inputs,
    nested_named_tensors,
)
from hf_ckpt.recovery.escalation import Escalation, Failed
from hf_ckpt.recovery.failed_run import describe_examples
from hf_ckpt.recovery.ladder import Size
from hf_ckpt.recovery.out_of_memory import Failure
from hf_ckpt.recovery.replay_proof import ReplayProof
from hf_ckpt.trainer.other_models import trained_beside
from hf_ckpt.upstream.accelerate import set_sync_gradients

if TYPE_CHECKING:
    from hf_ckpt.auto.replan import RunPlanner
    from hf_ckpt.trainer.batch import Batch

# So many steps begin with a look for what a loss has made of its own: most do so in the first one.
_LOOKS_BESIDE = 3
_TO_DO = (
    "Keep it as an attribute of the Trainer, of an object on it or of a module, and not in a global, a closure or a "
    'class; or set on_oom="error".'
)


# Note [Alone among others]. What is sent in a window under DistributedDataParallel is what its forwards send when they
# begin (buffers, the order of buckets) and the gradients of its last backward. A process that has failed before the
# first of those gradients has sent nothing that the others would not have been sent in any case. It may take its time
# and run again, if it does not send again what its forwards have sent. The others wait in their first bucket, need no
# message, and may stand on another plan: checkpointing sends nothing. From the first gradient on a window cannot be
# left: the reducer does not take it back, and nobody knows which of the others have it.
class DataParallel:
    """What this process has sent in a window; see Note [Alone among others]. `wrapper` is around the trained model."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper
        self._trainable = [parameter for parameter in wrapper.parameters() if parameter.requires_grad]
        self._gradients = Gradients(self._trainable)
        self.begin_window()
        self._hooks = (
            wrapper.register_forward_pre_hook(self._before_wrapper),
            wrapper.module.register_forward_pre_hook(self._before_module, prepend=True),
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin_window(self) -> None:
        # Forwards that have begun, also again, and those that have sent what they send; per micro-batch those before.
        self._num_begun = self._num_sent = 0
        self._begun_before: list[int] = []
        self._is_sending = False

    def begin_replay(self) -> int:
        """Micro-batches run again. Returns the number of the first of them."""
        # Once the last forward is done the reducer sends the gradients of whatever backward comes next. So where the
        # last micro-batch failed, it alone runs again: the sums of those before it are as they were, and each bitwise
        # plan would give the same.
        first = len(self._begun_before) - 1 if self.syncs else 0
        self._num_begun = self._begun_before[first]
        self._is_sending = False
        return first

    @property
    def syncs(self) -> bool:
        return bool(self._wrapper.require_backward_grad_sync)

    def begin_micro_batch(self) -> None:
        self._begun_before.append(self._num_begun)
        self._gradients = Gradients(self._trainable)

    def begin_again(self, *, syncs: bool) -> None:
        self._wrapper.require_backward_grad_sync = syncs
        self._gradients = Gradients(self._trainable)

    def fault(self, window: Window) -> str | None:
        """Return why a window cannot be run again by this process alone; None if it can."""
        if written := window.begun[0].attributes.changed_buffers():
            names = ", ".join(written[:4])
            return f"forwards change buffers ({names}), which DistributedDataParallel sends from process 0"
        if self._is_sending:
            return "memory ran out while DistributedDataParallel was sending buffers"
        if self.syncs and self._gradients.is_changed():
            return "its backward had begun to send gradients to the other processes, which cannot be taken back"
        return None

    def _before_wrapper(self, wrapper: nn.Module, args: Any) -> None:
        self._num_begun += 1
        self._is_sending = True
        if self._num_begun <= self._num_sent:
            wrapper.require_forward_param_sync = False  # type: ignore[assignment]

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if self._is_sending:
            self._is_sending = False
            self._num_sent = max(self._num_sent, self._num_begun)


@dataclass
class _MicroBatch:
    """One call of a Trainer's `training_step`."""

    call: TrainerCall
    inputs: Any
    size: Size
    # As accelerate counts micro-batches.
    syncs_gradients: bool
    # To other processes.
    sends_gradients: bool

    def again(self) -> TrainerCall:
        return self.call.with_inputs(copy.copy(self.inputs))


@dataclass(eq=False)
class TrainingSteps:
    """Runs the training steps of one run."""

    _trainer: Any
    _model: nn.Module
    _escalation: Escalation
    # Of policy `auto`: sees what the model is given.
    _planning: RunPlanner | None
    # What else counts in a micro-batch, in its attributes.
    _counters: Sequence[object]
    # What this process sends to others, where there are some.
    _data_parallel: DataParallel | None

    def __post_init__(self) -> None:
        trainer = self._trainer
        owners: list[tuple[str, object]] = [("", trainer), ("state", trainer.state), ("model", self._model)]
        owners += [(type(counter).__name__, counter) for counter in self._counters]
        are_sent = self._data_parallel is not None
        self._window = Window(self._model, owners, trainer.optimizer, are_zeros=True, are_sent=are_sent)
        self._num_looks = 0
        self._micro_batches: list[_MicroBatch] = []
        self._is_running = False

    def begin_step(self) -> None:
        self._escalation.begin_step()
        if self._num_looks < _LOOKS_BESIDE:
            self._num_looks += 1
            self._window.look_beside(trained_beside(self._trainer))
        # One that no optimizer step has ended goes on: the end of a stream may have cut it short.
        has_begun = bool(self._window.begun) and self._data_parallel is None
        if not (has_begun and any(parameter.grad is not None for parameter in self._model.parameters())):
            is_mixed = self._trainer.accelerator.mixed_precision != "no"
            step = f"Step {self._step}"
            self._clear(ReplayProof(step, "micro-batch", self._model.parameters, _TO_DO, is_mixed=is_mixed))
        if self._data_parallel is not None:
            self._data_parallel.begin_window()

    def _clear(self, proof: ReplayProof | None = None) -> None:
        self._window.clear(proof)
        self._micro_batches.clear()

    def undo(self) -> bool:
        """Bring back what the step began with, for it to be saved. Returns whether that is so."""
        window = self._window
        if not window.begun or window.has_written_weights:
            return False
        if self._data_parallel is not None and window.begun[0].attributes.changed_buffers():
            # What they were like is known of the run's first step only.
            return False
        window.undo()
        return True

    def end_step(self) -> None:
        """The weights have changed: the window cannot be undone any longer, and need not be."""
        self._clear()
        self._escalation.ladder.end_step()

    def run(self, call: TrainerCall) -> Any:
        """Run a micro-batch, and the whole window again for as long as memory runs out and there is a leaner plan."""
        escalation = self._escalation
        if self._window.proof is None:
            # Somebody runs a step by hand.
            return call()
        micro_batch = self._begin(call)
        escalation.stand_on(escalation.ladder.level_for(micro_batch.size))
        returned, failed = self._attempt(self._window.proof, len(self._micro_batches) - 1, call)
        if failed is not None:
            returned = escalation.recover(failed, self._fault, partial(self._replay, self._window.proof))
        escalation.ladder.passed(micro_batch.size, self._batch)
        return returned

    def run_once(self, call: TrainerCall) -> Any:
        """Run a micro-batch that is not run again, and note what `undo` needs."""
        if self._window.proof is not None:
            self._begin(call)
        return call()

    def note_loss(self, loss: Any) -> None:
        """The forward of the micro-batch that runs has ended: its backward begins."""
        # Somebody may run a backward by hand, between micro-batches.
        if self._window.proof is not None and self._is_running:
            self._window.proof.note_loss(loss)

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1

    @property
    def _batch(self) -> Batch | None:
        return None if self._planning is None else self._planning.seen

    def _begin(self, call: TrainerCall) -> _MicroBatch:
        others = self._data_parallel
        if others is not None:
            others.begin_micro_batch()
        inputs = list(nested_named_tensors(call.inputs))
        micro_batch = _MicroBatch(
            call,
            # A step may take entries out of what it is given.
            copy.copy(call.inputs),
            Size.of(inputs),
            self._trainer.accelerator.gradient_state.sync_gradients,
            others is not None and others.syncs,
        )
        self._window.begin(inputs)
        self._micro_batches.append(micro_batch)
        return micro_batch

    def _attempt(self, proof: ReplayProof, number: int, call: TrainerCall) -> tuple[Any, Failed | None]:
        """Run a micro-batch of the window, for the first time or again."""

        def proven() -> Any:
            proof.begin_micro_batch(nested_named_tensors(call.inputs), self._escalation.ladder.rung.plan)
            self._is_running = True
            try:
                returned = call()
            finally:
                self._is_running = False
            proof.end_micro_batch(returned)
            return returned

        returned, failure = self._escalation.attempt(proven)
        return returned, None if failure is None else self._failed(self._micro_batches[number], number, failure)

    def _failed(self, micro_batch: _MicroBatch, number: int, failure: Failure) -> Failed:
        inputs = micro_batch.call.inputs
        examples = partial(describe_examples, self._trainer, number, inputs)
        return Failed(failure, self._step, micro_batch.size, describe_inputs(inputs), self._batch, examples)

    def _fault(self) -> str | None:
        if fault := self._window.fault():
            return fault
        if self._window.look_beside(trained_beside(self._trainer)):
            return (
                "modules or weights beside the model, of a loss, were made since the run began, and nothing noted them"
            )
        return None if self._data_parallel is None else self._data_parallel.fault(self._window)

    def _replay(self, proof: ReplayProof) -> tuple[Any, Failed | None]:
        gradient_state, others = self._trainer.accelerator.gradient_state, self._data_parallel
        syncs = gradient_state.sync_gradients
        first = 0 if others is None else others.begin_replay()
        returned: Any = None
        proof.begin_replay(first)
        try:
            for number, micro_batch in enumerate(self._micro_batches[first:], first):
                self._window.undo_and_check(number)
                set_sync_gradients(gradient_state)(micro_batch.syncs_gradients)
                if others is not None:
                    others.begin_again(syncs=micro_batch.sends_gradients)
                if self._planning is not None:
                    self._planning.start_micro_batch_again()
                returned, failed = self._attempt(proof, number, micro_batch.again())
                if failed is not None:
                    return None, failed
        finally:
            set_sync_gradients(gradient_state)(syncs)
        proof.end_replay()
        return returned, None
