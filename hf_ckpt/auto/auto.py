"""Policy `auto`: its options, and what it finds when a run begins: the model, its largest batch, the budget.

`Auto` plans for a Trainer, `plan_own_step` for a loop without one, whose sizes are given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

from hf_ckpt.auto.batch_of_forward import reads_text, with_inputs, without_adapter
from hf_ckpt.auto.budgets import capacity_of_run, free_host_bytes, unknown_bytes
from hf_ckpt.auto.largest_multimodal_batch_in_data import collated_batches
from hf_ckpt.auto.live_step import ModelState, given_optimizer, live_sharding, live_step, mixed_precision
from hf_ckpt.auto.replan import RunPlanner, say_fallback
from hf_ckpt.auto.simulation_coverage import (
    Coverage,
    NewModels,
    check_call,
    check_not_compiled,
    check_run,
    evaluates,
    refuse,
)
from hf_ckpt.auto.trainer_loss import UsersLoss, users_loss
from hf_ckpt.auto.trl_trainers import trl_loss
from hf_ckpt.distributed import deepspeed, store
from hf_ckpt.errors import OtherProcessError, PolicyError, UnsupportedError
from hf_ckpt.patch.apply import make_plan
from hf_ckpt.patch.checks import check_model
from hf_ckpt.patch.interrupted_run import running_trainer
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import AUTO, Policy
from hf_ckpt.simulation.devices import CPU, this_device
from hf_ckpt.simulation.fake_model import meta_copy
from hf_ckpt.simulation.fit import capacity_of
from hf_ckpt.simulation.optimizers import innermost_optimizer
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import GivenOptimizer, Sharding, Step
from hf_ckpt.structure.layers import find_layers, is_sharded
from hf_ckpt.structure.stored import ByModel
from hf_ckpt.trainer.batch import Batch, is_packing, largest_text_batch
from hf_ckpt.trainer.input_gradients import choose_input_gradients, switch_input_gradients
from hf_ckpt.trainer.part import Planning, PolicySource
from hf_ckpt.units import Budget

logger = logging.getLogger(__name__)

_SMALL_LENGTH = 16  # Tokens of the rows that a user's loss is tried with where no batch is known.


class Auto(PolicySource):
    """Policy `auto` with its options, for any number of runs."""

    def __init__(
        self,
        # None takes what is free of the GPU.
        memory_budget: Budget | None,
        # Tokens that no example exceeds; None reads them off the data.
        max_length: int | None,
        # `layers`, `attention` and `ffn` of `apply`.
        structure: dict[str, Any],
        # What a plan may hold besides modes.
        allowed: Allowed,
        *,
        # The first step under each plan is proven, and has to stay within the budget too.
        is_proven: bool,
        # The mode of all layers where a run cannot be planned for; None refuses it.
        fallback: str | None = None,
    ) -> None:
        if max_length is not None and (type(max_length) is not int or max_length < 1):
            raise PolicyError(f"max_length is {max_length}. Write the tokens of the longest example, padding included.")
        self._memory_budget = memory_budget
        self._max_length = max_length
        self._structure = structure
        self._allowed = allowed
        self._is_proven = is_proven
        super().__init__(None if fallback is None else Policy.parse(fallback))
        self._before_sharding = ByModel[nn.Module]()

    def keep_shape(self, model: nn.Module) -> None:
        self._before_sharding.note(model, meta_copy(model))

    def describe(self) -> str:
        return f'"{AUTO}"'

    def begin_run(
        self, model: nn.Module, args: TrainingArguments, state: TrainerState, **given: Any
    ) -> tuple[Planning, Policy | Plan, bool | None]:
        """Plan a run, or go on with the fallback where it is refused and there is one. See `begin`."""
        # That nothing fits is no reason to fall back.
        try:
            planning = self.begin(model, args, state, **given)
        except (UnsupportedError, OtherProcessError) as error:
            # Where it is another process that cannot plan, that has reported only that it failed.
            is_refusal = isinstance(error, UnsupportedError)
            if self.policy is not None and store.num_processes() > 1:
                is_refusal = any(store.all_gather(is_refusal, "falling back"))
            if self.policy is None or not is_refusal:
                raise
            say_fallback(error)
            return super().begin_run(model, args, state, **given)
        return planning, planning.plan, planning.input_gradients

    def begin(
        self,
        model: nn.Module,
        args: TrainingArguments,
        state: TrainerState,
        *,
        dataloader: Any,
        optimizer: Any,
        input_gradients: bool | None,
    ) -> RunPlanner:
        """Plan for the largest batch of a run that is about to begin.

        Nothing is drawn from the data. `input_gradients` is what the user says; None decides.

        Raises:
            BudgetError: no plan fits the budget.
            PolicyError: there is no budget, or it is more than the device has.
            UnsupportedError: the step cannot be simulated.
            OtherProcessError: one of these was raised in another process.
        """
        made, trainer = innermost_optimizer(optimizer), running_trainer()
        collator, dataset = getattr(dataloader, "collate_fn", None), getattr(dataloader, "dataset", None)
        sharding = live_sharding(args, model)
        loss = trl_loss(trainer, args, model, sharding, dataset, collator) or users_loss(trainer, model, sharding)
        optimizer_name = args.optim if made is None else type(made).__name__
        coverage = check_run(trainer, args, model, optimizer_name, loss)
        shape = self._shape_of(model)
        given = given_optimizer(optimizer, args, model, sharding)
        device = this_device() if args.device.type == "cuda" else CPU
        num_rows = state.train_batch_size or args.train_batch_size

        def read_limits() -> _RunLimits:
            if loss is None or loss.batch.takes_more_than_text:
                batches = _largest_batches(shape, dataset, collator, num_rows, self._max_length)
            else:
                batch = loss.batch.largest(dataset, collator, num_rows, self._max_length)
                batches = [] if batch is None else [with_inputs(batch, dataset, collator, shape)]
            free = free_host_bytes(self._allowed.offload)
            given = self._memory_budget, device, model, optimizer, coverage.counted_bytes
            return capacity_of_run(*given, num_processes=args.world_size).num_bytes, batches, free

        budget, batches, host_bytes = _agreed(read_limits)
        is_on = choose_input_gradients(shape, find_layers(shape, **self._structure), input_gradients)
        # They stay on the copy, and so are part of each simulated step.
        switch_input_gradients(shape, is_on)
        rows_per_example = 1 if loss is None else loss.rows_per_example

        now = ModelState(model, shape, made, mixed_precision(args))

        def simulating(given: GivenOptimizer | None) -> Callable[[Batch], StepSimulator]:
            any_step = StepSimulator(shape, Step(), device, self._structure)
            autocast = now.autocast

            def simulator(batch: Batch) -> StepSimulator:
                own = None if loss is None else loss.of(batch)
                step = live_step(args, batch, sharding, given_optimizer=given, is_proven=self._is_proven, loss=own)
                return any_step.without_traces(replace(step, autocast=autocast, beside_bytes=coverage.beside_bytes))

            return simulator

        def simulating_anew() -> Callable[[Batch], StepSimulator]:
            return simulating(given_optimizer(now.optimizer, args, now.follow(refuse), sharding))

        simulator = simulating(given)
        small = Batch(num_rows, _SMALL_LENGTH) if reads_text(shape) else None
        tried = batches[0] if batches else small
        if isinstance(loss, UsersLoss) and (fault := _fault(simulator, tried, args.ddp_timeout)):
            loss = None
            with _because(fault):
                coverage = check_run(trainer, args, model, optimizer_name)
        if given is not None and given.copied is not None:
            coverage = coverage.without(f"what {optimizer_name} does in some steps only, such as its first")
        # Without a budget it is off what is free. Engines of several processes have buffers of their own by then.
        if self._memory_budget is not None and args.world_size == 1:
            unknown = unknown_bytes(device, model, optimizer, coverage.counted_bytes)
            coverage = coverage.without_unknown(unknown, budget)
        planning = RunPlanner(
            make_plan(shape, Policy.parse("none"), **self._structure),
            simulator,
            capacity_of(device, args.world_size, budget),
            coverage=coverage,
            allowed=self._allowed,
            host_bytes=host_bytes,
            place=args.device,
            timeout_s=args.ddp_timeout,
            is_bounded=bool(batches),
            rows_per_example=rows_per_example,
            fallback=None if self.policy is None else make_plan(shape, self.policy, **self._structure),
            check_again=None if trainer is None else NewModels(trainer, model, args.device, coverage, loss).check,
            model_state=now,
            simulate_anew=simulating_anew,
            # Of several processes all would have to begin again.
            tries_fewer_rows=args.auto_find_batch_size and store.num_processes() == 1 and num_rows > 1,
        )
        planning.input_gradients = is_on
        planning.start_all(batches)
        if evaluates(args) and batches and not batches[0].tensors:
            sizes = num_rows, args.eval_batch_size, collator, rows_per_example
            planning.check_evaluation(_of_evaluation(batches[0], *sizes))
        return planning

    def _shape_of(self, model: nn.Module) -> nn.Module:
        is_whole = not is_sharded(model) and not deepspeed.is_sharded(model)
        # As it is now, adapters and frozen weights included; accelerate's part of it is taken off.
        shape = meta_copy(model) if is_whole else self._before_sharding.of(model)
        if shape is None:
            raise UnsupportedError(
                'Policy "auto" simulates the model as it was before it is sharded, and this callback came to the '
                "Trainer afterwards. Pass it to the Trainer: Trainer(..., callbacks=[HFCkptCallback(...)])."
            )
        return shape


# What one rank finds, or the bounds for all of them: the bytes that a step may use, the largest batches (empty where
# no bound is known), and the bytes of host memory that are free (None where that is not known).
_RunLimits = tuple[int, list[Batch], int | None]


@contextmanager
def _because(fault: str) -> Iterator[None]:
    """Say first why the loss is not simulated: what is refused without it would not be with it."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{fault} The model's own loss cannot be simulated in its place: {error}") from error


