"""Training steps of a Trainer that go on after their forward or backward has run out of memory.

The window of micro-batches is undone, a leaner plan put in force, and the window run again from its first micro-batch,
with the same inputs and the same random numbers: to the bit what that plan would have given at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_ckpt.recovery.accumulation_window import (
    Buffers,
    MicroBatch,
    Randomness,
    TrainerCall,
    Window,
    describe_inputs,
    one_of_each_device,
)
from hf_ckpt.recovery.attribute_snapshots import Attributes
from hf_ckpt.recovery.data_parallel import DataParallel
from hf_ckpt.recovery.escalation import Escalation, Failed
from hf_ckpt.recovery.failed_examples import describe_examples
from hf_ckpt.recovery.out_of_memory import Failure

if TYPE_CHECKING:
    from hf_ckpt.auto.largest_batch_in_data import Batch
    from hf_ckpt.auto.replan import RunPlanner


class TrainingSteps:
    """Runs the training steps of one run.

    Args:
        trainer: whose steps they are.
        model: that it trains.
        escalation: puts leaner plans in force.
        planning: of policy `auto`, which sees what the model is given.
        counters: what else counts in a micro-batch, in its attributes.
        data_parallel: what this process sends to others, where there are some.
    """

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        escalation: Escalation,
        planning: RunPlanner | None,
        counters: Sequence[object],
        data_parallel: DataParallel | None = None,
    ) -> None:
        self._trainer = trainer
        self._escalation = escalation
        self._planning = planning
        self._counters = counters
        self._data_parallel = data_parallel
        self._buffers = Buffers(model, are_sent=data_parallel is not None)
        # Those that are frozen too: they may be trained later, and a forward may write to them.
        self._parameters = list(model.parameters())
        self._on_devices = one_of_each_device(model)
        self._window: Window | None = None

    def begin_step(self) -> None:
        """A window of micro-batches begins."""
        self._escalation.begin_step()
        if not self._goes_on():
            self._window = Window(self._parameters)
        if self._data_parallel is not None:
            self._data_parallel.begin_window()

    def _goes_on(self) -> bool:
        """Whether a window that no optimizer step has ended goes on: the end of a stream may have cut it short."""
        has_begun = self._window is not None and bool(self._window.micro_batches) and self._data_parallel is None
        return has_begun and any(parameter.grad is not None for parameter in self._parameters)

    def undo(self) -> bool:
        """Bring back what the step began with, for it to be saved. Returns whether that is so."""
        window = self._window
        if window is None or not window.micro_batches or window.has_written_weights:
            return False
        if self._data_parallel is not None and window.micro_batches[0].buffers.with_other_values():
            # What they were like is known of the run's first step only.
            return False
        window.undo()
        window.micro_batches[0].attributes.restore()
        window.micro_batches[0].randomness.restore()
        return True

    def end_step(self) -> None:
        """The weights have changed: the window cannot be undone any longer, and need not be."""
        self._window = None
        self._escalation.ladder.end_step()

    def run(self, call: TrainerCall) -> Any:
        """Run a micro-batch, and the whole window again for as long as memory runs out and there is a leaner plan.

        Raises:
            OutOfMemoryError: there is none, or the window cannot be undone.
        """
        window, escalation = self._window, self._escalation
        if window is None:
            # Somebody runs a step by hand.
            return call()
        micro_batch = self._begin(window, call)
        escalation.stand_on(escalation.ladder.level_for(micro_batch.size))
        returned, failure = escalation.attempt(call)
        if failure is not None:
            failed = self._failed(window, len(window.micro_batches) - 1, failure)
            returned = escalation.recover(failed, partial(self._fault, window), partial(self._replay, window))
        self._buffers.learn(micro_batch.buffers)
        escalation.ladder.passed(micro_batch.size, self._batch)
        return returned

    def run_once(self, call: TrainerCall) -> Any:
        """Run a micro-batch that is not run again, and note what `undo` needs."""
        micro_batch = None if self._window is None else self._begin(self._window, call)
        returned = call()
        if micro_batch is not None:
            self._buffers.learn(micro_batch.buffers)
        return returned

    @property
    def _batch(self) -> Batch | None:
        return None if self._planning is None else self._planning.seen

    def _fault(self, window: Window) -> str | None:
        fault = window.fault()
        return self._data_parallel.fault(window) if fault is None and self._data_parallel is not None else fault

    def _begin(self, window: Window, call: TrainerCall) -> MicroBatch:
        trainer, others = self._trainer, self._data_parallel
        if others is not None:
            others.begin_micro_batch()
        micro_batch = MicroBatch(
            call,
            Randomness.now(self._on_devices),
            Attributes(trainer, trainer.state, *self._counters),
            self._buffers.now(),
            trainer.accelerator.gradient_state.sync_gradients,
            others is not None and others.syncs,
        )
        window.micro_batches.append(micro_batch)
        return micro_batch

    def _failed(self, window: Window, number: int, failure: Failure) -> Failed:
        step, micro_batch = int(self._trainer.state.global_step) + 1, window.micro_batches[number]
        examples = partial(describe_examples, self._trainer, number, micro_batch.call.inputs)
        inputs = describe_inputs(micro_batch.call.inputs)
        return Failed(failure, step, micro_batch.size, inputs, self._batch, examples)

    def _replay(self, window: Window) -> tuple[Any, Failed | None]:
        """Run the window's micro-batches again, or the last one, until one fails."""
        gradient_state, others = self._trainer.accelerator.gradient_state, self._data_parallel
        syncs = gradient_state.sync_gradients
        first = 0 if others is None else others.begin_replay()
        if first == 0:
            window.undo()
        else:
            window.micro_batches[first].buffers.restore()
        returned: Any = None
        try:
            for number, micro_batch in enumerate(window.micro_batches[first:], first):
                micro_batch.attributes.restore()
                micro_batch.randomness.restore()
                gradient_state._set_sync_gradients(micro_batch.syncs_gradients)
                if others is not None:
                    others.begin_again(syncs=micro_batch.sends_gradients)
                if self._planning is not None:
                    self._planning.start_micro_batch_again()
                returned, failure = self._escalation.attempt(micro_batch.again())
                if failure is not None:
                    return None, self._failed(window, number, failure)
        finally:
            gradient_state._set_sync_gradients(syncs)
        return returned, None
