"""What every test on a device runs under: kernels that repeat themselves bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.repeatable import ask_cublas, repeatable_kernels

# Before anything here uses CUDA, and for as long as this process lives: torch looks at it once.
ask_cublas()

HERE = Path(__file__).parent
ON_CUDA = (
    # Of operators that have no kernel that repeats itself, and run all the same. Each test shows whether it matters.
    "ignore:.*does not have a deterministic implementation:UserWarning",
    # The same of fused attention: flash, memory-efficient and cuDNN's.
    "ignore:.*defaults to a non-deterministic algorithm:UserWarning",
    # The thread of the backward makes itself a context where it is the first to call cuBLAS.
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
    # Engines make gradients on streams of their own, which costs an event.
    "ignore:The AccumulateGrad node's stream does not match:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let these warnings pass; all others are errors here too."""
    for item in items:
        if HERE in item.path.parents:
            # Those that a test names itself come later, and so first.
            for words in ON_CUDA:
                item.add_marker(pytest.mark.filterwarnings(words), append=False)


@pytest.fixture(autouse=True)
def _repeatable_kernels() -> Iterator[None]:
    # Without this the backward of an embedding on CUDA adds in any order, and no two steps are alike. Not every
    # operator of every model has such a kernel; tests of fused attention ask for one, which they get only so.
    with repeatable_kernels(warn_only=True):
        yield
