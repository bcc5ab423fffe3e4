"""`hf-ckpt verify`: a recipe run a few steps with and without its plan, and everything that must be equal compared."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Dataset
from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging as transformers_logging

from hf_ckpt.errors import RecipeError
from hf_ckpt.loading.columns import with_label
from hf_ckpt.loading.dataset import collator_of
from hf_ckpt.loading.row_formats import IGNORED
from hf_ckpt.loading.sources import log_level
from hf_ckpt.loading.tokenizer import complete_tokenizer
from hf_ckpt.loading.trainer import check_reads_text
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.shipped import shown
from hf_ckpt.recipe.trainer_kinds import TrainerKind
from hf_ckpt.units import counted
from hf_ckpt.verify import compare, processes, state_checks
from hf_ckpt.verify.compare import HALF_TOLERANCE, Trials, first_module_changed_by_plan
from hf_ckpt.verify.localize import (
    FirstDifference,
    OperatorDifference,
    OperatorWatch,
    describe_operators,
    first_differing_layer,
    layer_of_first_differing_parameter,
    likely_cause,
)
from hf_ckpt.verify.record import Record
from hf_ckpt.verify.reduce_model import ReducedRecipe, reduce_recipe
from hf_ckpt.verify.report import Check, Report
from hf_ckpt.verify.saved_checks import check_resume, check_saved
from hf_ckpt.verify.state_checks import check_counts, check_in_force
from hf_ckpt.verify.trial import MAX_ACCUMULATION, TrialInputs, run_trial

NUM_STEPS = 4  # Default optimizer steps of a trial: two before the checkpoint that is resumed from, and two after.
NUM_TOKENS = 32  # Tokens of a row; each second row of a recipe that pads is shorter.
_MAX_REASON_LENGTH = 600
_SHORTENED = 3
_SHARE_WITHOUT_LOSS = 4


def verify(
    recipe: Recipe,
    *,
    is_full: bool = False,
    num_steps: int = NUM_STEPS,
    setup: Callable[[nn.Module], None] | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Run a recipe a few steps without its plan, again without it, and with it, and compare; the same on all processes.

    Costs some five short runs of the recipe's model, reduced unless `is_full`, and two of one step where tiles or the
    chunked head run in half precision. Nothing is left on disk. Resuming is compared from two steps on.

    Args:
        recipe: its `checkpointing` section is verified.
        is_full: the real size and weights instead of a reduced model.
        num_steps: optimizer steps of each run, at least 1.
        setup: called with the model right after it was built, in every run: hooks and patches of the user's script.
        say: called with each line of progress.

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
    check_reads_text(recipe, "verify")
    if num_steps < 1:
        raise RecipeError(f"{num_steps} optimizer steps were asked for. Use 1 or more.")
    folder = processes.temporary_folder()
    with _quiet_libraries(), _single_thread(is_on=not is_full):
        try:
            small = reduce_recipe(recipe, folder / "model", is_full=is_full)
            inputs = _trial_inputs(small, folder, num_steps, setup)
            saves_model_only = bool(recipe.training.get("save_only_model"))
            verification = _Verification(inputs, folder, num_steps, say, saves_model_only, is_full)
            checks = processes.combine_checks(list(verification.checks()))
        finally:
            processes.gather(None)
            if processes.is_first():
                shutil.rmtree(folder, ignore_errors=True)
    facts = (*small.facts, *_facts(recipe, verification))
    return Report(title=shown(recipe.path), checks=checks, facts=facts)


def _trial_inputs(
    small: ReducedRecipe, folder: Path, num_steps: int, setup: Callable[[nn.Module], None] | None
) -> TrialInputs:
    recipe, tokenizer = small.recipe, complete_tokenizer(small.tokenizer, small.recipe.data)
    inputs = TrialInputs(recipe=recipe, tokenizer=tokenizer, rows=(), collator=None, setup=setup)
    args = inputs.arguments(folder, num_steps, save_at=None, is_planned=False)
    batches = sample_rows(recipe, tokenizer, args, num_steps=num_steps)
    return replace(inputs, rows=batches.rows, collator=batches.collator)


def _facts(recipe: Recipe, verification: _Verification) -> Iterator[tuple[str, str]]:
    num_processes = len(processes.gather(None))
    yield "engine", verification.engine if num_processes == 1 else f"{verification.engine}, {num_processes} processes"
    own = int(recipe.training.get("gradient_accumulation_steps", 1))
    if own > MAX_ACCUMULATION:
        yield "accumulation", f"{MAX_ACCUMULATION} micro-batches a step, of {own} in the recipe"


@contextmanager
def _single_thread(*, is_on: bool) -> Iterator[None]:
    """Compute in one thread: the small operators of a reduced model take many times as long in two."""
    found = torch.get_num_threads()
    if is_on:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(found)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence what libraries say of each model and run: five runs would say it five times."""
    level = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # upstream
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    maps_with_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with log_level("hf_ckpt", logging.WARNING), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        if maps_with_bars:
            datasets.enable_progress_bars()
        if has_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@dataclass
