"""The fastest plan within a budget where frozen weights may wait on the host: how many layers' do, and the rest.

What waits makes room for activations, and takes the link. Each number of layers is planned for what it leaves, and
simulated whole with its copies. The time first falls with their number and then rises, so that few numbers are tried.
An embedding takes no more of the link than the rows of a batch: it waits in all of these plans, if it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice, pairwise

from hf_ckpt.errors import BudgetError
from hf_ckpt.policy.allowances import Allowed
from hf_ckpt.policy.options import EmbeddingPlace, Weights
from hf_ckpt.policy.plan import LayerPlan, Plan, with_entries
from hf_ckpt.regions.offload.pacing import is_offloaded
from hf_ckpt.simulation.fit import Capacity, Fit, Verdict
from hf_ckpt.simulation.simulator import StepSimulator
from hf_ckpt.simulation.step_memory import StepMemory

_ENGINES = ("none", "ddp")
"""Those that leave whole weights on each device."""
_MAX_NUMBERS = 5
"""Numbers of layers that are planned for, all and none aside."""
_MAX_TRIES = 3
"""Plans for one number: torch may reserve more beyond the peak than without copies."""

Found = tuple[Plan, StepMemory, Verdict]


class WeightsPlanner:
    """Lets embedding and weights of some layers of a step wait, and plans for what that leaves.

    Args:
        simulator: of the step.
        allowed: which may wait, and how.
        plan_for: the fastest plan for a capacity with all weights on the device; raises `BudgetError`.
    """

    def __init__(self, simulator: StepSimulator, allowed: Allowed, plan_for: Callable[[Capacity], Plan]) -> None:
        self._simulator = simulator
        self._allowed = allowed
        self._weights = allowed.weights or Weights()
        self._plan_for = plan_for

    @cached_property
    def _layers(self) -> list[tuple[int, int, int]]:
        """Stack, `layer_idx` and bytes of the layers whose weights can wait."""
        is_allowed = self._allowed.weights is not None and self._has_room
        return [each for each in self._simulator.waiting_bytes() if each[2]] if is_allowed else []

    @cached_property
    def _table_bytes(self) -> int:
        """Bytes of the embeddings that can wait."""
        num_bytes = self._simulator.table_bytes if self._allowed.moves_embedding and self._has_room else 0
        most = self._weights.host_memory
        return num_bytes if most is None or num_bytes <= most else 0

    @property
    def _has_room(self) -> bool:
        simulator = self._simulator
        # Where the device's memory is the host's, what waits takes as much of it.
        return simulator.step.sharding.engine in _ENGINES and not simulator.device.shares_host_memory

    @property
    def can_wait(self) -> bool:
        """Whether there are weights that could."""
        return bool(self._layers or self._table_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory that all of them take."""
        return sum(num_bytes for _, _, num_bytes in self._layers) + self._table_bytes

    def with_all(self, plan: Plan) -> Plan:
        """Return a plan in which all weights wait that can."""
        return self._with(plan, len(self._layers))

    def fastest(self, capacity: Capacity) -> Found | None:
        """Return the fastest plan in which weights wait and that fits; None where none does."""
        most = len(self._layers)
        if self._weights.host_memory is not None:
            taken = self._table_bytes
            for number, (_, _, num_bytes) in enumerate(self._layers):
                taken += num_bytes
                if taken > self._weights.host_memory:
                    most = number
                    break
        found: dict[int, Found] = {}
        # With an embedding that waits, none is a number too.
        first = [0] if self._table_bytes else []
        for number in chain(first, islice(self._numbers(most, found), _MAX_NUMBERS)):
            planned = self._planned(number, capacity)
            if planned is not None:
                found[number] = planned
        return min(found.values(), key=lambda each: each[1].time.total, default=None)

    @staticmethod
    def _numbers(most: int, found: dict[int, Found]) -> Iterator[int]:
        """Yield numbers of layers to plan for: all, half of them, and from then on those next to the fastest."""
        tried = {0}
        for number in (most, (most + 1) // 2):
            if number not in tried:
                tried.add(number)
                yield number
        while found:
            best = min(found, key=lambda number: found[number][1].time.total)
            known = sorted(tried)
            place = known.index(best)
            near = pairwise(known[max(0, place - 1) : place + 2])
            width, start = max(((high - low, low) for low, high in near), default=(0, 0))
            if width < 2:
                return
            tried.add(start + width // 2)
            yield start + width // 2

    def _planned(self, number: int, capacity: Capacity) -> Found | None:
        room = self._room(number)
        for _ in range(_MAX_TRIES):
            try:
                plan = self._with(self._plan_for(capacity.with_bytes(capacity.num_bytes + room)), number)
            except BudgetError:
                return None
            memory, verdict = self._simulator.memory(plan), self._simulator.verdict(plan, capacity)
            if verdict.fit is Fit.YES:
                return plan, memory, verdict
            room -= verdict.needed_bytes - capacity.num_bytes
        return None

    def _room(self, number: int) -> int:
        """Return the bytes of the device that are free where so many layers' weights wait."""
        sizes = [num_bytes for position, (_, _, num_bytes) in enumerate(self._layers) if self._waits(position, number)]
        resident = self._weights.resident
        there = (sum(sizes[start : start + resident]) for start in range(max(1, len(sizes) - resident + 1)))
        return sum(sizes) - max(there, default=0) + self._table_bytes

    def _waits(self, position: int, number: int) -> bool:
        # Spread evenly: a copy has the time of the layers between as well.
        return is_offloaded(position, len(self._layers), number / max(1, len(self._layers)))

    def _with(self, plan: Plan, number: int) -> Plan:
        waiting = {
            (stack, layer_idx)
            for position, (stack, layer_idx, _) in enumerate(self._layers)
            if self._waits(position, number)
        }
        places = ((number, idx) for number, stack in enumerate(plan.stacks) for idx in range(len(stack.layers)))

        def changed(entry: LayerPlan) -> LayerPlan:
            if next(places) in waiting:
                return replace(entry.alone, weights=self._weights)
            # The layers of a segment save an input each: their weights would be copied a third time.
            return entry if entry.segment is None or not waiting else entry.alone

        place = EmbeddingPlace.CPU if self._table_bytes else plan.embedding
        return replace(with_entries(plan, changed), embedding=place)