def _fault(simulator: Callable[[Batch], StepSimulator], batch: Batch | None, timeout_s: float) -> str:
    """Return why a step with the user's loss cannot be simulated, and say it, the same on all ranks."""

    def tried() -> str:
        if batch is None:
            return "what its batches are made of is not known."
        try:
            simulator(batch).memory(None)
        # It is the user's code, given tensors without values.
        except Exception as error:  # noqa: BLE001
            return str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
        return ""

    fault = store.broadcast_result(tried, timeout_s, "simulating the loss")
    if fault:
        logger.info("The Trainer's own loss is not simulated: %s", fault)
    return fault


def _largest_batches(
    model: nn.Module, dataset: Any, collator: Any, num_rows: int, max_length: int | None
) -> list[Batch]:
    """Return the largest batches of more than a text, or that of a text; none where no bound is known."""
    found = [] if collator is None else collated_batches(model, dataset, collator, num_rows)
    for each in found:
        check_call(model, each.names)
    if found and max_length is not None:
        logger.warning(
            "max_length=%d says nothing of %s: the largest examples are planned for, larger batches before they run.",
            *(max_length, found[0].describe()),
        )
    if found or not reads_text(model):
        return found
    batch = largest_text_batch(dataset, collator, num_rows, max_length)
    return [] if batch is None else [with_inputs(batch, dataset, collator, model)]


