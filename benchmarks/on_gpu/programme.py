"""Runs stages one after the other, each in a process of its own, and keeps what they find as it comes.

The process of a stage is forked from this one, which has imported torch and touched no device. It writes a line for
each entry that begins or ends into a pipe. It is killed when an entry hangs, when the stage's time or that of the whole
programme is over, and by the kernel when this process ends. Where it dies by itself, what it measured is noted and the
stage begins anew behind it.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from benchmarks.children import die_with_parent
from benchmarks.environment import describe
from benchmarks.journal import DeviceFaultError, OutOfTimeError, PipeJournal, replace_text, sentence_of
from benchmarks.on_gpu.identity import ROOT
from benchmarks.on_gpu.results import Results
from benchmarks.on_gpu.setting import Setting, Stage

_OUT_OF_TIME = 75
# EX_TEMPFAIL of sysexits.h: there is more to do, later.
_GRACE_S = 3.0
# Between the end of a child's own time and its being killed: it ends by itself where it can.

_TICK_S = 0.2
# So often a child that says nothing is looked at.

_LOG_BYTES = 8 * 2**20
# A log that has grown longer keeps its second half of this.

Say = Callable[[str], None]


@dataclass
class _Child:
    """The process of a stage.

    Args:
        number: of the process, and of its group.
        pipe: that it writes to.
        limits: when each entry that it measures counts as hanging, by key.
        fault: what it said of its device.
        unread: the beginning of a line.
        code: how it ended.
    """

    number: int
    pipe: int
    limits: dict[str, float] = field(default_factory=dict)
    fault: str = ""
    unread: bytes = b""
    code: int | None = None

    def has_ended(self) -> bool:
        """Whether the process has ended; then `code` says how, by a signal if negative."""
        if self.code is None:
            ended, status = os.waitpid(self.number, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code is not None


def run(
    stages: Sequence[Stage], setting: Setting, results: Results, deadline: float, log: IO[bytes], say: Say
) -> list[str]:
    """Run stages until all is measured or time is over; return the names of those with something left to do.

    Args:
        stages: in the order of their value.
        setting: for all of them.
        results: are added to.
        deadline: of `time.monotonic`; nothing runs on behind it.
        log: takes what the stages print.
        say: is called with each entry.
    """
    for stage in stages:
        if results.is_finished(stage.name, is_lean=setting.is_lean):
            say(f"{stage.name}: measured before")
        elif time.monotonic() + 2 * _GRACE_S < deadline:
            _run(stage, setting, results, min(deadline, time.monotonic() + stage.limit_in(setting)), log, say)
    return [stage.name for stage in stages if not results.is_finished(stage.name, is_lean=setting.is_lean)]


def _run(stage: Stage, setting: Setting, results: Results, deadline: float, log: IO[bytes], say: Say) -> None:
    """Run one stage, again and again if its process dies, until it is finished, gives up or time is over."""
    while time.monotonic() < deadline and not results.has_given_up(stage.name):
        say(f"{stage.name}: begins ({stage.question})")
        _shorten(log)
        child = _start(stage, setting, results, deadline - _GRACE_S, log)
        why: str | None = _TIME
        try:
            why = _follow(child, stage, results, deadline, say)
        finally:
            code = _end(child, is_over=why is None)
        if why is None and code == 0:
            results.finish(stage.name, is_lean=setting.is_lean)
            say(f"{stage.name}: finished")
            return
        if why == _TIME or (why is None and code == _OUT_OF_TIME):
            results.stop(stage.name)
            say(f"{stage.name}: goes on in the next run")
            return
        why = why or child.fault or f"its process ended with {_named(code)}"
        say(f"{stage.name}: {why}")
        results.died(stage.name, why)


_TIME = "time is over"


def _follow(child: _Child, stage: Stage, results: Results, deadline: float, say: Say) -> str | None:
    """Take what a child says until it ends; return why it must be killed, None if it ended by itself."""
    with selectors.DefaultSelector() as selector:
        selector.register(child.pipe, selectors.EVENT_READ)
        while True:
            key, until = min([("", deadline), *child.limits.items()], key=lambda limit: limit[1])
            # Not only the end of the pipe tells: a child of the child may hold it open.
            has_ended = child.has_ended()
            if not has_ended and not selector.select(min(_TICK_S, max(0.0, until - time.monotonic()))):
                if time.monotonic() < until:
                    continue
                return f"{key} took too long" if key else _TIME
            try:
                read = os.read(child.pipe, 2**16)
            except BlockingIOError:
                read = b""
            if not read:
                return None
            *lines, child.unread = (child.unread + read).split(b"\n")
            for line in lines:
                _take(json.loads(line), child, stage, results, say)


def _take(message: dict[str, Any], child: _Child, stage: Stage, results: Results, say: Say) -> None:
    """Keep what a child says."""
    if "begin" in message:
        child.limits[message["begin"]] = time.monotonic() + message["limit_s"]
        results.begin(stage.name, message["begin"])
    elif "end" in message:
        child.limits.pop(message["end"], None)
        results.end(stage.name, message["end"], message["found"])
        say(f"{stage.name}: {message['end']}: {_line(message['found'])}")
    elif "machine" in message:
        results.note_machine(message["machine"])
    elif "fault" in message:
        child.fault = message["fault"]


def _line(found: dict[str, Any]) -> str:
    """Return an entry in a few words."""
    for reason in ("out_of_memory", "failed", "died", "outcome"):
        if reason in found:
            return f"{reason.replace('_', ' ')}: {found[reason]}"[:160]
    return f"{found.get('took_s', 0):.1f} s"


def _named(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _shorten(log: IO[bytes]) -> None:
    """Leave out the beginning of a log that is too long to bring home."""
    with Path(log.name).open("r+b") as file:
        if file.seek(0, os.SEEK_END) > _LOG_BYTES:
            file.seek(-_LOG_BYTES // 2, os.SEEK_END)
            end = file.read()
            file.seek(0)
            file.write(end)
            file.truncate()


# --- The process of a stage. ---


def _start(stage: Stage, setting: Setting, results: Results, deadline: float, log: IO[bytes]) -> _Child:
    """Fork the process of a stage."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    number = os.fork()
    if number:
        os.close(writing)
        os.set_blocking(reading, False)
        # Here as well: it may have to be killed before it has come to do so.
        with suppress(OSError):
            os.setpgid(number, number)
        return _Child(number, reading)
    try:
        os.setpgid(0, 0)
        die_with_parent(parent)
        os.close(reading)
        for output in (1, 2):
            os.dup2(log.fileno(), output)
        os.environ.update(stage.variables)
        if needs_a_fresh_interpreter():
            _exec(stage.name, setting, results, deadline, writing)
        be(stage, setting, PipeJournal(writing, results.entries(stage.name), deadline))
    finally:
        # Whatever happened, this process must not go on as the one that it was forked from.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def needs_a_fresh_interpreter() -> bool:
    """Whether an import has touched the device before the fork, after which CUDA cannot start in this process."""
    return torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()


