"""`hf-ckpt verify --processes N`: this command in N processes, started by torchrun, and one answer.

Imports nothing heavy: the process that starts the others only waits for them. torchrun hands on neither exit codes nor
results, so that each process leaves an answer in a folder; the first process's report stands for all, and a refusal of
any of them stands before it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hf_ckpt.errors import HFCkptError

PROGRESS = "verify: "
"""What lines of progress begin with."""

# A trial of a reduced model takes seconds, one at full size may take long.
_SILENT_SECONDS = 1800
_LAST_WORDS = 30
_TORCHRUN = "torch/distributed/elastic/"
# What an earlier launch in this environment may have left, and accelerate would act on.
_LEFT_BY_OTHERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


_SECONDS_TO_END = 10

Lines = queue.SimpleQueue[str | None]


class LostProcessError(HFCkptError, RuntimeError):
    """Raised when one of several processes ended without an answer."""


@dataclass(frozen=True)
class Answer:
    """What several processes came to.

    Args:
        report: the report as JSON types, if there is one.
        refusal: why the input was refused, if it was.
    """

    report: Any = None
    refusal: str = ""


def ask(command: Sequence[str], *, num_processes: int, say: Callable[[str], None]) -> Answer:
    """Run a command of this package in several processes and return their answer.

    Args:
        command: arguments of `hf-ckpt`; the folder for answers is added.
        num_processes: how many.
        say: is told what goes on.

    Raises:
        LostProcessError: a process ended without an answer; with its last words.
    """
    with tempfile.TemporaryDirectory(prefix="hf_ckpt-answers-") as folder:
        last_words = _run([*_torchrun(num_processes), *command, "--answers", folder], say)
        answers = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    refusals = [answer["refusal"] for answer in answers if answer["refusal"]]
    if refusals:
        return Answer(refusal=refusals[0])
    reports = [answer["report"] for answer in answers if answer["report"]]
    if len(reports) < num_processes:
        raise LostProcessError(
            f"{num_processes - len(reports)} of {num_processes} processes ended without an answer. The last that was "
            f"heard of them:\n{last_words}"
        )
    return Answer(report=reports[0])


def leave_answer(folder: Path, answer: Answer) -> None:
    """Write this process's answer where `ask` looks for it."""
    path = folder / f"{int(os.environ['RANK']):05d}.json"
    path.write_text(json.dumps({"report": answer.report, "refusal": answer.refusal}), encoding="utf-8")


def _torchrun(num_processes: int) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    return [*run, "-m", "hf_ckpt.cli.main"]


def _run(command: Sequence[str], say: Callable[[str], None]) -> str:
    """Run the processes to their end, hand on lines of progress, and return the last other lines."""
    last_words: deque[str] = deque(maxlen=_LAST_WORDS)
    lines: Lines = queue.SimpleQueue()
    with subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        try:
            with _ending_on_sigterm():
                _sort(lines, say, last_words)
        finally:
            # torchrun ends its processes when it is told to end.
            process.terminate()
            process.wait()
            reader.join(_SECONDS_TO_END)
    return "\n".join(last_words)


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise, as Ctrl-C does, so that the processes started here do not outlive this one."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        # Only the main thread hears signals.
        yield
        return
    found = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, found)


def _sort(lines: Lines, say: Callable[[str], None], last_words: deque[str]) -> None:
    """Hand on what is progress and keep what is not, until there is no more or there has been nothing for too long."""
    is_torchrun = False
    while True:
        try:
            line = lines.get(timeout=_SILENT_SECONDS)
        except queue.Empty:
            last_words.append(f"Nothing was heard for {_SILENT_SECONDS} s; the processes were stopped.")
            return
        if line is None:
            return
        # What torchrun says of itself comes last, and would push out what the processes said.
        is_torchrun = is_torchrun or _TORCHRUN in line
        if line.startswith(PROGRESS):
            say(line.removeprefix(PROGRESS))
        elif not is_torchrun:
            last_words.append(line)


def _read(process: subprocess.Popen[str], lines: Lines) -> None:
    """Pass on what the processes write, as they write it, and None at its end."""
    assert process.stderr is not None  # it was asked for
    for line in process.stderr:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_BY_OTHERS)}
    # Without it torchrun says that it sets the same.
    kept.setdefault("OMP_NUM_THREADS", "1")
    return {**kept, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
