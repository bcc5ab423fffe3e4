"""What is left free of a device's memory."""

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
def test_reserve_of_a_card_is_a_range(name: str, workspace: int, context: float) -> None:
    device = find_device(name)
    kept = reserve(device)
    assert [item.name for item in kept.items] == ["context", "workspaces", "fragmentation"]
    assert all(item.low_bytes < item.high_bytes for item in kept.items)
    assert workspace_bytes(device) == workspace
    assert kept.low_bytes == int(0.3 * GIB) + int(0.01 * device.memory_bytes)
    assert kept.high_bytes == int(context * GIB) + 2 * workspace + int(0.05 * device.memory_bytes)


def test_reserve_of_a_cpu_is_what_the_process_takes() -> None:
    assert [(item.name, item.low_bytes, item.high_bytes) for item in reserve(CPU).items] == [
        ("process", 256 * MIB, GIB)
    ]
    assert workspace_bytes(CPU) == 0
