"""A subject's step, predicted: under a given plan, or under the fastest one that fits a budget.

What was simulated once is not simulated again: a plan's memory is the same under each of its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial

from hf_ckpt.errors import PolicyError
from hf_ckpt.estimate.step_of_recipe import Subject, evaluation_step_of
from hf_ckpt.planner.advice import as_keywords
from hf_ckpt.planner.chain import Chain
from hf_ckpt.planner.search import Planned, StepPlanner
from hf_ckpt.planner.waiting_weights import WeightsPlanner
from hf_ckpt.policy.allowances import ALLOWANCES, Allowed
from hf_ckpt.policy.options import POLICY_OPTIONS, Weights
from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import AUTO
from hf_ckpt.recipe.checkpointing import NO_CHECKPOINTING, OF_AUTO
from hf_ckpt.recipe.recipe import Recipe
from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH
from hf_ckpt.simulation.caching_allocator import Held
from hf_ckpt.simulation.devices import CPU, Device, find_device, this_device
from hf_ckpt.simulation.fit import Capacity, Verdict, capacity_of
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase, StepMemory, StepTime
from hf_ckpt.units import Budget


@dataclass
class Predictor:
    """Predicts the steps of one subject on one device; each is simulated once."""

    subject: Subject
    device: Device

    def memory(self, plan: Plan | None, step: Step | None = None) -> StepMemory:
        """Return what a step needs, with what comes before it: the subject's own, or another one."""
        simulator = self._simulator.with_step(step or self.subject.step)
        return self._shown(_with_preparation(simulator.memory(plan), simulator.prepare()))

    def _shown(self, memory: StepMemory) -> StepMemory:
        """Return a step without its times where those of the device are not known."""
        return memory if self.device.is_timed else replace(memory, time=StepTime())

    @cached_property
    def weights_and_gradients(self) -> int:
        """The bytes that are there whatever the plan: weights and all gradients, as the optimizer finds them."""
        timeline = self._simulator.memory(None).timeline
        moment = next((at for at, place in enumerate(timeline.places) if place.phase is Phase.OPTIMIZER), None)
        found = timeline.bytes_by_category
        return 0 if moment is None else sum(found[each][moment] for each in _LASTING if each in found)

    def capacity(self, device: Device, budget: Budget | None = None) -> Capacity:
        """Return what there is for each process: a device, or a budget of it."""
        num_bytes = None if budget is None else budget.bytes_on(device.memory_bytes, device=device.title)
        return capacity_of(device, self.subject.step.sharding.world_size, num_bytes)

    def verdict(self, plan: Plan | None, capacity: Capacity, step: Step | None = None) -> Verdict:
        """Return whether a step fits: the subject's own, or another one."""
        return self._simulator.with_step(step or self.subject.step).verdict(plan, capacity)

    def with_expandable_segments(self, plan: Plan | None) -> int:
        """Return what torch reserves with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
        return self._simulator.reserved_bytes(plan, expands=True)

    def held_within(self, plan: Plan | None, capacity: Capacity) -> Held | None:
        """Return what torch holds where it has to give back what it holds unused; None where that is not played."""
        is_played = self.device.is_cuda and not self.subject.step.prepares
        return self._simulator.held_within(plan, capacity.reserved_bytes) if is_played else None

    def evaluation(self, plan: Plan | None = None) -> StepMemory | None:
        """Return what a batch of the recipe's evaluation needs under a plan; None where it does not evaluate."""
        subject = self.subject
        step = None if subject.recipe is None else evaluation_step_of(subject.recipe, subject.step)
        if step is None:
            return None
        return self._simulator.with_step(step).evaluate(plan).memory

    @property
    def has_waiting_weights(self) -> bool:
        """Whether there are frozen weights that could wait on the host."""
        return WeightsPlanner(self._simulator, Allowed(weights=Weights()), lambda capacity: Plan("", ())).can_wait

    @property
    def chain(self) -> Chain:
        """What each layer costs under each option."""
        return self._planner.chain

    def planned(
        self, capacity: Capacity, say: Callable[[str], None] | None = None, *, compare: bool = False
    ) -> Planned:
        """Return the fastest plan that fits. See `StepPlanner.plan_for`."""
        found = self._planner.plan_for(capacity, compare=compare, write=partial(written, self.subject), say=say)
        exactness = found.exactness
        if not self.device.is_timed and exactness is not None:
            exactness = replace(exactness, of_none=None, inexact_of_none=None)
        memory = _with_preparation(found.memory, self._simulator.prepare())
        return replace(found, memory=self._shown(memory), exactness=exactness)

    def ahead(
        self, plans: Iterable[Plan | None], step: Step | None = None, *, in_numbers: bool = False
    ) -> AbstractContextManager[None]:
        """Let a second process simulate a step under plans, the subject's own or another. See `StepSimulator.ahead`."""
        return self._simulator.with_step(step or self.subject.step).ahead(plans, in_numbers=in_numbers)

    def warm_up(self) -> None:
        """See `StepSimulator.warm_up`."""
        self._simulator.warm_up()

    def host_bytes(self, plan: Plan | None, step: Step) -> int:
        """Return what lies on the host at the peak of a step, or of what comes before it."""
        simulator = self._simulator.with_step(step)
        needs, before = simulator.needs(plan), simulator.prepare()
        is_before = before is not None and before.peak_bytes > needs.peak_bytes
        return before.host_bytes if before is not None and is_before else needs.host_bytes

    def plans_to_read(self) -> Iterable[Plan | None]:
        """Return the plans that the planner simulates for any capacity. See `StepPlanner.plans_to_read`."""
        return self._planner.plans_to_read()

    @cached_property
    def _simulator(self) -> StepSimulator:
        return self.subject.simulator(self.device)

    @cached_property
    def _planner(self) -> StepPlanner:
        return StepPlanner(self._simulator, allowed=self.subject.allowed)


