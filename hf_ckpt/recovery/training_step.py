"""Training steps of a Trainer that go on after their forward or backward has run out of memory.

The window of micro-batches is undone, a leaner plan put in force, and the window run again from its first micro-batch,
with the same inputs and the same random numbers: to the bit what that plan would have given at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recovery.attributes import Attributes
from hf_ckpt.recovery.instance_methods import Method
from hf_ckpt.recovery.ladder import Ladder, Rung
from hf_ckpt.recovery.out_of_memory import Failure, is_out_of_memory, release_memory
from hf_ckpt.recovery.window import Buffers, MicroBatch, Randomness, Window, describe_inputs

logger = logging.getLogger(__name__)

NextRung = Callable[[Plan, Failure, int], Rung | None]
"""Returns the rung after a plan that failed, from the failure and the size of its batch."""


class TrainingSteps:
    """Runs the training steps of one run.

    Args:
        trainer: whose steps they are.
        model: that it trains.
        ladder: what plans there are.
        next_rung: makes the next one.
        put_in_force: gets the plan that is to replace the one in force.
        start_again: called before a micro-batch of the window, given by its number, runs again.

    Attributes:
        num_recovered: steps that went on after they had run out of memory.
        num_switches: how often another plan was put in force.
    """

    def __init__(
        self,
        trainer: Any,
        model: nn.Module,
        ladder: Ladder,
        next_rung: NextRung,
        put_in_force: Callable[[Rung], None],
        start_again: Callable[[int], None],
    ) -> None:
        self.ladder = ladder
        self.num_recovered = 0
        self.num_switches = 0
        self._trainer = trainer
        self._next_rung = next_rung
        self._put_in_force = put_in_force
        self._start_again = start_again
        self._buffers = Buffers(model)
        self._trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # One of each device tells which generators there are.
        self._on_devices = list({tensor.device: tensor for tensor in model.parameters()}.values())
        # Older than the graph of any step; see `_drop_failed_backward`.
        with torch.enable_grad():
            self._oldest = torch.zeros((), requires_grad=True) * 1
        self._window: Window | None = None

    def begin_step(self) -> None:
        """A window of micro-batches begins."""
        self._window = Window(self._trainable)

    def end_step(self) -> None:
        """The weights have changed: the window cannot be undone any longer, and need not be."""
        self._window = None
        self.ladder.end_step()

    def run(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a micro-batch, and the whole window again for as long as memory runs out and there is a leaner plan.

        Raises:
            OutOfMemoryError: there is none, or the window cannot be undone.
        """
        window = self._window
        if window is None:
            # Somebody runs a step by hand.
            return method(*args, **kwargs)
        micro_batch = self._begin(args, kwargs)
        window.micro_batches.append(micro_batch)
        self._stand_on(self.ladder.level_for(micro_batch.size))
        returned, failure = self._try(method, micro_batch, args, kwargs)
        if failure is not None:
            returned = self._recover(method, window, failure)
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

    def _try(
        self, method: Method, micro_batch: MicroBatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Failure | None]:
        try:
            return method(*args, **kwargs), None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = Failure.caught(error)
        self._drop_failed_backward()
        return None, failure

    def _drop_failed_backward(self) -> None:
        """Let go of the nodes that a failed backward has left in autograd's queue of this thread, and their graph.

        The youngest node is run first: a backward of one that is older than all of them finds and drops them.
        """
        with torch.enable_grad(), _disable_current_modes():
            self._oldest.backward(retain_graph=True)  # type: ignore[no-untyped-call]

    def _recover(self, method: Method, window: Window, failure: Failure) -> Any:
        is_retried = False
        failed: MicroBatch = window.micro_batches[-1]
        last: Failure | None = failure
        while last is not None:
            if (fault := window.fault()) is not None:
                self._give_up(last, failed, f"The step cannot be undone: {fault}.")
            if last.figures.is_fragmented and not is_retried:
                is_retried = True
                self._retry_with_same_plan(last)
            else:
                self._escalate(last, failed)
            returned, last, failed = self._replay(method, window)
        self.num_recovered += 1
        return returned

    def _retry_with_same_plan(self, failure: Failure) -> None:
        logger.warning(
            "Out of memory in the %s of step %d, in pieces: %s The allocator's cache is emptied, and the step runs "
            "again under the same plan.",
            *(failure.part, self._step, failure.figures.describe()),
        )
        release_memory()
        # What the failed run has left in the regions is gone with the old patches.
        self._put_in_force(self.ladder.rung)

    def _escalate(self, failure: Failure, failed: MicroBatch) -> None:
        release_memory()
        before = self.ladder.rung.plan
        if not self.ladder.fail(failed.size, lambda plan: self._next_rung(plan, failure, failed.size)):
            self._give_up(failure, failed, "There is no leaner plan.")
        self._put_in_force(self.ladder.rung)
        self.num_switches += 1
        self._say(failure, failed, self.ladder.rung, before)

    def _say(self, failure: Failure, failed: MicroBatch, rung: Rung, before: Plan) -> None:
        inexact = (
            ""
            if rung.is_exact
            else " Sums are added in another order from here on: results differ by up to 1e-6 in float32. exact=True "
            "forbids it."
        )
        logger.warning(
            "Out of memory in the %s of step %d (%s). %s The step runs again: %s (%s).%s",
            *(failure.part, self._step, describe_inputs(failed.inputs), failure.figures.describe()),
            *(rung.change, _cost(before, rung.plan), inexact),
        )

    def _replay(self, method: Method, window: Window) -> tuple[Any, Failure | None, MicroBatch]:
        """Run the window's micro-batches again, until one fails."""
        window.undo()
        gradient_state = self._trainer.accelerator.gradient_state
        syncs = gradient_state.sync_gradients
        micro_batch = window.micro_batches[0]
        returned: Any = None
        failure: Failure | None = None
        try:
            for number, micro_batch in enumerate(window.micro_batches):
                micro_batch.attributes.restore()
                micro_batch.randomness.restore()
                gradient_state._set_sync_gradients(micro_batch.syncs_gradients)
                self._start_again(number)
                args, kwargs = micro_batch.arguments()
                returned, failure = self._try(method, micro_batch, args, kwargs)
                if failure is not None:
                    break
        finally:
            gradient_state._set_sync_gradients(syncs)
        return returned, failure, micro_batch

    def _stand_on(self, level: int) -> None:
        if level != self.ladder.level:
            self.ladder.level = level
            self.num_switches += 1
            self._put_in_force(self.ladder.rung)

    def _give_up(self, failure: Failure, failed: MicroBatch, why: str) -> NoReturn:
        tried = ", ".join(rung.change for rung in self.ladder.rungs[1 : self.ladder.level + 1])
        raise OutOfMemoryError(
            f"Out of memory in the {failure.part} of step {self._step}, with {describe_inputs(failed.inputs)}. "
            f"{failure.figures.describe()} {why}{f' Tried: {tried}.' if tried else ''}"
        ) from failure.error

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step) + 1


def _cost(before: Plan, after: Plan) -> str:
    shares = [_recomputed(plan) for plan in (before, after)]
    return f"{shares[1]} of {_num_layers(after)} layers recomputed, {shares[0]} before"


def _recomputed(plan: Plan) -> int:
    return sum(entry.recomputes for stack in plan.stacks for entry in stack.layers)


def _num_layers(plan: Plan) -> int:
    return sum(len(stack.layers) for stack in plan.stacks)
