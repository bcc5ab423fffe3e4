"""When operators of a step run: after the host has issued them, and after what ranks send each other has arrived.

Note [The host under FSDP and ZeRO-3]. To gather a unit and to let it go, the host runs Python for
`Device.unit_seconds`: hooks, views, one collective. PEFT's adapters are units of their own, and ZeRO-3 does it for
each module with weights, so that small steps wait for the host. FSDP1 lets it run ahead by two units: before it gathers
one, it waits until the device has let go of the last but one (`limit_all_gathers`, `_FreeEventQueue`). So what it
issues behind that point is not there yet when the device gets to it.

What is gathered is waited for in full, as published steps with fast and slow links show (docs/accuracy.md). Gradients
are sent while earlier layers run backward, and the optimizer waits for the last of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_ckpt.policy.plan import Plan
from hf_ckpt.policy.policy import SELECTIVE_MODES, Mode
from hf_ckpt.regions.selective.save_rules import OperatorRole
from hf_ckpt.simulation.devices import Device
from hf_ckpt.simulation.op_costs import copy_seconds, is_kept_selectively, role_of_operator
from hf_ckpt.simulation.step_memory import Phase, Place
from hf_ckpt.simulation.tape import Columns, Tape, TransferKind

_BETWEEN_RANKS = (TransferKind.GATHER, TransferKind.LET_GO, TransferKind.REDUCE)
_UNITS_AHEAD = 2  # Units that FSDP1's host may let go of before the device does.


class LaunchQueue:
    """Predicts the time of operators, one after another, on a device that works while the host issues further ones.

    The device waits where the host is slower, as it is with small tensors. Where the device is slower, the host runs
    ahead. An operator takes the time from when the device was done with the one before until it is done with this one:
    over a step these times add up to the time of the step. A CPU works and issues in turn.
    """

    def __init__(self, device: Device, *, limits_units: bool = False) -> None:
        self._device = device
        self._queued_seconds = 0.0
        self._reducing_seconds = 0.0
        self._limits_units = limits_units
        self._host_seconds = 0.0
        self._free_seconds = deque[float]()

    def take(self, busy: float, *, records_graph: bool, is_intercepted: bool = False) -> float:
        """Return the seconds of the next operator.

        `busy` is that of `busy_seconds`. `records_graph` holds in a forward, and not in a backward or an optimizer.
        `is_intercepted` is whether a layer in a selective mode handles the operator in Python.
        """
        issued = self.issue_seconds(records_graph=records_graph, is_intercepted=is_intercepted)
        return self._run(issued, busy) if self._device.is_cuda else issued + busy

    def issue_seconds(self, *, records_graph: bool, is_intercepted: bool = False) -> float:
        """Return the seconds that the host takes to issue an operator; see `take`."""
        device = self._device
        issued = device.launch_seconds if records_graph else device.backward_launch_seconds
        return issued + device.selective_seconds if is_intercepted else issued

    def take_all(self, issued: Sequence[float], busy: Sequence[float]) -> list[float]:
        """Return the seconds of operators on a GPU, one after another, while ranks send each other nothing.

        `issued` are those of `issue_seconds`. See `take`.
        """
        queued, taken = self._queued_seconds, []
        for issuing, working in zip(issued, busy, strict=True):
            waited = issuing - queued if issuing > queued else 0.0
            queued = (queued - issuing if queued > issuing else 0.0) + working
            taken.append(waited + working)
        self._queued_seconds = queued
        return taken

    def gather(self, num_bytes: int) -> float:
        """Return the seconds until a unit's weights are there; `num_bytes` come from other ranks."""
        device = self._device
        sending = copy_seconds(num_bytes, device, between_ranks=True)
        if not device.is_cuda:
            return sending
        waited = 0.0
        if self._limits_units and len(self._free_seconds) >= _UNITS_AHEAD:
            waited = max(0.0, self._free_seconds.popleft() - self._host_seconds)
        return self._run(waited + device.unit_seconds, sending)

    def let_go(self) -> None:
        """Let go of a unit's weights as soon as the device has done what was issued before."""
        if self._limits_units:
            self._free_seconds.append(self._host_seconds + self._queued_seconds)

    def reduce(self, num_bytes: int, num_calls: int = 0) -> float:
        """Send gradients while the device goes on; return how long it waits for the host, which calls so much."""
        waited = self._run(num_calls * self._device.backward_launch_seconds, 0.0)
        self._reducing_seconds += copy_seconds(num_bytes, self._device, between_ranks=True)
        return waited

    def finish_reducing(self) -> float:
        """Return the seconds until all gradients have arrived."""
        waited, self._reducing_seconds = self._reducing_seconds, 0.0
        self._queued_seconds += waited
        return waited

    def _run(self, issued: float, busy: float) -> float:
        """Return how much later the device is done, when the host takes `issued` before it can work for `busy`."""
        waited = max(0.0, issued - self._queued_seconds)
        self._queued_seconds = max(0.0, self._queued_seconds - issued) + busy
        self._host_seconds += issued
        self._reducing_seconds = max(0.0, self._reducing_seconds - waited - busy)
        return waited + busy


