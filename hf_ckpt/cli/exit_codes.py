"""With what codes the commands of `hf-ckpt` end, and how they end on Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator

from hf_ckpt.cli.shared_options import say

HOLDS, FAILS, WRONG_INPUT, PERHAPS, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 130, 141
"""Exit codes: all is well; a check failed, or nothing fits; wrong input; it fits only perhaps; Ctrl-C; nobody reads
what is printed."""
STOPPED = "Stopped by Ctrl-C."


def code_of(fits: Iterable[str]) -> int:
    """Return the code for what fits on one device or another; see `simulation.fit.Fit`."""
    found = set(fits)
    return HOLDS if "yes" in found else PERHAPS if "perhaps" in found else FAILS


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
