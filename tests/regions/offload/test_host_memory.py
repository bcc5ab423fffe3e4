"""What host memory can still be taken: /proc/meminfo, and control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_ckpt.auto.budgets import free_host_bytes
from hf_ckpt.policy.options import Offload
from hf_ckpt.regions.offload import host_memory
from hf_ckpt.regions.offload.host_memory import HostMemory

pytestmark = pytest.mark.core

GIB = 2**30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB // 1024} kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    """Write a machine's files below a directory."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_limits(tmp_path: Path) -> None:
    assert host_memory.read_host_memory(machine(tmp_path, {})) == HostMemory(48 * GIB, None, 64 * GIB)


def test_an_unknown_system_says_nothing(tmp_path: Path) -> None:
    found = host_memory.read_host_memory(tmp_path)
    assert found == HostMemory(None, None)
    assert found.available_bytes is None
    assert str(found) == "what is free is not known"


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


def test_version_2_takes_the_tightest_group_above(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user/job/step\n",
        "proc/self/mountinfo": V2,
        "sys/fs/cgroup/user/job/step/memory.max": "max\n",
        "sys/fs/cgroup/user/job/step/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/user/job/memory.max": f"{16 * GIB}\n",
        "sys/fs/cgroup/user/job/memory.current": f"{10 * GIB}\n",
        "sys/fs/cgroup/user/job/memory.stat": f"anon {4 * GIB}\ninactive_file {2 * GIB}\n",
        "sys/fs/cgroup/user/memory.max": f"{40 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{20 * GIB}\n",
    }
    found = host_memory.read_host_memory(machine(tmp_path, files))
    # 16 less the 10 in use, of which 2 are files that can be dropped.
    assert found == HostMemory(48 * GIB, 8 * GIB, 16 * GIB, 16 * GIB)
    assert str(found) == "8.0 GiB are free (limit of the control group less its usage)"


def test_version_1_reads_the_hierarchy_of_memory(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:cpu:/job\n4:memory:/job\n0::/\n",
        "proc/self/mountinfo": (
            "34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
        ),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{30 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{5 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    assert host_memory.read_host_memory(machine(tmp_path, files)) == HostMemory(48 * GIB, 4 * GIB, 8 * GIB, 8 * GIB)


def test_in_a_container_the_group_lies_below_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        "proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    }
    assert host_memory.read_host_memory(machine(tmp_path, files)) == HostMemory(48 * GIB, 3 * GIB, 4 * GIB, 4 * GIB)


def test_a_group_that_cannot_be_seen_falls_back_to_what_can(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/kubepods/pod\n",
        "proc/self/mountinfo": V2,
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
    }
    # A group over its limit has nothing left, and not less than that.
    assert host_memory.read_host_memory(machine(tmp_path, files)) == HostMemory(48 * GIB, 0, 2 * GIB, 2 * GIB)


def test_a_machine_that_is_trusted_is_bound_by_its_groups_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = HostMemory(48 * GIB, 4 * GIB, 8 * GIB, 16 * GIB)
    assert found.of_groups() == HostMemory(None, 4 * GIB, 16 * GIB, 16 * GIB)
    without = host_memory.read_host_memory(machine(tmp_path, {}))
    assert without.of_groups() == HostMemory(None, None)
    for told, free, trusted in ((found, 4 * GIB, 4 * GIB), (without, 48 * GIB, None)):
        monkeypatch.setattr(host_memory, "read_host_memory", lambda told=told: told)
        assert (host_memory.available_bytes(), host_memory.available_bytes(trusts=True)) == (free, trusted)


def test_plans_are_made_for_what_a_trusted_machine_may_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "read_host_memory", lambda: HostMemory(2 * GIB, 9 * GIB, 4 * GIB, 16 * GIB))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert free_host_bytes(None) == free_host_bytes(Offload()) == GIB // 2
    assert free_host_bytes(Offload(trust_host_memory=True)) == 4 * GIB


def test_this_machine_has_some() -> None:
    free = host_memory.available_bytes()
    assert free is None or 0 < free < 2**50
