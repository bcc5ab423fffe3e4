"""How much of the device a step may be predicted to need, for a faster plan to return: what failed, budget, measured.

room.begin_window()                       # steps run
room.bytes(failed_bytes, plans_and_batches_that_ran)
room.needed(faster_plan, batch)           # it returns if this is no more
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from hf_ckpt.errors import HFCkptError
from hf_ckpt.policy.plan import Plan
from hf_ckpt.recovery.out_of_memory import MUCH
from hf_ckpt.trainer.device_peak import DevicePeak

if TYPE_CHECKING:
    from hf_ckpt.auto.largest_batch_in_data import Batch
    from hf_ckpt.auto.replan import RunPlanner


class Room:
    """What there is for a step of one run.

    Args:
        planning: of policy `auto`; None predicts nothing.
        peak: of the device.
    """

    def __init__(self, planning: RunPlanner | None, peak: DevicePeak) -> None:
        self._planning = planning
        self._peak = peak

    def needed(self, plan: Plan, batch: Batch | None) -> int | None:
        """Return the bytes that a step is predicted to need; None where that is not known."""
        # Values of images and the like are gone when this is asked.
        if self._planning is None or batch is None or batch.tensors:
            return None
        try:
            return self._planning.peak_of(plan, batch)
        except HFCkptError:
            return None

    def begin_window(self, plans: Iterable[Plan]) -> None:
        """Steps begin that run under some of these plans, and are to be measured."""
        if self._measures(plans):
            self._peak.begin_window()

    def bytes(self, failed_bytes: int | None, ran: Collection[tuple[Plan, Batch | None]]) -> int | None:
        """Return the bytes that a step may be predicted to need; None where nothing is predicted.

        Args:
            failed_bytes: predicted need of a step that failed, less what was missing.
            ran: largest batches since `begin_window`, and under which plans.
        """
        if self._planning is None:
            return None
        found = [self._planning.budget_bytes]
        if failed_bytes is not None:
            found.append(failed_bytes)
        memory = self._peak.in_window() if self._measures(plan for plan, _ in ran) else None
        predicted = [each for plan, batch in ran if (each := self.needed(plan, batch)) is not None]
        if memory is not None and predicted:
            # By as much as these steps needed more than predicted, others will; and some is lost in pieces.
            found.append(int((1 - MUCH) * memory.capacity) - (memory.peak - max(predicted)))
        return min(found)

    def _measures(self, plans: Iterable[Plan]) -> bool:
        """Whether the device's count is for us to begin anew: an offload that measures itself reads it too."""
        return self._planning is not None and not any(
            entry.offload is not None for plan in plans for stack in plan.stacks for entry in stack.layers
        )
