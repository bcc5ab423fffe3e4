"""Processes that end with the one that started them, and that are ended with all that they started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""
_GRACE_S = 5.0
# Loaded here: between fork and exec nothing may be imported.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process in a group of its own that dies with this one.

    Args:
        words: the command.
        options: of `subprocess.Popen`.
    """
    options = {"process_group": 0, "preexec_fn": partial(die_with_parent, os.getpid())} | options
    return subprocess.Popen(list(words), **options)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, however that happens. Linux only.

    To the kernel the parent is the thread that started this process, and one that ends counts as dead: start processes
    from the main thread.

    Args:
        parent: its process number: it may have died before the kernel was asked.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process of `start` with its group, and wait for it.

    Args:
        process: running or not.
    """
    # Not waited for, its number is still its group's, even if it has ended by itself.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait(_GRACE_S)
