"""The end of a run that has run out of memory for good: what is known of it, and what several processes save.

Each process under DistributedDataParallel has the whole model and the optimizer's whole state. So the one that fails,
whose main thread waits for nobody, writes the checkpoint; of several that fail, the first. The others learn it
afterwards: whoever starts processes ends all of them as soon as one has ended.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from transformers.trainer_utils import get_last_checkpoint

from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.recovery.accumulation_window import TrainerCall, describe_inputs
from hf_ckpt.recovery.failed_examples import describe_examples
from hf_ckpt.recovery.out_of_memory import attempt
from hf_ckpt.recovery.training_step import TrainingSteps
from hf_ckpt.trainer.folders import checkpoint_folder, output_folder
from hf_ckpt.trainer.saved_files import write_plan
from hf_ckpt.trainer.training_run import TrainingRun
from hf_ckpt.units import counted
from hf_ckpt.upstream.torch import default_store
from hf_ckpt.upstream.transformers import save_rng_state

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_STATE_FILE = "trainer_state.json"
"""Of the Trainer, which writes it at the end of a checkpoint."""


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

    def run(self, call: TrainerCall) -> Any:
        """Raise `OutOfMemoryError` where memory runs out."""
        num_steps = int(self._trainer.state.global_step)
        self._num_steps, self._number = num_steps, self._number + 1 if num_steps == self._num_steps else 0
        returned, failure = attempt(call if self._steps is None else partial(self._steps.run_once, call))
        if failure is None:
            return returned
        where, examples = f"{self._what}, after {counted(num_steps, 'step')}", ""
        if self._what is None:
            where = f"{failure.part} of step {num_steps + 1}, with {describe_inputs(call.inputs)}"
            examples = describe_examples(self._trainer, self._number, call.inputs)
        sentences = (f"Out of memory in the {where}.", failure.figures.describe(), self._why, examples)
        raise OutOfMemoryError(" ".join(filter(None, sentences))) from failure.error


# --- Several processes. ---


def newest_checkpoint(trainer: Any) -> str:
    """Return what a run that has ended can go on from, in words."""
    step, folder = int(trainer.state.global_step), output_folder(trainer.args)
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None  # type: ignore[no-untyped-call]
    if last is None or not (Path(last) / _STATE_FILE).is_file():
        return f"There is no checkpoint to go on from: {_lost(step)}."
    return f"The newest complete checkpoint is {last}: {_lost(step - int(last.rpartition('-')[2]))}."


def _lost(num_steps: int) -> str:
    return f"{counted(num_steps, 'step')} {'is' if num_steps == 1 else 'are'} lost"


class CleanEnd:
    """Ends a run.

    Args:
        trainer: that trains.
        run: what is in force; lets the other processes know why this one ends.
        save: writes into a checkpoint where the ladder stands.
        is_whole: whether each process has the whole model and the optimizer's whole state.
    """

    def __init__(self, trainer: Any, run: TrainingRun, save: Callable[[Path], None], *, is_whole: bool) -> None:
        self._trainer = trainer
        self._run = run
        self._save = save
        self._is_whole = is_whole
        default = default_store()
        # Counted, so that runs that follow each other are not mixed up.
        number = default.add(f"hf_ckpt/ends/{dist.get_rank()}", 1)
        self._store = PrefixStore(f"hf_ckpt/end/{number}", default)
        if not is_whole and dist.get_rank() == 0 and str(trainer.args.save_strategy) in ("no", "SaveStrategy.NO"):
            logger.warning(
                "Out of memory ends this run, whose processes share the model: nothing can be written then, and with "
                'save_strategy="no" nothing is there to go on from. save_strategy="steps" saves every save_steps steps.'
            )

    def ended(self, error: OutOfMemoryError, *, is_as_before_step: bool) -> OutOfMemoryError:
        """Save what can be, tell the other processes, and return the error that this one is to end with.

        Args:
            error: of this process.
            is_as_before_step: whether weights, buffers and random states are those that the step began with.
        """
        rank = dist.get_rank()
        where = self._where(is_written=is_as_before_step and self._is_whole)
        found = OutOfMemoryError(f"Process {rank}: {error} All processes end. {where}")
        self._run.report_error(found)
        return found

    def _where(self, *, is_written: bool) -> str:
        """Return what to go on from, in words; written, where that can be."""
        fault = ""
        if is_written:
            folder = checkpoint_folder(self._trainer.args, self._trainer.state)
            fault = self._written_by_first(folder)
            if not fault:
                return f"Nothing is lost: {folder} holds the state before this step."
        return fault + newest_checkpoint(self._trainer)

    def _written_by_first(self, folder: Path) -> str:
        """Write a checkpoint, or wait for another process that does. Returns why there is none; empty if there is."""
        rank = str(dist.get_rank())
        if self._store.compare_set("writer", "", rank).decode() != rank:
            return self._waited_for()
        fault = ""
        try:
            if not (folder / _STATE_FILE).is_file():
                self._write(folder)
        # Whatever it is, the run ends for want of memory, and not for this.
        except Exception as error:  # noqa: BLE001
            fault = f"A checkpoint could not be written ({type(error).__name__}: {error}). "
        self._store.set("written", fault)
        return fault

    def _waited_for(self) -> str:
        end = time.monotonic() + self._trainer.args.ddp_timeout
        while not self._store.check(["written"]):
            if time.monotonic() > end:
                return "Another process has not written a checkpoint in time. "
            time.sleep(_POLL_S)
        return self._store.get("written").decode()

    def _write(self, folder: Path) -> None:
        """Write a checkpoint that a Trainer resumes from, whole or not at all. Sends nothing to other processes."""
        trainer = self._trainer
        half = folder.with_name(f"{folder.name}.part")
        half.mkdir(parents=True, exist_ok=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        # transformers from 5.2x on writes in process 0 only.
        model.should_save_on_this_rank = _always
        try:
            model.save_pretrained(half)
        finally:
            del model.should_save_on_this_rank
        if trainer.processing_class is not None:
            trainer.processing_class.save_pretrained(half)
        torch.save(trainer.args, half / "training_args.bin")
        parts = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        parts["scaler"] = getattr(trainer.accelerator, "scaler", None)
        for name, part in parts.items():
            if part is not None:
                torch.save(part.state_dict(), half / f"{name}.pt")
        save_rng_state(trainer)(str(half))
        write_plan(self._run.applied.plan, half)
        self._save(half)
        trainer.state.save_to_json(str(half / _STATE_FILE))
        os.replace(half, folder)


def _always(is_main_process: bool) -> bool:
    return is_main_process
