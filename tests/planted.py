"""Faults planted in the library: what runs in the place of a region's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from torch import Tensor

from hf_ckpt.regions.execution_state import RandomState, recomputing
from hf_ckpt.regions.saved_tensors import Checkpoint


def in_place_of_checkpoint(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """Let `run(function, *tensors)` run each region, with the options that torch's checkpoint takes."""

    def forward(checkpoint: Checkpoint, tensors: Sequence[Tensor], *_: Any) -> Any:
        runs: list[None] = []

        def function(*tensors: Tensor) -> Any:
            runs.append(None)
            with recomputing() if len(runs) > 1 else nullcontext():
                return checkpoint._run(*tensors)

        return run(function, *tensors, use_reentrant=False, preserve_rng_state=True)

    monkeypatch.setattr(Checkpoint, "forward", forward)


def not_checkpointed(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Keep everything."""
    return function(*args)


def random_state_left(state: RandomState) -> AbstractContextManager[None]:
    """Bring nothing back; in the place of `RandomState.brought_back`."""
    return nullcontext()
