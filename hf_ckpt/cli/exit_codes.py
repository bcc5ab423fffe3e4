"""With what codes the commands of `hf-ckpt` end, and how they end on Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from hf_ckpt.cli.shared_options import say

HOLDS, FAILS, WRONG_INPUT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
"""Exit codes: all is well; a check failed, or nothing fits; wrong input; Ctrl-C; nobody reads what is printed."""
STOPPED = "Stopped by Ctrl-C."


@contextlib.contextmanager
def leaving_at_ctrl_c() -> Iterator[None]:
    """Leave at once on Ctrl-C: during transformers' imports it comes out as another error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        say(f"\n{STOPPED}")
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
