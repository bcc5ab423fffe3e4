"""Host memory: what this process can still take of the machine and its control groups, and how much offload may take.

Reads `/proc` and `/sys/fs/cgroup`; pure Python, and says "unknown" where there is neither (macOS, Windows).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hf_ckpt.errors import HostMemoryError
from hf_ckpt.units import format_bytes

# Version 1 writes "no limit" as a number near 2**63.
_UNLIMITED = 2**60

# Bytes of the machine's memory that are left to everything else; below that a machine starts to swap or to kill.
_LEFT_OVER = 2**29
_OTHERWISE = (
    ", lower fraction, shorten the sequence, offload fewer layers, or write to disk with "
    "offload: {to: disk, path: /scratch}."
)


@dataclass(frozen=True)
class HostMemory:
    """What can still be taken, in bytes; None where that is not known."""

    machine_bytes: int | None
    """`MemAvailable` of the machine: free, or used for what can be dropped."""
    group_bytes: int | None
    """The smallest rest that a control group above this process leaves; None if none has a limit."""
    total_bytes: int | None = None
    """All there is, used or not: memory of the machine, or the lowest limit of a control group."""
    group_total_bytes: int | None = None
    """The lowest limit of a control group; None if none has one."""

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
            return "what is free is not known"
        is_machine = self.available_bytes == self.machine_bytes
        where = "MemAvailable of the machine" if is_machine else "limit of the control group less its usage"
        return f"{format_bytes(self.available_bytes)} are free ({where})"


def num_local_processes() -> int:
    """Return how many processes the launcher (torchrun, accelerate) has started on this machine: they share it."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() else 1


def available_bytes(*, trusts: bool = False) -> int | None:
    """Return the bytes of host memory that this process can still take, or None if that is not known.

    With `trusts` only the limits of control groups count: the machine may have more than it says.

    Example:
        >>> free = available_bytes()
        >>> free is None or free > 0
        True
    """
    found = read_host_memory()
    return (found.of_groups() if trusts else found).available_bytes


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """Read what can be taken at this moment; `root` holds `proc` and `sys`."""
    groups = list(_groups(root))
    left = min((max(limit - used, 0) for limit, used in groups), default=None)
    group_total = min((limit for limit, _ in groups), default=None)
    total = min((limit for limit in (_machine(root, "MemTotal"), group_total) if limit is not None), default=None)
    return HostMemory(_machine(root, "MemAvailable"), left, total, group_total)


class HostLimits:
    """Refuses memory before it runs out: beyond the user's cap, or beyond what the machine has."""

    def __init__(
        self,
        cap: int | None,
        machine: Callable[[], HostMemory] = read_host_memory,
        *,
        trusts: bool = False,
    ) -> None:
        # The cap is for this process. `trusts` leaves out the figures of the machine, as those of virtual machines may
        # grow when memory is touched; limits of control groups hold all the same.
        self._cap = cap
        self._trusts = trusts
        self._machine = machine
        self._num_processes = num_local_processes()

    def check(self, num_bytes: int, held_bytes: int) -> None:
        """Check that `num_bytes` more can be taken by a process that holds `held_bytes` already.

        Raises:
            HostMemoryError: the cap or the machine forbids it.
        """
        if num_bytes <= 0:
            return
        total = num_bytes + held_bytes
        if self._cap is not None and total > self._cap:
            raise HostMemoryError(
                f"Offloading to the host needs {format_bytes(total)} of host memory, but host_memory allows "
                f"{format_bytes(self._cap)}. Raise host_memory{_OTHERWISE}"
            )
        found = self._machine()
        groups = found.of_groups()
        machine = groups if self._trusts else found
        if machine.available_bytes is not None and num_bytes > machine.available_bytes - _LEFT_OVER:
            raise HostMemoryError(
                f"Offloading to the host needs {format_bytes(num_bytes)} more of host memory, but {machine}. "
                f"Free some{_OTHERWISE}{_trust(machine.available_bytes, groups.available_bytes)}"
            )
        # What is free says nothing of what the other processes are about to take, or have taken for the same.
        if machine.total_bytes is not None and self._num_processes * total > machine.total_bytes:
            raise HostMemoryError(
                f"Offloading to the host needs {format_bytes(total)} in each of {self._num_processes} processes, "
                f"but this machine has {format_bytes(machine.total_bytes)} in all. Start fewer{_OTHERWISE}"
                f"{_trust(machine.total_bytes, groups.total_bytes)}"
            )

    def allocation_error(self, num_bytes: int, held_bytes: int, error: Exception) -> HostMemoryError:
        """Return the error for bytes that were allowed, but that the system does not give or does not pin."""
        trusted = ", which trust_host_memory says not to look at" if self._trusts else ""
        return HostMemoryError(
            f"Offloading to the host needs {format_bytes(num_bytes)} more of host memory than the "
            f"{format_bytes(held_bytes)} that it holds, which the system does not give: {error}; "
            f"{self._machine()}{trusted}. Raise the limit of locked memory (ulimit -l), set host_memory to what there "
            f"is{_OTHERWISE}"
        )


def _trust(bound: int, of_groups: int | None) -> str:
    if bound == of_groups:
        return ""
    return (
        " Where the machine's figures are too low (a virtual machine that is given memory when it is touched), set "
        "trust_host_memory: true."
    )


# --- Reading /proc and /sys. ---


def _machine(root: Path, field: str) -> int | None:
    kibibytes = _field(root / "proc/meminfo", f"{field}:")
    return None if kibibytes is None else kibibytes * 1024


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and usage, in bytes, of each control group above this process that has a limit; both versions.

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
            # Files that were read and can be dropped count as used, but can be taken.
            yield limit, used - (_field(folder / "memory.stat", names[2]) or 0)
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


def _field(path: Path, name: str) -> int | None:
    """Return the number behind a name, in a file that has one on each line."""
    found = (words for words in map(str.split, _lines(path)) if words[:1] == [name])
    return next((int(words[1]) for words in found), None)


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
