"""`hf-ckpt verify`: a recipe run a few steps with and without its plan, and everything that must be equal compared."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from hf_ckpt.errors import RecipeError
from hf_ckpt.loading.tokenizer import complete_tokenizer
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.verify import compare, processes, state_checks
from hf_ckpt.verify.batches import dataset
from hf_ckpt.verify.causes import cause_of, describe
from hf_ckpt.verify.check import Check, Report
from hf_ckpt.verify.counts import check_counts, check_in_force
from hf_ckpt.verify.localize import (
    FirstDifference,
    OperatorDifference,
    OperatorWatch,
    first_layer,
    layer_of_first_parameter,
)
from hf_ckpt.verify.record import Record
from hf_ckpt.verify.reduce_model import reduced
from hf_ckpt.verify.saved import check_resume, check_saved
from hf_ckpt.verify.subject import MAX_ACCUMULATION, Subject
from hf_ckpt.verify.tolerance import HALF
from hf_ckpt.verify.trial import run_trial
from hf_ckpt.verify.trials import Trials, first_module_before
from hf_ckpt.verify.words import counted

NUM_STEPS = 4
"""Optimizer steps of a trial, unless told otherwise: two before the checkpoint that is resumed from, and two after."""

_ROWS_FOR = "verify"


def verify(
    recipe: Recipe,
    *,
    is_full: bool = False,
    num_steps: int = NUM_STEPS,
    setup: Callable[[nn.Module], None] | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Run a recipe a few steps without its plan, again without it, and with it, and compare.

    Costs some five short runs of the recipe's model, reduced unless `is_full`, and two of one step where tiles or the
    chunked head run in half precision. Nothing is left on disk.

    Args:
        recipe: the recipe; its `checkpointing` section is what is verified.
        is_full: the real size and weights instead of a reduced model.
        num_steps: optimizer steps of each run, at least 1; resuming is compared from 2 on.
        setup: called with the model right after it was built, in every run: hooks and patches of the user's script.
        say: is told what goes on, in one line each.

    Returns:
        One check for each line of the table; the same on all processes.

    Raises:
        RecipeError: the recipe has no `checkpointing` section, or does not suit its model.
        PolicyError: the policy does not suit the model.
        StructureError: the layers cannot be found.

    Example:
        report = verify(load_recipe("recipes/tiny_llama_base.yaml"))
        assert report.holds
    """
    if recipe.checkpointing is None:
        raise RecipeError(f"{recipe.path} has no checkpointing section, so that there is no plan to verify. Add one.")
    if num_steps < 1:
        raise RecipeError(f"{num_steps} optimizer steps were asked for. Use 1 or more.")
    folder = processes.temporary_folder()
    with _quiet(), _one_thread(is_on=not is_full):
        try:
            small = reduced(recipe, folder / "model", is_full=is_full)
            subject = _subject(small.recipe, folder, num_steps, setup)
            saves_model_only = bool(recipe.training.get("save_only_model"))
            verification = _Verification(subject, folder, num_steps, say, saves_model_only, is_full)
            checks = processes.combined(list(verification.checks()))
        finally:
            processes.gathered(None)
            if processes.is_first():
                shutil.rmtree(folder, ignore_errors=True)
    facts = (*small.facts, *_facts(recipe, verification))
    return Report(title=str(recipe.path), checks=checks, facts=facts)


def _subject(recipe: Recipe, folder: Path, num_steps: int, setup: Callable[[nn.Module], None] | None) -> Subject:
    tokenizer = AutoTokenizer.from_pretrained(recipe.model["name_or_path"])
    subject = Subject(
        recipe=recipe,
        tokenizer=complete_tokenizer(tokenizer, recipe.data),
        rows=(),
        collator=None,
        setup=setup,
    )
    args = subject.arguments(folder / _ROWS_FOR, num_steps, save_at=None, is_planned=False)
    batches = dataset(recipe, subject.tokenizer, args, num_steps=num_steps)
    return Subject(
        recipe=recipe, tokenizer=subject.tokenizer, rows=batches.rows, collator=batches.collator, setup=setup
    )


