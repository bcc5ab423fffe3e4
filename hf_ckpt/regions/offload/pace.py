"""The share of the layers that send away what they save: as asked for, or as many as can be copied in time.

Note on the measured share. A layer's forward has to be as long as the copy of what it sends, or the device waits for
the link; backward, which recomputes as well, is longer. Where copies take longer, only so many layers send that the
time of all of them suffices. The others keep what they save on the device, so the share is lowered only as far as
memory was left there when all were sending; and when more comes to be sent than was measured (a longer batch), all
send again and are measured anew.

Note on the peak. Torch counts one peak, since the process started or somebody had it begin anew, and it may be older
than what is measured: loading a model can take more than a step. It is everybody's, so it is begun anew only where it
did not rise in the step that was measured and would cost layers their place; what it was is kept for reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import torch

from hf_ckpt.regions.offload.link import DeviceMemory, Link, Mark

_NUM_WARM_UP = 1
"""Forwards that are not measured: kernels are chosen and memory is allocated in the first."""
_MARGIN = 0.95
"""Share of a layer's time that its copy may take; of the device's memory that may be used."""
_LONGER = 1.1
"""Times the bytes that were measured, from which on the measurement no longer holds."""


@dataclass
class _Region:
    """What was noted of one region.

    Attributes:
        began: when it sent the first tensor.
        copies: of what it sent.
        ended: when it ended.
    """

    began: Mark
    copies: list[tuple[Mark, Mark]] = field(default_factory=list)
    ended: Mark | None = None


class Pace:
    """Decides on the share, and measures what it takes to.

    Args:
        asked: the user's share; None to measure.
        num_layers: how many layers could send.

    Attributes:
        fraction: the share as it stands now.
        forgotten_peak: the most of the device that was allocated before its peak was begun anew; 0 where it was not.
    """

    def __init__(self, asked: float | None, num_layers: int) -> None:
        self.fraction = 1.0 if asked is None else asked
        self.forgotten_peak = 0
        self._is_measuring = asked is None
        self._is_fixed = asked is not None
        self._num_layers = num_layers
        self._num_passes = 0
        self._regions: list[_Region] = []
        self._bytes = 0
        self._measured: float | None = None
        self._before: DeviceMemory | None = None
        self._growth = 0
        self._counts_anew = False
        self._device: torch.device | None = None

    def begin(self, link: Link | None) -> None:
        """Take note that a forward begins, and decide on its share."""
        regions, self._regions = self._regions, []
        if self._is_fixed or link is None or self._device is None:
            return
        memory = link.memory(self._device)
        if memory is None:
            return
        if self._is_measuring:
            self._num_passes += 1
            if self._num_passes > _NUM_WARM_UP:
                self._measured = _share(regions)
                self._is_measuring = False
                self._counts_anew = self._note_growth(memory) and self._least(memory) > self._measured
                if self._counts_anew:
                    self.forgotten_peak = max(self.forgotten_peak, memory.peak)
                    link.forget_peak(self._device)
            self._before = memory
        elif self._counts_anew:
            self._note_growth(memory)
            self._counts_anew = False
        if self._measured is not None and not self._counts_anew:
            self.fraction = max(self._measured, self._least(memory))

    def _note_growth(self, memory: DeviceMemory) -> bool:
        """Note by how much the pass that ends grew, and whether that is only a bound: see the note on the peak."""
        assert self._before is not None, "the first pass is not measured"
        self._growth = memory.peak - self._before.allocated
        return memory.peak == self._before.peak

    def sent(self, link: Link, parcel: object, device: torch.device, num_bytes: int, *, is_first: bool) -> None:
        """Take note of what a region sends.

        Args:
            link: over which.
            parcel: the link's.
            device: from where.
            num_bytes: what the region has sent so far, this included.
            is_first: whether it is the first that the region sends.
        """
        if self._is_fixed:
            return
        if self._device is None:
            self._device = device
        if not self._is_measuring and num_bytes > _LONGER * self._bytes:
            self._measure_again()
        self._bytes = max(self._bytes, num_bytes)
        if not self._is_measuring:
            return
        if is_first:
            mark = link.mark(device)
            if mark is not None:
                self._regions.append(_Region(mark))
        marks = link.marks(parcel)
        if marks is not None and self._regions:
            self._regions[-1].copies.append(marks)

    def leave(self, link: Link | None, device: torch.device | None) -> None:
        """Take note that a region ends that has sent something."""
        if self._is_measuring and link is not None and device is not None and self._regions:
            self._regions[-1].ended = link.mark(device)

    def _measure_again(self) -> None:
        self.fraction = 1.0
        self._is_measuring = True
        self._counts_anew = False
        self._num_passes = 0
        self._regions = []
        self._measured = self._before = None
        self._growth = 0

    def _least(self, memory: DeviceMemory) -> float:
        """Return the least share with which a forward that grows as those that were measured fits on the device."""
        room = _MARGIN * memory.capacity - memory.allocated - self._growth
        return 1 - min(1.0, max(0.0, room) / max(1, self._bytes * self._num_layers))


def _share(regions: list[_Region]) -> float:
    """Return the share of the regions whose copies take no longer than all regions do."""
    whole = [region for region in regions if region.ended is not None and region.copies]
    if not whole:
        return 1.0
    computing = median(region.began.seconds_to(region.ended) for region in whole)
    copying = median(sum(began.seconds_to(ended) for began, ended in region.copies) for region in whole)
    return min(1.0, _MARGIN * computing / copying) if copying > 0 else 1.0
