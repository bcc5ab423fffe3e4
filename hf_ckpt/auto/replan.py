"""The plan of a run under policy `auto`: made for its largest batch, and made anew before a larger one runs.

    planning = Auto(budget, max_length, structure, ...).begin(model, args, state, ...)
    planning.plan                 # to be put in force before the first step
    planning.place_hooks(model, change_plan)

Where no bound is known, the first plan keeps everything, and the inputs of the first forward decide. Simulating draws
no random numbers and touches no weight: losses stay those of a run without a plan.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.auto.batch_of_forward import batch_of_forward
from hf_ckpt.auto.live_step import ModelState
from hf_ckpt.auto.simulation_coverage import Coverage, InputCheck, refuse
from hf_ckpt.distributed import store
from hf_ckpt.errors import BudgetError, SmallerBatchError, UnsupportedError
from hf_ckpt.patch.interrupted_run import is_beside_training_steps
from hf_ckpt.planner.advice import Exactness, inexact_parts
from hf_ckpt.planner.largest_that_fits import largest
from hf_ckpt.planner.search import StepPlanner
from hf_ckpt.policy.allowances import Allowed, cap_to_free_memory, restore_user_cap
from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.fit import Capacity, Fit, Verdict
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import make_inputs
from hf_ckpt.simulation.step_memory import StepMemory
from hf_ckpt.trainer.batch import Batch
from hf_ckpt.trainer.part import ChangePlan, Planning
from hf_ckpt.units import format_bytes
from hf_ckpt.upstream.torch import disable_current_modes

logger = logging.getLogger(__name__)

# Where no bound is known, lengths are planned for in steps: each is at most an eighth more than what came.
_STEPS_IN_A_DOUBLING = 8

# A plan as rank 0 broadcasts it: its JSON, its predicted peak in bytes, what it needs in all, whether that fits for
# certain, where the peak lies, and what it is compared with: what a step without a plan needs, and its time as a share
# of that one's; 0 where the plan was there before.
_PlanMessage = tuple[str, int, int, bool, str, int, float]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Simulate as if nothing ran around it: a forward of the Trainer's may, under autocast or without gradients."""
    # Only where it is on: within it, casts of weights are kept until its end.
    plain = torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()
    with disable_current_modes(), plain, torch.enable_grad():
        yield