def queue_operators(tape: Tape, device: Device, plan: Plan | None, *, limits_units: bool = False) -> None:
    """Let operators wait for the host and for other ranks, in the order of the whole step.

    The tape is of one rank, with the seconds that each operator keeps the device busy. `limits_units`: whether the host
    waits for units to be let go of, as under FSDP1.
    """
    queue = LaunchQueue(device, limits_units=limits_units)
    columns = tape.columns
    is_recorded = columns.places.is_in(columns.place, Phase.FORWARD, Phase.RECOMPUTATION)
    is_intercepted = _intercepted(columns, plan)[columns.place]
    # Copies to the host and back are waited for later: see `offload.add_copy_waits`.
    transfers = {row: each for row, each in columns.transfers().items() if each.kind in _BETWEEN_RANKS}
    if device.is_cuda and not transfers:
        rows = np.flatnonzero(columns.seconds)
        ways = [queue.issue_seconds(records_graph=way >= 2, is_intercepted=way % 2 == 1) for way in range(4)]
        hosts = np.array(ways)[2 * is_recorded[rows] + is_intercepted[rows]]
        columns.seconds[rows] = queue.take_all(hosts.tolist(), columns.seconds[rows].tolist())
        tape.columns = columns
        return
    optimizer = columns.places.is_in(columns.place, Phase.OPTIMIZER).tolist()
    seconds, recorded, intercepted = columns.seconds.tolist(), is_recorded.tolist(), is_intercepted.tolist()
    for row in sorted({*np.flatnonzero(columns.seconds).tolist(), *transfers}):
        transfer = transfers.get(row)
        if transfer is None:
            waited = queue.finish_reducing() if optimizer[row] else 0.0
            taken = queue.take(seconds[row], records_graph=recorded[row], is_intercepted=intercepted[row])
            seconds[row] = waited + taken
            continue
        match transfer.kind:
            case TransferKind.GATHER:
                seconds[row] = queue.gather(transfer.num_bytes)
                columns.is_copy[row] = True
            case TransferKind.LET_GO:
                queue.let_go()
            case TransferKind.REDUCE:
                seconds[row] = queue.reduce(transfer.num_bytes, transfer.num_calls)
                columns.is_copy[row] = True
    columns.seconds = np.array(seconds, dtype=np.float64)
    tape.columns = columns


def _intercepted(columns: Columns, plan: Plan | None) -> NDArray[np.bool_]:
    """Return, by number of a place, whether Python handles each of its operators."""
    modes: dict[tuple[str, int | None], Mode] = {
        (stack.path, layer_idx): entry.mode
        for stack in (() if plan is None else plan.stacks)
        for layer_idx, entry in enumerate(stack.layers)
        if entry.mode in SELECTIVE_MODES
    }
    found = np.zeros(len(columns.places.all), dtype=bool)
    if not modes:
        return found
    used = {number: columns.places.all[number] for number in np.unique(columns.place).tolist()}
    has_kernel = {
        _layer(place) for place in used.values() if role_of_operator(place.operator) is OperatorRole.ATTENTION
    }
    for number, place in used.items():
        mode = modes.get(_layer(place))
        if mode is Mode.SELECTIVE_ATTENTION and _layer(place) not in has_kernel:
            # Its probabilities are followed from operator to operator.
            found[number] = place.phase in (Phase.FORWARD, Phase.RECOMPUTATION)
        else:
            found[number] = mode is not None and is_kept_selectively(place)
    return found


def _layer(place: Place) -> tuple[str, int | None]:
    return place.stack, place.layer_idx
