"""Batches of evaluation that do not fit, in parts of their rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_ckpt.auto.batch_of_forward import without_adapter
from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.recovery.accumulation_window import (
    TrainerCall,
    describe_inputs,
    named_tensors,
    one_of_each_device,
)
from hf_ckpt.recovery.attribute_snapshots import AttributeSnapshots
from hf_ckpt.recovery.out_of_memory import Failure, attempt, release_memory
from hf_ckpt.regions.execution_state import RandomState
from hf_ckpt.upstream.transformers import LOSS_SHIFTS

logger = logging.getLogger(__name__)

_IGNORED = -100
"""A label that no loss counts."""


class Gathered:
    """What a batch has gathered from other processes, which is sent once however often the batch runs again.

    The Trainer counts the labels of all processes' batches, to divide the loss of each by: that of a part too, then.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.values: list[Any] = []
        self.is_lost = False

    @contextmanager
    def once(self) -> Iterator[None]:
        """Gather what has not been gathered yet."""
        if self._accelerator.num_processes == 1:
            yield
            return
        known = iter(list(self.values))
        gather = self._accelerator.gather

        def gathered(tensor: Any) -> Any:
            value = next(known, None)
            if value is None:
                # An error in it does not tell whether the others have been sent something.
                self.is_lost = True
                value = gather(tensor)
                self.is_lost = False
                self.values.append(value)
            return value

        found = vars(self._accelerator).get("gather")
        self._accelerator.gather = gathered
        try:
            yield
        finally:
            del self._accelerator.gather
            if found is not None:
                self._accelerator.gather = found


Prediction = tuple[Tensor | None, Any, Any]
"""What `prediction_step` returns: loss, logits and labels."""


