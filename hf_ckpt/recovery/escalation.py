"""What has run out of memory runs again, under leaner plans, for as long as there is one.

Knows neither Trainer nor loop: whoever runs a step says how it is undone and run again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from hf_ckpt.errors import OutOfMemoryError
from hf_ckpt.patch.apply import Applied
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recovery.ladder import Ladder, Rung, Size, leanest_rung, next_rung
from hf_ckpt.recovery.out_of_memory import Failure, Part, allocated_bytes, attempt, release_memory
from hf_ckpt.upstream.torch import hidden_from_modes

if TYPE_CHECKING:
    from hf_ckpt.auto.replan import RunPlanner
    from hf_ckpt.trainer.batch import Batch

logger = logging.getLogger(__name__)

# Of what a plan is predicted to need, that a leaner one is to do without: where nothing says how much, and bounds.
_USUAL_SHARE, _LEAST_SHARE, _MOST_SHARE = 0.1, 0.02, 0.5
_MARGIN = 1.1
# Of one step. What was missing when memory ran out is the least that was, and each rerun costs a step: so each gives up
# twice the share of the one before it, and the last one all that can be given up.
MOST_RERUNS = 4


@dataclass(frozen=True, slots=True)
class Failed:
    """A run of a batch that ended for want of memory."""

    failure: Failure
    # From 1.
    step: int
    size: Size
    # Their shapes.
    inputs: str
    # What the model was given, where the planner has seen it.
    batch: Batch | None = None
    # Says which examples they are; asked only where the run ends.
    examples: Callable[[], str] = str


@dataclass(eq=False)
class Escalation:
    """Puts leaner plans in force."""

    ladder: Ladder
    # Returns the rung after a plan, of a failure, for a rerun of the step with this number, from 1 (`rung_after`).
    _next_rung: Callable[..., Rung | None]
    _put_in_force: Callable[[Rung], None]
    # Steps that went on after they had run out of memory.
    num_recovered: int = 0
    # How often another plan was put in force.
    num_switches: int = 0
    _num_reruns: int = 0
    _oldest: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """A step begins in this thread."""
        self._num_reruns = 0
        # Older than the graph of the step; see `attempt`. Each thread counts its nodes for itself.
        if not hasattr(self._oldest, "node"):
            with torch.enable_grad(), hidden_from_modes():
                self._oldest.node = torch.zeros((), requires_grad=True) * 1

    def stand_on(self, level: int) -> None:
        if level != self.ladder.level:
            self.ladder.level = level
            self.num_switches += 1
            self._put_in_force(self.ladder.rung)

    def attempt(self, function: Callable[[], Any]) -> tuple[Any, Failure | None]:
        """Return what a function returns, or, where memory ran out in it, the failure; its graph is dropped too."""
        returned, failure = attempt(function)
        if failure is not None:
            # A failed backward has left nodes in autograd's queue of this thread, and they hold their graph. The
            # youngest node is run first: a backward of one that is older than all of them finds and drops them.
            with torch.enable_grad(), hidden_from_modes():
                self._oldest.node.backward(retain_graph=True)
        return returned, failure

    def recover(
        self, failed: Failed, fault: Callable[[], str | None], run_again: Callable[[], tuple[Any, Failed | None]]
    ) -> Any:
        """Run a step again until it passes, and return what it returns then, or raise `OutOfMemoryError`.

        `fault` returns why it cannot be undone, or None; `run_again` undoes it and runs it.
        """
        # Of its micro-batches several may fail, one after the other: their reruns count together.
        last: Failed | None = failed
        is_retried = False
        returned: Any = None
        while last is not None:
            if (why := fault()) is not None:
                self._give_up(last, f"The step cannot be undone: {why}.")
            self._num_reruns += 1
            failure = last.failure
            release_memory()
            if failure.figures.is_fragmented and not is_retried and self._num_reruns < MOST_RERUNS:
                is_retried = True
                logger.warning(
                    "Out of memory in the %s of step %d, in pieces: %s The allocator's cache is emptied, and the step "
                    "runs again under the same plan.",
                    *(failure.part, last.step, failure.figures.describe()),
                )
                # What the failed run has left in the regions is gone with the old patches.
                self._put_in_force(self.ladder.rung)
            else:
                self._escalate(last)
            returned, last = run_again()
        self.num_recovered += 1
        return returned

    def _escalate(self, failed: Failed) -> None:
        failure, rerun, before = failed.failure, self._num_reruns, self.ladder.rung.plan
        # A later micro-batch of the step may stand on a rung that another one has skipped: the leanest is the last.
        if not self.ladder.fail(
            failed.size,
            lambda plan: self._next_rung(plan, failure, rerun=rerun),
            to_leanest=rerun >= MOST_RERUNS,
            # What the host had no room for says nothing about the device.
            batch=None if failure.is_of_host else failed.batch,
            of_step=share_of_step(failure),
            of_batch=share_of_batch(failure, allocated_bytes()),
        ):
            self._give_up(failed, "There is no leaner plan.")
        rung = self.ladder.rung
        self._put_in_force(rung)
        self.num_switches += 1
        were, are = (
            [layer.recomputes for stack in plan.stacks for layer in stack.layers] for plan in (before, rung.plan)
        )
        inexact = (
            " Sums are added in another order from here on: results differ by up to 1e-6 in float32. exact=True "
            "forbids it."
        )
        logger.warning(
            "Out of memory in the %s of step %d (%s). %s The step runs again: %s (%d of %d layers recomputed, %d "
            "before).%s",
            *(failure.part, failed.step, failed.inputs, failure.figures.describe()),
            *(rung.change, sum(are), len(are), sum(were), "" if rung.is_exact else inexact),
        )

    def _give_up(self, failed: Failed, why: str) -> NoReturn:
        tried = ", ".join(rung.change for rung in self.ladder.rungs[1 : self.ladder.level + 1])
        sentences = [
            f"Out of memory in the {failed.failure.part} of step {failed.step}, with {failed.inputs}.",
            failed.failure.figures.describe(),
            why,
            f"Tried: {tried}." if tried else "",
            failed.examples(),
        ]
        raise OutOfMemoryError(" ".join(filter(None, sentences))) from failed.failure.error


def rung_after(
    plan: Plan,
    failure: Failure,
    applied: Applied,
    model: nn.Module,
    planning: RunPlanner | None,
    *,
    is_exact: bool,
    rerun: int = 1,
) -> Rung | None:
    """Return a leaner plan than the one that failed: of the planner where there is one, else of the modes."""
    # The last `rerun` of a step gets the leanest plan of the modes.
    if rerun >= MOST_RERUNS:
        return leanest_rung(plan, applied.stacks, model, is_exact=is_exact, drops_offload=failure.is_of_host)
    growth: float = 2 ** (rerun - 1)
    if planning is not None and not failure.is_of_host:
        share = min(growth * share_of_step(failure), _MOST_SHARE)
        leaner = planning.leaner_plan(share, is_exact=is_exact)
        if leaner is not None:
            leaner_plan, time_ratio = leaner
            time = "" if time_ratio is None else f", predicted to take {time_ratio:.2f} of the time"
            return Rung(leaner_plan, f"the plan for {share:.1%} less memory{time}", is_exact=is_exact)
    of_layers = None if failure.is_of_host else share_of_layers(failure, allocated_bytes())
    return next_rung(
        *(plan, applied.stacks, model),
        is_exact=is_exact,
        drops_offload=failure.is_of_host,
        share=of_layers,
        growth=growth,
    )


def share_of_step(failure: Failure) -> float:
    """Return the share of what a step is predicted to need that is taken to have been missing."""
    missing = failure.figures.missing_share
    # What was missing when it ran out is the least that was: later in the step more may be needed.
    return _USUAL_SHARE if missing is None else min(max(_LEAST_SHARE, _MARGIN * missing), _MOST_SHARE)


def share_of_batch(failure: Failure, held: int | None) -> float:
    """Return the share of what a step needed for its batch that was missing; 0 where that is not known."""
    figures = failure.figures
    if held is None or figures.missing_bytes is None or figures.allocated is None or figures.wanted is None:
        return 0.0
    # What it needed besides what is held is taken to grow with the batch, or faster.
    of_batch = figures.allocated + figures.wanted - held
    return min(1.0, figures.missing_bytes / of_batch) if of_batch > 0 else 0.0


def share_of_layers(failure: Failure, held: int | None) -> float | None:
    """Return the share of the layers that need not keep their activations for the missing bytes to be there.

    None where that is not known. `held` are bytes of the device that are held once the failed run has been let go of.
    """
    figures = failure.figures
    if held is None or figures.allocated is None or figures.missing_bytes is None:
        return None
    # Every layer is taken to keep as much as the others. Before the forward is through nobody can say how much.
    kept = figures.allocated - held
    if failure.part not in (Part.BACKWARD, Part.RECOMPUTATION) or kept <= 0:
        return None
    return min(1.0, _MARGIN * figures.missing_bytes / kept)
