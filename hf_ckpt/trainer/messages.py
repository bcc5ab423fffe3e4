"""What a run says of its plan: in the log, and in a script that has set up no logging on standard error.

As with the Trainer's own progress, what is shown is for people: `disable_tqdm` and a verbosity of transformers below
warnings switch it off. What the policy overrules is said under `disable_tqdm` too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from transformers import TrainerState, TrainingArguments
from transformers.utils import logging as transformers_logging

from hf_ckpt.policy.plan import Plan

logger = logging.getLogger(__name__)


class Messages:
    """What one callback says of its runs: of a search for hyperparameters, of the first trial only."""

    def __init__(self, *, is_quiet: bool) -> None:
        self.is_quiet = is_quiet
        self._is_trial_shown = False
        self._is_main = self._is_shown = False

    def begin(
        self, args: TrainingArguments, state: TrainerState, plan: Plan, path: Path, prediction: str | None
    ) -> None:
        """Say under which plan a run begins, where it is written, and what it is predicted to need, if it is."""
        self._is_main = state.is_world_process_zero
        self._is_shown = self._is_main and self._is_asked(args, state)
        self._log("Activation checkpointing is in force.\n%s", plan.summary())
        self._show(f"{plan.describe()} (layer by layer in {path})")
        if prediction is not None:
            self._log("Memory: %s.", prediction)
            self._show(prediction)

    def change_plan(self, plan: Plan, prediction: str) -> None:
        self._log("Another plan is in force from here on, for larger batches.\n%s", plan.summary())
        self._show(f"planned again, for larger batches: {plan.describe()}; {prediction}")

    def end(self, comparison: str | None, figures: Mapping[str, float]) -> None:
        """Say what was predicted and measured; `comparison` is None where nothing was predicted."""
        if comparison is not None:
            self._log("%s", comparison)
        for name, what in (("peak_allocated_gib", "of the device"), ("peak_resident_gib", "of the process")):
            if comparison is None and f"ckpt/{name}" in figures:
                comparison = f'Peak memory {what} {figures[f"ckpt/{name}"]:.2f} GiB; only policy "auto" predicts one.'
        if comparison is not None:
            self._show(comparison)

    def _is_asked(self, args: TrainingArguments, state: TrainerState) -> bool:
        if self.is_quiet or args.disable_tqdm or transformers_logging.get_verbosity() > logging.WARNING:
            return False
        is_repeated, self._is_trial_shown = self._is_trial_shown, state.is_hyper_param_search
        return not (state.is_hyper_param_search and is_repeated)

    def _log(self, message: str, text: str) -> None:
        if self._is_main:
            logger.info(message, text)

    def _show(self, text: str) -> None:
        if self._is_shown:
            # Not when this is imported: the Trainer chooses its bars for notebooks and terminals later.
            from tqdm.auto import tqdm

            tqdm.write(f"hf_ckpt: {text}", file=sys.stderr)
