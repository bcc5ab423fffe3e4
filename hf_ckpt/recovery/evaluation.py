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
    Beginning,
    TrainerCall,
    describe_inputs,
    named_tensors,
    one_of_each_device,
)
from hf_ckpt.recovery.attribute_snapshots import AttributeSnapshots
from hf_ckpt.recovery.out_of_memory import Failure, attempt, release_memory
from hf_ckpt.regions.execution_state import RandomState
from hf_ckpt.structure.stored import replaced
from hf_ckpt.upstream.transformers import LOSS_SHIFTS

logger = logging.getLogger(__name__)

# A label that no loss counts.
_IGNORED = -100
# What `prediction_step` returns: loss, logits and labels.
Prediction = tuple[Tensor | None, Any, Any]


class EvaluationRecovery:
    """Runs the prediction steps of a Trainer. `num_recovered` batches ran in parts, or once more."""

    def __init__(self, trainer: Any) -> None:
        self.num_recovered = 0
        self._trainer = trainer
        self._has_said = False
        self._snapshots = AttributeSnapshots(("", trainer))
        self._on_devices = one_of_each_device(trainer.model)
        # What the batch has gathered from other processes.
        self._gathered: list[Any] = []
        self._is_gathering = False

    def run(self, call: TrainerCall) -> Any:
        """Run a batch, and halves of it where memory runs out, or raise `OutOfMemoryError`."""
        self._gathered, self._is_gathering = [], False
        returned, failure = self._try(call)
        if failure is not None:
            release_memory()
            # What the allocator held in pieces is together again: first the whole once more.
            returned = self._whole_or_in_halves(call)
            self.num_recovered += 1
        return returned

    def _try(self, call: TrainerCall) -> tuple[Any, Failure | None]:
        beginning = Beginning(self._snapshots.now(), RandomState.of(*self._on_devices), ())
        # A step may take entries out of what it is given.
        call = call.with_inputs(copy.copy(call.inputs))
        with self._gathers_once():
            returned, failure = attempt(call)
        if failure is None:
            return returned, None
        if self._is_gathering:
            self._give_up(failure, call.inputs, "It was sending to the other processes.")
        if fault := beginning.fault():
            self._give_up(failure, call.inputs, f"It cannot be undone: {fault}.")
        beginning.restore()
        return None, failure

    def _whole_or_in_halves(self, call: TrainerCall) -> Any:
        returned, failure = self._try(call)
        if failure is None:
            return returned
        release_memory()
        inputs = call.inputs
        rows = _common_rows(inputs)
        if rows is None or rows < 2:
            why = "It is one sequence." if rows == 1 else "Its inputs cannot be split: they have no common batch size."
            self._give_up(failure, inputs, why)
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "Out of memory in the evaluation of %s. %s It goes on in halves: predictions and loss are those of the "
                "whole up to rounding, if the loss is a mean over labels. per_device_eval_batch_size=%d avoids it.",
                *(describe_inputs(inputs), failure.figures.describe(), rows // 2),
            )
        parts = _rows(inputs, rows, 0, rows // 2), _rows(inputs, rows, rows // 2, rows)
        found = [self._whole_or_in_halves(call.with_inputs(part)) for part in parts]
        try:
            return _joined(found, None if self._gathered else list(map(self._num_counted, parts)))
        except ValueError as error:
            self._give_up(failure, inputs, f"In parts it would fit, but {error}.")

    @contextmanager
    def _gathers_once(self) -> Iterator[None]:
        """Let a batch gather from other processes what it has not gathered yet, however often it runs again."""
        # The Trainer counts the labels of all processes' batches, to divide the loss of each by: that of a part too.
        accelerator = self._trainer.accelerator
        if accelerator.num_processes == 1:
            yield
            return
        known = iter(list(self._gathered))
        gather = accelerator.gather

        def gathered(tensor: Any) -> Any:
            value = next(known, None)
            if value is None:
                # An error in it does not tell whether the others have been sent something.
                self._is_gathering = True
                value = gather(tensor)
                self._is_gathering = False
                self._gathered.append(value)
            return value

        with replaced(accelerator, "gather", gathered):
            yield

    def _num_counted(self, inputs: Any) -> float:
        """Return how many labels the loss of some rows is the mean of, as far as labels tell."""
        shifted = inputs.get("shift_labels")
        names = self._trainer.label_names
        labels = inputs.get(names[0]) if len(names) == 1 and shifted is None else shifted
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return float(_common_rows(inputs) or 1)
        # Losses of causal language models leave out the first label of each row.
        shifts: bool | None = getattr(self._trainer, LOSS_SHIFTS, None)
        if shifts is None:
            name = type(without_adapter(self._trainer.model)).__name__
            shifts = name.endswith(("ForCausalLM", "LMHeadModel"))
        if labels.dim() > 1 and shifted is None and shifts:
            labels = labels[:, 1:]
        return float((labels != _IGNORED).sum())

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
    if weights is None:
        loss = torch.stack(losses).sum(0)
    else:
        # A part without a label has no mean.
        pairs = [(each, weight) for each, weight in zip(losses, weights, strict=True) if each is not None and weight]
        total = sum(weight for _, weight in pairs)
        loss = torch.stack([each * (weight / total) for each, weight in pairs]).sum(0) if pairs else losses[0]
    return loss, _concatenated(logits), _concatenated(labels)


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
