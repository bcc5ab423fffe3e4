"""Steps of a training loop of one's own that go on after they have run out of memory.

A closure holds the whole window of a step: gradients set to None, and forward and backward of each micro-batch. It is
undone as a whole and runs again as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_ckpt.auto.largest_batch_in_data import batch_of
from hf_ckpt.recovery.accumulation_window import (
    Buffers,
    Gradients,
    Randomness,
    describe_tensors,
    nested_named_tensors,
    one_of_each_device,
)
from hf_ckpt.recovery.attribute_snapshots import Attributes
from hf_ckpt.recovery.escalation import Escalation, Failed

Closure = Callable[[], Any]


class ClosureSteps:
    """Runs the steps of one loop.

    Args:
        model: that the closures train.
        escalation: puts leaner plans in force.
        is_undone: whether steps can be; else each runs once.
    """

    def __init__(self, model: nn.Module, escalation: Escalation, *, is_undone: bool) -> None:
        self._is_undone = is_undone
        self._model = model
        self._escalation = escalation
        self._num_steps = 0
        self._buffers = Buffers(model)
        self._on_devices = one_of_each_device(model)

    def run(self, closure: Closure, batch: Any, undo: Sequence[object]) -> Any:
        """Return what a closure returns, under a leaner plan where need be. See `AppliedInLoop.step`.

        Raises:
            OutOfMemoryError: there is no leaner plan, or the closure cannot be undone.
        """
        if not self._is_undone:
            return closure()
        escalation, ladder = self._escalation, self._escalation.ladder
        escalation.begin_step()
        self._num_steps += 1
        inputs = list(nested_named_tensors(batch))
        size = sum(tensor.nbytes for _, tensor in inputs)
        shapes = describe_tensors(inputs) if inputs else "a batch that applied.step() was not given"
        # The planner of a loop sees no forward.
        planned = batch_of((), batch) if isinstance(batch, Mapping) else None
        window = _ClosureWindow(self._model, inputs, undo, Randomness.now(self._on_devices), self._buffers)
        if inputs:
            escalation.stand_on(ladder.level_for(size))

        def attempt() -> tuple[Any, Failed | None]:
            returned, failure = escalation.attempt(closure)
            return returned, None if failure is None else Failed(failure, self._num_steps, size, shapes, planned)

        def run_again() -> tuple[Any, Failed | None]:
            window.undo()
            return attempt()

        returned, failed = attempt()
        if failed is not None:
            returned = escalation.recover(failed, window.fault, run_again)
        window.learn(self._buffers)
        ladder.passed(size, planned)
        ladder.end_step()
        return returned


class _ClosureWindow:
    """What things were like before a closure, and what brings that back."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[tuple[str, Tensor]],
        undo: Sequence[object],
        randomness: Randomness,
        buffers: Buffers,
    ) -> None:
        self._parameters = list(model.parameters())
        self._versions = [parameter._version for parameter in self._parameters]
        self._gradients = Gradients(self._parameters)
        self._inputs = [(name, tensor, tensor._version) for name, tensor in inputs]
        self._randomness = randomness
        self._attributes = Attributes(*undo)
        self._buffers = buffers.now()

    def learn(self, buffers: Buffers) -> None:
        """Tell which buffers the closure has changed."""
        buffers.learn(self._buffers)

    def fault(self) -> str | None:
        """Return why the closure cannot be undone; None if it can."""
        if [parameter._version for parameter in self._parameters] != self._versions:
            return "weights have changed since it began: the optimizer's step belongs behind applied.step()"
        if self._gradients.are_written():
            return (
                "it has added to gradients that were there before, or set them to zero in place. Let it begin with "
                "optimizer.zero_grad(), which sets them to None"
            )
        if written := [name for name, tensor, version in self._inputs if tensor._version != version]:
            return f"it has written to its batch: {', '.join(written)}"
        if changed := self._attributes.lost():
            return f"it has written to large tensors among what it is to undo: {', '.join(changed)}"
        return self._buffers.describe_lost()

    def undo(self) -> None:
        """Bring everything back; gradients that are new are dropped."""
        self._gradients.drop_new()
        # Casts of weights that the failed forward has left hold its graph.
        torch.clear_autocast_cache()
        self._attributes.restore()
        self._buffers.restore()
        self._randomness.restore()
