"""What a run tells a person: how far it is, and at its end what it did, with the peak that one step more had."""

from __future__ import annotations

import copy
import logging
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.loading.sources import log_level
from hf_ckpt.measure.track_real_step import follow_trainer
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recipe.checkpointing import Checkpointing
from hf_ckpt.trainer.batch import Batch
from hf_ckpt.trainer.metrics import describe_recomputed
from hf_ckpt.units import format_bytes

_WIDTH = 72
# Below what a layer does, in `Plan.summary`; names are not broken.
_HANGING: dict[str, Any] = {"subsequent_indent": " " * 15, "break_on_hyphens": False, "break_long_words": False}


@dataclass(frozen=True)
class RunSummary:
    """What a run did."""

    title: str
    plan: Plan | None  # What was in force, or None without a policy.
    figures: Mapping[str, float]  # `HFCkptCallback.report()`.
    log_history: Sequence[Mapping[str, Any]]  # The Trainer's.
    saved: Path  # Folder that holds the adapter or the model.
    is_adapter: bool  # Whether it is an adapter.
    prediction: str | None = None  # `HFCkptCallback.prediction`.
    merged: Path | None = None  # Folder of the merged model, if one was written.
    engine: str | None = None  # What ran on how many processes, and what it sharded, in words.
    verdict: str | None = None  # That what was saved is complete, in words.
    batch: str | None = None  # Rows of an optimizer step over all processes, in words.
    measured_bytes: int | None = None  # The peak of a step whose tensors were followed; see `measured_peak`.

    def table(self) -> str:
        """Return the summary as a table of two columns."""
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        rule = "-" * max(len(line) for line in lines)
        return "\n".join([rule, *lines, rule])

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "Recipe", self.title
        if self.prediction:
            # First what the plan is for, then what it is.
            yield from self._memory_rows()
        if self.engine is not None:
            yield "Engine", self.engine
        if self.batch is not None:
            yield "Batch", self.batch
        yield from self._plan_rows()
        if not self.prediction:
            yield from self._memory_rows()
        if "ckpt/tokens_per_sec" in self.figures:
            yield "Speed", f"{self.figures['ckpt/tokens_per_sec']:,.0f} tokens/s per process"
        yield from self._loss_row("Training loss", "loss")
        yield from self._loss_row("Evaluation loss", "eval_loss")
        yield ("Adapter" if self.is_adapter else "Model"), f"{self.saved} ({_weights(self.saved)})"
        if self.verdict is not None:
            yield "", self.verdict
        if self.merged is not None:
            yield "Merged model", f"{self.merged} ({_weights(self.merged)})"

    def _memory_rows(self) -> Iterator[tuple[str, str]]:
        for number, line in enumerate(textwrap.wrap(self.prediction or "", _WIDTH)):
            yield "" if number else "Memory", line
        if "ckpt/predicted_peak_gib" in self.figures:
            predicted = format_bytes(self.figures["ckpt/predicted_peak_gib"] * 2**30)
            yield "Predicted peak", f"{predicted}{self._measured()}"
        process = "of the process, Python and libraries included"
        for key, what in (("peak_allocated_gib", "on the device"), ("peak_resident_gib", process)):
            if f"ckpt/{key}" in self.figures:
                yield "Peak memory", f"{self.figures[f'ckpt/{key}']:.2f} GiB {what}"

    def _measured(self) -> str:
        if "ckpt/peak_allocated_gib" in self.figures:
            return ""
        if self.measured_bytes is not None:
            return f", measured {format_bytes(self.measured_bytes)} in a further step of that size"
        return "; a CPU does not count what is allocated, so nothing was measured"

    def _plan_rows(self) -> Iterator[tuple[str, str]]:
        if self.plan is None:
            yield "Layers", "no activation checkpointing"
            return
        lines = [part for line in self.plan.summary().splitlines() for part in textwrap.wrap(line, _WIDTH, **_HANGING)]
        for number, line in enumerate(lines):
            yield "" if number else "Layers", line
        yield "Recomputed", describe_recomputed(self.figures["ckpt/recomputed_share"])

    def _loss_row(self, name: str, key: str) -> Iterator[tuple[str, str]]:
        losses = [entry[key] for entry in self.log_history if key in entry]
        if len(losses) == 1:
            yield name, f"{losses[0]:.3f}"
        elif losses:
            first, last = losses[0], losses[-1]
            change = abs(last - first) / first if first else 0.0
            how = f"{'fell' if last < first else 'rose'} by {change:.1%}" if last != first else "unchanged"
            yield name, f"{first:.3f} -> {last:.3f} ({how})"


