"""Which run of a region is going on in this thread, for the modules inside of it."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch import nn

from hf_ckpt.regions.selective.kernels import Region


class Run(Region, Protocol):
    """One run of a region: the forward, or a recomputation of it.

    Attributes:
        modules: globs that the modules which run now match, one entry for each module.
    """

    modules: list[str]

    def enter(self, module: nn.Module, args: Any) -> None:
        """The forward of a linear or adapted layer begins (`linears`)."""

    def leave(self, module: nn.Module, output: Any) -> Any:
        """It ends. Return what takes the place of its output; None to leave that."""


class _Running(threading.local):
    """By thread: backward runs in others than forward, and replicas of a model in one each."""

    run: Run | None = None


RUNNING = _Running()
