"""What a run shows of its progress where nobody watches a terminal: a line now and then in place of progress bars."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

SECONDS_BETWEEN = 30.0
"""Between two lines."""
_STEPS_BEFORE_TIME = 5
"""The first steps take longer: caches fill, and the plan is proven."""


def is_piped() -> bool:
    """Whether progress bars would fill a file or a pipe."""
    return not sys.stderr.isatty()


class ProgressLines(TrainerCallback):
    """Says every 30 seconds how far a run is, and once, early, how long it will take.

    Args:
        say: prints a line, in one process.
        is_periodic: whether there is more to say than how long it will take.
    """

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
