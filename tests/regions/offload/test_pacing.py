"""Which layers send, as many as the link carries in time, and in which order tensors come back."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_ckpt import HFCkptCallback
from hf_ckpt.regions.offload.offloader import Offloader, run_offloaded
from hf_ckpt.regions.offload.pacing import (
    FractionTuner,
    PrefetchOrder,
    SentGroup,
    SentTensor,
    is_offloaded,
    num_offloaded,
)
from hf_ckpt.regions.offload.transfer import (
    DeviceMemory,
    Link,
)
from hf_ckpt.regions.recompute import recompute
from tests import training
from tests.offloading import TO_HOST

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("num_layers", "fraction", "expected"),
    [
        (4, None, "xxxx"),
        (4, 1.0, "xxxx"),
        (4, 0.5, "x.x."),
        (4, 0.75, "xxx."),
        (4, 0.01, "x..."),
        (7, 0.5, "xx.x.x."),
        (8, 0.25, "x...x..."),
        (3, 0.0, "..."),
        (1, 0.5, "x"),
    ],
)
def test_layers_that_send_are_spread_evenly(num_layers: int, fraction: float | None, expected: str) -> None:
    flags = [is_offloaded(position, num_layers, fraction) for position in range(num_layers)]
    assert "".join("x" if flag else "." for flag in flags) == expected
    assert sum(flags) == num_offloaded(num_layers, fraction)


def test_backward_is_foreseen() -> None:
    order = PrefetchOrder()
    items = [[SentTensor(None, 0, 0), SentTensor(None, 0, 0)] for _ in range(3)]
    groups: list[SentGroup] = []
    for row in items:
        groups.append(order.new_group())
        for item in row:
            groups[-1].add(item)
    assert order.next_items(items[2][0], groups[2], 1) == [items[2][1], *items[1]]
    assert order.next_items(items[2][0], groups[2], 2) == [items[2][1], *items[1], *items[0]]
    assert order.next_items(items[0][1], groups[0], 1) == []
    items[1].clear()
    assert order.next_items(items[2][1], groups[2], 1) == items[0]


class _Foreseen(Link):
    """Keeps what is sent, and notes what is foreseen."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def send(self, tensor: Tensor) -> Tensor:
        return tensor

    def prefetch(self, handle: Tensor) -> None:
        self.log.append(f"{handle.device.type} starts")

    def cancel(self, handle: Tensor) -> None:
        self.log.append(f"{handle.device.type} was for nothing")

    def receive(self, handle: Tensor) -> Tensor:
        self.log.append(f"{handle.device.type} is asked for")
        return handle


def test_backwards_of_two_devices_do_not_cancel_each_other() -> None:
    offloader, link = Offloader(TO_HOST, 2), _Foreseen()
    offloader.use_link(link)
    ends = []
    for device in ("cpu", "meta"):
        weight = torch.randn(64, 64, requires_grad=True, device=device)
        hidden = torch.randn(8, 64, device=device)
        for position in range(2):
            hidden = run_offloaded(offloader, position, recompute, partial(torch.matmul, other=weight), hidden.detach())
            ends.append(hidden)
    # Both second layers, then both first ones, as two threads of autograd can come to them.
    for end in (ends[1], ends[3], ends[0], ends[2]):
        end.sum().backward()
    foreseen = ["cpu is asked for", "cpu starts", "meta is asked for", "meta starts"]
    assert link.log == [*foreseen, "cpu is asked for", "meta is asked for"]


class _Marks(Link):
    """Regions of one second, copies of `copying` seconds."""

    def __init__(self, copying: float, memory: Any) -> None:
        self.timed_wire = self
        self._copying = copying
        self._memory = memory
        self._now = 0.0
        self.asked: list[str] = []

    def record_event(self, device: torch.device) -> Any:
        self._now += 1.0
        return _At(self._now)

    def copy_events(self, handle: object) -> Any:
        return _At(0.0), _At(self._copying)

    def memory(self, device: torch.device) -> Any:
        self.asked.append("memory")
        return self._memory

    def allocated(self, device: torch.device) -> Any:
        self.asked.append("allocated")
        return self._memory.allocated


class _At:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _At) -> float:
        return 1000 * (later._seconds - self._seconds)


def run_passes(tuner: FractionTuner, link: Link, num_passes: int, num_bytes: int = 100) -> list[float]:
    fractions = []
    for _ in range(num_passes):
        tuner.begin_forward(link)
        fractions.append(tuner.fraction)
        for _ in range(10):
            tuner.note_sent(link, None, torch.device("cpu"), num_bytes, is_first=True)
            tuner.end_region(link, torch.device("cpu"))
    return fractions


def test_the_share_follows_the_link() -> None:
    plenty = DeviceMemory(capacity=10**6, allocated=0, peak=1000)
    assert run_passes(FractionTuner(None, 10), _Marks(0.5, plenty), 4) == [1.0, 1.0, 1.0, 1.0]
    assert run_passes(FractionTuner(None, 10), _Marks(2.0, plenty), 4) == [1.0, 1.0, 0.475, 0.475]
    assert run_passes(FractionTuner(0.25, 10), _Marks(2.0, plenty), 4) == [0.25] * 4


def test_the_share_leaves_room_on_the_device() -> None:
    # 950 - 500 - 100 bytes are free: 3.5 of 10 layers of 100 bytes may stay.
    tight = DeviceMemory(capacity=1000, allocated=500, peak=600)
    assert run_passes(FractionTuner(None, 10), _Marks(2.0, tight), 4)[-1] == pytest.approx(0.65)


