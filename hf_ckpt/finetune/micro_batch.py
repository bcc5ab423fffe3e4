"""`micro_batch: auto`: rows of a micro-batch, number of micro-batches and plan, chosen together.

The rows of an optimizer step stay what the recipe says. A larger micro-batch uses the device better, and needs more
recomputation to fit: which one is faster is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import TrainingArguments

from hf_ckpt.auto.budgets import capacity_of_run, check_budget
from hf_ckpt.distributed import store
from hf_ckpt.errors import BudgetError, RecipeError
from hf_ckpt.estimate.launch_config import Launch
from hf_ckpt.estimate.step_of_recipe import subject_of
from hf_ckpt.loading.dataset import PreparedData
from hf_ckpt.loading.sharding_engine import Engine, asked_engine
from hf_ckpt.planner.search import StepPlanner
from hf_ckpt.recipe.checkpointing import NO_CHECKPOINTING
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.simulation.devices import CPU, Device, this_device
from hf_ckpt.simulation.step import Step
from hf_ckpt.trainer.batch import Batch, largest_text_batch


def choose_micro_batch(
    rows_of_step: int, price: Callable[[int, int], float], say: Callable[[str], None] = lambda text: None
) -> int:
    """Return the rows of the micro-batch whose step takes the least time for each token; of equal ones the smallest.

    `price`: predicted seconds per token, padding included, of so many rows and so many micro-batches under the fastest
    plan; raises `BudgetError` where no plan fits.
    """
    found: dict[int, float] = {}
    for rows in (each for each in range(1, rows_of_step + 1) if rows_of_step % each == 0):
        times = rows_of_step // rows
        try:
            found[rows] = price(rows, times)
        except BudgetError:
            if not found:
                raise
            # Nor does a larger one.
            say(f"{rows} x {times}: no plan fits")
            break
        say(f"{rows} x {times}: {found[rows] * 1e6:.3g} microseconds per token")
    return min(found, key=found.__getitem__)


# --- Recipes. ---


def device_of(args: TrainingArguments) -> Device:
    """Return the device that a run with these arguments trains on."""
    return this_device() if args.device.type == "cuda" else CPU


def launch_of_run(args: TrainingArguments) -> Launch:
    """Return how this run was started, as what is simulated on `meta` wants it."""
    if args.world_size == 1:
        return Launch()
    engine = asked_engine(args)
    name = engine.name.lower()
    if engine is Engine.DEEPSPEED:
        plugin: Any = args.deepspeed_plugin
        name = f"zero{plugin.zero_stage}" if plugin.zero_stage else "ddp"
    return Launch(engine=name, num_processes=args.world_size)


def step_of_batch(step: Step, batch: Batch, times: int) -> Step:
    """Return a step with other micro-batches."""
    rows_per_example = 1 if step.loss is None else step.loss.rows_per_example
    return replace(
        step,
        batch_size=-(-batch.rows // rows_per_example),
        seq_length=batch.length,
        is_padded=batch.is_padded,
        is_packed=batch.is_packed,
        gradient_accumulation_steps=times,
    )


def with_micro_batch(recipe: Recipe, args: TrainingArguments, data: PreparedData, say: Callable[[str], None]) -> Recipe:
    """Return a recipe with the micro-batch that is left to us. Process 0 chooses it for all.

    `args`: as the recipe says; the rows of a step are taken from them.
    """
    rows_of_step = args.per_device_train_batch_size * args.gradient_accumulation_steps

    def chosen() -> int:
        return choose_micro_batch(rows_of_step, _price(recipe, args, data), say)

    rows = store.broadcast_result(chosen, args.ddp_timeout, "choosing the micro-batch")
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": rows_of_step // rows}
    return replace(recipe, training={**recipe.training, **sizes})


def _price(recipe: Recipe, args: TrainingArguments, data: PreparedData) -> Callable[[int, int], float]:
    subject, device = subject_of(recipe, launch_of_run(args)), device_of(args)
    checkpointing = recipe.checkpointing or NO_CHECKPOINTING
    budget, processes = checkpointing.budget, args.world_size
    capacity = capacity_of_run(budget, device, subject.model, None, num_processes=processes)

    def price(rows: int, times: int) -> float:
        batch = largest_text_batch(data.train, data.collator, rows, checkpointing.max_length)
        assert batch is not None, "a recipe's data is tokenised"
        step = step_of_batch(subject.step, batch, times)
        simulator = subject.simulator(device).with_step(step)
        memory = StepPlanner(simulator, allowed=subject.allowed).plan_for(capacity).memory
        return memory.time.total / step.tokens

    return price


def is_asked(recipe: Recipe) -> bool:
    """Whether a recipe leaves its micro-batch to us."""
    return recipe.checkpointing is not None and recipe.checkpointing.chooses_micro_batch


def check_auto(recipe: Recipe, args: TrainingArguments) -> None:
    """Refuse a recipe whose policy `auto` has no budget on this machine, before anything is loaded."""
    if recipe.checkpointing is None or not recipe.is_auto:
        return
    if is_asked(recipe) and args.auto_find_batch_size:
        raise RecipeError(
            "checkpointing.micro_batch is auto, and training.auto_find_batch_size is true: both choose the batch. Set "
            "training.auto_find_batch_size=false."
        )
    budget, device = recipe.checkpointing.budget, device_of(args)
    if budget is not None or not device.is_cuda:
        check_budget(budget, device)


def effective_batch(args: TrainingArguments) -> str:
    """Return the effective batch over all processes, in words."""
    numbers = (args.train_batch_size, args.gradient_accumulation_steps, args.world_size)
    names = (("sequence", "sequences"), ("micro-batch", "micro-batches"), ("process", "processes"))
    parts = (f"{number} {one if number == 1 else many}" for number, (one, many) in zip(numbers, names, strict=True))
    total = math.prod(numbers)
    return f"{' x '.join(parts)} = {total} {'sequence' if total == 1 else 'sequences'} in each optimizer step"
