"""The peak that a run had, beside the one that was predicted."""

from __future__ import annotations

import torch

from hf_ckpt.units import format_bytes


class TrainingPeak:
    """The highest memory of a device since this was made."""

    def __init__(self) -> None:
        self._before = _peak_allocated()

    def beside(self, predicted_bytes: int) -> str:
        """Return predicted and measured peak in words."""
        return _beside(predicted_bytes, self._before, _peak_allocated())


def _beside(predicted_bytes: int, before: int | None, now: int | None) -> str:
    predicted = f"Predicted peak {format_bytes(predicted_bytes)}"
    if before is None or now is None:
        return f"{predicted}; a CPU does not count what is allocated, so nothing was measured."
    if now <= before:
        # The counter is everybody's, and so not set back: it tells of this time only once it has risen.
        return f"{predicted}; measured no more than the {format_bytes(before)} that were allocated before."
    return f"{predicted}, measured {format_bytes(now)} ({now / predicted_bytes - 1:+.1%})."


def _peak_allocated() -> int | None:
    return torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else None
