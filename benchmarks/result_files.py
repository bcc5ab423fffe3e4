"""How a result is written: one JSON, with what it says of where it was measured.

A long measurement keeps its entries next to its result until all of them are there, so that the same command goes on
where it was stopped.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.environment import describe
from benchmarks.journal import FileJournal, Journal, OutOfTimeError, replace_text

_PAIR = re.compile(r"\[\s+([-+.\de]+),\s+([-+.\de]+)\s+\]")


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result as one JSON; its folder is made."""
    replace_text(path, json.dumps(result, indent=1) + "\n")


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result behind what `describe` says of this machine, and say where."""
    write(path, {"environment": describe()} | result)
    print(f"written to {path}")


def carry_out(
    path: Path,
    collect: Callable[[Journal], None],
    assemble: Callable[[Journal], dict[str, Any]],
    seconds: float | None = None,
) -> dict[str, Any]:
    """Collect what a result is made of, from where the same command stopped, and write it.

    What another command, commit or machine left is begun anew, and what failed is tried again.

    Args:
        path: of the result. The entries lie next to it, in `.NAME.entries`, until the result is whole.
        collect: makes entries.
        assemble: makes the result of those that are there.
        seconds: after which no entry begins; None for no limit.

    Returns:
        The result as it was written.

    Raises:
        DeviceFaultError: the device does not answer any more. What was found before lies next to the result's place.
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


def text_of(result: dict[str, Any]) -> str:
    """Return a result as JSON, each point of a timeline on one line.

    Args:
        result: with its environment.
    """
    return _PAIR.sub(r"[\1, \2]", json.dumps(result, indent=1)) + "\n"
