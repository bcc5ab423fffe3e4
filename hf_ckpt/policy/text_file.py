"""Text that a user names: a file, a pipe, or standard input. Never more than a limit, and never for ever."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import time
from pathlib import Path

MAX_BYTES = 2**20
"""Of a recipe or a plan; the largest ones that ship have a few thousand."""
_SILENCE_S = 5.0
_WHOLE_S = 30.0
_CHUNK = 2**16


def read_text(path: Path) -> str:
    """Read a whole text in UTF-8: a file, a pipe (`/dev/stdin`, `/dev/fd/63` of a process substitution) or a device.

    Raises `OSError` where it cannot be read, holds more than 1 MiB, or is a pipe from which nothing comes for 5 s.
    """
    file = _open(path)
    try:
        return _content(file).decode("utf-8")
    finally:
        os.close(file)


def _open(path: Path) -> int:
    try:
        # Without O_NONBLOCK the opening of a pipe waits for somebody to write.
        return os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
    except OSError as error:
        # A socket as standard input can be read, but not opened.
        if error.errno == errno.ENXIO and path == Path("/dev/stdin"):
            return os.dup(0)
        raise


def _content(file: int) -> bytes:
    content = b""
    waits = not stat.S_ISREG(os.fstat(file).st_mode)
    deadline = time.monotonic() + _WHOLE_S
    while True:
        if waits:
            _wait(file, deadline)
        # Another reader of the same pipe may have been quicker.
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(file, _CHUNK)
            if not chunk:
                return content
            content += chunk
        if len(content) > MAX_BYTES:
            raise OSError(f"it holds more than {MAX_BYTES // 2**20} MiB")


def _wait(file: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    if not poll.poll(_SILENCE_S * 1000):
        raise TimeoutError(f"nothing came for {_SILENCE_S:.0f} s")
    if time.monotonic() > deadline:
        raise TimeoutError(f"it did not end within {_WHOLE_S:.0f} s")