def _agreed(read_limits: Callable[[], _RunLimits]) -> _RunLimits:
    """Return the smallest budget, the largest batches and the least host memory of all ranks."""
    # There is no batch where one rank knows no bound.

    def sizes() -> tuple[int, list[Any], int | None]:
        budget, batches, host = read_limits()
        return budget, [each.to_json() for each in batches], host

    found = store.gather_results(sizes, "looking at the data")
    budget = min(budget for budget, _, _ in found)
    host = min((host for _, _, host in found if host is not None), default=None)
    batches = [Batch.from_json(each) for _, of_rank, _ in found for each in of_rank]
    if not all(of_rank for _, of_rank, _ in found):
        return budget, [], host
    if any(each.tensors for each in batches):
        return budget, sorted(dict.fromkeys(batches), key=lambda each: -each.num_bytes), host
    largest = Batch(
        max(batch.rows for batch in batches),
        max(batch.length for batch in batches),
        any(batch.is_padded for batch in batches),
        any(batch.is_packed for batch in batches),
        tuple(sorted({name for batch in batches for name in batch.more})),
    )
    return budget, [largest], host


def _of_evaluation(batch: Batch, num_rows: int, eval_rows: int, collator: Any, rows_per_example: int) -> Batch:
    """Return a batch of evaluation whose examples are as long as the longest ones of training."""
    if is_packing(collator):
        length = -(-batch.length // num_rows) * eval_rows
        return replace(batch, rows=1, length=length, is_padded=False, is_packed=eval_rows > 1)
    eval_rows *= rows_per_example
    return replace(batch, rows=eval_rows, is_padded=batch.is_padded and eval_rows > 1, is_packed=False)


# --- Without a Trainer. ---


def plan_own_step(
    model: nn.Module, budget: Budget | None, allowed: Allowed, structure: dict[str, Any], optimizer: Any, **given: Any
) -> RunPlanner:
    """Return the plans of a loop that runs a step, the one for its sizes made already."""
    # The model is not changed. Arguments and errors are those of `Auto` and its `begin`. Without an `optimizer` the one
    # that `Step` names is counted; `given` are other fields of `Step`.
    step = Step(**given)
    check_model(model)
    check_not_compiled(model)
    if store.num_processes() > 1 or is_sharded(model):
        raise refuse("in a loop of your own it knows one process that has the whole model")
    step = replace(step, given_optimizer=given_optimizer(optimizer, None, model, Sharding()))
    place = next(model.parameters()).device
    device = this_device() if place.type == "cuda" else CPU
    shape = meta_copy(model)
    any_step = StepSimulator(shape, step, device, structure)
    made = innermost_optimizer(optimizer)
    name = step.optim if made is None else type(made).__name__
    planning = RunPlanner(
        make_plan(shape, Policy.parse("none"), **structure),
        lambda batch: any_step.without_traces(replace(step, batch_size=batch.rows, seq_length=batch.length)),
        capacity_of_run(budget, device, model, optimizer),
        coverage=Coverage((type(without_adapter(model)).__name__, str(name), "one process"), ()),
        allowed=allowed,
        host_bytes=free_host_bytes(allowed.offload),
        place=torch.device(place),
        timeout_s=0,
        is_bounded=True,
    )
    planning.start(Batch(step.batch_size, step.seq_length, step.is_padded))
    return planning
