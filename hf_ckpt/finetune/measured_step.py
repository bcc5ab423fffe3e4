"""The peak of a step where the device counts none: on a CPU, one step more is run with every tensor followed."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from transformers import PrinterCallback, Trainer

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.loading.sources import log_level
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.recipe.checkpointing import Checkpointing
from hf_ckpt.trainer.batch import Batch

_STEPS = 2  # In the first one the optimizer makes its state.


def measured_peak(trainer: Trainer, callback: HFCkptCallback | None, checkpointing: Checkpointing) -> int | None:
    """Return the bytes that a step of the batch that was planned for really takes, all of them for tensors.

    Trains the model on, so what it has learned must be saved by now. None where a device counts by itself, or where
    such a batch cannot be made of the data.
    """
    if callback is None or callback.planned_for is None or not _can_be_followed(trainer, callback.planned_for):
        return None
    structure, is_on = checkpointing.structure, checkpointing.input_require_grads
    # This package does not say once more under which plan a run begins.
    quiet = log_level("hf_ckpt", logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="hf_ckpt-measured-") as folder, quiet:
        args = copy.copy(trainer.args)
        vars(args).update(_ONLY_STEPS, output_dir=folder, max_steps=_STEPS)
        data: Any = trainer.train_dataset
        rows, collator = _rows(data[0], callback.planned_for), trainer.data_collator
        follower = Trainer(
            model=trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False),
            args=args,
            # An example is a whole batch: in whatever order they come, each has all of its rows.
            train_dataset=[rows] * (_STEPS * args.gradient_accumulation_steps),
            data_collator=lambda batches: collator(batches[0]),
            callbacks=[HFCkptCallback(callback.plan, prove="off", quiet=True, input_require_grads=is_on, **structure)],
        )
        # It would print the figures of these steps.
        follower.remove_callback(PrinterCallback)
        return follow_trainer(follower, at_step=_STEPS, **structure).peak_bytes


_ONLY_STEPS: Mapping[str, Any] = {
    "per_device_train_batch_size": 1,
    "dataloader_num_workers": 0,
    # Which of the two names it has depends on the version of transformers.
    "group_by_length": False,
    "train_sampling_strategy": "random",
    "eval_on_start": False,
    "eval_strategy": "no",
    "save_strategy": "no",
    "logging_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": [],
    "disable_tqdm": True,
}


def _can_be_followed(trainer: Trainer, batch: Batch) -> bool:
    args = trainer.args
    is_plain_text = type(trainer) is Trainer and batch.length > 0 and not (batch.is_packed or batch.tensors)
    return is_plain_text and args.device.type == "cpu" and args.world_size == 1 and not args.push_to_hub


def _rows(row: Mapping[str, Any], batch: Batch) -> list[dict[str, Any]]:
    """Return the rows of a batch that is as large as the one that was planned for, made of one row of the data."""
    long, shorter = (
        {name: list(islice(cycle(values), batch.length - less)) for name, values in row.items()} for less in (0, 1)
    )
    # With padding somewhere, attention gets a mask.
    return [long, *[shorter if batch.is_padded else long] * (batch.rows - 1)]
