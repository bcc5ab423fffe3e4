"""What is left free of a device's memory, and why."""

from __future__ import annotations

import pytest

from hf_ckpt.simulation.devices import CPU, GIB, MIB, find_device, workspace_bytes
from hf_ckpt.simulation.reserve import reserve


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
def test_reserve_is_a_range_with_reasons(name: str, workspace: int, context: float) -> None:
    device = find_device(name)
    kept = reserve(device)
    assert [item.name for item in kept.items] == ["context", "workspaces", "fragmentation"]
    assert all(item.reason and item.low_bytes < item.high_bytes for item in kept.items)
    assert workspace_bytes(device) == workspace
    assert kept.low_bytes == int(0.3 * GIB) + int(0.01 * device.memory_bytes)
    assert kept.high_bytes == int(context * GIB) + 2 * workspace + int(0.05 * device.memory_bytes)


def test_reserve_is_described_on_one_line() -> None:
    assert reserve(find_device("rtx4090")).describe() == (
        "548.9 MiB to 1.9 GiB: context 307.2 MiB to 716.8 MiB, workspaces 0 B to 16.2 MiB, "
        "fragmentation 241.7 MiB to 1.2 GiB"
    )
    assert reserve(CPU).describe() == "256.0 MiB to 1.0 GiB: process 256.0 MiB to 1.0 GiB"
    assert workspace_bytes(CPU) == 0
