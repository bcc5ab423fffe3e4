"""What every test on a device runs under: kernels that repeat themselves bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _repeatable_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Without this the backward of an embedding on CUDA adds in any order, and no two steps are alike.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
