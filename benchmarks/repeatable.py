"""Kernels that repeat themselves bit by bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables that ask cuBLAS for products that repeat themselves."""


def ask_cublas() -> None:
    """Ask cuBLAS for products that repeat themselves. It reads this when it starts: call it before CUDA is used."""
    for name, value in CUBLAS.items():
        os.environ.setdefault(name, value)


@contextmanager
def repeatable_kernels(*, warn_only: bool) -> Iterator[None]:
    """Let torch choose kernels that repeat themselves; to be entered before CUDA is used in this process.

    Args:
        warn_only: whether operators that have none run all the same. Fused attention then takes the fast backward,
            which does not repeat itself; only where operators may fail does it take the other one.
    """
    ask_cublas()
    found = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # It would fill whatever a kernel is about to write, which takes time that no training pays.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(found[0], warn_only=found[1])
