"""A simulated step, read layer by layer: what each costs as it ran, and what lies outside the layers."""

from __future__ import annotations

import math
from collections import defaultdict

from hf_ckpt.planner.chain import Cost
from hf_ckpt.simulation.simulator import num_repeats
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import Event, Mark, MemoryChange, Tape, assign_categories, bytes_after

LayerKey = tuple[int, int]
"""Number of the stack, and `layer_idx`."""


class StepReading:
    """What each layer of a simulated step costs. Bytes are those of the last micro-batch, which needs most.

    Attributes:
        order: the layers, as they run.
        forward_seconds: of each layer's forward, in all micro-batches.
        events: of the whole step.
        levels: bytes that are allocated after each event.
    """

    def __init__(self, tape: Tape, step: Step) -> None:
        assign_categories(tape)
        self.events = tape.events
        self.levels: list[int] = bytes_after(tape).tolist()
        self._last = max(event.place.micro_batch for event in tape.events)
        self._repeats = num_repeats(step) if self._last else 1
        self._starts: dict[tuple[Phase, LayerKey], int] = {}
        self._ends: dict[tuple[Phase, LayerKey], int] = {}
        self.order: list[LayerKey] = []
        self._gradients: dict[LayerKey | None, int] = defaultdict(int)
        self._seconds: dict[tuple[Phase, LayerKey], list[float]] = defaultdict(list)
        self._end_of_layers = self._first_back = 0
        self._walk()
        self._all_seconds = [event.seconds * self.weight(event) for event in self.events if event.seconds]
        self._casts = self._freed_after_forward()
        self.forward_seconds = {key: math.fsum(self._seconds[Phase.FORWARD, key]) for key in self.order}

    def _walk(self) -> None:
        """Find where each layer's forward and backward begins and ends, what it takes and what it leaves."""
        region: tuple[Phase, LayerKey] | None = None
        final = self._final_layer()
        for index, event in enumerate(self.events):
            mark = event.mark
            begins = mark is not None and not mark.is_end
            is_over = mark is not None and mark.is_end and (mark.stack, mark.layer_idx) == final
            if begins or is_over or event.place.phase is Phase.OPTIMIZER:
                if region is not None and event.place.micro_batch == self._last:
                    self._ends[region] = self._last_before_new(index) if is_over else index
                region = (mark.phase, (mark.stack, mark.layer_idx)) if mark is not None and begins else None
            if mark is not None and (begins or is_over) and event.place.micro_batch == self._last:
                self._note(mark, index)
            if event.seconds and region is not None:
                self._seconds[region].append(event.seconds * self.weight(event))
            self._add_gradient(event, region)
        if region is not None:
            self._ends[region] = len(self.events) - 1

    def _final_layer(self) -> LayerKey:
        """Return the layer that runs last."""
        marks = (event.mark for event in reversed(self.events))
        return next((mark.stack, mark.layer_idx) for mark in marks if mark and mark.phase is Phase.FORWARD)

    def _note(self, mark: Mark, index: int) -> None:
        key = (mark.stack, mark.layer_idx)
        if mark.is_end:
            self._end_of_layers = self._last_before_new(index)
            return
        if mark.phase is Phase.BACKWARD and not self._first_back:
            self._first_back = index
        if (mark.phase, key) not in self._starts:
            self._starts[mark.phase, key] = index
            if mark.phase is Phase.FORWARD:
                self.order.append(key)

    def _last_before_new(self, index: int) -> int:
        """Return the last event before anything new is made: a layer's inputs are freed after it has returned."""
        while self.events[index + 1].change is not MemoryChange.ALLOCATE:
            index += 1
        return index

    def _add_gradient(self, event: Event, region: tuple[Phase, LayerKey] | None) -> None:
        storage = event.storage
        if event.change is MemoryChange.ALLOCATE and storage is not None and storage.category is Category.GRADIENTS:
            self._gradients[None if region is None else region[1]] += storage.num_bytes

    def weight(self, event: Event) -> int:
        """Return how often an event happens in the step."""
        is_repeated = event.place.phase is not Phase.OPTIMIZER and event.place.micro_batch == self._last
        return self._repeats if is_repeated else 1

    @property
    def all_weight(self) -> int:
        """How often a micro-batch runs in the step: the first one, and the repeats of the last one."""
        return self._last + self._repeats

    def cost(self, key: LayerKey) -> Cost:
        """Return what a layer costs under the plan of the step."""
        forward, backward = (self.span(region, key) for region in (Phase.FORWARD, Phase.BACKWARD))
        place = self.order.index(key)
        before = self.levels[forward[0]]
        # Of what was there before the layer's forward, what is still there in its backward.
        left = before - sum(self._casts[other] for other in self.order[:place])
        later = 0
        if not self._last:
            # In the only micro-batch gradients come as the backward goes on.
            later = self.head_left_bytes + sum(self._gradients[other] for other in self.order[place + 1 :])
        return Cost(
            kept_bytes=self.levels[forward[1]] - before - self._casts[key],
            forward_bytes=self._most(forward) - before,
            backward_bytes=self._most(backward) - left - later,
            left_bytes=self._gradients[key],
            seconds=math.fsum(
                second for region in (Phase.FORWARD, Phase.BACKWARD) for second in self._seconds[region, key]
            ),
            cast_bytes=self._casts[key],
        )

    def _freed_after_forward(self) -> dict[LayerKey, int]:
        """Return, by layer, the bytes that autocast casts and frees when the model's forward ends."""
        head = self.events[self._end_of_layers : self._first_back]
        freed = {id(event.storage) for event in head if event.change is MemoryChange.FREE}
        casts = {}
        for key in self.order:
            start, end = self.span(Phase.FORWARD, key)
            casts[key] = sum(
                event.storage.num_bytes
                for event in self.events[start : end + 1]
                if event.change is MemoryChange.ALLOCATE
                and event.storage is not None
                and id(event.storage) in freed
                and event.place.operator.startswith("aten._to_copy")
            )
        return casts

    def span(self, region: Phase, key: LayerKey) -> tuple[int, int]:
        """Return the first and the last event of a layer's forward or backward, in the last micro-batch."""
        # A layer that no gradient reaches has no backward.
        start = self._starts.get((region, key), self._starts[Phase.FORWARD, key])
        return start, self._ends.get((region, key), start)

    def _most(self, span: tuple[int, int]) -> int:
        return max(self.levels[span[0] : span[1] + 1])

    @property
    def _all_gradients(self) -> int:
        return sum(self._gradients.values()) if self._last else 0

    @property
    def base_bytes(self) -> int:
        """Allocated before the first layer runs, gradients of earlier micro-batches left out."""
        return self.levels[self._starts[Phase.FORWARD, self.order[0]]] - self._all_gradients

    @property
    def head_bytes(self) -> int:
        """The most between the last layer's forward and the end of the model's, over what is there in between."""
        return self._most((self._end_of_layers, self._head_turns)) - self.levels[self._end_of_layers]

    @property
    def head_backward_bytes(self) -> int:
        """The most in the head's backward, over what is there between the last layer's forward and its backward."""
        casts = sum(self._casts.values())
        return self._most((self._head_turns, self._first_back)) - self.levels[self._end_of_layers] + casts

    @property
    def _head_turns(self) -> int:
        """The last event of the model's forward."""
        head = range(self._end_of_layers, self._first_back)
        return max((index for index in head if self.events[index].place.phase is Phase.FORWARD), default=head.start)

    @property
    def head_left_bytes(self) -> int:
        """Gradients of the head."""
        return self._gradients[None]

    @property
    def fixed_peak_bytes(self) -> int:
        """The most before the first layer and in the optimizer's step."""
        first = self._starts[Phase.FORWARD, self.order[0]]
        in_optimizer = (
            level for level, event in zip(self.levels, self.events, strict=True) if event.place.phase is Phase.OPTIMIZER
        )
        return max(max(self.levels[: first + 1]) if not self._last else 0, max(in_optimizer, default=0))

    @property
    def other_seconds(self) -> float:
        """Time outside the layers."""
        inside = (second for seconds in self._seconds.values() for second in seconds)
        return max(0.0, math.fsum(self._all_seconds) - math.fsum(inside))

    @property
    def head_seconds(self) -> float:
        """Time outside the layers and the optimizer: of embeddings, head and loss."""
        optimizer = [event.seconds for event in self.events if event.place.phase is Phase.OPTIMIZER]
        return self.other_seconds - math.fsum(optimizer)
