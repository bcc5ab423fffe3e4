"""Buffers in host memory, their sizes, and the limits that they keep to."""

from __future__ import annotations

import pytest
import torch

import hf_ckpt
from hf_ckpt.errors import HostMemoryError
from hf_ckpt.policy.options import Offload
from hf_ckpt.regions.offload.host_buffers import BufferPool, HostLink
from hf_ckpt.regions.offload.host_memory import HostLimits, HostMemory
from hf_ckpt.regions.offload.offloader import Offloader, run_offloaded
from hf_ckpt.regions.offload.transfer import (
    PageableMemory,
    Wire,
)
from hf_ckpt.regions.recompute import recompute
from tests import exactness, zoo
from tests.offloading import TO_HOST, engine, is_empty

pytestmark = pytest.mark.core


def test_a_cap_that_is_too_small_is_refused_in_the_first_layer(case: zoo.Case) -> None:
    size = case.inputs["input_ids"].numel() * case.model.config.hidden_size * 4
    with hf_ckpt.apply(case.model, "full", offload=Offload(min_bytes=0, host_memory=2 * size)) as applied:
        with pytest.raises(HostMemoryError) as error:
            exactness.step(case)
        said = str(error.value)
        # What is on its way up holds the graph of the first layer.
        del error
        assert engine(applied).stats.num_tensors == 1
        assert is_empty(engine(applied))
    assert said == (
        "Offloading to the host needs 32.0 KiB of host memory, but host_memory allows 16.0 KiB. Raise host_memory, "
        "lower fraction, shorten the sequence, offload fewer layers, or write to disk with offload: {to: disk, "
        "path: /scratch}."
    )
    with hf_ckpt.apply(case.model, "full", offload=Offload(min_bytes=0, host_memory=4 * size)):
        exactness.step(case)
        exactness.step(case)


def test_layers_without_a_gradient_hold_nothing_on_the_host() -> None:
    offloader = Offloader(Offload(min_bytes=0, host_memory=2 * 8 * 64 * 4), 8)
    weight = torch.randn(64, 64)
    hidden = torch.randn(8, 64)
    for position in range(8):
        weight.requires_grad_(position >= 6)
        hidden = run_offloaded(offloader, position, recompute, lambda x: torch.tanh(x @ weight), hidden)
    assert offloader.stats.num_live == 2
    hidden.sum().backward()
    assert is_empty(offloader)


def test_a_machine_without_room_is_refused() -> None:
    limits = HostLimits(None, lambda: HostMemory(machine_bytes=2**30, group_bytes=2**29))
    limits.check(0, held_bytes=2**40)
    with pytest.raises(HostMemoryError, match=r"needs 1.0 GiB more .* 512.0 MiB are free \(limit of the control group"):
        limits.check(2**30, held_bytes=0)
    HostLimits(None, lambda: HostMemory(None, None)).check(2**50, held_bytes=0)


LOW = HostMemory(machine_bytes=2**30, group_bytes=None, total_bytes=2**31)
TRUST = (
    " Where the machine's figures are too low (a virtual machine that is given memory when it is touched), set "
    "trust_host_memory: true."
)


def test_the_figures_of_a_machine_can_be_left_out() -> None:
    for num_bytes, held_bytes in ((2**30, 0), (2**29, 2**31)):
        with pytest.raises(HostMemoryError) as error:
            HostLimits(None, lambda: LOW).check(num_bytes, held_bytes)
        assert str(error.value).endswith(TRUST)
        HostLimits(None, lambda: LOW, trusts=True).check(num_bytes, held_bytes)


