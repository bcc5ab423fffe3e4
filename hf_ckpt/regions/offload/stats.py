"""What an engine has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stats:
    """Counts since the engine was made.

    Attributes:
        num_tensors: tensors copied to the host (or to disk).
        bytes_out: bytes copied there.
        bytes_in: bytes copied back.
        num_live: tensors that wait on the host now.
        live_bytes: their bytes.
        host_bytes: host memory held now, in use or kept for later.
        peak_host_bytes: most host memory held at once.
        seconds_waited: seconds for which a thread waited for a copy. On a GPU streams wait for each other instead,
            which this does not see.
        fraction: share of the layers that send away what they save, as it stands now.
        forgotten_peak_bytes: the most of the device that was allocated before the engine let torch count the peak anew,
            to measure the share; 0 where it did not.
        num_left_alone: tensors that stayed where they were, by the reason.
    """

    num_tensors: int
    bytes_out: int
    bytes_in: int
    num_live: int
    live_bytes: int
    host_bytes: int
    peak_host_bytes: int
    seconds_waited: float
    fraction: float
    forgotten_peak_bytes: int
    num_left_alone: dict[str, int]


@dataclass
class Counts:
    """The part of `Stats` that the engine itself counts."""

    num_tensors: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    num_live: int = 0
    live_bytes: int = 0
    num_passes: int = 0
    num_left_alone: dict[str, int] = field(default_factory=dict)

    def leave_alone(self, reason: str) -> None:
        """Count a tensor that stayed."""
        self.num_left_alone[reason] = self.num_left_alone.get(reason, 0) + 1

    def send(self, num_bytes: int) -> None:
        """Count a tensor that was sent away."""
        self.num_tensors += 1
        self.bytes_out += num_bytes
        self.num_live += 1
        self.live_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Count a tensor that nobody needs any more."""
        self.num_live -= 1
        self.live_bytes -= num_bytes
