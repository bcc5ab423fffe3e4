"""Holds Python's collector of cycles off. Loads nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycles_collected() -> Iterator[None]:
    """Hold the collector off: a tape has so many objects that it would take a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
