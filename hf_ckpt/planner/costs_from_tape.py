"""A simulated step, read layer by layer: what each costs as it ran, and what lies outside the layers."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from hf_ckpt.planner.chain import Cost
from hf_ckpt.simulation.simulator import num_repeats
from hf_ckpt.simulation.step import Step
from hf_ckpt.simulation.step_memory import Category, Phase
from hf_ckpt.simulation.tape import ALLOCATED, FREED, Event, IntColumn, Mark, Tape, assign_categories, bytes_after

LayerKey = tuple[int, int]
"""Number of the stack, and `layer_idx`."""


class StepReading:
    """What each layer of a simulated step costs. Bytes are those of the last micro-batch, which needs most.

    Attributes:
        order: the layers, as they run.
        forward_seconds: of each layer's forward, in all micro-batches.
        levels: bytes that are allocated after each event.
        num_micro_batches: of the step; the tape has the first and the last, which stands for all others.
    """

    def __init__(self, tape: Tape, step: Step) -> None:
        assign_categories(tape)
        self._tape, self._columns = tape, tape.columns
        self.levels: IntColumn = bytes_after(tape)
        places, at = tape.columns.places, tape.columns.place
        self._micro_batches = places.micro_batches(at)
        self._in_optimizer = places.is_in(at, Phase.OPTIMIZER)
        self._last = int(self._micro_batches.max())
        repeats = num_repeats(step) if self._last else 1
        self.num_micro_batches = self._last + repeats
        is_repeated = ~self._in_optimizer & (self._micro_batches == self._last)
        # Of all events: sums are exact, so that those without any change nothing.
        self._all_seconds = tape.columns.seconds * np.where(is_repeated, repeats, 1)
        self._starts: dict[tuple[Phase, LayerKey], int] = {}
        self._ends: dict[tuple[Phase, LayerKey], int] = {}
        self.order: list[LayerKey] = []
        self._gradients: dict[LayerKey | None, int] = defaultdict(int)
        self._seconds: dict[tuple[Phase, LayerKey], list[float]] = defaultdict(list)
        self._end_of_layers = self._first_back = 0
        self._walk()
        self._casts = self._freed_after_forward()
        self.forward_seconds = {key: math.fsum(self._seconds[Phase.FORWARD, key]) for key in self.order}

    @property
    def events(self) -> list[Event]:
        """Of the whole step."""
        return self._tape.events

    def _walk(self) -> None:
        """Find where each layer's forward and backward begins and ends, what it takes and what it leaves."""
        region: tuple[Phase, LayerKey] | None = None
        begin, num_events = 0, len(self._columns)
        begun = self._in_optimizer & ~np.append(False, self._in_optimizer[:-1])
        marks: dict[int, Mark | None] = dict.fromkeys(np.flatnonzero(begun).tolist())
        marks.update((row, note) for row, note in self._columns.noted() if isinstance(note, Mark))
        final = [mark for mark in marks.values() if mark is not None and mark.phase is Phase.FORWARD][-1]
        for index in sorted(marks):
            mark = marks[index]
            is_end = mark is not None and mark.is_end
            if mark is not None and is_end and (mark.stack, mark.layer_idx) != (final.stack, final.layer_idx):
                continue
            self._add(region, begin, index)
            is_last = self._micro_batches[index] == self._last
            if region is not None and is_last:
                self._ends[region] = self._last_before_new(index) if is_end else index
            region = None if mark is None or is_end else (mark.phase, (mark.stack, mark.layer_idx))
            begin = index
            if mark is not None and is_last:
                self._note(mark, index)
        self._add(region, begin, num_events)
        if region is not None:
            self._ends[region] = num_events - 1

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
        while self._columns.change[index + 1] != ALLOCATED:
            index += 1
        return index

    def _add(self, region: tuple[Phase, LayerKey] | None, begin: int, end: int) -> None:
        """Count the time and the gradients of events that lie in a layer, or outside of all."""
        columns = self._columns
        if region is not None:
            self._seconds[region].extend(self._all_seconds[begin:end].tolist())
        made = columns.storage[begin:end][columns.change[begin:end] == ALLOCATED]
        gradients = (columns.storages[number] for number in made.tolist())
        num_bytes = sum(each.num_bytes for each in gradients if each.category is Category.GRADIENTS)
        self._gradients[None if region is None else region[1]] += num_bytes

    def cost(self, key: LayerKey) -> Cost:
        """Return what a layer costs under the plan of the step."""
        forward, backward = (self.levels[self.span(region, key)] for region in (Phase.FORWARD, Phase.BACKWARD))
        place = self.order.index(key)
        before = int(forward[0])
        # Of what was there before the layer's forward, what is still there in its backward.
        left = before - sum(self._casts[other] for other in self.order[:place])
        later = 0
        if not self._last:
            # In the only micro-batch gradients come as the backward goes on.
            later = self.head_left_bytes + sum(self._gradients[other] for other in self.order[place + 1 :])
        return Cost(
            kept_bytes=int(forward[-1]) - before - self._casts[key],
            forward_bytes=int(forward.max()) - before,
            backward_bytes=int(backward.max()) - left - later,
            left_bytes=self._gradients[key],
            seconds=math.fsum(
                second for region in (Phase.FORWARD, Phase.BACKWARD) for second in self._seconds[region, key]
            ),
            cast_bytes=self._casts[key],
        )

    def _freed_after_forward(self) -> dict[LayerKey, int]:
        """Return, by layer, the bytes that autocast casts and frees when the model's forward ends."""
        columns = self._columns
        head = slice(self._end_of_layers, self._first_back)
        is_freed = np.zeros(len(columns.storages) + 1, dtype=bool)
        is_freed[columns.storage[head][columns.change[head] == FREED]] = True
        made = np.flatnonzero((columns.change == ALLOCATED) & is_freed[columns.storage])
        num_bytes = np.zeros(len(columns) + 1, dtype=np.int64)
        for row in made.tolist():
            if columns.places.all[columns.place[row]].operator.startswith("aten._to_copy"):
                num_bytes[row + 1] = columns.storages[columns.storage[row]].num_bytes
        totals = np.cumsum(num_bytes)
        spans = {key: self.span(Phase.FORWARD, key) for key in self.order}
        return {key: int(totals[span.stop] - totals[span.start]) for key, span in spans.items()}

    def span(self, region: Phase, key: LayerKey) -> slice:
        """Return the events of a layer's forward or backward, in the last micro-batch."""
        # A layer that no gradient reaches has no backward.
        start = self._starts.get((region, key), self._starts[Phase.FORWARD, key])
        return slice(start, self._ends.get((region, key), start) + 1)

    def _most(self, first: int, last: int) -> int:
        return int(self.levels[first : last + 1].max())

    @property
    def base_bytes(self) -> int:
        """Allocated before the first layer runs, gradients of earlier micro-batches left out."""
        gradients = sum(self._gradients.values()) if self._last else 0
        return int(self.levels[self._starts[Phase.FORWARD, self.order[0]]]) - gradients

    @property
    def head_bytes(self) -> int:
        """The most between the last layer's forward and the end of the model's, over what is there in between."""
        return self._most(self._end_of_layers, self._head_turns) - int(self.levels[self._end_of_layers])

    @property
    def head_backward_bytes(self) -> int:
        """The most in the head's backward, over what is there between the last layer's forward and its backward."""
        casts = sum(self._casts.values())
        return self._most(self._head_turns, self._first_back) - int(self.levels[self._end_of_layers]) + casts

    @property
    def _head_turns(self) -> int:
        """The last event of the model's forward."""
        columns, start = self._columns, self._end_of_layers
        in_forward = np.flatnonzero(columns.places.is_in(columns.place[start : self._first_back], Phase.FORWARD))
        return start + int(in_forward.max(initial=0))

    @property
    def head_left_bytes(self) -> int:
        """Gradients of the head."""
        return self._gradients[None]

    @property
    def fixed_peak_bytes(self) -> int:
        """The most before the first layer and in the optimizer's step."""
        first = self._starts[Phase.FORWARD, self.order[0]]
        in_optimizer = int(self.levels[self._in_optimizer].max(initial=0))
        return max(self._most(0, first) if not self._last else 0, in_optimizer)

    @property
    def other_seconds(self) -> float:
        """Time outside the layers."""
        inside = (second for seconds in self._seconds.values() for second in seconds)
        return max(0.0, math.fsum(self._all_seconds.tolist()) - math.fsum(inside))

    @property
    def head_seconds(self) -> float:
        """Time outside the layers and the optimizer: of embeddings, head and loss."""
        return self.other_seconds - math.fsum(self._columns.seconds[self._in_optimizer].tolist())
