"""The peak that is predicted is the memory that the process takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.resident import CASES, measure, predict

GIB = 2**30

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells of resident memory"),
]


def test_resident_memory_of_the_process_rises_by_what_is_predicted() -> None:
    # The suite of the benchmark holds the others, which compute for minutes.
    name = "none"
    predicted = predict(CASES[name])
    assert predicted > GIB
    # Blocks below 64 KiB stay with the allocator, and the interpreter needs some of its own.
    assert measure(name) == pytest.approx(predicted, rel=0.03)
