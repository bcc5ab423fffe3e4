"""Random generators as a run has left them, after code that may draw from any of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put back the states of torch's generators (CPU and current GPU), numpy's global one and Python's afterwards."""
    state, of_numpy = random.getstate(), np.random.get_state()  # the global one
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]  # upstream
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(of_numpy)