class EvaluationRecovery:
    """Runs the prediction steps of a Trainer.

    Attributes:
        num_recovered: batches that ran in parts, or once more.
    """

    def __init__(self, trainer: Any) -> None:
        self.num_recovered = 0
        self._trainer = trainer
        self._has_said = False
        self._snapshots = AttributeSnapshots(("", trainer))
        self._on_devices = one_of_each_device(trainer.model)
        self._gathered = Gathered(trainer.accelerator)

    def run(self, call: TrainerCall) -> Any:
        """Run a batch, and halves of it where memory runs out.

        Raises:
            OutOfMemoryError: not even one row fits, or what the step returns cannot be put together.
        """
        self._gathered = Gathered(self._trainer.accelerator)
        returned, failure = self._try(call)
        if failure is None:
            return returned
        release_memory()
        # What the allocator held in pieces is together again.
        returned, failure = self._try(call)
        if failure is not None:
            returned = self._in_halves(call, failure)
        self.num_recovered += 1
        return returned

    def _whole_or_in_halves(self, call: TrainerCall) -> Any:
        returned, failure = self._try(call)
        if failure is None:
            return returned
        release_memory()
        return self._in_halves(call, failure)

    def _try(self, call: TrainerCall) -> tuple[Any, Failure | None]:
        noted, randomness = self._snapshots.now(), RandomState.of(*self._on_devices)
        # A step may take entries out of what it is given.
        call = call.with_inputs(copy.copy(call.inputs))
        with self._gathered.once():
            returned, failure = attempt(call)
        if failure is None:
            return returned, None
        if self._gathered.is_lost:
            self._give_up(failure, call.inputs, "It was sending to the other processes.")
        if lost := noted.describe_lost("The step has written to the Trainer's tensors"):
            self._give_up(failure, call.inputs, f"{lost}.")
        noted.restore()
        randomness.restore()
        return None, failure

    def _in_halves(self, call: TrainerCall, failure: Failure) -> Any:
        inputs = call.inputs
        rows = _common_rows(inputs)
        if rows is None or rows < 2:
            why = "It is one sequence." if rows == 1 else "Its inputs cannot be split: they have no common batch size."
            self._give_up(failure, inputs, why)
        self._say(inputs, failure)
        found, weights = [], []
        for part in (_rows(inputs, rows, 0, rows // 2), _rows(inputs, rows, rows // 2, rows)):
            found.append(self._whole_or_in_halves(call.with_inputs(part)))
            weights.append(self._num_counted(part))
        try:
            return _joined(found, None if self._gathered.values else weights)
        except ValueError as error:
            self._give_up(failure, inputs, f"In parts it would fit, but {error}.")

    def _num_counted(self, inputs: Any) -> float:
        """Return how many labels the loss of some rows is the mean of, as far as labels tell."""
        shifted = inputs.get("shift_labels")
        names = self._trainer.label_names
        labels = inputs.get(names[0]) if len(names) == 1 and shifted is None else shifted
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return float(_common_rows(inputs) or 1)
        if labels.dim() > 1 and shifted is None and self._loss_shifts():
            labels = labels[:, 1:]
        return float((labels != _IGNORED).sum())

    def _loss_shifts(self) -> bool:
        """Whether the loss leaves out the first label of each row, as those of causal language models do."""
        of_trainer: bool | None = getattr(self._trainer, LOSS_SHIFTS, None)
        if of_trainer is not None:
            return of_trainer
        return type(without_adapter(self._trainer.model)).__name__.endswith(("ForCausalLM", "LMHeadModel"))

    def _say(self, inputs: Any, failure: Failure) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "Out of memory in the evaluation of %s. %s It goes on in halves: predictions and loss are those of the "
                "whole up to rounding, if the loss is a mean over labels. per_device_eval_batch_size=%d avoids it.",
                *(describe_inputs(inputs), failure.figures.describe(), max(1, (_common_rows(inputs) or 2) // 2)),
            )

    def _give_up(self, failure: Failure, inputs: Any, why: str) -> NoReturn:
        raise OutOfMemoryError(
            f"Out of memory in the evaluation of {describe_inputs(inputs)}. {failure.figures.describe()} {why} "
            "Evaluate shorter sequences, or set eval_accumulation_steps, which moves predictions to the host."
        ) from failure.error


def _common_rows(inputs: Any) -> int | None:
    """Return the rows of a batch; None where its tensors differ in them, or have none."""
    found = {tensor.shape[0] if tensor.dim() else None for _, tensor in named_tensors(inputs)}
    return found.pop() if len(found) == 1 else None


def _rows(inputs: Mapping[str, Any], rows: int, start: int, stop: int) -> Any:
    part = copy.copy(inputs)
    assert isinstance(part, MutableMapping), "a batch with known rows has names"
    for name, value in inputs.items():
        if isinstance(value, Tensor) or (isinstance(value, list | tuple) and len(value) == rows):
            part[name] = value[start:stop]
    return part


# --- Parts put together. ---


def _joined(found: list[Prediction], weights: list[float] | None) -> Prediction:
    """Put parts together, whose losses are means with these weights, or parts of one sum."""
    losses, logits, labels = zip(*found, strict=True)
    loss = torch.stack(losses).sum(0) if weights is None else _mean(losses, weights)
    return loss, _concatenated(logits), _concatenated(labels)


def _mean(losses: tuple[Tensor | None, ...], weights: list[float]) -> Tensor | None:
    present = [(loss, weight) for loss, weight in zip(losses, weights, strict=True) if loss is not None and weight]
    if not present:
        return losses[0]
    if len(present) < len(losses):
        # A part without a label has no mean.
        return present[0][0]
    total = sum(weight for _, weight in present)
    return torch.stack([loss * (weight / total) for loss, weight in present]).sum(0)


def _concatenated(parts: tuple[Any, ...]) -> Any:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        if not first.dim():
            raise ValueError(
                "the model returns a value for the whole batch, which is not the mean of those of its parts"
            )
        return torch.cat(parts)
    if isinstance(first, list | tuple):
        return type(first)(_concatenated(each) for each in zip(*parts, strict=True))
    if isinstance(first, Mapping):
        return {name: _concatenated(tuple(part[name] for part in parts)) for name in first}
    raise ValueError(f"the model returns a {type(first).__name__}, whose rows are not known")
