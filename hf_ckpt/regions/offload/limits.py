"""How much host memory the engine may take: the user's cap, and what the machine has."""

from __future__ import annotations

from collections.abc import Callable

from hf_ckpt.errors import HostMemoryError
from hf_ckpt.regions.offload import host_memory
from hf_ckpt.units import format_bytes

_LEFT_OVER = 2**29
"""Bytes of the machine's memory that are left to everything else; below that a machine starts to swap or to kill."""


_OTHERWISE = (
    ", lower fraction, shorten the sequence, offload fewer layers, or write to disk with "
    "offload: {to: disk, path: /scratch}."
)


class HostLimits:
    """Says no before memory runs out.

    Args:
        cap: bytes that may be held in all by this process; None for no cap but the machine's.
        trusts: whether the machine's own figures are left out: those of virtual machines may grow when memory is
            touched. Limits of control groups hold all the same.
        machine: returns what the machine has; replaced in tests.
        num_processes: how many on this machine take as much; None for what the launcher says.
    """

    def __init__(
        self,
        cap: int | None,
        machine: Callable[[], host_memory.HostMemory] = host_memory.now,
        num_processes: int | None = None,
        *,
        trusts: bool = False,
    ) -> None:
        self._cap = cap
        self._trusts = trusts
        self._machine = machine
        self._num_processes = num_processes or host_memory.num_processes()

    def check(self, num_bytes: int, held_bytes: int) -> None:
        """Refuse bytes that there are not.

        Args:
            num_bytes: how many more are wanted.
            held_bytes: how many are held already.

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

    def not_given(self, num_bytes: int, held_bytes: int, error: Exception) -> HostMemoryError:
        """Return the error for bytes that were allowed, and that the system does not give or does not pin.

        Args:
            num_bytes: how many more were wanted.
            held_bytes: how many are held already.
            error: what the system says.
        """
        trusted = ", which trust_host_memory says not to look at" if self._trusts else ""
        return HostMemoryError(
            f"Offloading to the host needs {format_bytes(num_bytes)} more of host memory beside the "
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