def _weights(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    return f"{files[0].name if len(files) == 1 else f'{len(files)} files'}, {format_bytes(size)}"


# --- Progress, where nobody watches a terminal: a line now and then in place of bars. ---


SECONDS_BETWEEN = 30.0  # Between two lines.
_STEPS_BEFORE_TIME = 5  # The first steps take longer: caches fill, and the plan is proven.


class ProgressLines(TrainerCallback):
    """Says every 30 seconds, if `is_periodic`, how far a run is, and once, early, how long it will take."""

    def __init__(self, say: Callable[[str], None], *, is_periodic: bool) -> None:
        self._say = say
        self._is_periodic = is_periodic
        self._start = self._last = 0.0
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note when it began."""
        self._start = self._last = time.monotonic()
        self._first_step = state.global_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say how far the run is, and how long the rest will take."""
        now, num_done = time.monotonic(), state.global_step - self._first_step
        left = (now - self._start) / num_done * (state.max_steps - state.global_step)
        is_time = num_done == _STEPS_BEFORE_TIME and left > SECONDS_BETWEEN
        if is_time or (self._is_periodic and now - self._last >= SECONDS_BETWEEN):
            self._last = now
            self._say(f"Step {state.global_step:,} of {state.max_steps:,}; about {duration(left)} left.")

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Say that a long evaluation goes on."""
        if self._is_periodic and (now := time.monotonic()) - self._last >= SECONDS_BETWEEN:
            self._last = now
            self._say(f"Step {state.global_step:,} of {state.max_steps:,}; evaluating.")


def duration(seconds: float) -> str:
    """Return a time as a person says it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


# --- The peak, where the device counts none: on a CPU, one step more is run with every tensor followed. ---


_STEPS = 2  # In the first one the optimizer makes its state.


def measured_peak(trainer: Trainer, callback: HFCkptCallback | None, checkpointing: Checkpointing) -> int | None:
    """Return the bytes that a step of the batch that was planned for really takes, all of them for tensors.

    Trains the model on, so what it has learned must be saved by now. None where a device counts by itself, or where
    such a batch cannot be made of the data.
    """
    batch = None if callback is None else callback.planned_for
    if callback is None or batch is None:
        return None
    is_plain_text = type(trainer) is Trainer and batch.length > 0 and not (batch.is_packed or batch.tensors)
    is_alone = trainer.args.world_size == 1 and not trainer.args.push_to_hub
    if not is_plain_text or not is_alone or trainer.args.device.type != "cpu":
        return None
    structure, is_on = checkpointing.structure, checkpointing.input_require_grads
    # This package does not say once more under which plan a run begins.
    quiet = log_level("hf_ckpt", logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="hf_ckpt-measured-") as folder, quiet:
        args = copy.copy(trainer.args)
        vars(args).update(_ONLY_STEPS, output_dir=folder, max_steps=_STEPS)
        data: Any = trainer.train_dataset
        rows, collator = _rows(data[0], batch), trainer.data_collator
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


def _rows(row: Mapping[str, Any], batch: Batch) -> list[dict[str, Any]]:
    """Return the rows of a batch that is as large as the one that was planned for, made of one row of the data."""
    long, shorter = (
        {name: list(islice(cycle(values), batch.length - less)) for name, values in row.items()} for less in (0, 1)
    )
    # With padding somewhere, attention gets a mask.
    return [long, *[shorter if batch.is_padded else long] * (batch.rows - 1)]
