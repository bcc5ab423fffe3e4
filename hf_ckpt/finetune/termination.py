"""SIGTERM ends a run as Ctrl-C does. Only a command may say so: signals belong to the program, not to a library."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_DEADLINE_S = 20.0
"""How long the run may take to end, in seconds. Launchers kill what has not ended 30 s after SIGTERM."""
EXIT_CODE = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """Raised in the main thread on SIGTERM."""


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM, after the handler that was there; in the end put that one back.

    A handler that is set within governs, such as the Trainer's with `enable_jit_checkpoint`.
    """
    found = signal.getsignal(signal.SIGTERM)
    # Only the main thread may set a handler. None: one that is not Python's.
    if threading.current_thread() is not threading.main_thread() or found in (signal.SIG_IGN, None):
        yield
        return
    process, deadline = os.getpid(), threading.Timer(_DEADLINE_S, os._exit, [EXIT_CODE])
    deadline.daemon = True

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            # A forked child, such as one that reads data, has its parent's handlers.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if callable(found):
            found(number, frame)
        # Once: the run is ending, and must not be interrupted in that.
        if deadline.ident is None:
            deadline.start()
            raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, found)
        deadline.cancel()
