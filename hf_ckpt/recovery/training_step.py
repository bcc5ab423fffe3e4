"""Training steps of a Trainer that go on after their forward or backward has run out of memory.

The window of micro-batches is undone, a leaner plan put in force, and the window run again from its first micro-batch,
with the same inputs and the same random numbers: to the bit what that plan would have given at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from hf_ckpt.recovery.attributes import Attributes
from hf_ckpt.recovery.escalation import Escalation, Failed
from hf_ckpt.recovery.instance_methods import Method
from hf_ckpt.recovery.out_of_memory import Failure
from hf_ckpt.recovery.window import Buffers, MicroBatch, Randomness, Window, describe_inputs, one_of_each_device


class TrainingSteps:
    """Runs the training steps of one run.

    Args:
        trainer: whose steps they are.
        model: that it trains.
        escalation: puts leaner plans in force.
        start_again: called before a micro-batch of the window, given by its number, runs again.
    """

    def __init__(
        self, trainer: Any, model: nn.Module, escalation: Escalation, start_again: Callable[[int], None]
    ) -> None:
        self._trainer = trainer
        self._escalation = escalation
        self._start_again = start_again
        self._buffers = Buffers(model)
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._on_devices = one_of_each_device(model)
        self._window: Window | None = None

    def begin_step(self) -> None:
        """A window of micro-batches begins."""
        self._escalation.begin_step()
        self._window = Window(self._trainable)

    def end_step(self) -> None:
        """The weights have changed: the window cannot be undone any longer, and need not be."""
        self._window = None
        self._escalation.ladder.end_step()

    def run(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a micro-batch, and the whole window again for as long as memory runs out and there is a leaner plan.

        Raises:
            OutOfMemoryError: there is none, or the window cannot be undone.
        """
        window, escalation = self._window, self._escalation
        if window is None:
            # Somebody runs a step by hand.
            return method(*args, **kwargs)
        micro_batch = self._begin(args, kwargs)
        window.micro_batches.append(micro_batch)
        escalation.stand_on(escalation.ladder.level_for(micro_batch.size))
        returned, failure = escalation.attempt(partial(method, *args, **kwargs))
        if failure is not None:
            failed = self._failed(micro_batch, failure)
            returned = escalation.recover(failed, window.fault, partial(self._replay, method, window))
        self._buffers.learn(micro_batch.buffers)
        return returned

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MicroBatch:
        trainer = self._trainer
        return MicroBatch(
            args,
            kwargs,
            Randomness.now(self._on_devices),
            Attributes(trainer, trainer.state),
            self._buffers.now(),
            trainer.accelerator.gradient_state.sync_gradients,
        )

    def _failed(self, micro_batch: MicroBatch, failure: Failure) -> Failed:
        step = int(self._trainer.state.global_step) + 1
        return Failed(failure, step, micro_batch.size, describe_inputs(micro_batch.inputs))

    def _replay(self, method: Method, window: Window) -> tuple[Any, Failed | None]:
        """Run the window's micro-batches again, until one fails."""
        window.undo()
        gradient_state = self._trainer.accelerator.gradient_state
        syncs = gradient_state.sync_gradients
        returned: Any = None
        try:
            for number, micro_batch in enumerate(window.micro_batches):
                micro_batch.attributes.restore()
                micro_batch.randomness.restore()
                gradient_state._set_sync_gradients(micro_batch.syncs_gradients)
                self._start_again(number)
                args, kwargs = micro_batch.arguments()
                returned, failure = self._escalation.attempt(partial(method, *args, **kwargs))
                if failure is not None:
                    return None, self._failed(micro_batch, failure)
        finally:
            gradient_state._set_sync_gradients(syncs)
        return returned, None
