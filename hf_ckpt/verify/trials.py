"""Three trials of one recipe, and what they say of each other as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hf_ckpt.verify.gradients import Spread, between_gradients
from hf_ckpt.verify.record import Record


@dataclass(frozen=True)
class Trials:
    """Three trials from the same weights, seed and batches.

    Args:
        reference: without the plan.
        repeated: the same once more.
        planned: with the plan.
    """

    reference: Record
    repeated: Record
    planned: Record

    @cached_property
    def noise(self) -> Spread:
        """How far the reference is from itself."""
        return between_gradients(self.reference, self.repeated)

    @cached_property
    def spread(self) -> Spread:
        """How far the planned trial is from the reference."""
        return between_gradients(self.reference, self.planned)

    @cached_property
    def first_spread(self) -> Spread:
        """How far the planned trial is from the reference in the first step."""
        return between_gradients(self.reference, self.planned, 1)

    @cached_property
    def is_within_leeway(self) -> bool:
        """Whether the planned trial's gradients are as near as a plan that adds up in another order comes."""
        leeway = self.planned.leeway
        return (
            leeway is not None
            and not (self.spread.lost or self.spread.gained)
            and self.first_spread.max_scaled_error <= leeway.first
            and self.spread.max_scaled_error <= leeway.later
        )

    @cached_property
    def is_repeatable(self) -> bool:
        """Whether the reference repeats itself bit by bit."""
        return self.noise.is_equal and losses_of(self.reference) == losses_of(self.repeated)


def losses_of(record: Record) -> list[float]:
    """Return the losses of the micro-batches that were completed."""
    # A micro-batch that failed has no loss.
    return [micro.loss for micro in record.micro_batches if micro.random_state]


def first_module_before(trials: Trials) -> str | None:
    """Return the first module whose output differs before any gradient could be the reason; None if none does."""
    if not trials.is_repeatable or trials.planned.leeway is not None:
        return None
    micro_batches = trials.planned.micro_batches
    per_step = max(len(micro_batches) // max(trials.planned.num_steps, 1), 1)
    # Up to the end of the first step whose gradients differ, weights are those of the reference.
    until = (trials.spread.first_step or trials.planned.num_steps) * per_step
    return first_module(trials.reference, trials.planned, until)


def first_module(first: Record, second: Record, until: int | None = None) -> str | None:
    """Return the first module whose output in forward differs between two trials, in the micro-batches `until` then."""
    for expected, got in zip(first.micro_batches[:until], second.micro_batches[:until], strict=False):
        for (path, digest), (other_path, other) in zip(expected.outputs, got.outputs, strict=False):
            if (path, digest) != (other_path, other):
                return path or "the model"
    return None