@dataclass
class _Verification:
    """The runs of one verification, one after another."""

    subject: Subject
    folder: Path
    num_steps: int
    say: Callable[[str], None]
    saves_model_only: bool
    is_full: bool = False
    engine: str = ""

    def checks(self) -> Iterator[Check]:
        reference = self._run("without", "without the plan")
        self.engine = reference.engine
        if any(processes.gathered(reference.failure is not None)):
            yield _check_reference(reference)
            return
        repeated = self._run("repeated", "without the plan, again")
        planned = self._run("planned", "with the plan", is_planned=True, save_at=self._save_at())
        trials = Trials(reference, repeated, planned)
        yield _check_run(planned)
        if planned.plan is not None:
            yield check_counts(reference, planned)
            yield check_in_force(planned)
            yield from _compared(trials)
            yield from self._in_float32(trials)
        yield from self._first_difference(trials)
        if not any(processes.gathered(planned.failure is not None)):
            yield from self._saved(trials)

    def _run(self, name: str, what: str, *, is_planned: bool = False, **options: Any) -> Record:
        self.say(f"Running {counted(self.num_steps, 'step')} {what} ...")
        return run_trial(self.subject, self.folder / name, is_planned=is_planned, num_steps=self.num_steps, **options)

    def _in_float32(self, trials: Trials) -> Iterator[Check]:
        """Repeat the first step in float32 where the plan adds up in another order, in half precision."""
        leeway = trials.planned.leeway
        if leeway is None or leeway.first != HALF:
            return
        if self.is_full:
            what = "Not with real weights; hf-ckpt verify without --full does it with a small model."
            yield Check(name="in float32", verdict="skip", detail=what)
            return
        self.say(f"Running 1 step in float32, for {leeway.what} ...")
        subject = self.subject.in_float32()
        expected, got = (
            run_trial(subject, self.folder / name, is_planned=is_planned, num_steps=1)
            for name, is_planned in (("float32", False), ("float32_planned", True))
        )
        yield compare.check_in_float32(expected, got)

    def _save_at(self) -> int | None:
        return None if self.engine == "fsdp1" else self.num_steps // 2 or None

    def _saved(self, trials: Trials) -> Iterator[Check]:
        if not trials.planned.is_whole:
            yield Check(name="saved files", verdict="skip", detail="Under FSDP1 saving and resuming are not looked at.")
            return
        if processes.is_first():
            self.say("Loading what was saved ...")
            yield from check_saved(self.subject, trials)
        processes.gathered(None)
        save_at = self._save_at()
        if save_at is None:
            yield Check(name="resume", verdict="skip", detail="One step cannot be stopped half way; use --steps 2.")
        elif self.saves_model_only:
            detail = "save_only_model: the recipe's checkpoints have no optimizer state to go on from."
            yield Check(name="resume", verdict="skip", detail=detail)
        else:
            checkpoint = trials.planned.saved / f"checkpoint-{save_at}"
            resumed = self._run("resumed", "from a checkpoint", is_planned=True, resume_from=checkpoint)
            yield check_resume(trials, resumed, save_at)

    def _first_difference(self, trials: Trials) -> Iterator[Check]:
        """Look for the layer and the operator where the trials part, if they do so on any process."""
        if (module := first_module_before(trials)) is not None:
            detail = f"In forward, {module} is the first module whose output differs: the plan changes the forward."
            yield Check(name="first difference", verdict="fail", detail=detail)
        found = processes.gathered(self._difference(trials))
        first = next((difference for difference in found if difference is not None), None)
        if first is None:
            return
        self.say(f"Looking at the operators of {first.layer or 'the model'} ...")
        operators = None
        for micro_batch in range(first.micro_batch, first.micro_batch + MAX_ACCUMULATION):
            operators = self._operators(FirstDifference(first.layer, micro_batch))
            if any(processes.gathered(operators is not None)):
                break
        if processes.is_one_to_speak(operators is not None or _has_evidence(trials)):
            yield _check_difference(trials, first, operators)

    def _difference(self, trials: Trials) -> FirstDifference | None:
        planned = trials.planned
        if planned.failure is not None:
            return _of_failure(planned)
        is_known = trials.spread.is_equal or trials.is_within_leeway or first_module_before(trials) is not None
        if is_known or not trials.is_repeatable:
            return None
        return first_layer(trials.reference, planned) or _by_parameter(trials)

    def _operators(self, difference: FirstDifference) -> OperatorDifference | None:
        watch = OperatorWatch(difference.layer, difference.micro_batch)
        run_trial(self.subject, self.folder / "watched", is_planned=True, num_steps=self.num_steps, watch=watch)
        return watch.first_difference()


def _compared(trials: Trials) -> Iterator[Check]:
    """Yield one check after another, in the order of the table."""
    yield compare.check_repeatability(trials)
    yield compare.check_loss(trials)
    yield compare.check_gradients(trials)
    yield compare.check_trainable(trials)
    if trials.planned.failure is None:
        yield compare.check_weights(trials)
    yield state_checks.check_random_numbers(trials)
    if trials.planned.failure is None:
        yield state_checks.check_buffers(trials)
    yield state_checks.check_names(trials)
    yield from state_checks.check_state(trials.planned)
    if trials.planned.failure is None:
        yield state_checks.check_hooks(trials)
        yield state_checks.check_use_cache(trials.planned)
        yield state_checks.check_generation(trials)


