"""Answers of commands on disk: one JSON file each, by key, the least recently used out.

Whatever a folder holds and whoever writes there, an answer is read whole or not at all. Where nothing can be read or
written, nothing is remembered, and nothing is said. Knows nothing of what an answer or a key means.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

MAX_BYTES = 256 * 2**20
"""Of all answers together."""
_ABANDONED_S = 3600.0
"""Age from which a temporary file is taken for that of a writer that was killed."""
_ANSWER = re.compile(r"[0-9a-f]{64}\.json")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.\w+\.tmp")
_UNAVAILABLE = (OSError, RuntimeError)
"""RuntimeError: a user without a home."""


def read(key: str) -> dict[str, Any] | None:
    """Return the answer that was written under `key` (a SHA-256 in hex), and note that it was used."""
    try:
        path = _folder() / f"{key}.json"
        content = path.read_bytes()
    except _UNAVAILABLE:
        return None
    document = _checked(key, content)
    with contextlib.suppress(OSError):
        if document is None:
            path.unlink()
        else:
            os.utime(path)
    return document


def write(key: str, document: dict[str, Any]) -> None:
    """Keep an answer, in one move: a reader finds the whole of it or nothing. Others go until there is room."""
    content = json.dumps({"key": key, "sha256": _digest(document), "document": document}).encode()
    with contextlib.suppress(*_UNAVAILABLE):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        _make_room(folder, len(content))
        # In the same folder, else it would be copied and not moved.
        handle, temporary = tempfile.mkstemp(prefix=f"{key}.", suffix=".tmp", dir=folder)
        try:
            with open(handle, "wb") as file:
                file.write(content)
            os.replace(temporary, folder / f"{key}.json")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _folder() -> Path:
    # A folder of its own: what is removed there is never the user's.
    own = os.environ.get("HF_CKPT_CACHE")
    if own:
        return Path(own).expanduser() / "answers"
    general = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(general) if os.path.isabs(general) else Path.home() / ".cache") / "hf_ckpt" / "answers"


def _digest(document: object) -> str:
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _checked(key: str, content: bytes) -> dict[str, Any] | None:
    """Return the document of a file, or nothing where it is not what `write` wrote under this key."""
    try:
        read = json.loads(content)
        document: dict[str, Any] = read["document"]
        is_whole = read["key"] == key and read["sha256"] == _digest(document)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return document if is_whole else None


def _make_room(folder: Path, num_bytes: int) -> None:
    """Remove the answers used least recently until `num_bytes` more fit, and what killed writers left."""
    answers: list[tuple[int, int, Path]] = []
    for path in folder.iterdir():
        # Another process may remove it first.
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if _ANSWER.fullmatch(path.name):
                answers.append((found.st_mtime_ns, found.st_size, path))
            elif _TEMPORARY.fullmatch(path.name) and time.time() - found.st_mtime > _ABANDONED_S:
                path.unlink()
    excess = sum(size for _, size, _ in answers) + num_bytes - MAX_BYTES
    for _, size, path in sorted(answers):
        if excess <= 0:
            break
        path.unlink(missing_ok=True)
        excess -= size
