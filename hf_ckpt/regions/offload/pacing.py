"""Which layers send away what they save, as many as can be copied in time, and in which order it comes back.

Note on the measured share. A layer's forward has to be as long as the copy of what it sends, or the device waits for
the link; backward, which recomputes as well, is longer. Where copies take longer, only so many layers send that the
time of all of them suffices. The others keep what they save on the device, so the share is lowered only as far as
memory was left there when all were sending. When more comes to be sent than was measured (a longer batch), all send
again and are measured again.

Note on the peak. Torch counts one peak, since the process started or somebody reset it. It is everybody's, and is only
read here. So what a measured pass needed is known exactly where the peak rose in it, and from above otherwise: loading
a model can take more than a step, and then fewer layers keep what they save than could.

Note on passes. A pass is an optimizer step where somebody says when it begins and ends, as the Trainer does, otherwise
a forward with its backward. The device's memory is read when the measured pass begins and when it ends. Afterwards,
where copies take longer than layers, torch's count of what is allocated is read when a pass begins: an optimizer makes
its state late. Nothing is read where the user has fixed the share, or where all can send in time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, starmap
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hf_ckpt.regions.offload.transfer import DeviceMemory, Link, StorageKey

# Share of a layer's time that its copy may take; of the device's memory that may be used.
_MARGIN = 0.95
# Times the bytes that were measured, from which on the measurement no longer holds.
_LONGER = 1.1


def is_offloaded(position: int, num_layers: int, fraction: float | None) -> bool:
    """Whether the layer at this position (0 to `num_layers - 1`, in the order of the forward) sends away what it saves.

    The layers that do are spread evenly, beginning with the first. So each copy has as much time as the others, and the
    last layers stay where their backward needs them first.
    """
    count = num_offloaded(num_layers, fraction)

    def num_sending(first: int) -> int:
        """Return how many of the first layers do: their share, rounded up."""
        return -(-first * count // num_layers)

    return num_sending(position + 1) > num_sending(position)


def num_offloaded(num_layers: int, fraction: float | None) -> int:
    """Return how many layers send away what they save: at least one, unless the fraction is 0; all for None."""
    if fraction is None or fraction >= 1 or not num_layers:
        return num_layers
    return 0 if fraction <= 0 else max(1, int(num_layers * fraction + 0.5))


@dataclass
class _RegionTiming:
    """What was recorded of one region, from the first tensor that it sent."""

    began: torch.Event
    copies: list[tuple[torch.Event, torch.Event]] = field(default_factory=list)
    ended: torch.Event | None = None


class FractionTuner:
    """Decides on the share of layers that send: the user's `fraction`, or what measurements allow if that is None."""

    def __init__(self, fraction: float | None, num_layers: int) -> None:
        self._is_fixed = fraction is not None
        self._num_layers = num_layers
        self._bytes = 0
        self._device: torch.device | None = None
        self._has_steps = self._step_begins = False
        self._start_measuring()
        if fraction is not None:
            self.fraction, self._is_measuring = fraction, False

    def _start_measuring(self) -> None:
        self.fraction = 1.0
        self._is_measuring = True
        self._regions: list[_RegionTiming] = []
        self._measured = 1.0
        # None until the measured pass begins: in the one before, kernels are chosen and memory is allocated.
        self._before: DeviceMemory | None = None
        self._capacity = self._growth = 0

    def begin_step(self) -> None:
        """Note that an optimizer step begins, whose end `end_step` will tell."""
        self._has_steps = self._step_begins = True

    def end_step(self, link: Link | None) -> None:
        """Note that the last backward of an optimizer step has ended."""
        memory = None if self._before is None else self._memory_if_measuring(link)
        if memory is not None:
            self._end_pass(memory, self._regions)
        self._before = None

    def begin_forward(self, link: Link | None) -> None:
        """Note that a forward begins, and decide on its share if a pass begins with it."""
        regions, self._regions = self._regions, []
        begins_pass, self._step_begins = self._step_begins or not self._has_steps, False
        if not begins_pass:
            return
        memory = self._memory_if_measuring(link)
        if memory is not None:
            if self._before is not None and not self._has_steps:
                self._end_pass(memory, regions)
            self._before = memory
        if self._measured < 1 and link is not None and link.timed_wire is not None and self._device is not None:
            self.fraction = max(self._measured, self._min_fraction(link.timed_wire.allocated(self._device)))

    def _memory_if_measuring(self, link: Link | None) -> DeviceMemory | None:
        if not self._is_measuring or link is None or link.timed_wire is None or self._device is None:
            return None
        return link.timed_wire.memory(self._device)

    def _end_pass(self, memory: DeviceMemory, regions: list[_RegionTiming]) -> None:
        """Take what was measured in the pass that ends, unless somebody has reset the peak in it."""
        assert self._before is not None, "the pass has begun"
        growth = memory.peak - self._before.allocated
        # A region makes as much as it sends, or more: less was counted only if the count began anew afterwards.
        if memory.peak >= self._before.peak and growth >= self._bytes:
            self._is_measuring = False
            self._measured = _fraction_in_time(regions)
            self._capacity, self._growth = memory.capacity, growth

    def note_sent(self, link: Link, handle: object, device: torch.device, num_bytes: int, *, is_first: bool) -> None:
        """Note that a region sends a tensor; `num_bytes` is what the region has sent so far, this tensor included."""
        if self._is_fixed:
            return
        if self._device is None:
            self._device = device
        if not self._is_measuring and num_bytes > _LONGER * self._bytes:
            self._start_measuring()
        self._bytes = max(self._bytes, num_bytes)
        if not self._is_measuring or link.timed_wire is None:
            return
        if is_first:
            event = link.timed_wire.record_event(device)
            if event is not None:
                self._regions.append(_RegionTiming(event))
        events = link.copy_events(handle)
        if events is not None and self._regions:
            self._regions[-1].copies.append(events)

    def end_region(self, link: Link | None, device: torch.device) -> None:
        """Note the end of a region that has sent something."""
        if self._is_measuring and link is not None and link.timed_wire is not None and self._regions:
            self._regions[-1].ended = link.timed_wire.record_event(device)

    def _min_fraction(self, allocated_bytes: int) -> float:
        """Return the smallest share with which a pass that grows as the measured one fits on the device."""
        room = _MARGIN * self._capacity - allocated_bytes - self._growth
        return 1 - min(1.0, max(0.0, room) / max(1, self._bytes * self._num_layers))