class _Counting(_Marks):
    """A device of 1,000 bytes, 100 of them in use between passes and `step` at most in a pass; loading took `loading`.

    It cannot be reset.
    """

    def __init__(self, copying: float, step: int, loading: int = 0) -> None:
        super().__init__(copying, None)
        self._step = step
        self.peak = loading
        self.in_use = 100

    def memory(self, device: torch.device) -> Any:
        # A pass lies behind each question.
        super().memory(device)
        self.peak = max(self.peak, self._step)
        return DeviceMemory(capacity=1000, allocated=self.in_use, peak=self.peak)

    def allocated(self, device: torch.device) -> int:
        self.asked.append("allocated")
        return self.in_use


@pytest.mark.parametrize(("loading", "share"), [(0, 0.475), (300, 0.475), (700, 0.75), (900, 0.95)])
def test_what_loading_took_counts_for_a_step_that_takes_less(loading: int, share: float) -> None:
    # 950 bytes less those of loading let some layers of 100 stay; the link asks for half of them.
    link = _Counting(2.0, step=200, loading=loading)
    assert run_passes(FractionTuner(None, 10), link, 5) == pytest.approx([1.0, 1.0, share, share, share])


def test_a_count_that_the_user_began_anew_before_training_is_exact() -> None:
    link = _Counting(2.0, step=200, loading=900)
    tuner = FractionTuner(None, 10)
    run_passes(tuner, link, 1)
    link.peak = 100
    assert run_passes(tuner, link, 3)[1:] == [0.475, 0.475]


def test_a_count_that_begins_anew_in_each_pass_says_nothing() -> None:
    link = _Counting(2.0, step=0)
    tuner = FractionTuner(None, 10)
    for _ in range(4):
        link.peak = 100
        assert run_passes(tuner, link, 1) == [1.0]
    # And where it begins anew in the measured pass only, the next one is measured.
    link = _Counting(2.0, step=200, loading=900)
    tuner = FractionTuner(None, 10)
    run_passes(tuner, link, 2)
    link.peak = 0
    assert run_passes(tuner, link, 3) == [1.0, 0.475, 0.475]


def test_memory_is_asked_for_only_where_it_decides() -> None:
    fast, slow, fixed = _Counting(0.5, step=200), _Counting(2.0, step=200), _Counting(2.0, step=200)
    run_passes(FractionTuner(None, 10), fast, 6)
    assert fast.asked == ["memory", "memory"]
    run_passes(FractionTuner(None, 10), slow, 6)
    assert slow.asked == ["memory", "memory", *["allocated"] * 4]
    run_passes(FractionTuner(0.5, 10), fixed, 6)
    assert fixed.asked == []


def run_steps(tuner: FractionTuner, link: _Marks, num_steps: int, num_forwards: int = 3) -> list[float]:
    fractions = []
    for _ in range(num_steps):
        tuner.begin_step()
        fractions += run_passes(tuner, link, num_forwards)
        tuner.end_step(link)
    return fractions


def test_with_steps_a_whole_one_is_measured_and_memory_asked_for_at_its_ends() -> None:
    link = _Counting(2.0, step=200)
    tuner = FractionTuner(None, 10)
    assert run_steps(tuner, link, 1) == [1.0] * 3
    assert link.asked == []
    assert run_steps(tuner, link, 1) == [1.0] * 3
    assert link.asked == ["memory", "memory"]
    assert run_steps(tuner, link, 2) == [0.475] * 6
    assert link.asked == ["memory", "memory", "allocated", "allocated"]


def test_with_steps_what_is_allocated_later_is_seen_when_a_step_begins() -> None:
    link = _Counting(2.0, step=200)
    tuner = FractionTuner(None, 10)
    run_steps(tuner, link, 3)
    link.in_use = 600
    # 950 - 600 - 100 bytes are left.
    assert run_steps(tuner, link, 1) == pytest.approx([0.75] * 3)


def test_with_steps_longer_batches_are_measured_in_the_next_whole_one() -> None:
    link = _Counting(2.0, step=200)
    tuner = FractionTuner(None, 10)
    run_steps(tuner, link, 3)
    tuner.begin_step()
    run_passes(tuner, link, 1, num_bytes=120)
    assert tuner.fraction == 1.0
    link._step = 300
    run_passes(tuner, link, 1, num_bytes=120)
    tuner.end_step(link)
    assert run_steps(tuner, link, 1) == [1.0] * 3
    assert run_steps(tuner, link, 1) == [0.475] * 3


def test_the_trainer_says_when_steps_begin_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def noted(name: str, found: Any) -> Any:
        def run(owner: Any, *args: Any) -> None:
            log.append(name)
            found(owner, *args)

        return run

    for owner, name in ((Offloader, "begin_step"), (Offloader, "end_step"), (FractionTuner, "begin_forward")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    callback = HFCkptCallback("full", offload={"to": "cpu", "min_bytes": 0}, prove="off")
    training.trainer(training.llama(), tmp_path, callback, gradient_accumulation_steps=2).train()
    assert log == ["begin_step", "begin_forward", "begin_forward", "end_step"] * 2


def test_a_step_that_fills_the_device_keeps_all_layers_sending() -> None:
    assert run_passes(FractionTuner(None, 10), _Counting(2.0, step=950), 5) == [1.0] * 5


def test_longer_batches_are_measured_anew() -> None:
    plenty = DeviceMemory(capacity=10**6, allocated=0, peak=1000)
    tuner, link = FractionTuner(None, 10), _Marks(2.0, plenty)
    assert run_passes(tuner, link, 4)[-1] == 0.475
    run_passes(tuner, link, 1, num_bytes=1000)
    assert tuner.fraction == 1.0
