"""Parts of a run that are not run again: where memory runs out in them the run ends, with what is known of it."""

from __future__ import annotations

from typing import Any

from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.recovery.examples import describe_examples
from hf_ckpt.recovery.instance_methods import Method
from hf_ckpt.recovery.out_of_memory import Failure, is_out_of_memory
from hf_ckpt.recovery.training_step import TrainingSteps
from hf_ckpt.recovery.window import describe_inputs
from hf_ckpt.units import counted


class EndingPart:
    """Runs a method of a Trainer that is not run again.

    Args:
        trainer: whose method it is.
        why: it is not run again, as a sentence.
        what: the method does; None for a training step.
        steps: note what a training step begins with, where the run may be saved as it was then.
    """

    def __init__(self, trainer: Any, why: str, what: str | None = None, *, steps: TrainingSteps | None = None) -> None:
        self._trainer = trainer
        self._why = why
        self._what = what
        self._steps = steps
        self._num_steps, self._number = -1, 0

    def run(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Raise `OutOfMemoryError` where memory runs out."""
        num_steps = int(self._trainer.state.global_step)
        self._num_steps, self._number = num_steps, self._number + 1 if num_steps == self._num_steps else 0
        try:
            return method(*args, **kwargs) if self._steps is None else self._steps.run_once(method, args, kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = Failure.caught(error)
        where, examples = f"{self._what}, after {counted(num_steps, 'step')}", ""
        if self._what is None:
            inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
            where = f"{failure.part} of step {num_steps + 1}, with {describe_inputs(inputs)}"
            examples = describe_examples(self._trainer, self._number, inputs)
        sentences = (f"Out of memory in the {where}.", failure.figures.describe(), self._why, examples)
        raise OutOfMemoryError(" ".join(filter(None, sentences))) from failure.error
