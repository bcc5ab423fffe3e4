"""Progress of a command on standard error: as a bar on a terminal, as lines elsewhere."""

from __future__ import annotations

import shutil
import sys
from typing import Self

from hf_ckpt.cli.shared_options import say

_BAR = 20


class Progress:
    """What goes on, on standard error, and what is found, on standard output as it was when this was made.

    On a terminal the first is a bar below the second, which is taken away when more is found and in the end.
    """

    def __init__(self) -> None:
        self.total = 0
        """Parts of the work; 0 while that is not known."""
        self.done = 0
        self._out = sys.stdout
        self._is_bar = sys.stderr.isatty() and sys.stdout.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def say(self, text: str) -> None:
        """Tell what goes on."""
        if not self._is_bar:
            say(text)
            return
        filled = _BAR * self.done // max(self.total, 1)
        bar = f"[{'#' * filled:<{_BAR}}] {self.done} of {self.total}  " if self.total else ""
        self._write(f"{bar}{text}")

    def show(self, text: str) -> None:
        """Print what was found."""
        self.clear()
        print(text, file=self._out, flush=True)

    def clear(self) -> None:
        """Take the bar away."""
        if self._is_bar:
            self._write("")

    def _write(self, text: str) -> None:
        room = shutil.get_terminal_size().columns - 1
        print(f"\r{text[:room]:<{room}}\r", end="", file=sys.stderr, flush=True)
