"""Host memory that a process can still take: what the machine has free, and what its control groups allow.

Reads `/proc` and `/sys/fs/cgroup`; pure Python, and says "unknown" where there is neither (macOS, Windows).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hf_ckpt.units import format_bytes

_UNLIMITED = 2**60
"""Version 1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True)
class HostMemory:
    """What can still be taken, in bytes; None where it cannot be told.

    Attributes:
        machine_bytes: `MemAvailable` of the machine: free, or used for what can be dropped.
        group_bytes: the least that a control group above this process leaves, None where none has a limit.
        total_bytes: all there is, used or not: memory of the machine, or the least limit of a control group.
        group_total_bytes: the least limit of a control group, None where none has one.
    """

    machine_bytes: int | None
    group_bytes: int | None
    total_bytes: int | None = None
    group_total_bytes: int | None = None

    def of_groups(self) -> HostMemory:
        """Return what the control groups alone say: a virtual machine may be given more memory when it is touched."""
        return HostMemory(None, self.group_bytes, self.group_total_bytes, self.group_total_bytes)

    @property
    def available_bytes(self) -> int | None:
        """The smaller of the two."""
        return min((left for left in (self.machine_bytes, self.group_bytes) if left is not None), default=None)

    def __str__(self) -> str:
        """Return a clause for messages."""
        if self.available_bytes is None:
            return "what is free cannot be told"
        is_machine = self.available_bytes == self.machine_bytes
        where = "MemAvailable of the machine" if is_machine else "limit of the control group less its usage"
        return f"{format_bytes(self.available_bytes)} are free ({where})"


def num_processes() -> int:
    """Return how many processes the launcher (torchrun, accelerate) has started on this machine: they share it."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdigit() else 1


def available_bytes(*, trusts: bool = False) -> int | None:
    """Return the bytes of host memory that this process can still take, or None where that cannot be told.

    Args:
        trusts: look at the limits of control groups only, and trust the machine to have what it says it has not.

    Example:
        >>> free = available_bytes()
        >>> free is None or free > 0
        True
    """
    found = now()
    return (found.of_groups() if trusts else found).available_bytes


def now(root: Path = Path("/")) -> HostMemory:
    """Read what can be taken at this moment.

    Args:
        root: directory that holds `proc` and `sys`.
    """
    groups = list(_groups(root))
    left = min((max(limit - used, 0) for limit, used in groups), default=None)
    group_total = min((limit for limit, _ in groups), default=None)
    total = min((told for told in (_machine(root, "MemTotal"), group_total) if told is not None), default=None)
    return HostMemory(_machine(root, "MemAvailable"), left, total, group_total)


def _machine(root: Path, field: str) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, amount = line.partition(":")
        if name == field:
            return int(amount.split()[0]) * 1024
    return None


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and usage of each control group above this process that has a limit; both versions, in bytes.

    Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.
    """
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            home = _mounted(root, "cgroup2", None)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            home = _mounted(root, "cgroup", "memory")
        else:
            continue
        if home is not None:
            yield from _limits(*home, path, names)


def _limits(base: Path, mounted: str, path: str, names: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    # In a container the group's path may be that of the host, of which only what lies below the mount can be seen.
    inside = PurePosixPath(path)
    below = inside.relative_to(mounted) if inside.is_relative_to(mounted) else PurePosixPath(".")
    group = base / below
    for folder in (group, *group.parents):
        limit, used = _number(folder / names[0]), _number(folder / names[1])
        if limit is not None and limit < _UNLIMITED and used is not None:
            yield limit, used - _reclaimable(folder, names[2])
        if folder == base:
            return


def _mounted(root: Path, kind: str, option: str | None) -> tuple[Path, str] | None:
    """Return where a hierarchy of control groups is mounted, and which of its groups is seen there."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        words, filesystem = fields.split(), rest.split()
        if len(words) > 4 and filesystem[:1] == [kind] and (option is None or option in filesystem[-1].split(",")):
            return root / words[4].lstrip("/"), words[3]
    return None


def _reclaimable(folder: Path, name: str) -> int:
    """Return the bytes of files that were read and can be dropped: they count as used, and stand in nobody's way."""
    for line in _lines(folder / "memory.stat"):
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return 0


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