def _exec(stage: str, setting: Setting, results: Results, deadline: float, writing: int) -> NoReturn:
    """Become a new interpreter with the same task."""
    os.set_inheritable(writing, True)
    task = {"stage": stage, "results": str(results.path), "deadline": deadline, "pipe": writing}
    given = {
        "device": setting.device,
        "is_small": setting.is_small,
        "is_lean": setting.is_lean,
        "scratch": str(setting.scratch),
    }
    file = setting.scratch / f"{stage}.json"
    replace_text(file, json.dumps(task | given | {"prepared": asdict(setting.prepared)}))
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.on_gpu.stage", str(file)])


def be(stage: Stage, setting: Setting, journal: PipeJournal) -> NoReturn:
    """Run a stage, and end this process with what came of it.

    Args:
        stage: to run.
        setting: see there.
        journal: leads to the process that started this one.
    """
    code = 0
    try:
        print(f"--- {stage.name}", flush=True)
        journal.send({"machine": describe()})
        stage.collect(journal, setting)
    except OutOfTimeError as error:
        print(error)
        code = _OUT_OF_TIME
    except DeviceFaultError as error:
        journal.send({"fault": str(error)})
        code = 1
    except Exception as error:  # noqa: BLE001  # the process that started this one has to know, whatever it is
        traceback.print_exc()
        journal.send({"fault": f"{type(error).__name__}: {sentence_of(error)}"})
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Destructors of a process with a device may hang or crash, and everything is said.
    os._exit(code)


def _end(child: _Child, *, is_over: bool) -> int:
    """Wait for a child that is about to end, or kill it, and then what is left of its own children.

    Args:
        child: see there.
        is_over: whether it has said all that it has to.

    Returns:
        Its exit code, or a signal if negative.
    """
    until = time.monotonic() + (_GRACE_S if is_over else 0.0)
    while not child.has_ended() and time.monotonic() < until:
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(child.number, signal.SIGKILL)
    while not child.has_ended():
        time.sleep(0.01)
    os.close(child.pipe)
    assert child.code is not None, "it has ended"
    return child.code
