"""The end of a run that has run out of memory for good: what is known of it, and what several processes save.

Each process under DistributedDataParallel has the whole model and the optimizer's whole state. So the one that fails,
whose main thread waits for nobody, writes the checkpoint; of several that fail, the first. The others learn it
afterwards: whoever starts processes ends all of them as soon as one has ended.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from transformers.trainer_utils import get_last_checkpoint

from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.recovery.accumulation_window import TrainerCall, describe_inputs, named_tensors
from hf_ckpt.recovery.out_of_memory import attempt
from hf_ckpt.structure.stored import replaced
from hf_ckpt.trainer.saved_files import checkpoint_folder, output_folder, write_plan
from hf_ckpt.trainer.training_run import TrainingRun
from hf_ckpt.units import counted
from hf_ckpt.upstream.torch import NUM_SAMPLES, default_store, hidden_from_modes
from hf_ckpt.upstream.transformers import save_rng_state

logger = logging.getLogger(__name__)

# So many examples of a batch are named.
_SHOWN = 16
_POLL_S = 0.1
# Of the Trainer, which writes it at the end of a checkpoint.
_STATE_FILE = "trainer_state.json"


@dataclass
class EndingPart:
    """Runs a method of a Trainer that is not run again."""

    _trainer: Any
    _why: str
    # What the method does; None for a training step.
    _what: str | None = None
    # Of a training step that notes what it begins with, where the run may be saved as it was then.
    run_step: Callable[[TrainerCall], Any] = field(default=TrainerCall.__call__, kw_only=True)
    _num_steps: int = -1
    _number: int = 0

    def run(self, call: TrainerCall) -> Any:
        """Raise `OutOfMemoryError` where memory runs out, which says why it is not run again."""
        num_steps = int(self._trainer.state.global_step)
        self._num_steps, self._number = num_steps, self._number + 1 if num_steps == self._num_steps else 0
        returned, failure = attempt(partial(self.run_step, call))
        if failure is None:
            return returned
        where, examples = f"{self._what}, after {counted(num_steps, 'step')}", ""
        if self._what is None:
            where = f"{failure.part} of step {num_steps + 1}, with {describe_inputs(call.inputs)}"
            examples = describe_examples(self._trainer, self._number, call.inputs)
        sentences = (f"Out of memory in the {where}.", failure.figures.describe(), self._why, examples)
        raise OutOfMemoryError(" ".join(filter(None, sentences))) from failure.error


# --- Which examples of the training data a batch holds. ---


def describe_examples(trainer: Any, number: int, inputs: Any) -> str:
    """Return which examples the micro-batch of a step with this number, from 0, holds, as a sentence."""
    # They are named by their indices in the data that the Trainer reads. Draws from no generator that training draws
    # from, but reads the examples, and calls the collator again.
    indices: list[int] | None = None
    # Samplers, data sets and collators are anybody's, and the run ends anyway.
    with hidden_from_modes(), suppress(Exception):
        loader = trainer.callback_handler.train_dataloader
        batches = _batches(loader.batch_sampler)
        if batches is not None:
            accumulated = trainer.args.gradient_accumulation_steps
            position = trainer.state.global_step % -(-len(loader) // accumulated) * accumulated + number
            found = next(islice(batches, position, None))
            # Only if they give the batch's own tensors they are known.
            indices = found if _gives(loader, found, inputs) else None
    if indices is None:
        return "The indices of its examples are not known: its data or their order cannot be read again."
    shown = ", ".join(map(str, indices[:_SHOWN]))
    more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    return f"Examples of the training data in it: {shown}{more}."


def _batches(sampler: Any) -> Iterable[list[int]] | None:
    """Return the batches of the epoch that runs, from its first; None where their order was drawn elsewhere."""
    # Of several processes each takes its share of the batches of an inner sampler.
    inner = getattr(sampler, "batch_sampler", None)
    base = copy.copy(sampler if inner is None else inner)
    if type(base) is not BatchSampler:
        return None
    order: Any = base.sampler
    if not isinstance(order, SequentialSampler):
        generator = getattr(order, "generator", None)
        if type(order).__name__ != "SeedableRandomSampler" or generator is None:
            return None
        # The generator of accelerate's sampler is set to the seed of each epoch, and drawn from by nobody else. So the
        # order is drawn once more.
        again = torch.Generator().manual_seed(generator.initial_seed())
        base.sampler = RandomSampler(order.data_source, order.replacement, getattr(order, NUM_SAMPLES, None), again)
    if inner is None:
        return base
    share: Any = copy.copy(sampler)
    share.batch_sampler = base
    batches: Iterable[list[int]] = share
    return batches


def _gives(loader: Any, indices: list[int], inputs: Any) -> bool:
    with torch.random.fork_rng():
        again = loader.collate_fn([loader.dataset[index] for index in indices])
    if not isinstance(again, Mapping):
        return False
    pairs = [(tensor, again[name]) for name, tensor in named_tensors(inputs) if isinstance(again.get(name), Tensor)]
    return bool(pairs) and all(torch.equal(ours.cpu(), theirs.cpu()) for ours, theirs in pairs)


# --- What the run can go on from. ---


def newest_checkpoint(trainer: Any) -> str:
    """Return what a run that has ended can go on from, in words."""
    num_lost, folder = int(trainer.state.global_step), output_folder(trainer.args)
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None  # type: ignore[no-untyped-call]
    found = "There is no checkpoint to go on from"
    if last is not None and (Path(last) / _STATE_FILE).is_file():
        num_lost -= int(last.rpartition("-")[2])
        found = f"The newest complete checkpoint is {last}"
    return f"{found}: {counted(num_lost, 'step')} {'is' if num_lost == 1 else 'are'} lost."


class CleanEnd:
    """Ends a run of several processes; `save` writes into a checkpoint where the ladder stands.

    `is_whole`: whether each process has the whole model and the optimizer's whole state.
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

        `is_as_before_step`: whether weights, buffers and random states are those that the step began with.
        """
        folder = checkpoint_folder(self._trainer.args, self._trainer.state)
        fault = self._written_by_first(folder) if is_as_before_step and self._is_whole else None
        where = f"Nothing is lost: {folder} holds the state before this step."
        if fault != "":
            where = (fault or "") + newest_checkpoint(self._trainer)
        found = OutOfMemoryError(f"Process {dist.get_rank()}: {error} All processes end. {where}")
        self._run.report_error(found)
        return found

    def _written_by_first(self, folder: Path) -> str:
        """Write a checkpoint, or wait for another process that does. Returns why there is none; empty if there is."""
        rank = str(dist.get_rank())
        if self._store.compare_set("writer", "", rank).decode() != rank:
            end = time.monotonic() + self._trainer.args.ddp_timeout
            while not self._store.check(["written"]):
                if time.monotonic() > end:
                    return "Another process has not written a checkpoint in time. "
                time.sleep(_POLL_S)
            return self._store.get("written").decode()
        fault = ""
        try:
            if not (folder / _STATE_FILE).is_file():
                self._write(folder)
        # Whatever it is, the run ends for want of memory, and not for this.
        except Exception as error:  # noqa: BLE001
            fault = f"A checkpoint could not be written ({type(error).__name__}: {error}). "
        self._store.set("written", fault)
        return fault

    def _write(self, folder: Path) -> None:
        """Write a checkpoint that a Trainer resumes from, whole or not at all. Sends nothing to other processes."""
        trainer = self._trainer
        half = folder.with_name(f"{folder.name}.part")
        half.mkdir(parents=True, exist_ok=True)
        model = trainer.accelerator.unwrap_model(trainer.model)
        # transformers from 5.2x on writes in process 0 only.
        with replaced(model, "should_save_on_this_rank", lambda is_main_process: is_main_process):
            model.save_pretrained(half)
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
