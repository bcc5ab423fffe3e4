"""Figures sent to the reporters of a run (TensorBoard, Weights & Biases, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks


def send(
    figures: Mapping[str, float],
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    model: nn.Module,
) -> None:
    """Log figures through the reporters that the run names in `report_to`.

    A user's callback sees `on_log` after the reporters have read the logs, so that figures added there arrive
    nowhere. Reporters of our own write to the same run: TensorBoard reads all event files of a folder as one run,
    the others join the run that is active in the process.

    Args:
        figures: names such as `ckpt/tokens_per_sec`, with values; TensorBoard shows them below `train/`.
        args: the run's arguments.
        state: the run's state, for the step.
        control: the run's control.
        model: the model that is trained.
    """
    if not state.is_world_process_zero:
        return
    for reporter_class in get_reporting_integration_callbacks(args.report_to):  # type: ignore[no-untyped-call]
        if reporter_class.on_log is TrainerCallback.on_log:
            # It takes no figures; a second one would be made for nothing.
            continue
        reporter = reporter_class()
        if hasattr(reporter, "tb_writer") and not _joins_the_run(reporter, args.output_dir):
            continue
        reporter.on_log(args, state, control, logs=dict(figures), model=model)
        if getattr(reporter, "tb_writer", None) is not None:
            reporter.tb_writer.close()


def _joins_the_run(reporter: Any, output_dir: str | None) -> bool:
    """Point a TensorBoard reporter at the run's own folder; False if there is none.

    Left alone, that of transformers 5.23 would begin a second run in the working directory.
    """
    if getattr(reporter, "logging_dir", None) is None:
        reporter.logging_dir = _newest_event_folder(output_dir)
    return reporter.logging_dir is not None


def _newest_event_folder(output_dir: str | None) -> str | None:
    events = Path(output_dir or ".").rglob("events.out.tfevents.*")
    newest = max(events, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else str(newest.parent)
