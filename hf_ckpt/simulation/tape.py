"""What happened in a step, event by event: storages that come and go, operators that run, and where.

A tape is made by `tracker`, may be filled up by `copies`, and is read by `reading`. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from hf_ckpt.simulation.step_memory import Category, Place


@dataclass(slots=True, eq=False)
class Storage:
    """One block of memory.

    Args:
        num_bytes: on the device, rounded as its allocator does.
        made: where in the step; None for what was there before.
        shape: of the tensor that came with it.
        dtype: such as `bfloat16`.
        category: where it is known: of what was there before, of gradients, and of the optimizer's state.
        why: who held it for backward, in words, as far as it was seen.
        parameter: path of the parameter that it is, or whose gradient or state it is, if any.
    """

    num_bytes: int
    made: Place | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    category: Category | None = None
    why: str = ""
    parameter: str = ""


class Change(StrEnum):
    """What an event does to the memory."""

    ALLOCATE = "allocate"
    FREE = "free"
    NOTHING = "nothing"


class Region(StrEnum):
    """What a mark begins."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Mark:
    """The forward or the backward of a layer begins or ends here.

    Args:
        region: which of the two.
        stack: number of the stack.
        layer_idx: the layer.
        micro_batch: counted from 0.
        is_end: whether it ends.
        is_copy: whether the layer was passed through, so that another one stands for it.
    """

    region: Region
    stack: int
    layer_idx: int
    micro_batch: int
    is_end: bool = False
    is_copy: bool = False


class Move(StrEnum):
    """What a transfer does."""

    SEND = "send"
    """A copy to the host begins, and takes host memory."""
    SETTLE = "settle"
    """The device waits for the oldest copy to the host that it has not waited for."""
    FETCH = "fetch"
    """A copy from the host begins."""
    RECEIVE = "receive"
    """The device waits for the oldest copy from the host that it has not waited for."""
    RELEASE = "release"
    """Host memory is let go."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A step of what goes to the host and comes back.

    Args:
        move: what happens.
        num_bytes: of how much.
    """

    move: Move
    num_bytes: int


@dataclass(slots=True)
class Event:
    """One entry of the tape. Not frozen: there are tens of thousands, and frozen ones take twice as long to make.

    Args:
        place: where in the step.
        change: what it does to `storage`.
        storage: what comes or goes.
        seconds: predicted, of an operator.
        num_flops: floating-point operations of an operator.
        mark: the forward or backward of a layer that begins or ends.
        is_copy: whether the seconds are of a copy between host and device, or between ranks.
        transfer: what goes to the host or comes back.
    """

    place: Place
    change: Change = Change.NOTHING
    storage: Storage | None = None
    seconds: float = 0.0
    num_flops: int = 0
    mark: Mark | None = None
    is_copy: bool = False
    transfer: Transfer | None = None


@dataclass(slots=True)
class Tape:
    """A step.

    Args:
        before: the storages that are alive when the step begins.
        events: in the order in which they happened.
        copied_gradients: by parameter: those whose making other events stand for.
    """

    before: list[Storage] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    copied_gradients: dict[str, Storage] = field(default_factory=dict)


def settle(tape: Tape) -> None:
    """Put in order what is let go at once.

    Autocast clears its cache in the order of addresses, which is another one in each run.
    """
    made = {id(event.storage): index for index, event in enumerate(tape.events) if event.change is Change.ALLOCATE}
    settled: list[Event] = []
    for (change, _), run in groupby(tape.events, key=lambda event: (event.change, event.place)):
        together = list(run)
        if change is Change.FREE:
            together.sort(key=lambda event: made.get(id(event.storage), -1))
        settled.extend(together)
    tape.events = settled