_LASTING = (Category.PARAMETERS, Category.GRADIENTS, Category.REFERENCE)
"""What no plan changes; a smaller optimizer is advised, so that its state does not count."""


def _with_preparation(memory: StepMemory, before: StepMemory | None) -> StepMemory:
    """Return what a step needs, at its peak before the first micro-batch if that is the higher one."""
    if before is None or before.peak_bytes <= memory.peak_bytes:
        return memory
    return replace(before, plan=memory.plan, ledger=memory.ledger, time=memory.time, num_flops=memory.num_flops)


_USUAL = ("rtx4090", "a6000", "a100-80gb")
"""One card each with 24, 48 and 80 GB, for where no device was named and there is none."""

_LARGER = ("h200", "b200")


def devices_for(recipe: Recipe | None, names: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices to estimate for, by the names that a user wrote.

    Without names, a recipe that trains on the CPU is estimated for it, another one for this machine's GPU, or else for
    one card of each usual size. Raises `PolicyError`: a name is not known, or one simulation does not do for all.
    """
    if names:
        devices = tuple(find_device(name) for name in names)
        first = devices[0]
        for other in devices[1:]:
            if (other.is_cuda, other.shares_host_memory) != (first.is_cuda, first.shares_host_memory):
                raise PolicyError(
                    f"--device {first.name} and --device {other.name} run a step in other ways: one has memory of its "
                    "own and CUDA, the other has not. Ask for each by itself."
                )
        return devices
    if recipe is not None and recipe.training.get("use_cpu"):
        return (CPU,)
    own = this_device()
    return (own,) if own.is_cuda else tuple(find_device(name) for name in _USUAL)


def usual_device_with(num_bytes: int) -> Device:
    """Return the smallest card of a few usual ones that has so much memory, or the largest of them."""
    cards = [find_device(name) for name in (*_USUAL, *_LARGER)]
    return next((card for card in cards if card.memory_bytes >= num_bytes), cards[-1])


_OF_TRAINING = ("per_device_train_batch_size", "gradient_accumulation_steps", "optim")
_OF_STEPS = {"max_length": "seq_length", "row_length": "seq_length", "per_device_train_batch_size": "batch_size"}
"""Names of the fields of `Step`, which a model without a recipe is asked about with."""


def written(subject: Subject, options: Mapping[str, object]) -> str:
    """Return options as overrides of a subject's recipe, such as `checkpointing.memory_budget=22GiB`.

    For a subject that is a model, keyword arguments are returned. `options`: by the names of `planner.advice.Write`.
    """
    if subject.recipe is None:
        return as_keywords({_OF_STEPS.get(name, name): value for name, value in options.items()})
    return " ".join(_overrides(subject, subject.recipe, options))


def _overrides(subject: Subject, recipe: Recipe, options: Mapping[str, object]) -> Iterator[str]:
    given = subject.command_options
    # Options of the planner leave the plan to it, where the recipe has a policy of its own.
    is_planned = any(name in (*OF_AUTO, *ALLOWANCES) and name not in ("max_length", *given) for name in options)
    if is_planned and not recipe.is_auto:
        yield f"checkpointing.policy={AUTO}"
        for name in POLICY_OPTIONS:
            if name not in ALLOWANCES and (recipe.checkpointing or NO_CHECKPOINTING).get(name):
                yield f"checkpointing.{name}={'false' if name == 'skip_frozen' else 'null'}"
    for name, value in options.items():
        if name in given:
            yield f"{given[name]} {value}"
        elif name == "row_length":
            assert isinstance(value, int), "tokens are counted"
            # As many examples are packed into a row.
            examples = max(1, subject.step.seq_length // int(recipe.data.get("max_length", DEFAULT_MAX_LENGTH)))
            yield f"data.max_length={value // examples}"
        else:
            section = "data" if name == "max_length" else "training" if name in _OF_TRAINING else "checkpointing"
            yield f"{section}.{name}={value}"
