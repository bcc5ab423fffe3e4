"""What a long measurement has found so far: one entry for each piece of work, kept when it is there, not made again.

A benchmark asks its journal for each entry by a key and says how to measure it. What an earlier run left is returned as
it is; what is new is kept before the next piece begins, so that an error, a fault of the device or a kill loses one
entry. Where entries are kept is the journal's business: in a file (`FileJournal`), or with the process that started
this one (`PipeJournal`), which writes them and counts how often an entry took the process with it.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Entry = dict[str, Any]
"""What one piece of work found, as JSON types. `out_of_memory`, `failed` and `died` say why there are no figures."""

NO_FIGURES = frozenset({"out_of_memory", "failed", "died"})
"""Keys of entries that say why a piece of work has no figures; the value is a sentence."""
ENTRY_LIMIT_S = 240.0
"""An entry that takes longer than this hangs, unless it was given another limit."""
# What libraries say that find no memory; the device goes on.
_OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "cudaErrorMemoryAllocation",
)


class OutOfTimeError(Exception):
    """There is not enough time left for the next entry."""


class DeviceFaultError(Exception):
    """The device does not answer this process any more: nothing that it measures from here on means anything."""


class Journal(ABC):
    """Entries by key, in the order in which they were made.

    Args:
        found: what earlier runs left.
        deadline: of `time.monotonic`, after which no entry begins; None for no limit.
    """

    def __init__(self, found: Mapping[str, Entry], deadline: float | None = None) -> None:
        self.entries: dict[str, Entry] = dict(found)
        self._deadline = deadline

    def entry(
        self, key: str, measure: Callable[[], Entry], *, needs_s: float = 0.0, limit_s: float = ENTRY_LIMIT_S
    ) -> Entry:
        """Return an entry; measure it where it is not there.

        Args:
            key: of the entry; parts are separated by slashes.
            measure: makes it. An out-of-memory error and any other exception become the entry.
            needs_s: seconds that it takes about; it does not begin with less left.
            limit_s: seconds after which it counts as hanging.

        Raises:
            OutOfTimeError: less time is left than it needs.
            DeviceFaultError: the device has failed, so that this process cannot go on.
        """
        if key in self.entries:
            return self.entries[key]
        left = self.seconds_left()
        if left < max(needs_s, 1.0):
            raise OutOfTimeError(f"{key}: {max(left, 0):.0f} s are left, and it needs about {needs_s:.0f} s")
        self.begin(key, limit_s)
        began = time.monotonic()
        found = json.loads(json.dumps(_measured(measure)))
        found["took_s"] = round(time.monotonic() - began, 3)
        self.end(key, found)
        return found

    def give(self, key: str, found: Entry) -> None:
        """Keep an entry that was made elsewhere, unless there is one."""
        if key not in self.entries:
            self.end(key, json.loads(json.dumps(found)))

    def end(self, key: str, found: Entry) -> None:
        """An entry is there: keep it before anything else happens."""
        self.entries[key] = found
        self._keep(key, found)

    def seconds_left(self) -> float:
        """Return the seconds until the deadline; infinity without one."""
        return float("inf") if self._deadline is None else self._deadline - time.monotonic()

    def below(self, prefix: str) -> Journal:
        """Return a journal whose entries are those of this one below a prefix, so that a benchmark can be a part.

        Args:
            prefix: of keys, without the slash behind it.
        """
        return _Below(self, f"{prefix}/")

    @abstractmethod
    def begin(self, key: str, limit_s: float) -> None:
        """An entry is being measured, and hangs if it takes longer than the limit."""

    @abstractmethod
    def _keep(self, key: str, found: Entry) -> None:
        """Keep an entry."""


class ReadJournal(Journal):
    """Entries that are there, and no others: what has not been measured is a KeyError."""

    def begin(self, key: str, limit_s: float) -> None:
        """Nothing can begin here."""
        raise KeyError(key)

    def _keep(self, key: str, found: Entry) -> None:
        raise KeyError(key)


class _Below(Journal):
    """See `Journal.below`."""

    def __init__(self, whole: Journal, prefix: str) -> None:
        found = {key.removeprefix(prefix): one for key, one in whole.entries.items() if key.startswith(prefix)}
        super().__init__(found)
        self._whole = whole
        self._prefix = prefix

    def seconds_left(self) -> float:
        return self._whole.seconds_left()

    def begin(self, key: str, limit_s: float) -> None:
        self._whole.begin(self._prefix + key, limit_s)

    def _keep(self, key: str, found: Entry) -> None:
        self._whole.end(self._prefix + key, found)


class FileJournal(Journal):
    """Keeps entries in a JSON file of its own, whole after each of them.

    Args:
        path: of the file; what it holds is gone on from, and what failed is tried again. None keeps entries in memory.
        deadline: see `Journal`.
        facts: what entries depend on, as JSON types; kept in the file. One with other facts is begun anew.
    """

    def __init__(
        self, path: Path | None = None, deadline: float | None = None, facts: Mapping[str, Any] | None = None
    ) -> None:
        self.facts = dict(facts or {})
        self._path = path
        found = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
        kept = found["entries"] if found and found["facts"] == self.facts else {}
        super().__init__({key: entry for key, entry in kept.items() if "failed" not in entry}, deadline)

    def begin(self, key: str, limit_s: float) -> None:
        """Nobody has to know."""

    def _keep(self, key: str, found: Entry) -> None:
        if self._path is not None:
            document = {"facts": self.facts, "entries": self.entries}
            replace_text(self._path, json.dumps(document, indent=1) + "\n")


class PipeJournal(Journal):
    """Hands each entry to the process that started this one, a line of JSON at a time.

    Args:
        file_number: of the pipe's end to write to.
        found: see `Journal`.
        deadline: likewise.
    """

    def __init__(self, file_number: int, found: Mapping[str, Entry], deadline: float | None = None) -> None:
        super().__init__(found, deadline)
        self._file_number = file_number

    def begin(self, key: str, limit_s: float) -> None:
        """Tell that process, which ends this one when the limit is over."""
        self.send({"begin": key, "limit_s": limit_s})

    def _keep(self, key: str, found: Entry) -> None:
        self.send({"end": key, "found": found})

    def send(self, message: dict[str, Any]) -> None:
        """Write one message."""
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._file_number, line) :]


def replace_text(path: Path, text: str) -> None:
    """Replace a file by one with this text, so that whoever reads it at any moment finds the old one or the new one.

    Args:
        path: of the file; its folder is made.
        text: all of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Always the same name, so that kills leave one such file at most.
    made = path.with_name(f".{path.name}.new")
    with made.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    made.replace(path)


def _measured(measure: Callable[[], Entry]) -> Entry:
    try:
        return measure()
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": sentence_of(error)}
    except OutOfTimeError:
        raise
    except Exception as error:  # whatever it is, it is what came of this entry, and others follow
        if any(words in str(error) for words in _OUT_OF_MEMORY):
            return {"out_of_memory": sentence_of(error)}
        if is_device_fault(error):
            raise DeviceFaultError(sentence_of(error)) from error
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {sentence_of(error)}"}


def is_device_fault(error: BaseException) -> bool:
    """Whether an error of CUDA's has left the process without a device: every later call would fail likewise."""
    fault = getattr(torch, "AcceleratorError", ())
    return isinstance(error, fault) or "CUDA error" in str(error)


def sentence_of(error: BaseException) -> str:
    """Return the first 400 characters of an error's text, on one line."""
    return " ".join(str(error).split())[:400]
