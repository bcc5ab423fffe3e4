"""Holds Python's collector of cycles off where it would find nothing, or be in the way. Loads nothing else."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycles_collected() -> Iterator[None]:
    """Hold the collector off. A tape, say, has so many objects that it would take a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def hold_off_for_good() -> None:
    """Hold the collector off until the process ends, which uses all that it makes: a command that predicts."""
    gc.disable()
    _IS_HELD_OFF.append(True)
    # Else nanobind, at exit, takes what is frozen for leaked.
    atexit.register(gc.unfreeze)


_IS_HELD_OFF: list[bool] = []


def count_as_old() -> None:
    """Make every object old that is there now, in no time: what looks at the new ones then has few to look at.

    Where the collector is held off for good, who looks for what refers to an object finds none of the old ones.
    """
    if _IS_HELD_OFF:
        gc.freeze()
    # What somebody else has frozen stays frozen.
    elif not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


@contextmanager
def imports_are_no_garbage() -> Iterator[None]:
    """Leave what is imported inside out of all searches for garbage, which the Trainer makes whenever a run begins.

    Among the objects of torch and transformers each takes as long as a step of a small model.
    """
    with no_cycles_collected():
        yield
    gc.freeze()
    # Else nanobind, at exit, takes what is frozen for leaked.
    atexit.register(gc.unfreeze)
