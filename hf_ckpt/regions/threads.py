"""Regions that run in several threads at once: exact while no random number is drawn, refused where one may be.

All state of a region belongs to its call or to its thread, but for torch's generators, which are the process's: what
another thread draws while a region runs is missing when the region draws again in backward. Nothing else would show it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from hf_ckpt.errors import UnsupportedError


class OneOfSeveral:
    """A run of a region, forward or recomputation, while others may go on in other threads. A context manager.

    Costs nothing but a look at the others while there are none.

    Raises:
        UnsupportedError: another thread was in a region meanwhile, and the state of a generator has moved.
    """

    __slots__ = ("_random_state", "_task", "_thread")

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._task = torch._C._current_graph_task_id()
        self._random_state: list[Tensor] | None = None
        with _LOCK:
            others = [run for run in _RUNS if not self._belongs_to(run)]
            _RUNS.append(self)
            if others:
                now = _random_state()
                for run in (self, *others):
                    run._random_state = run._random_state or now

    def __exit__(self, *raised: object) -> None:
        with _LOCK:
            _RUNS.remove(self)
        before, self._random_state = self._random_state, None
        if before is not None and not all(map(torch.equal, before, _random_state())):
            raise UnsupportedError(
                "Two threads ran layers under a plan at the same time, and random numbers were drawn or brought back "
                "meanwhile. Their generator is the whole process's, so that recomputation could not draw the same ones "
                "again. Let the threads take turns (a lock around forward and backward), or use processes."
            )

    def _belongs_to(self, other: OneOfSeveral) -> bool:
        """Whether this is a part of the same forward or backward: one backward may run in a thread for each device."""
        return self._thread == other._thread or (self._task == other._task and self._task != _NO_TASK)


_NO_TASK = -1
_LOCK = threading.Lock()
_RUNS: list[OneOfSeveral] = []
"""The runs that go on now, of all models: the generators are the process's as well."""


def _random_state() -> list[Tensor]:
    states = [torch.get_rng_state()]
    devices: Any = torch.get_device_module()
    if getattr(devices, "_initialized", False) and hasattr(devices, "get_rng_state_all"):
        states.extend(devices.get_rng_state_all())
    return states