class _Verification:
    """The runs of one verification, one after another."""

    inputs: TrialInputs
    folder: Path
    num_steps: int
    say: Callable[[str], None]
    saves_model_only: bool
    is_full: bool = False
    engine: str = ""

    def checks(self) -> Iterator[Check]:
        reference = self._run("without", "without the plan")
        self.engine = reference.engine
        if any(processes.gather(reference.failure is not None)):
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
        if not any(processes.gather(planned.failure is not None)):
            yield from self._saved(trials)

    def _run(self, name: str, what: str, *, is_planned: bool = False, **options: Any) -> Record:
        self.say(f"Running {counted(self.num_steps, 'step')} {what} ...")
        return run_trial(self.inputs, self.folder / name, is_planned=is_planned, num_steps=self.num_steps, **options)

    def _in_float32(self, trials: Trials) -> Iterator[Check]:
        """Repeat the first step in float32 where the plan adds up in another order and in half precision."""
        tolerance = trials.planned.tolerance
        if tolerance is None or tolerance.first != HALF_TOLERANCE:
            return
        if self.is_full:
            what = "Not with real weights; hf-ckpt verify without --full does it with a small model."
            yield Check("in float32", "skip", what)
            return
        self.say(f"Running 1 step in float32, for {tolerance.what} ...")
        inputs = self.inputs.in_float32()
        expected, got = (
            run_trial(inputs, self.folder / name, is_planned=is_planned, num_steps=1)
            for name, is_planned in (("float32", False), ("float32_planned", True))
        )
        yield compare.check_in_float32(expected, got)

    def _save_at(self) -> int | None:
        return None if self.engine == "fsdp1" else self.num_steps // 2 or None

    def _saved(self, trials: Trials) -> Iterator[Check]:
        if not trials.planned.can_save_model:
            yield Check("saved files", "skip", "Under FSDP1 saving and resuming are not looked at.")
            return
        if processes.is_first():
            self.say("Loading what was saved ...")
            yield from check_saved(self.inputs, trials)
        processes.gather(None)
        save_at = self._save_at()
        if save_at is None:
            yield Check("resume", "skip", "One step cannot be stopped half way; use --steps 2.")
        elif self.inputs.recipe.has_virtual_tokens:
            yield Check("resume", "skip", "PEFT trains virtual tokens that were saved no further.")
        elif self.saves_model_only:
            detail = "save_only_model: the recipe's checkpoints have no optimizer state to go on from."
            yield Check("resume", "skip", detail)
        else:
            checkpoint = trials.planned.saved / f"checkpoint-{save_at}"
            resumed = self._run("resumed", "from a checkpoint", is_planned=True, resume_from=checkpoint)
            yield check_resume(trials, resumed, save_at)

    def _first_difference(self, trials: Trials) -> Iterator[Check]:
        """Find the layer and the operator from which on the trials differ, if they do on any process."""
        if (module := first_module_changed_by_plan(trials)) is not None:
            detail = f"In forward, {module} is the first module whose output differs: the plan changes the forward."
            yield Check("first difference", "fail", detail)
        found = processes.gather(self._difference(trials))
        first = next((difference for difference in found if difference is not None), None)
        if first is None:
            return
        self.say(f"Looking at the operators of {first.layer} ...")
        operators = None
        for micro_batch in range(first.micro_batch, first.micro_batch + MAX_ACCUMULATION):
            watch = OperatorWatch(first.layer, micro_batch)
            run_trial(self.inputs, self.folder / "watched", is_planned=True, num_steps=self.num_steps, watch=watch)
            operators = watch.first_difference()
            if any(processes.gather(operators is not None)):
                break
        planned = trials.planned
        # Whether this process saw the cause itself, and not only gradients that it shares with others.
        has_evidence = planned.state_changes or planned.no_output_gradient - trials.reference.no_output_gradient
        if processes.is_first_with(operators is not None or bool(has_evidence)):
            yield _check_difference(trials, first, operators)

    def _difference(self, trials: Trials) -> FirstDifference | None:
        planned = trials.planned
        if (failure := planned.failure) is not None:
            is_of_layer = failure.is_recomputing and failure.path
            return FirstDifference(failure.path, len(planned.micro_batches) - 1) if is_of_layer else None
        is_known = (
            trials.differences.is_equal
            or trials.is_within_tolerance
            or first_module_changed_by_plan(trials) is not None
        )
        if is_known or not trials.is_repeatable:
            return None
        return first_differing_layer(trials.reference, planned) or _by_parameter(trials)


def _compared(trials: Trials) -> Iterator[Check]:
    """Yield the checks in the order of the table."""
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


def _by_parameter(trials: Trials) -> FirstDifference | None:
    """Return the layer of the first parameter whose gradient differs, where no layer's input gradient does."""
    step = trials.differences.first_step - 1
    expected, got = trials.reference.gradients(step), trials.planned.gradients(step)
    layer = layer_of_first_differing_parameter(expected, got, [layer.path for layer in trials.planned.layers])
    per_step = len(trials.planned.micro_batches) // trials.planned.num_steps
    return None if layer is None else FirstDifference(layer, step * per_step)


