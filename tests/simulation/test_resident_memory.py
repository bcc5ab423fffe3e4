"""The peak that is predicted is the memory that the process takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.resident import Case, measure, predict

MIB = 2**20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells of resident memory"),
]


@pytest.mark.sweep
def test_resident_memory_of_the_process_rises_by_what_is_predicted() -> None:
    # The benchmark holds the policies and larger steps, which compute for minutes.
    case = Case(batch_size=6, layers=4)
    predicted = predict(case)
    assert predicted > 128 * MIB
    # Blocks below 64 KiB stay with the allocator, and the interpreter needs some of its own.
    assert measure(case) == pytest.approx(predicted, rel=0.03)