def _fraction_in_time(regions: list[_RegionTiming]) -> float:
    """Return the share of the regions whose copies take no longer than all regions do."""
    whole = [region for region in regions if region.ended is not None and region.copies]
    if not whole:
        return 1.0
    computing = median(_milliseconds(region.began, region.ended) for region in whole)
    copying = median(sum(starmap(_milliseconds, region.copies)) for region in whole)
    return min(1.0, _MARGIN * computing / copying) if copying > 0 else 1.0


def _milliseconds(began: torch.Event, ended: Any) -> float:
    # Waits until it was reached: before, there is no time.
    ended.synchronize()
    return began.elapsed_time(ended)


# --- What has been sent, and the order in which it comes back. ---


@dataclass(slots=True, eq=False, weakref_slot=True)
class SentTensor:
    """A tensor that was sent away; all who saved it share this."""

    handle: Any
    """The link's."""
    num_bytes: int
    start_pid: int
    """The process in which the offloader had started."""


@dataclass(slots=True, eq=False)
class PendingCopy:
    """A tensor that is being copied. Nobody may write to it before the copy is done."""

    handle: Any
    tensor: Tensor
    version: int
    """Autograd's count of writes to the tensor when it was sent."""
    made_in: object | None
    """The `OffloadScope` that made the tensor; None if the region was given it."""


@dataclass(slots=True, frozen=True)
class ReleasedTensor:
    """What is left of a tensor that nobody needs any more."""

    handle: Any
    num_bytes: int
    start_pid: int
    key: StorageKey
    storage: StorageWeakRef
    """Keeps the key from being given to another tensor."""


class SentGroup:
    """What one call of a region sent away, in that order. Lives as long as one of its tensors is needed.

    `order` is that of its device, `number` counts the calls that sent something away.
    """

    def __init__(self, order: PrefetchOrder, number: int) -> None:
        self.order = order
        self.number = number
        self._items: list[weakref.ref[SentTensor]] = []

    def add(self, item: SentTensor) -> None:
        """Add what was just sent away."""
        self._items.append(weakref.ref(item))

    def items(self) -> list[SentTensor]:
        """Return the tensors that are still needed."""
        return [item for item in (reference() for reference in self._items) if item is not None]

    def after(self, item: SentTensor) -> list[SentTensor]:
        """Return the tensors that are still needed and come after this one."""
        items = self.items()
        return items[next((number + 1 for number, other in enumerate(items) if other is item), 0) :]


class PrefetchOrder:
    """The groups of one device that are still needed, in the order of the forward. Backward runs the other way.

    Counts and weak references only.
    """

    def __init__(self) -> None:
        self.num_groups = 0
        self._groups: list[weakref.ref[SentGroup]] = []
        self._ahead: list[weakref.ref[SentTensor]] = []

    def new_group(self) -> SentGroup:
        """Begin a group, after all others."""
        self._groups = [reference for reference in self._groups if reference() is not None]
        group = SentGroup(self, self.num_groups)
        self.num_groups += 1
        self._groups.append(weakref.ref(group))
        return group

    def next_items(self, item: SentTensor, group: SentGroup, num_ahead: int) -> list[SentTensor]:
        """Return what backward asks for next after `item` of `group`, in that order, up to `num_ahead` groups further.

        A region asks for what it saved in the order of its forward; the regions follow each other the other way.
        """
        return group.after(item) + self.last_items(group.number, num_ahead)

    def last_items(self, number: int, num_groups: int) -> list[SentTensor]:
        """Return the items of the last groups before a number, in the order in which backward asks for them."""
        return [item for group in islice(self._before(number), num_groups) for item in group.items()]

    def update_prefetched(
        self, received: SentTensor | None, wanted: list[SentTensor]
    ) -> tuple[list[SentTensor], list[SentTensor]]:
        """Set what is to be on its way from now on; return what has to be cancelled and what has to be started.

        `received` was on its way and has been asked for; `wanted` is what backward asks for next.
        """
        alive = (reference() for reference in self._ahead)
        started = [item for item in alive if item is not None and item is not received]
        self._ahead = [weakref.ref(item) for item in wanted]
        return [item for item in started if item not in wanted], [item for item in wanted if item not in started]

    def _before(self, number: int) -> Iterator[SentGroup]:
        for reference in reversed(self._groups):
            group = reference()
            if group is not None and group.number < number and group.items():
                yield group
