"""Whether a step fits: one verdict, from what is allocated and reserved, the context and a margin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_ckpt.simulation.devices import CPU, GIB, MIB, find_device, workspace_bytes
from hf_ckpt.simulation.fit import Capacity, Fit, capacity_of, judge

CARD = replace(find_device("rtx4090"), memory_bytes=100 * GIB)


@pytest.mark.parametrize(
    ("name", "workspace", "context"),
    [
        ("rtx4090", 8 * MIB + 128 * 1024, 0.7),
        ("a100-80gb", 8 * MIB + 128 * 1024, 1.8),
        ("h200", 32 * MIB, 1.8),
        ("b200", 32 * MIB, 1.8),
        ("rtx5090", 32 * MIB, 0.7),
    ],
)
def test_a_card_has_room_for_a_step_next_to_the_context_and_a_margin(name: str, workspace: int, context: float) -> None:
    device = find_device(name)
    capacity = capacity_of(device)
    assert workspace_bytes(device) == workspace
    assert capacity.outside == (int(0.3 * GIB), int(context * GIB))
    assert capacity.reserved_bytes == device.memory_bytes - int(context * GIB) - -(-device.memory_bytes // 100)
    assert capacity.allocated_bytes == device.memory_bytes - int(0.3 * GIB)


@pytest.mark.parametrize(
    ("peak", "reserved", "fit"),
    [
        # 100 GiB less 0.7 of the context and 1 of a margin.
        (20.0, 98.3, Fit.YES),
        (20.0, 98.31, Fit.PERHAPS),
        (20.0, 400.0, Fit.PERHAPS),
        (99.69, 400.0, Fit.PERHAPS),
        (99.71, 400.0, Fit.NO),
        # What is allocated is reserved too.
        (98.31, 0.0, Fit.PERHAPS),
    ],
)
def test_a_step_fits_without_giving_back_perhaps_with_it_or_not_even_so(peak: float, reserved: float, fit: Fit) -> None:
    capacity = capacity_of(CARD)
    verdict = judge(int(peak * GIB), int(reserved * GIB), capacity)
    assert verdict.fit is fit
    # What it needs is the smallest card that it fits.
    assert (verdict.needed_bytes <= capacity.num_bytes) is (fit is Fit.YES)
    enough = capacity.with_bytes(verdict.needed_bytes)
    assert judge(verdict.peak_bytes, verdict.reserved_bytes, enough).fit is Fit.YES
    less = capacity.with_bytes(verdict.needed_bytes - 2)
    assert judge(verdict.peak_bytes, verdict.reserved_bytes, less).fit is not Fit.YES


def test_several_processes_have_buffers_between_them() -> None:
    device = find_device("a100-80gb")
    assert capacity_of(device, 8).outside[1] - capacity_of(device).outside[1] == int(0.7 * GIB) + 1


def test_a_budget_is_of_the_same_kind_as_the_card_and_on_a_cpu_the_step_is_all_of_it() -> None:
    assert capacity_of(CARD, budget_bytes=CARD.memory_bytes) == capacity_of(CARD)
    machine = replace(CPU, memory_bytes=16 * GIB)
    assert capacity_of(machine, budget_bytes=4 * GIB) == Capacity(4 * GIB)
    # No more than the machine has besides the process.
    assert capacity_of(machine).reserved_bytes == capacity_of(machine, budget_bytes=16 * GIB).num_bytes == 15 * GIB
    assert judge(4 * GIB, 4 * GIB, Capacity(4 * GIB)).fit is Fit.YES
    assert judge(4 * GIB + 1, 4 * GIB + 1, Capacity(4 * GIB)).fit is Fit.NO
