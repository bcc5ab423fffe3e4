"""A second process that works out ahead what is asked for next, where another core is idle. Loads nothing else.

A fork takes only one thread along, so that nobody forks but a command that runs no other (`allow`). No answer depends
on the second process: what it has not done, cannot do, or would say something about, is worked out here.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

Take = Callable[[Hashable], Any]
"""Returns the outcome of the task with a key; None where it is to be worked out here."""

_NUM_CORES = 2
_PATIENCE_SECONDS = 60.0
"""Without a word of a second process that is waited for: then it is taken for stuck."""
_ALLOWED: list[bool] = []


def allow() -> None:
    """Let this process fork from now on: a command that ends soon, and runs no threads."""
    _ALLOWED.append(True)


@contextmanager
def work_ahead(tasks: Mapping[Any, Callable[[], Any]], *, first: Callable[[], object] = lambda: None) -> Iterator[Take]:
    """Let a second process work on tasks, the last one first, and yield what asks for their outcomes.

    Outcomes are pickled, and none is None. Whoever asks does what there is no outcome of, so that the two meet in the
    middle where all tasks are asked for in their order. Where nobody may fork, there are no outcomes.

    `first`: what the second process does before all tasks.
    """
    if not tasks or not may_fork():
        yield lambda key: None
        return
    _ALLOWED.clear()
    second: _SecondProcess | None = None
    # No room for one, say.
    with suppress(OSError):
        second = _SecondProcess(tasks, first)
    try:
        yield (lambda key: None) if second is None else second.take
    finally:
        if second is not None:
            second.end()
        _ALLOWED.append(True)


def may_fork() -> bool:
    """Whether there may be a second process now: one at a time, as there are no more cores."""
    # Linux has all three.
    if not (_ALLOWED and hasattr(os, "memfd_create") and hasattr(os, "sched_getaffinity")):
        return False
    return len(os.sched_getaffinity(0)) >= _NUM_CORES and threading.active_count() == 1


# What the second process tells: the number of a task, and where its outcome lies; nowhere where it begins or has none.
_MESSAGE = struct.Struct("<qqq")
_BEGUN, _FAILED = -1, -2
# What it is told: the number of a task that is done here.
_NUMBER = struct.Struct("<q")


class _SecondProcess:
    """The other one, as this process sees it."""

    def __init__(self, tasks: Mapping[Any, Callable[[], Any]], first: Callable[[], object]) -> None:
        self._numbers = {key: number for number, key in enumerate(tasks)}
        self._begun: set[int] = set()
        self._ended: dict[int, tuple[int, int]] = {}  # By number of a task: where its outcome begins, and its size.
        self._outcomes = os.memfd_create("outcomes")
        claims, self._claims = os.pipe()
        self._messages, messages = os.pipe()
        # Else it would write once more what is not written yet.
        for stream in (sys.stdout, sys.stderr, sys.__stdout__):
            if stream is not None:
                stream.flush()
        with warnings.catch_warnings():
            # Python counts the threads of allocators too, which see to forks themselves.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            # It must never come back to its caller, nor do what is done at exit.
            try:
                os.close(self._claims)
                os.close(self._messages)
                _work(first, list(tasks.values()), claims, messages, self._outcomes)
            finally:
                os._exit(0)
        os.close(claims)
        os.close(messages)
        # Where a command leaves early, and nobody else ends it.
        atexit.register(self.end)

    def take(self, key: Hashable) -> Any:
        """See `Take`."""
        number = self._numbers.get(key)
        if number is None or not self._pid:
            return None
        while select.select([self._messages], [], [], 0)[0] and self._read():
            pass
        if number not in self._begun:
            # It may begin with it at this moment: then both do it.
            with suppress(BrokenPipeError):
                os.write(self._claims, _NUMBER.pack(number))
            return None
        while number not in self._ended:
            if not select.select([self._messages], [], [], _PATIENCE_SECONDS)[0] or not self._read():
                self.end()
                return None
        begin, size = self._ended[number]
        return None if begin == _FAILED else pickle.loads(os.pread(self._outcomes, size, begin))

    def _read(self) -> bool:
        """Read a message; return whether there was one, and not the end."""
        message = os.read(self._messages, _MESSAGE.size)
        if not message:
            return False
        number, begin, size = _MESSAGE.unpack(message)
        if begin == _BEGUN:
            self._begun.add(number)
        else:
            self._ended[number] = begin, size
        return True

    def end(self) -> None:
        """End it, whatever it does, and leave nothing of it."""
        if not self._pid:
            return
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._pid = 0
        for handle in (self._claims, self._messages, self._outcomes):
            os.close(handle)
        atexit.unregister(self.end)


def _work(
    first: Callable[[], object], tasks: list[Callable[[], Any]], claims: int, messages: int, outcomes: int
) -> None:
    """Do tasks, the last one first, until all are done or nobody is there to ask."""
    # Ctrl-C goes to both processes: this one says nothing of it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Whoever waits for the end of the output does not wait for this process.
    said = os.memfd_create("said")
    for handle in (0, 1, 2):
        os.dup2(said, handle)
    os.set_blocking(claims, False)
    first()
    done_there: set[int] = set()
    end = 0
    for number in reversed(range(len(tasks))):
        with suppress(BlockingIOError):
            while (read := os.read(claims, 1024 * _NUMBER.size)) is not None:
                if not read:
                    return
                done_there.update(each for (each,) in _NUMBER.iter_unpack(read))
        if number in done_there:
            continue
        os.write(messages, _MESSAGE.pack(number, _BEGUN, 0))
        num_said = os.fstat(said).st_size
        try:
            outcome = pickle.dumps(tasks[number](), pickle.HIGHEST_PROTOCOL)
        # Whatever it is, it comes up again where the task is done once more.
        except Exception:  # noqa: BLE001
            outcome = b""
        sys.stderr.flush()
        is_silent = os.fstat(said).st_size == num_said
        if outcome and is_silent:
            os.pwrite(outcomes, outcome, end)
            os.write(messages, _MESSAGE.pack(number, end, len(outcome)))
            end += len(outcome)
        else:
            os.write(messages, _MESSAGE.pack(number, _FAILED, 0))
