"""Offload in a step that is followed: what leaves the device, what lies on the host meanwhile, and how long it takes.

The engine is the one that trains (`regions.offload`); only its link is another one, which copies nothing and tells the
tracker instead.

Note [Copies beside the computation]. The link carries one copy after the other each way, while the device computes. The
device waits where it comes to the end of a copy's time before the copy does: that wait is all that a copy costs. Copies
are waited for in the order in which they were begun, so that they need no names, and the events of a layer can stand
for those of another (`copies`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from torch import Tensor

from hf_ckpt.policy.modifiers import Offload
from hf_ckpt.policy.plan import Plan, StackPlan
from hf_ckpt.regions.offload import Link
from hf_ckpt.regions.offload.schedule import is_offloaded
from hf_ckpt.regions.offload.tensors import Layout
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.op_costs import copy_seconds
from hf_ckpt.simulation.tape import Event, Move, Tape, Transfer
from hf_ckpt.simulation.tracker import Tracker


@dataclass(eq=False)
class _Parcel:
    """A tensor that was sent.

    Args:
        layout: builds its like.
        values: it, out of sight; where nothing has values, an empty tensor as fake as it was.
        ready: its like on the device, where that was asked for ahead.
    """

    layout: Layout
    values: Tensor
    ready: Tensor | None = None


class CountedLink(Link):
    """A link that tells a tracker what goes and comes.

    Args:
        tracker: is told.
        has_values: whether the tensors are real, and have to come back as they went.
    """

    def __init__(self, tracker: Tracker, *, has_values: bool = False) -> None:
        self._tracker = tracker
        self._has_values = has_values

    def send(self, tensor: Tensor) -> _Parcel:
        """See `Link`."""
        layout = Layout.of(tensor)
        self._note(Move.SEND, layout)
        if not self._has_values:
            return _Parcel(layout, tensor.new_empty(0))
        with self._tracker.out_of_sight():
            return _Parcel(layout, layout.flat(tensor).clone())

    def settle(self, parcel: _Parcel) -> None:
        """See `Link`."""
        self._note(Move.SETTLE, parcel.layout)

    def prefetch(self, parcel: _Parcel) -> None:
        """See `Link`."""
        layout = parcel.layout
        if parcel.ready is not None:
            return
        self._note(Move.FETCH, layout)
        if not self._has_values:
            # Made of a fake tensor: what is made of nothing is real (`Concrete`).
            parcel.ready = parcel.values.new_empty_strided(layout.shape, layout.strides)
            return
        made, content = layout.empty()
        with self._tracker.out_of_sight():
            content.copy_(parcel.values)
        parcel.ready = layout.finish(made)

    def cancel(self, parcel: _Parcel) -> None:
        """See `Link`."""
        if parcel.ready is not None:
            self._note(Move.RECEIVE, parcel.layout)
            parcel.ready = None

    def receive(self, parcel: _Parcel) -> Tensor:
        """See `Link`."""
        self.prefetch(parcel)
        self._note(Move.RECEIVE, parcel.layout)
        tensor, parcel.ready = parcel.ready, None
        assert tensor is not None, "it was fetched"
        return tensor

    def release(self, parcel: _Parcel) -> None:
        """See `Link`."""
        self.cancel(parcel)
        self._note(Move.RELEASE, parcel.layout)

    def expect(self, num_bytes: int) -> None:
        """See `Link`: how much the host has is not looked at here."""

    def close(self) -> None:
        """See `Link`."""

    def _note(self, move: Move, layout: Layout) -> None:
        self._tracker.note_transfer(Transfer(move, layout.num_bytes))


def as_it_runs(plan: Plan) -> Plan:
    """Return a plan in which a layer offloads if its engine lets it: a fraction of them may have been asked for.

    Where the engine measures before it decides, all do, as in its first step.
    """
    counts: dict[Offload, int] = {}
    for stack in plan.stacks:
        for entry in stack.layers:
            if entry.offload is not None:
                counts[entry.offload] = counts.get(entry.offload, 0) + 1
    places = dict.fromkeys(counts, 0)
    stacks = []
    for stack in plan.stacks:
        layers = []
        for entry in stack.layers:
            offload = entry.offload
            if offload is not None:
                does = is_offloaded(places[offload], counts[offload], offload.fraction)
                places[offload] += 1
                entry = replace(entry, offload=replace(offload, fraction=1.0) if does else None)
            layers.append(entry)
        stacks.append(StackPlan(stack.path, tuple(layers)))
    return replace(plan, stacks=tuple(stacks))


def host_bytes_of(tape: Tape) -> int:
    """Return the most that lies on the host at any moment of a step."""
    most = now = 0
    for event in tape.events:
        if event.transfer is not None:
            sign = {Move.SEND: 1, Move.RELEASE: -1}.get(event.transfer.move, 0)
            now += sign * event.transfer.num_bytes
            most = max(most, now)
    return most


def add_waits(tape: Tape, device: Device) -> None:
    """Let the device wait for copies that are not done in time. See Note [Copies beside the computation].

    Args:
        tape: its operators have their times.
        device: has the link.
    """
    now = 0.0
    ends = {Move.SEND: deque[float](), Move.FETCH: deque[float]()}
    free = {Move.SEND: 0.0, Move.FETCH: 0.0}
    begins = {Move.SETTLE: Move.SEND, Move.RECEIVE: Move.FETCH}
    for event in tape.events:
        transfer = event.transfer
        if transfer is not None and transfer.move in ends:
            free[transfer.move] = max(now, free[transfer.move]) + copy_seconds(transfer.num_bytes, device)
            ends[transfer.move].append(free[transfer.move])
        elif transfer is not None and transfer.move in begins and (waiting := ends[begins[transfer.move]]):
            _wait(event, max(0.0, waiting.popleft() - now))
        now += event.seconds


def _wait(event: Event, seconds: float) -> None:
    event.seconds = seconds
    event.is_copy = True
