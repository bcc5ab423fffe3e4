"""Answers on disk: whole or absent, whoever writes, whatever fails."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from hf_ckpt.cli import answer_cache

ROOT = Path(__file__).parents[2]
DOCUMENT = {"peak_bytes": 2**34, "seconds": 0.1, "rows": [{"name": "full", "refusal": None}]}


def key_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


KEY = key_of("one")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_CKPT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "answers"


def started(code: str) -> subprocess.Popen[str]:
    """A process of its own, with `key` and `answer_cache` at hand."""
    first = f"import os, time\nfrom hf_ckpt.cli import answer_cache\nkey = {KEY!r}\n"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", first + code], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)


def test_what_was_written_is_read(folder: Path) -> None:
    assert answer_cache.read_answer(KEY) is None
    answer_cache.write_answer(KEY, DOCUMENT)
    assert answer_cache.read_answer(KEY) == DOCUMENT
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.json"]


def test_folder_is_ours_or_beside_what_comes_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer_cache._folder() == folder
    monkeypatch.delenv("HF_CKPT_CACHE")
    monkeypatch.setattr(answer_cache.constants, "HF_HOME", "/cache/huggingface")
    assert answer_cache._folder() == Path("/cache/huggingface/hf_ckpt/answers")


# --- Files that are not what was written. ---


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _of_another_key(content: bytes) -> bytes:
    return content.replace(KEY.encode(), key_of("another").encode())


@pytest.mark.parametrize(
    "spoil",
    [
        *(_cut, _of_another_key),
        *(lambda _: b"", lambda _: b"\xff\x00", lambda _: b"[]", lambda _: b"{}", lambda _: b"[" * 100_000),
    ],
)
def test_spoiled_file_is_absent_and_written_anew(spoil: Any, folder: Path) -> None:
    answer_cache.write_answer(KEY, DOCUMENT)
    path = folder / f"{KEY}.json"
    path.write_bytes(spoil(path.read_bytes()))
    assert answer_cache.read_answer(KEY) is None
    answer_cache.write_answer(KEY, DOCUMENT)
    assert answer_cache.read_answer(KEY) == DOCUMENT


# --- Other processes. ---


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_writer_killed_before_its_file_is_moved_leaves_nothing_to_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
def hang(*_):
    print("written", flush=True)
    time.sleep(60)
os.replace = hang
answer_cache.write_answer(key, {"half": True})
"""
    with started(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    (left,) = folder.iterdir()
    assert answer_cache.read_answer(KEY) is None
    # Its file goes as an old answer does.
    os.utime(left, (time.time() - 3601,) * 2)
    monkeypatch.setattr(answer_cache, "_MOST_ANSWERS", 1)
    answer_cache.write_answer(KEY, DOCUMENT)
    assert (answer_cache.read_answer(KEY), left.exists()) == (DOCUMENT, False)


def test_two_writers_at_once_leave_one_whole_answer(folder: Path) -> None:
    code = """
print("ready", flush=True)
input()
for number in range(200):
    answer_cache.write_answer(key, {"writer": WRITER, "numbers": list(range(number * 20))})
    found = answer_cache.read_answer(key)
    assert found is not None and found["numbers"] == list(range(len(found["numbers"])))
"""
    writers = [started(code.replace("WRITER", str(number))) for number in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        found = answer_cache.read_answer(KEY)
        assert found is None or found["numbers"] == list(range(len(found["numbers"])))
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    last = answer_cache.read_answer(KEY)
    assert last is not None
    assert len(last["numbers"]) == 199 * 20
    assert len(list(folder.iterdir())) == 1


# --- Disks and folders that do not take anything. ---


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full is needed")
def test_full_disk_keeps_what_was_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_cache.write_answer(KEY, DOCUMENT)

    def on_full_disk(dir: Path, prefix: str) -> tuple[int, str]:
        handle, path = made(dir=dir, prefix=prefix)
        os.close(handle)
        return os.open("/dev/full", os.O_WRONLY), path

    made = tempfile.mkstemp
    monkeypatch.setattr(answer_cache.tempfile, "mkstemp", on_full_disk)
    answer_cache.write_answer(KEY, {"other": True})
    answer_cache.write_answer(key_of("two"), {"other": True})
    assert answer_cache.read_answer(KEY) == DOCUMENT
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.json"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_file_that_cannot_be_moved_is_taken_away(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(answer_cache.os, "replace", refuse)
    answer_cache.write_answer(KEY, DOCUMENT)
    assert list(folder.iterdir()) == []
    assert answer_cache.read_answer(KEY) is None


def test_file_in_the_folders_place_means_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("HF_CKPT_CACHE", str(tmp_path / "file"))
    answer_cache.write_answer(KEY, DOCUMENT)
    assert answer_cache.read_answer(KEY) is None
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_folder_without_the_right_to_write_is_read_and_not_written(folder: Path) -> None:
    answer_cache.write_answer(KEY, DOCUMENT)
    folder.chmod(0o500)
    try:
        answer_cache.write_answer(key_of("two"), DOCUMENT)
        assert answer_cache.read_answer(KEY) == DOCUMENT
        assert answer_cache.read_answer(key_of("two")) is None
    finally:
        folder.chmod(0o700)


# --- Room. ---


def test_least_recently_used_answers_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["first", "second", "third"]
    for age, name in zip((30, 20, 10), names, strict=True):
        answer_cache.write_answer(key_of(name), DOCUMENT)
        os.utime(folder / f"{key_of(name)}.json", (time.time() - age,) * 2)
    monkeypatch.setattr(answer_cache, "_MOST_ANSWERS", 3)
    assert answer_cache.read_answer(key_of("first")) == DOCUMENT  # now used last
    answer_cache.write_answer(key_of("fourth"), DOCUMENT)
    kept = [name for name in (*names, "fourth") if answer_cache.read_answer(key_of(name)) is not None]
    assert kept == ["first", "third", "fourth"]


def test_only_answers_are_ever_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(parents=True)
    theirs = [folder / name for name in ("notes.json", "0.json", "old.tmp")]
    for path in theirs:
        path.write_text(json.dumps("x" * 10_000))
        os.utime(path, (0, 0))
    monkeypatch.setattr(answer_cache, "_MOST_ANSWERS", 1)
    answer_cache.write_answer(KEY, DOCUMENT)
    assert all(path.exists() for path in theirs)
    assert answer_cache.read_answer(KEY) == DOCUMENT
