"""Offload in a simulated step: what leaves the device, what lies on the host meanwhile, and how long it takes.

The engine is the one that trains (`regions.offload`). Only its link is another one, which copies nothing and records
each transfer with the tracker.

Note [Copies during computation]. The link carries one copy after the other each way, while the device computes. Where
the computation finishes before a copy that it needs, the device waits: that wait is all that a copy costs. Copies are
waited for in the order in which they began. So they need no names, and `layer_reuse` can use the events of a layer for
another one.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.plan import LayerPlan, Plan, with_entries
from hf_ckpt.regions.offload.pacing import is_offloaded
from hf_ckpt.regions.offload.transfer import Link, TensorLayout
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.op_costs import copy_seconds
from hf_ckpt.simulation.tape import Tape, Transfer, TransferKind
from hf_ckpt.simulation.tracker import Tracker


@dataclass(eq=False)
class _SentTensor:
    """The handle of a tensor that was sent."""

    layout: TensorLayout
    values: Tensor  # On the host; where tensors are fake, an empty fake tensor that others can be made of.
    ready: Tensor | None = None  # The tensor back on the device, where it was prefetched.
    buffer: Tensor | None = None  # Where it lies, if that is the device's memory too.


class SimulatedLink(Link):
    """A link that records transfers. With `has_values` tensors are real, and come back as they went.

    `shares_memory`: the host's memory is the device's, so that what is sent takes as much of it there.
    """

    def __init__(self, tracker: Tracker, *, has_values: bool = False, shares_memory: bool = False) -> None:
        self._tracker = tracker
        self._has_values = has_values
        self._shares_memory = shares_memory

    def send(self, tensor: Tensor) -> _SentTensor:
        """See `Link`."""
        layout = TensorLayout.of(tensor)
        self._note(TransferKind.SEND, layout)
        if not self._has_values:
            # The tracker sees the buffer, as memory of the device, for as long as the handle lives.
            buffer = tensor.new_empty(layout.num_bytes, dtype=torch.uint8) if self._shares_memory else None
            return _SentTensor(layout, tensor.new_empty(0), buffer=buffer)
        with self._tracker.on_host():
            return _SentTensor(layout, layout.flat(tensor).clone())

    def wait_for_send(self, sent: _SentTensor) -> None:
        """See `Link`."""
        self._note(TransferKind.WAIT_FOR_SEND, sent.layout)

    def prefetch(self, sent: _SentTensor) -> None:
        """See `Link`."""
        layout = sent.layout
        if sent.ready is not None:
            return
        self._note(TransferKind.FETCH, layout)
        if not self._has_values:
            # Made of a fake tensor: `fold` makes what depends on no tensor for real.
            sent.ready = sent.values.new_empty_strided(layout.shape, layout.strides)
            return
        made, content = layout.empty()
        with self._tracker.on_host():
            content.copy_(sent.values)
        sent.ready = layout.finish(made)

    def cancel(self, sent: _SentTensor) -> None:
        """See `Link`."""
        if sent.ready is not None:
            self._note(TransferKind.RECEIVE, sent.layout)
            sent.ready = None

    def receive(self, sent: _SentTensor) -> Tensor:
        """See `Link`."""
        self.prefetch(sent)
        self._note(TransferKind.RECEIVE, sent.layout)
        tensor, sent.ready = sent.ready, None
        assert tensor is not None, "it was fetched"
        return tensor

    def release(self, sent: _SentTensor) -> None:
        """See `Link`."""
        self.cancel(sent)
        self._note(TransferKind.RELEASE, sent.layout)
        sent.buffer = None

    def _note(self, kind: TransferKind, layout: TensorLayout) -> None:
        self._tracker.record_transfer(Transfer(kind, layout.num_bytes))


def resolve_fractions(plan: Plan) -> Plan:
    """Return a plan in which a layer offloads only if its engine lets it: `fraction` may ask for a part of the layers.

    Where the engine measures before it decides, all of them do, as in its first step.
    """
    counts = Counter(entry.offload for stack in plan.stacks for entry in stack.layers)
    places = Counter[Offload]()

    def resolved(entry: LayerPlan) -> LayerPlan:
        offload = entry.offload
        if offload is None:
            return entry
        does = is_offloaded(places[offload], counts[offload], offload.fraction)
        places[offload] += 1
        return replace(entry, offload=replace(offload, fraction=1.0) if does else None)

    return with_entries(plan, resolved)


def peak_host_bytes(tape: Tape) -> int:
    """Return the most that lies on the host at any moment of a step."""
    signs = {TransferKind.SEND: 1, TransferKind.RELEASE: -1}
    changes = (signs.get(each.kind, 0) * each.num_bytes for each in tape.columns.transfers().values())
    return max(accumulate(changes, initial=0))


# By what waits: the copies that it waits for, in the order in which they began.
_WAITS = {
    TransferKind.WAIT_FOR_SEND: TransferKind.SEND,
    TransferKind.RECEIVE: TransferKind.FETCH,
    TransferKind.RECEIVE_WEIGHTS: TransferKind.FETCH_WEIGHTS,
}


def add_copy_waits(tape: Tape, device: Device) -> None:
    """Let the device wait for copies that are not done in time. See Note [Copies during computation]."""
    columns = tape.columns
    transfers = columns.transfers()
    if not transfers:
        return
    now = 0.0
    ends = {kind: deque[float]() for kind in _WAITS.values()}
    free = {"away": 0.0, "back": 0.0}
    begin = 0
    for row, transfer in transfers.items():
        # One after the other, as they run: the last bits of a sum depend on the order.
        now = float(np.cumsum(np.append(now, columns.seconds[begin:row]))[-1])
        begin = row
        if transfer.kind in ends:
            way = "away" if transfer.kind is TransferKind.SEND else "back"
            free[way] = max(now, free[way]) + copy_seconds(transfer.num_bytes, device)
            ends[transfer.kind].append(free[way])
        elif transfer.kind in _WAITS and (waiting := ends[_WAITS[transfer.kind]]):
            columns.seconds[row] = max(0.0, waiting.popleft() - now)
            columns.is_copy[row] = True
    tape.columns = columns