def _check_difference(trials: Trials, first: FirstDifference, operators: OperatorDifference | None) -> Check:
    what = f"{first.layer} could not be recomputed"
    if trials.planned.failure is None:
        what = (
            f"In backward, {first.layer} is the first layer whose input gradient differs while that at its output is "
            "equal, or a gradient inside it"
        )
    which = f"{describe_operators(operators)}. " if operators is not None else ""
    cause = likely_cause(trials.reference, trials.planned, operators)
    what += f" (micro-batch {first.micro_batch + 1}). {which}Likely cause: {cause}."
    return Check("first difference", "fail", what)


def _check_reference(reference: Record) -> Check:
    if reference.failure is None:
        return Check("run", "skip", "Another process failed without the plan.")
    error = reference.failure.error
    if "does not require grad" in str(error):
        return Check(
            "trainable parameters",
            "fail",
            "Nothing trains, without the plan either: the loss does not depend on any trainable parameter. Is "
            "the adapter frozen or disabled?",
        )
    return Check("run", "fail", f"Without the plan the recipe does not run: {type(error).__name__}: {error}")


def _check_run(planned: Record) -> Check:
    failure = planned.failure
    if failure is None:
        steps, batches = counted(planned.num_steps, "optimizer step"), len(planned.micro_batches)
        return Check(
            "run",
            "pass",
            f"{steps} of {batches // planned.num_steps} forward and backward each, {planned.engine}.",
            {"num_steps": planned.num_steps, "num_micro_batches": batches},
        )
    doing = "recomputing" if failure.is_recomputing else "running"
    where = f" while {doing} {failure.path}" if failure.path else ""
    # After this word torch says how to find the place; the check "first difference" does that.
    reason = " ".join(str(failure.error).split()).partition(" Tip: ")[0]
    return Check(
        "run",
        "fail",
        f"With the plan the run ends after {counted(planned.num_steps, 'step')}{where}: "
        f"{type(failure.error).__name__}: {reason[:_MAX_REASON_LENGTH]}",
        {"num_steps": planned.num_steps},
    )


# --- Rows drawn from a seed, so that no data is needed. ---


@dataclass(frozen=True)
class SampleRows:
    """What a Trainer needs in place of data."""

    rows: Any
    """A list with `input_ids` and `labels`, -100 where nothing is learned; or a data set of what a trainer reads."""
    collator: Callable[[list[Any]], dict[str, Any]] | None  # as the recipe's own; None for trl's


def sample_rows(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, args: TrainingArguments, *, num_steps: int
) -> SampleRows:
    """Draw rows of text tokens for that many optimizer steps of all processes.

    They have what the recipe's own batches have: prompts without loss where it learns completions or turns only, rows
    of unequal lengths where it pads, several documents in a row where it packs.
    """
    num_rows = num_steps * args.gradient_accumulation_steps * args.per_device_train_batch_size * args.world_size
    kind, seed = recipe.kind, int(recipe.training.get("seed", 42))
    if not kind.is_text:
        texts = Dataset.from_list(list(_judged_texts(kind, num_rows, seed)))
        if kind.of_trl:
            return SampleRows(texts, None)
        labelled = with_label(texts, recipe.data, tokenizer, recipe.model.get("num_labels", 1))
        return SampleRows(labelled, DataCollatorWithPadding(tokenizer))
    length = min(NUM_TOKENS, int(recipe.data.get("max_length") or NUM_TOKENS))
    special = set(tokenizer.all_special_ids)
    rows = list(_rows(num_rows, length, [token for token in range(len(tokenizer)) if token not in special], seed))
    for row in rows if recipe.data.get("loss_on") != "all" else ():
        num_given = max(1, len(row["labels"]) // _SHARE_WITHOUT_LOSS)
        row["labels"][:num_given] = [IGNORED] * num_given
    collator = collator_of(recipe.data, tokenizer)
    return SampleRows(Dataset.from_list(rows) if kind.of_trl else rows, collator)


def _judged_texts(kind: TrainerKind, num_rows: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield texts of letters in the columns that a trainer reads, some shorter than others."""
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> str:
        return "".join(map(chr, (torch.randint(26, (length,), generator=generator) + ord("a")).tolist()))

    for number in range(num_rows):
        length = NUM_TOKENS // 2 - _SHORTENED * (number % 4 == 3)
        texts = {name: text(length) for name in ("prompt", "chosen", "rejected", "completion", "text")}
        every = {**texts, "label": number % 2 == 0 if "completion" in kind.columns else number % 2}
        yield {name: every[name] for name in (*kind.more_columns, *kind.columns) if name in every}


def _rows(num_rows: int, length: int, tokens: list[int], seed: int) -> Iterator[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    for number in range(num_rows):
        # Pairs of rows have the same length or two lengths, for batches with and without padding.
        is_shorter = number % 4 == 3
        drawn = torch.randint(len(tokens), (max(2, length - _SHORTENED * is_shorter),), generator=generator)
        ids = [tokens[at] for at in drawn.tolist()]
        # No position predicts the first token.
        yield {"input_ids": ids, "labels": [IGNORED, *ids[1:]]}
