"""A subject's step, predicted: under a given plan, or under the fastest one that fits a budget.

What was simulated once is not simulated again: a plan's memory is the same under each of its names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from hf_ckpt.estimate.overrides import written
from hf_ckpt.estimate.subject import Subject
from hf_ckpt.estimate.training_step import evaluation_step_of
from hf_ckpt.planner.chain import NONE, Chain
from hf_ckpt.planner.layer_costs import chain_of
from hf_ckpt.planner.search import Planned, plan_for
from hf_ckpt.policy.modifiers import HeadMode
from hf_ckpt.policy.plan import Plan
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.evaluation import simulate_evaluation
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import StepMemory


@dataclass
class Predictor:
    """Simulates the steps of one subject on one device, each once.

    Args:
        subject: what is estimated.
        device: where.
    """

    subject: Subject
    device: Device
    _known: dict[Any, StepMemory] = field(default_factory=dict)

    def memory(self, plan: Plan | None, step: Step | None = None) -> StepMemory:
        """Return what a step needs.

        Args:
            plan: None, or a plan of the subject's model.
            step: another step than the subject's.
        """
        subject = self.subject
        wanted = None if plan is None or _does_nothing(plan) else plan
        taken = step or subject.step
        key = (wanted and wanted.digest(), taken.batch_size, taken.seq_length, taken.gradient_accumulation_steps)
        if key not in self._known:
            self._known[key] = simulate_step(subject.model, wanted, taken, self.device, **subject.structure)
        return replace(self._known[key], plan=plan)

    def evaluation(self) -> StepMemory | None:
        """Return what a batch of the recipe's evaluation needs; None where it does not evaluate."""
        subject = self.subject
        step = None if subject.recipe is None else evaluation_step_of(subject.recipe, subject.step)
        if step is None:
            return None
        return simulate_evaluation(subject.model, step, self.device, **subject.structure).memory

    @cached_property
    def chain(self) -> Chain:
        """What each layer costs under each option."""
        subject = self.subject
        return chain_of(subject.model, subject.step, self.device, allowed=subject.allowed, **subject.structure)

    def planned(self, budget_bytes: int, say: Callable[[str], None] | None = None, *, compare: bool = False) -> Planned:
        """Return the fastest plan that fits a budget, with what it needs.

        Args:
            budget_bytes: that the step may use.
            say: is told what goes on where nothing fits.
            compare: see `plan_for`.

        Raises:
            BudgetError: none fits; says what would.
        """
        subject = self.subject
        return plan_for(
            subject.model,
            subject.step,
            self.device,
            budget_bytes,
            chain=self.chain,
            allowed=subject.allowed,
            compare=compare,
            write=partial(written, subject),
            say=say,
            **subject.structure,
        )


def _does_nothing(plan: Plan) -> bool:
    """Whether a plan is no plan: nothing is recomputed, nothing runs in tiles, and the head is the model's own."""
    entries = {replace(layer, why="") for stack in plan.stacks for layer in stack.layers}
    return entries <= {NONE} and plan.head is HeadMode.PLAIN