@dataclass(eq=False)
class RunPlanner(Planning):
    """The plans of one run.

    Attributes:
        plan: what is to be in force now; the first one keeps everything.
        needed_bytes: what that needs with all that lies on the device besides.
        input_gradients: what was simulated for the output of the embeddings.
        seen: what the model was given in the micro-batch that runs; None where its forward has not begun.
    """

    plan: Plan
    # Makes the simulator of a batch's step. Each plan is made with one of its own, so that what was simulated for it
    # does not outlive it.
    simulator: Callable[[Batch], StepSimulator]
    # What there is for the step.
    capacity: Capacity
    _: KW_ONLY
    # What is counted, for the log.
    coverage: Coverage
    # What a plan may hold besides modes, as the user says.
    allowed: Allowed
    # Of host memory that are free for this process; None where that is not known.
    host_bytes: int | None = None
    # Where this rank's tensors are.
    place: torch.device
    # How long other processes wait for rank 0 to plan.
    timeout_s: float
    # Whether the largest batch is known.
    is_bounded: bool
    # Rows that the model sees of each example.
    rows_per_example: int = 1
    # The plan in the place of one for a batch that is refused; None raises.
    fallback: Plan | None = None
    # Raises before a forward whose step cannot be what was planned for; None checks nothing.
    check_again: Callable[[], None] | None = None
    # Tells whether the model is another one than was planned for; None where nobody changes it.
    model_state: ModelState | None = None
    # Makes what `simulator` is, for the model as it is now.
    simulate_anew: Callable[[], Callable[[Batch], StepSimulator]] | None = None
    # Whether the Trainer begins again with fewer rows where no plan fits.
    tries_fewer_rows: bool = False

    changes_plans = True

    def __post_init__(self) -> None:
        self._has_given_up = False
        self.predicted_bytes = self.needed_bytes = 0
        self.input_gradients: bool | None = None
        self._fitting: dict[str, list[Batch]] = {}
        self.seen: Batch | None = None
        self._held: dict[tuple[str, Batch], tuple[int, int]] = {}
        self._plans: dict[Batch, _Planned] = {}
        self._comparison = ""
        self._evaluated: list[Batch] = []
        self._has_warned = False
        self._inputs = InputCheck()

    def __deepcopy__(self, memo: dict[int, Any]) -> RunPlanner:
        # Hooks of the run lead here, and a copy of the model carries them: it has no run of its own to plan for.
        return self

    def longest_batch(self, num_rows: int, dataloader: Any) -> Batch | None:
        # Without token ids its length says nothing.
        return self.batch if self.is_bounded and self.batch is not None and self.batch.length else None

    def describe(self) -> str:
        """Return what the plan is predicted to need of the budget, in words."""
        budget = format_bytes(self.capacity.num_bytes)
        if self._has_given_up:
            return "not predicted"
        if self.batch is None:
            return f"how large batches are is not known: planned for as they come, within {budget}"
        if self._comparison:
            return self._comparison
        peak = _with_needed(self.predicted_bytes, self.needed_bytes)
        return f"predicted peak {peak} of {budget}, for {self.batch.describe()}"

    def start(self, batch: Batch, because: str = "") -> None:
        """Plan for a batch, the same on all ranks: rank 0 does, and broadcasts the plan. Raises `BudgetError`.

        `because`: what an error is to begin with.
        """
        budget = format_bytes(self.capacity.num_bytes)
        logger.info("Planning for %s within %s: simulating steps.", batch.describe(), budget)
        try:
            found = store.broadcast_result(partial(self._decide, batch), self.timeout_s, "planning")
        except BudgetError as error:
            if self.tries_fewer_rows:
                logger.warning("%s", smaller := SmallerBatchError(f"{because}{error}"))
                raise smaller from error
            if because:
                raise BudgetError(f"{because}{error}") from error
            raise
        text, peak_bytes, needed_bytes, fits, where, plain_bytes, of_plain = found
        self.plan = Plan.from_json(text)
        if plain_bytes:
            exactness = Exactness(inexact_parts(self.plan), of_plain).describe()
            self._comparison = (
                f"plain training would need {format_bytes(plain_bytes)}, your budget is {budget}. This plan needs "
                f"{format_bytes(needed_bytes)}, predicted for {batch.describe()}: {exactness}"
            )
        self.predicted_bytes = max(self.predicted_bytes, peak_bytes)
        self.needed_bytes = max(self.needed_bytes, needed_bytes)
        self.batch = batch
        # What it holds need not be asked of: each forward asks of all that are here.
        known = self._fitting.get(self.plan.digest(), [])
        self._fitting[self.plan.digest()] = [*(each for each in known if not batch.holds(each)), batch]
        bound = "" if self.is_bounded else "; bound not known, larger batches are planned for before they run"
        logger.info(
            "Planned for %s: predicted peak %s of %s, %s%s.",
            *(batch.describe(), _with_needed(peak_bytes, needed_bytes), budget, where, bound),
        )
        if not fits:
            logger.warning(
                "No plan fits %s for certain: this one needs least, and fits only by giving cached blocks back. "
                "Use shorter sequences, fewer of them, or a larger budget.",
                budget,
            )
        self.coverage.log(self._names_of_inputs(batch))

    @_undisturbed()
    def _names_of_inputs(self, batch: Batch) -> tuple[str, ...]:
        """Return the names of everything that a micro-batch of this size is made of."""
        if batch.tensors:
            return batch.names
        simulator = self.simulator(batch)
        return tuple(make_inputs(replace(simulator.step, batch_size=1), simulator.model))

    def start_all(self, batches: Sequence[Batch], because: str = "") -> None:
        """Plan for the largest of each kind of batch. See `start`."""
        # A plan for one may not do for another.
        for batch in (*batches, *batches):
            if not self._is_known(batch):
                self.start(batch, because)

    def place_hooks(self, model: nn.Module, change_plan: ChangePlan) -> Iterable[RemovableHandle]:
        """Check the inputs of each forward before it runs. See `Part`."""
        hook = _BeforeForward(self, partial(change_plan, self))
        return [model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)]

    def change_plan(self, plan: Plan) -> None:
        """Take a plan that was put in force after memory had run out: leaner, or again that for smaller batches."""
        fitting = self._fitting.setdefault(plan.digest(), [])
        known = (batch for batches in [*self._fitting.values()] for batch in batches)
        fitting.extend(batch for batch in dict.fromkeys(known) if batch not in fitting)
        self.plan = plan

    @_undisturbed()
    def leaner_plan(self, share: float, *, is_exact: bool) -> tuple[Plan, float | None] | None:
        """Return the plan for a share less than what the plan in force is predicted to need; None if there is none."""
        # With it, the predicted time of a step over that under the plan in force; None where none is predicted.
        if self.batch is None:
            return None
        allowed = self.allowed.bitwise if is_exact else self.allowed
        simulator = self.simulator(self.batch)
        before, reserved = simulator.memory(self.plan), simulator.reserved_bytes(self.plan)
        planner = StepPlanner(simulator, allowed=cap_to_free_memory(allowed, self.host_bytes))
        try:
            found = planner.plan_for(Capacity(int((1 - share) * reserved)))
        except BudgetError:
            return None
        plan, seconds = restore_user_cap(found.plan, self.allowed), before.time.total
        return None if plan == self.plan else (plan, found.memory.time.total / seconds if seconds else None)

    def held_by(self, plan: Plan, batch: Batch) -> tuple[int, int]:
        """Return the bytes that a step is predicted to allocate and torch to reserve. Raises `UnsupportedError`."""
        key = plan.digest(), batch
        if key not in self._held:
            with _undisturbed():
                simulator = self.simulator(batch)
                self._held[key] = simulator.memory(plan).peak_bytes, simulator.reserved_bytes(plan)
        return self._held[key]

    def start_micro_batch_again(self) -> None:
        """A micro-batch whose forward may have run is run again."""
        self.seen = None
        self._inputs.forget_micro_batch()

    def end_micro_batch(self) -> None:
        """Raise `UnsupportedError` if the model's forward, which was planned for, did not run in a micro-batch."""
        self.seen = None
        if not self._has_given_up:
            self._inputs.end_micro_batch()

    def faults_of_step(self) -> Iterable[str]:
        self.end_micro_batch()
        return ()

    def before_forward(self, batch: Batch | None, read: Callable[[], Batch | None], check: Callable[[], None]) -> None:
        """Change the plan if it was not made for a batch as large. No layer has run yet.

        `batch` is this rank's, to be held against others; None is refused by `check`, which raises where the forward is
        not the one that is simulated. `read` returns it to be simulated, with the values of whole numbers. Raises
        `BudgetError` where no plan fits, `UnsupportedError` where none is made and there is no fallback.
        """
        if self._has_given_up:
            return
        try:
            if self.check_again is not None:
                self.check_again()
            check()
            assert batch is not None, "a forward without one is refused"
            self.seen = batch
            if self.model_state is not None and self.model_state.is_changed():
                self._plan_for_other_model()
            self._plan_for_larger(batch, read)
        except UnsupportedError as error:
            # Other ranks may not know of it, and half of a micro-batch may be kept under the plan in force.
            if self.fallback is None or store.num_processes() > 1 or self._inputs.is_under_way:
                raise
            say_fallback(error)
            self.plan, self.batch, self._has_given_up = self.fallback, None, True
            self.predicted_bytes = self.needed_bytes = 0

    def _plan_for_other_model(self) -> None:
        known = dict.fromkeys(batch for batches in self._fitting.values() for batch in batches)
        try:
            if store.num_processes() > 1 or self.simulate_anew is None:
                raise refuse("what trains in this process is known to no other one")
            self.simulator = self.simulate_anew()
        except UnsupportedError as error:
            warnings.warn(
                "Other parameters train than the plan was made for, or the model computes in another way: the step may "
                f"need more than memory_budget={format_bytes(self.capacity.num_bytes)}. {error}",
                stacklevel=2,
            )
            return
        for found in (self._fitting, self._held, self._plans, self._evaluated):
            found.clear()
        logger.info("Other parameters train than the plan was made for, or in another dtype: planning anew.")
        largest_first = sorted(known, key=lambda each: (-each.rows * each.length, -each.num_bytes))
        self.start_all(largest_first, "Other parameters train than the plan was made for. ")

    def _plan_for_larger(self, batch: Batch, read: Callable[[], Batch | None]) -> None:
        if store.num_processes() > 1 and not self.compares_batches:
            # The other ranks do not know of this batch, and all train under one plan.
            self._warn_of(batch)
            return
        for each in self._new_batches(batch, read):
            self.start(each, f"A batch came with {each.describe()}. ")

    @property
    def compares_batches(self) -> bool:
        # Tensors: more than a text has been planned for.
        return not self.is_bounded or any(each.tensors for batches in self._fitting.values() for each in batches)

    def _new_batches(self, batch: Batch, read: Callable[[], Batch | None]) -> Iterator[Batch]:
        """Yield what is to be planned for: all ranks compare what comes to them, in each forward."""
        found = [batch]
        if store.num_processes() > 1:
            largest, has_tensors, is_any_new = self._compare(batch)
            if not has_tensors:
                found = [replace(largest, more=self._agreed_inputs(batch))]
            elif is_any_new:
                of_all = store.gather_results(lambda: (read() or batch).to_json(), "looking at a batch")
                found = list(map(Batch.from_json, of_all))
            else:
                found = []
        for each in found:
            # A plan for one of them may do for the next.
            if not self._is_known(each):
                yield (read() or each) if each is batch else each

    def _compare(self, batch: Batch) -> tuple[Batch, bool, bool]:
        """Return the largest text of all ranks, whether one has more than a text, and whether one is not known."""
        flags = batch.is_padded, batch.is_packed, bool(batch.tensors), not self._is_known(batch)
        # Waits for the device, in each forward of a run of which no longest row is known: before its first layer runs,
        # all have to know which plan is in force.
        sizes = torch.tensor([batch.rows, batch.length, *flags], device=self.place)
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        rows, length, is_padded, is_packed, has_tensors, is_new = sizes.tolist()
        return Batch(rows, length, bool(is_padded), bool(is_packed)), bool(has_tensors), bool(is_new)

    def _agreed_inputs(self, batch: Batch) -> tuple[str, ...]:
        """Return the further inputs to plan with: those of all ranks in their first forward."""
        if self.batch is None:
            found = store.gather_results(lambda: list(batch.more), "looking at the first batch")
            return tuple(sorted({name for names in found for name in names}))
        if not set(batch.more) <= set(self.batch.more):
            # No other rank knows of it.
            self._warn_of(batch)
        return self.batch.more

    def check_evaluation(self, batch: Batch, read: Callable[[], Batch | None] | None = None) -> None:
        """Warn if a batch of evaluation needs more than the budget. Each batch that is no larger counts as checked.

        `read`: see `before_forward`.
        """
        if any(known.holds(batch) for known in self._evaluated):
            return
        self._evaluated = [*(each for each in self._evaluated if not batch.holds(each)), batch]
        if store.num_processes() > 1 and dist.get_rank() != 0:
            return
        batch = (read and read()) or batch
        with _undisturbed():
            self._simulate_evaluation(batch)

    def _simulate_evaluation(self, batch: Batch) -> None:
        simulator = self.simulator(batch)
        if simulator.step.prepares:
            # Named in the log: evaluation prepares its batches too.
            return
        found = simulator.evaluate(self.plan)
        logger.info(
            "Evaluation of %s: predicted peak %s. With compute_metrics each batch leaves %s on the device, until "
            "eval_accumulation_steps moves them to the host.",
            *(batch.describe(), format_bytes(found.memory.peak_bytes), format_bytes(found.kept_bytes)),
        )
        if found.memory.peak_bytes > self.capacity.reserved_bytes:
            warnings.warn(self._evaluation_advice(batch, found.memory), stacklevel=2)

    def _evaluation_advice(self, batch: Batch, memory: StepMemory) -> str:
        def peak(examples: int) -> int:
            rows = examples * self.rows_per_example
            smaller = replace(batch, rows=rows, is_padded=batch.is_padded and rows > 1)
            return self.simulator(smaller).evaluate(self.plan).memory.peak_bytes

        fits = None
        examples = batch.rows // self.rows_per_example
        if examples > 1 and not batch.tensors:
            fits = largest(peak, self.capacity.reserved_bytes, start=examples // 2, most=examples - 1)
        what = f"Evaluate {'smaller batches' if batch.tensors else 'shorter sequences'}, or raise the budget."
        if fits is not None and fits.number:
            what = f"Set per_device_eval_batch_size={fits.number} ({format_bytes(fits.needed_bytes)})."
        outside = self.capacity.num_bytes - self.capacity.reserved_bytes
        allows = f", {format_bytes(outside)} of it for CUDA and a margin" if outside else ""
        return (
            f"Evaluation of {batch.describe()} needs {format_bytes(memory.peak_bytes)} as predicted, more than "
            f"memory_budget={format_bytes(self.capacity.num_bytes)}{allows}; activation checkpointing "
            f"does not change it. {what}"
        )

    def _is_known(self, batch: Batch) -> bool:
        return any(known.holds(batch) for known in self._fitting.get(self.plan.digest(), ()))

    def _warn_of(self, batch: Batch) -> None:
        if not self._is_known(batch) and not self._has_warned:
            self._has_warned = True
            assert self.batch is not None, "a bound is known"
            if batch.tensors:
                raise refuse(f"a batch came with {batch.describe()}, where the data set has shown texts alone")
            warnings.warn(
                f"A batch came with {batch.describe()}, but the plan was made for at most {self.batch.describe()}: it "
                "may need more than memory_budget. Tell the longest example: max_length=...",
                stacklevel=2,
            )

    @_undisturbed()
    def _decide(self, batch: Batch) -> _PlanMessage:
        # The plan in force may do: what recomputes nothing is the fastest plan there is, and a change costs.
        simulator = self.simulator(batch)
        plan, verdict = self.plan, simulator.verdict(self.plan, self.capacity)
        memory, plain_bytes, of_plain = simulator.memory(plan), 0, 0.0
        if verdict.fit is not Fit.YES:
            plan, memory, verdict, plain_bytes, of_plain = self._planned(batch)
        is_before = verdict.peak_bytes > memory.peak_bytes
        where = f"in the {simulator.step.prepares if is_before else memory.peak_at.describe()}"
        fits = verdict.fit is Fit.YES
        return plan.to_json(), verdict.peak_bytes, verdict.needed_bytes, fits, where, plain_bytes, of_plain

    def _planned(self, batch: Batch) -> _Planned:
        if not self.is_bounded and (stepped := _rounded_up(batch)) != batch:
            try:
                if (planned := self._planned_for(stepped)).verdict.fit is Fit.YES:
                    return planned
            except BudgetError:
                pass
            logger.info("No plan fits %s; planning for %s.", stepped.describe(), batch.describe())
        return self._planned_for(batch)

    def _planned_for(self, batch: Batch) -> _Planned:
        if batch not in self._plans:
            simulator = self.simulator(batch)
            planner = StepPlanner(simulator, allowed=cap_to_free_memory(self.allowed, self.host_bytes))
            found = planner.plan_for(self.capacity, compare=True)
            plain: tuple[int, float] = 0, 0.0
            if found.exactness is not None and found.exactness.of_none is not None:
                without = self.capacity.needed_bytes(simulator.reserved_bytes(None))
                plain = without, found.exactness.of_none
                logger.info("The plan for %s: %s.", batch.describe(), found.exactness.describe())
            plan = restore_user_cap(found.plan, self.allowed)
            self._plans[batch] = _Planned(plan, found.memory, found.verdict, *plain)
        return self._plans[batch]


class _Planned(NamedTuple):
    """A plan for a batch, and what the step needs without one, with the plan's time as a share of that one's."""

    plan: Plan
    memory: StepMemory
    verdict: Verdict
    plain_bytes: int
    of_plain: float


def _with_needed(peak_bytes: int, needed_bytes: int) -> str:
    """Return a peak, and what it needs with torch's cache, CUDA's context and a margin, where there are any."""
    peak = format_bytes(peak_bytes)
    return peak if needed_bytes == peak_bytes else f"{peak}, {format_bytes(needed_bytes)} with torch's cache and CUDA,"


def say_fallback(error: Exception) -> None:
    logger.warning("No plan is made, and checkpointing.fallback is in force. %s", error)


class _BeforeForward:
    """Plans before a forward of the model that is trained. A copy of the model, such as an average, plans nothing."""

    def __init__(self, planning: RunPlanner | None = None, change_plan: Callable[[Plan], None] | None = None) -> None:
        self._planning = planning
        self._change_plan = change_plan

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()

    def __call__(self, model: nn.Module, args: Any, kwargs: Any = None) -> None:
        # torch calls a hook without keywords that another hook of the same call has just removed.
        if self._planning is None or self._change_plan is None or kwargs is None or torch.compiler.is_compiling():
            return
        is_trained = model.training and torch.is_grad_enabled()
        if is_trained and is_beside_training_steps():
            # A callback's, and perhaps of one rank alone: the others would be waited for until they run one more, too.
            return
        planning = self._planning
        # The loss of the Trainer, where that is simulated, calls the model itself.
        has_settings = planning.coverage.loss is None
        describe = partial(batch_of_forward, model, args, kwargs, has_settings=has_settings)
        batch = describe(reads=False)
        if is_trained:
            before = planning.plan
            planning.before_forward(batch, describe, partial(planning._inputs.check, model, batch, args, kwargs))
            if planning.plan != before:
                self._change_plan(planning.plan)
        elif batch is not None and not model.training and "labels" in kwargs:
            # Without labels it is a generation, one token after the other.
            planning.check_evaluation(batch, describe)


def _rounded_up(batch: Batch) -> Batch:
    """Return the batch with the next length that is planned for where no bound is known."""
    if batch.tensors:
        # Where the next images would be is not known.
        return batch
    step = max(1, 2 ** (batch.length.bit_length() - 1) // _STEPS_IN_A_DOUBLING)
    return replace(batch, length=-(-batch.length // step) * step)
