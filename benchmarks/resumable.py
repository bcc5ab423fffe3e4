"""A measurement as a command: its entries lie beside its result until all of them are there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.journal import FileJournal, Journal, OutOfTimeError, replace_text
from benchmarks.side_by_side.text import text_of


def carry_out(
    path: Path,
    collect: Callable[[Journal], None],
    assemble: Callable[[Journal], dict[str, Any]],
    seconds: float | None = None,
) -> dict[str, Any]:
    """Collect what a result is made of, from where the same command stopped, and write it.

    What another command, commit or machine left is begun anew, and what failed is tried again.

    Args:
        path: of the result. The entries lie beside it, in `.NAME.entries`, until the result is whole.
        collect: makes entries.
        assemble: makes the result of those that are there.
        seconds: after which no entry begins; None for no limit.

    Returns:
        The result as it was written.

    Raises:
        DeviceFaultError: the device does not answer any more. What was found before lies beside the result's place.
    """
    kept = path.with_name(f".{path.name}.entries")
    environment = describe()
    journal = FileJournal(kept, None if seconds is None else time.monotonic() + seconds, environment)
    is_whole = True
    try:
        collect(journal)
    except OutOfTimeError as error:
        is_whole = False
        print(f"stopped: {error}. The same command goes on", file=sys.stderr)
    result = {"environment": environment} | assemble(journal)
    replace_text(path, text_of(result))
    if is_whole:
        kept.unlink(missing_ok=True)
    return result
