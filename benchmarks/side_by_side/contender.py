"""A way to save activation memory, as the benchmarks see it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

GROUPS = ("none", "today", "elsewhere", "compiled", "ours", "auto")
"""`today` is what a user of the plain Trainer can set; `elsewhere` is what other trainers and libraries have."""

OFFLOAD_WARMUP = 3
"""Steps in which an engine that offloads takes its buffers, and ours finds how much it can hide."""
SELECTIVE_WARMUP = 2
"""Steps in which our selective modes find out how to run: in both of them each kept output is read twice to look for
writes that no operator declares, and the device is waited for."""


class NotHereError(Exception):
    """A contender cannot run on this machine or on this model. The text says why, in the words of who refuses."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to save activation memory.

    Args:
        name: in results and on the command line.
        title: in tables and pictures.
        group: one of `GROUPS`.
        enter: takes a model in training mode; what it returns yields the module to call with a batch, and puts the
            model back on exit. Raises `NotHereError`.
        is_reversible: whether the model can be used by others afterwards; if not, it is built anew.
        num_warmup: steps before its step is as all later ones are.
    """

    name: str
    title: str
    group: str
    enter: Callable[[nn.Module], AbstractContextManager[nn.Module]]
    is_reversible: bool = True
    num_warmup: int = 1