def test_a_machine_that_is_trusted_keeps_to_the_cap_and_to_its_control_groups() -> None:
    with pytest.raises(HostMemoryError, match=r"host_memory allows 1\.0 GiB"):
        HostLimits(2**30, lambda: LOW, trusts=True).check(2**31, held_bytes=0)
    grouped = HostMemory(2**40, group_bytes=2**30, total_bytes=2**32, group_total_bytes=2**32)
    for limits in (HostLimits(None, lambda: grouped), HostLimits(None, lambda: grouped, trusts=True)):
        for num_bytes, held_bytes in ((2**30, 0), (2**29, 2**32)):
            with pytest.raises(HostMemoryError) as error:
                limits.check(num_bytes, held_bytes)
            assert "trust_host_memory" not in str(error.value)


def test_a_plan_says_that_the_machine_is_trusted(case: zoo.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    low = HostMemory(machine_bytes=0, group_bytes=None, total_bytes=1)
    monkeypatch.setattr(HostLimits.__init__, "__defaults__", (lambda: low,))
    expected = exactness.step(case)
    with hf_ckpt.apply(case.model, "full", offload=TO_HOST), pytest.raises(HostMemoryError, match="trust_host_memory"):
        exactness.step(case)
    case.model.zero_grad()
    with hf_ckpt.apply(case.model, "full", offload={"to": "cpu", "min_bytes": 0, "trust_host_memory": True}):
        assert exactness.differences(expected, exactness.step(case)) == []


def test_processes_of_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = HostMemory(2**40, None, total_bytes=2**34)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    HostLimits(None, lambda: machine).check(2**31, held_bytes=2**31)
    with pytest.raises(HostMemoryError, match=r"needs 4.5 GiB in each of 4 processes, but this machine has 16.0 GiB"):
        HostLimits(None, lambda: machine).check(2**31, held_bytes=2**31 + 2**29)


def test_the_pool_makes_no_more_buffers_than_are_out_at_once() -> None:
    pool = BufferPool(Wire(), HostLimits(None, lambda: HostMemory(None, None)))
    for sizes in ([100, 200, 50], [60, 150, 40], [300, 70, 70], [100, 200, 50]):
        buffers = [pool.take(size) for size in sizes]
        assert all(buffer.num_bytes >= size for buffer, size in zip(buffers, sizes, strict=True))
        assert pool.free_bytes == 0
        for buffer in buffers:
            pool.give_back(buffer)
        assert len(pool._free) == 3
        assert pool.held_bytes == pool.free_bytes
    assert pool.take(200).num_bytes == 300
    pool.close()
    assert pool._free == []


def lend_all(pool: BufferPool, num_buffers: int, num_bytes: int, most_bytes: int | None = None) -> int:
    """Take and give back so many buffers; return the bytes that were made anew."""
    made: list[int] = []
    found = pool._allocate
    pool._allocate = lambda size: (made.append(size), found(size))[1]
    for buffer in [pool.take(num_bytes, most_bytes) for _ in range(num_buffers)]:
        pool.give_back(buffer)
    pool._allocate = found
    return sum(made)


def test_slightly_longer_batches_find_room_in_the_buffers_that_there_are() -> None:
    pool = BufferPool(Wire(), HostLimits(None, lambda: HostMemory(None, None)))
    assert lend_all(pool, 3, 1000) == 3 * 1000
    # Those that were too small are replaced, one for one, by some that are a quarter larger.
    assert lend_all(pool, 3, 1001) == pool.held_bytes == 3 * 1250
    for num_bytes in range(1010, 1260, 10):
        assert lend_all(pool, 3, num_bytes) == 0
    assert lend_all(pool, 3, 5000) == pool.held_bytes == 3 * 5000


@pytest.mark.parametrize("cap", [3300, 3500, 3700])
def test_room_to_grow_is_taken_from_nobody(cap: int) -> None:
    pool = BufferPool(Wire(), HostLimits(cap, lambda: HostMemory(None, None)))
    lend_all(pool, 3, 1000)
    for num_bytes in (1010, 1060, 1099):
        lend_all(pool, 3, num_bytes)
        assert pool.held_bytes <= cap


def test_buffers_are_made_for_the_longest_batch_at_once() -> None:
    pool = BufferPool(Wire(), HostLimits(None, lambda: HostMemory(None, None)))
    assert lend_all(pool, 3, 100, most_bytes=1000) == 3000
    assert lend_all(pool, 3, 1000, most_bytes=1000) == 0
    # What was not foreseen is made as it comes.
    assert lend_all(pool, 1, 1200, most_bytes=1000) == 1200


def run_batches(offloader: Offloader, max_tokens: int, lengths: list[int]) -> list[int]:
    """Run forward and backward of four layers for each length; return how many buffers were made so far after each."""
    weight = torch.randn(16, 16, requires_grad=True)
    sizes: list[int] = []
    pool = offloader._link.pool
    allocate = pool._allocate
    pool._allocate = lambda size: (sizes.append(size), allocate(size))[1]
    made = []
    for length in lengths:
        offloader.expect_batch(length, max_tokens)
        hidden = torch.randn(1, length, 16)
        for position in range(4):
            hidden = run_offloaded(offloader, position, recompute, lambda x: torch.tanh(x @ weight), hidden)
        hidden.sum().backward()
        made.append(len(sizes))
    pool._allocate = allocate
    return made


def test_layers_behind_the_first_reserve_for_the_longest_batch() -> None:
    offloader = Offloader(TO_HOST, 4)
    offloader.use_link(HostLink(Wire(), HostLimits(None, lambda: HostMemory(None, None))))
    # The first layer says what all of them need; its own buffer alone is made anew.
    assert run_batches(offloader, 100, [10, 40, 100, 70, 100]) == [4, 5, 5, 5, 5]
    assert offloader.stats.host_bytes == offloader.stats.peak_host_bytes == 4 * 100 * 16 * 4
    assert is_empty(offloader)


def test_nothing_is_reserved_that_there_is_no_room_for() -> None:
    cap = 4 * 60 * 16 * 4
    offloader = Offloader(TO_HOST, 4)
    offloader.use_link(HostLink(Wire(), HostLimits(cap, lambda: HostMemory(None, None))))
    run_batches(offloader, 100, [10])
    assert offloader.stats.host_bytes == 4 * 10 * 16 * 4
    run_batches(offloader, 100, [60])
    with pytest.raises(HostMemoryError, match="host_memory allows"):
        run_batches(offloader, 100, [100])


def test_memory_that_the_system_does_not_give_is_said() -> None:
    offloader = Offloader(TO_HOST, 1)
    wire = Wire()
    wire.allocate = lambda num_bytes: PageableMemory(2**62)
    offloader.use_link(HostLink(wire, HostLimits(None, lambda: LOW, trusts=True)))
    with pytest.raises(HostMemoryError) as error:
        run_offloaded(offloader, 0, recompute, torch.tanh, torch.randn(5, 64, requires_grad=True) * 1)
    said = str(error.value)
    del error
    assert said.startswith(
        "Offloading to the host needs 1.2 KiB more of host memory than the 0 B that it holds, which the system does "
        "not give: "
    )
    assert said.endswith(
        "; 1.0 GiB are free (MemAvailable of the machine), which trust_host_memory says not to look at. "
        "Raise the limit of locked memory (ulimit -l), set host_memory to what there is, lower fraction, shorten the "
        "sequence, offload fewer layers, or write to disk with offload: {to: disk, path: /scratch}."
    )
    assert is_empty(offloader)


def test_buffers_have_the_size_of_the_tensor() -> None:
    offloader = Offloader(TO_HOST, 1)
    weight = torch.randn(64, requires_grad=True)
    kept = run_offloaded(offloader, 0, recompute, lambda x: x * weight, torch.randn(5, 64))
    assert offloader.stats.host_bytes == 5 * 64 * 4
    kept.sum().backward()
    offloader.use_link(HostLink(Wire(), HostLimits(None)))
    assert offloader.stats.host_bytes == 0