def _has_evidence(trials: Trials) -> bool:
    """Whether this process saw the cause itself, and not only gradients that it shares with others."""
    planned = trials.planned
    return bool(planned.state_changes or planned.cut_off - trials.reference.cut_off)


def _of_failure(planned: Record) -> FirstDifference | None:
    failure = planned.failure
    if failure is None or not failure.is_recomputing or not failure.path:
        return None
    return FirstDifference(failure.path, len(planned.micro_batches) - 1)


def _by_parameter(trials: Trials) -> FirstDifference | None:
    """Return the layer of the first parameter whose gradient differs, where no layer's input gradient does."""
    step = trials.spread.first_step - 1
    if step < 0:
        return None
    expected, got = trials.reference.gradients(step), trials.planned.gradients(step)
    layer = layer_of_first_parameter(expected, got, [layer.path for layer in trials.planned.layers])
    per_step = len(trials.planned.micro_batches) // max(trials.planned.num_steps, 1)
    return None if layer is None else FirstDifference(layer, step * per_step)


def _check_difference(trials: Trials, first: FirstDifference, operators: OperatorDifference | None) -> Check:
    what = f"In backward, {first.layer} is the first layer"
    if trials.planned.failure is not None:
        what = f"{first.layer} could not be recomputed"
    else:
        what += " whose input gradient differs while that at its output is equal, or a gradient inside it"
    which = f"{describe(operators)}. " if operators is not None else ""
    detail = f"{what} (micro-batch {first.micro_batch + 1}). {which[:1].upper()}{which[1:]}Likely cause: "
    return Check(
        name="first difference",
        verdict="fail",
        detail=f"{detail}{cause_of(trials.reference, trials.planned, operators)}.",
    )


def _check_reference(reference: Record) -> Check:
    if reference.failure is None:
        return Check(name="run", verdict="skip", detail="Another process failed without the plan.")
    error = reference.failure.error
    if "does not require grad" in str(error):
        return Check(
            name="trainable parameters",
            verdict="fail",
            detail="Nothing trains, without the plan either: the loss does not depend on any trainable parameter. Is "
            "the adapter frozen or disabled?",
        )
    what = f"Without the plan the recipe does not run: {type(error).__name__}: {error}"
    return Check(name="run", verdict="fail", detail=what)


def _check_run(planned: Record) -> Check:
    failure = planned.failure
    if failure is None:
        steps, batches = counted(planned.num_steps, "optimizer step"), len(planned.micro_batches)
        return Check(
            name="run",
            verdict="pass",
            detail=f"{steps} of {batches // planned.num_steps} forward and backward each, {planned.engine}.",
            figures={"num_steps": planned.num_steps, "num_micro_batches": batches},
        )
    doing = "recomputing" if failure.is_recomputing else "running"
    where = f" while {doing} {failure.path}" if failure.path else ""
    # Behind this word torch says how to look for the place, which is done here.
    reason = " ".join(str(failure.error).split()).partition(" Tip: ")[0]
    return Check(
        name="run",
        verdict="fail",
        detail=f"With the plan the run ends after {counted(failure.step, 'step')}{where}: "
        f"{type(failure.error).__name__}: {reason[:_LONGEST_REASON]}",
        figures={"num_steps": planned.num_steps},
    )


_LONGEST_REASON = 600


def _facts(recipe: Recipe, verification: _Verification) -> Iterator[tuple[str, str]]:
    num_processes = len(processes.gathered(None))
    yield "engine", verification.engine if num_processes == 1 else f"{verification.engine}, {num_processes} processes"
    own = int(recipe.training.get("gradient_accumulation_steps", 1))
    if own > MAX_ACCUMULATION:
        yield "accumulation", f"{MAX_ACCUMULATION} micro-batches a step, of {own} in the recipe"


@contextmanager
def _one_thread(*, is_on: bool) -> Iterator[None]:
    """Compute in one thread: operators as small as a reduced model's take many times as long in two."""
    found = torch.get_num_threads()
    if is_on:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(found)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what libraries say of each model and run; five runs would say it five times."""
    level, ours = transformers_logging.get_verbosity(), logging.getLogger("hf_ckpt")
    found = ours.level
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # upstream
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    ours.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        ours.setLevel(found)
        if has_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
