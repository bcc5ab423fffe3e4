"""What to say when a run goes out of memory: where, why, and what would fit. What is advised was simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_ckpt.callback import HFCkptCallback
from hf_ckpt.errors import BudgetError, HFCkptError, OutOfMemoryError
from hf_ckpt.estimate.predict import Predictor
from hf_ckpt.estimate.step_of_recipe import Subject, subject_of
from hf_ckpt.finetune.micro_batch import device_of, launch_of_run, step_of_batch
from hf_ckpt.planner.largest_that_fits import largest
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recovery.out_of_memory import MUCH, Figures, Part, allocated_bytes, part_of
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.fit import Capacity, Fit, capacity_of
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, StepMemory
from hf_ckpt.trainer.batch import Batch, batch_of
from hf_ckpt.units import format_bytes

# --- What a run tells of itself. ---


@dataclass(eq=False)
class RunWatch(TrainerCallback):
    """Notes what a run was doing: the last batch, the step, and what stays allocated from step to step."""

    allocated: Callable[[], int | None] = allocated_bytes  # Tells what tensors have on the device.
    batch: Batch | None = None  # The one that the model was given last.
    num_steps: int = 0  # Optimizer steps that have begun.
    after_steps: list[int] = field(default_factory=list)
    """What stayed allocated after the second step and after the last one."""

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Look at the inputs of a model while this is entered."""
        handle = model.register_forward_pre_hook(self._note_batch, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _note_batch(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self.batch = batch_of(args, kwargs) or self.batch

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the step."""
        self.num_steps = state.global_step + 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note what stays."""
        # The first step makes the optimizer's state.
        if state.global_step > 1 and (now := self.allocated()) is not None:
            self.after_steps = [*self.after_steps[:1], now]

    @property
    def grown_bytes(self) -> int:
        """What stays allocated after a step more than it did at first."""
        return self.after_steps[-1] - self.after_steps[0] if self.after_steps else 0


# --- What to say. ---


@dataclass(frozen=True)
class OutOfMemoryRun:
    """A run that went out of memory."""

    part: Part  # Where.
    figures: Figures  # How much.
    watch: RunWatch  # What the run was doing.
    planned_for: Batch | None = None  # The largest batch that a plan was made for, under policy `auto`.

    def head(self) -> str:
        """Return where it happened and how much was allocated, in words."""
        batch = "" if self.watch.batch is None else f", with a batch of {self.watch.batch.describe()}"
        step = f" of step {self.watch.num_steps}" if self.watch.num_steps and self.part is not Part.EVALUATION else ""
        return f"Out of memory in the {self.part}{step}{batch}. {self.figures.describe()}"

    def causes(self, predicted: StepMemory | None) -> Iterator[str]:
        """Yield what probably brought it about, each with what helps against it.

        `predicted`: the step with this batch under the plan in force; None where it cannot be simulated.
        """
        batch, planned_for, figures = self.watch.batch, self.planned_for, self.figures
        if batch is not None and planned_for is not None and not planned_for.holds(batch):
            yield (
                f"a larger batch than the plan was made for ({planned_for.describe()}): tell the longest example, "
                f"checkpointing.max_length={batch.length}"
            )
        if figures.is_fragmented:
            yield (
                "fragmentation: what the allocator holds without using it would have been enough, but in pieces. Set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
            )
        if self.watch.grown_bytes > MUCH * (figures.allocated or max(self.watch.after_steps, default=0)):
            yield (
                f"something grows: {format_bytes(self.watch.grown_bytes)} more stay allocated after step "
                f"{self.watch.num_steps - 1} than after step 2. Look for what is collected on the device, such as "
                "losses or outputs that are kept with their graph"
            )
        elif predicted is not None and (figures.allocated or 0) > (1 + MUCH) * predicted.peak_bytes:
            yield (
                f"something else than the step, which is predicted to need {format_bytes(predicted.peak_bytes)}. See "
                "what else this process holds on the device"
            )


_STATES = (Category.PARAMETERS, Category.GATHERED, Category.GRADIENTS, Category.OPTIMIZER, Category.WORKSPACES)


@contextmanager
def explained(
    trainer: Trainer, recipe: Recipe, callback: HFCkptCallback | None, say: Callable[[str], None]
) -> Iterator[None]:
    """Turn `torch.OutOfMemoryError` into an error that says where, why, and what would fit."""
    model: Any = trainer.model
    watch = RunWatch()
    trainer.add_callback(watch)
    try:
        with watch.on(model):
            yield
    except (torch.OutOfMemoryError, OutOfMemoryError) as error:
        # A recovery that gave up says what it has tried.
        cause = error.__cause__ if isinstance(error, OutOfMemoryError) else error
        if not isinstance(cause, torch.OutOfMemoryError):
            raise
        plan, planned_for = (None, None) if callback is None else (callback.plan, callback.planned_for)
        failure = OutOfMemoryRun(part_of(cause.__traceback__), Figures.of(str(cause)), watch, planned_for)
        say("Out of memory. Simulating what would fit ...")
        lines = [] if error is cause else [str(error)]
        lines.append(explanation(failure, recipe, trainer.args, plan, device_of(trainer.args)))
        raise OutOfMemoryError("\n".join(lines)) from cause


def explanation(
    failure: OutOfMemoryRun, recipe: Recipe, args: TrainingArguments, plan: Plan | None, device: Device
) -> str:
    """Return what there is to say of a failure, in paragraphs. `device`: where."""
    try:
        lines = list(_simulated(failure, recipe, args, plan, device))
    except HFCkptError as error:
        lines = [*_because(failure.causes(None)), f"What would fit is not known: {error}"]
    return "\n".join([failure.head(), *lines])


def _simulated(
    failure: OutOfMemoryRun, recipe: Recipe, args: TrainingArguments, plan: Plan | None, device: Device
) -> Iterator[str]:
    subject = subject_of(recipe, launch_of_run(args))
    step = subject.step
    whole = capacity_of(device, step.sharding.world_size)
    capacity = whole.with_bytes(failure.figures.capacity or device.memory_bytes)
    if (batch := failure.watch.batch) is not None:
        step = step_of_batch(step, batch, step.gradient_accumulation_steps)
    if failure.part is Part.EVALUATION:
        yield from _because(failure.causes(None))
        yield _evaluation_that_fits(subject, device, step, capacity.reserved_bytes)
        return
    predictor = Predictor(replace(subject, step=step), device)
    predicted, verdict = predictor.memory(plan), predictor.verdict(plan, capacity)
    yield (
        f"Predicted for this batch: {format_bytes(predicted.peak_bytes)}, in the {predicted.peak_at.describe()}, and "
        f"{format_bytes(verdict.needed_bytes)} with all that lies on the device besides; {device.title} has "
        f"{format_bytes(capacity.num_bytes)}."
    )
    causes = list(failure.causes(predicted))
    yield from _because(causes)
    if verdict.fit is not Fit.YES:
        try:
            yield f"What {_auto(predictor, capacity)}."
        except BudgetError as error:
            yield str(error)
            yield from _states(predicted, capacity.reserved_bytes)
    elif not causes:
        less = capacity.with_bytes(int((1 - 2 * MUCH) * verdict.needed_bytes))
        with suppress(BudgetError):
            yield f"The step was predicted to fit. What leaves more room: what {_auto(predictor, less)}."


def _auto(predictor: Predictor, capacity: Capacity) -> str:
    """Return how to ask for a plan within a budget, and what it is predicted to need."""
    verdict, budget = predictor.planned(capacity).verdict, capacity.num_bytes
    fits = "fits" if verdict.fit is Fit.YES else "fits perhaps, only by giving cached blocks back"
    amount = f"{budget // 2**20}MiB" if budget >= 2**20 else f"{budget}B"
    needed = format_bytes(verdict.needed_bytes)
    return f"{fits}: checkpointing.policy=auto checkpointing.memory_budget={amount}, predicted to need {needed}"


def _evaluation_that_fits(subject: Subject, device: Device, step: Step, usable: int) -> str:
    def peak(rows: int) -> int:
        batch = replace(step, batch_size=rows)
        batch = replace(batch, is_padded=step.is_padded and batch.rows > 1)
        return subject.simulator(device).with_step(batch).evaluate(subject.plan).memory.peak_bytes

    rows = step.batch_size
    needed = peak(rows)
    kept = "with compute_metrics, predictions stay on the device until training.eval_accumulation_steps moves them"
    if needed <= usable:
        return f"A batch of evaluation is predicted to need {format_bytes(needed)}, which fits; {kept}."
    found = largest(peak, usable, start=max(1, rows // 2), most=max(1, rows - 1))
    what = "Evaluate shorter sequences"
    if found.number:
        what = f"What fits: training.per_device_eval_batch_size={found.number} ({format_bytes(found.needed_bytes)})"
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
