"""What to say when a run goes out of memory: where, why, and what would fit. What is advised was simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from hf_ckpt.auto.batch_bounds import Batch
from hf_ckpt.errors import BudgetError, HFCkptError, OutOfMemoryError
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.subject import Subject, subject_of
from hf_ckpt.finetune.failure import MUCH, Failure, Figures, Part, RunWatch, part_of
from hf_ckpt.finetune.micro_batch import device_of, launch_of, step_of_batch
from hf_ckpt.planner.bisect import largest
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.devices import Device, reserve
from hf_ckpt.simulation.evaluation import simulate_evaluation
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, StepMemory
from hf_ckpt.units import format_bytes

_STATES = (Category.PARAMETERS, Category.GATHERED, Category.GRADIENTS, Category.OPTIMIZER, Category.WORKSPACES)


@contextmanager
def explained(
    trainer: Trainer,
    recipe: Recipe,
    watch: RunWatch,
    facts: Callable[[], tuple[Plan | None, Batch | None]],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Turn `torch.OutOfMemoryError` into an error that says where, why, and what would fit.

    Args:
        trainer: the run.
        recipe: what it carries out, with the sizes that it really has.
        watch: among the Trainer's callbacks.
        facts: tells the plan that is in force, and the largest batch that policy `auto` planned for.
        say: is told what goes on.

    Raises:
        OutOfMemoryError: the run went out of memory.
    """
    model: Any = trainer.model
    try:
        with watch.on(model):
            yield
    except torch.OutOfMemoryError as error:
        plan, planned_for = facts()
        failure = Failure(part_of(error.__traceback__), Figures.of(str(error)), watch, planned_for)
        say("Out of memory. Simulating what would fit ...")
        raise OutOfMemoryError(explanation(failure, recipe, trainer.args, plan, device_of(trainer.args))) from error


def explanation(failure: Failure, recipe: Recipe, args: TrainingArguments, plan: Plan | None, device: Device) -> str:
    """Return what there is to say of a failure, in paragraphs.

    Args:
        failure: what is known of it.
        recipe: what was carried out.
        args: the run's.
        plan: what was in force.
        device: where.
    """
    try:
        lines = list(_simulated(failure, recipe, args, plan, device))
    except HFCkptError as error:
        lines = [*_because(failure.causes(None)), f"What would fit is not known: {error}"]
    return "\n".join([failure.head(), *lines])


def _simulated(
    failure: Failure, recipe: Recipe, args: TrainingArguments, plan: Plan | None, device: Device
) -> Iterator[str]:
    subject = subject_of(recipe, launch_of(args))
    usable = (failure.figures.capacity or device.memory_bytes) - reserve(device).high_bytes
    step = subject.step
    if (batch := failure.watch.batch) is not None:
        step = step_of_batch(step, batch, step.gradient_accumulation_steps)
    if failure.part is Part.EVALUATION:
        yield from _because(failure.causes(None))
        yield _evaluation_that_fits(partial(_evaluation_peak, subject, device, step), step.batch_size, usable)
        return
    predictor = Predictor(replace(subject, step=step), device)
    predicted = predictor.memory(plan)
    yield (
        f"Predicted for this batch: {format_bytes(predicted.peak_bytes)}, in the {predicted.peak_at.describe()}; "
        f"a step can use about {format_bytes(usable)} of {device.title}."
    )
    causes = list(failure.causes(predicted))
    yield from _because(causes)
    if predicted.peak_bytes > usable:
        yield from _what_fits(predictor, predicted, usable)
    elif not causes:
        yield from _what_leaves_room(predictor, predicted)


def _what_fits(predictor: Predictor, predicted: StepMemory, usable: int) -> Iterator[str]:
    try:
        yield f"What fits: {_auto(predictor, usable)}."
    except BudgetError as error:
        yield str(error)
        yield from _states(predicted, usable)


def _what_leaves_room(predictor: Predictor, predicted: StepMemory) -> Iterator[str]:
    less = int((1 - 2 * MUCH) * predicted.peak_bytes)
    with suppress(BudgetError):
        yield f"The step was predicted to fit. What leaves more room: {_auto(predictor, less)}."


def _auto(predictor: Predictor, budget: int) -> str:
    """Return how to ask for a plan within a budget, and what it is predicted to need."""
    peak = predictor.planned(budget).memory.peak_bytes
    amount = f"{budget // 2**20}MiB" if budget >= 2**20 else f"{budget}B"
    return f"checkpointing.policy=auto checkpointing.memory_budget={amount}, predicted peak {format_bytes(peak)}"


def _evaluation_peak(subject: Subject, device: Device, step: Step, rows: int) -> int:
    batch = replace(step, batch_size=rows, is_padded=step.is_padded and rows > 1)
    return simulate_evaluation(subject.model, batch, device, **subject.structure).memory.peak_bytes


def _evaluation_that_fits(peak: Callable[[int], int], rows: int, usable: int) -> str:
    needed = peak(rows)
    kept = "with compute_metrics, predictions stay on the device until training.eval_accumulation_steps moves them"
    if needed <= usable:
        return f"A batch of evaluation is predicted to need {format_bytes(needed)}, which fits; {kept}."
    found = largest(peak, usable, start=max(1, rows // 2), most=max(1, rows - 1))
    what = "Evaluate shorter rows"
    if found.number:
        what = f"What fits: training.per_device_eval_batch_size={found.number} ({format_bytes(found.peak_bytes)})"
    return (
        f"A batch of evaluation is predicted to need {format_bytes(needed)} of {format_bytes(usable)}, and activation "
        f"checkpointing does not change it. {what}; {kept}."
    )


def _because(causes: Iterable[str]) -> Iterator[str]:
    yield from (f"Probable cause: {cause}." for cause in causes)


def _states(predicted: StepMemory, usable: int) -> Iterator[str]:
    """Yield what helps where weights and optimizer dominate."""
    states = sum(predicted.by_category.get(category, 0) for category in _STATES)
    if 2 * states > usable:
        yield (
            f"Weights, gradients and optimizer state take {format_bytes(states)} of it, and activation checkpointing "
            "does not make them smaller. Adapters (lora: {r: 16, target_modules: all-linear}), 4-bit weights "
            "(quantization: {load_in_4bit: true}), an 8-bit optimizer (training.optim=adamw_8bit) and sharding over "
            "several GPUs (FSDP) do."
        )
