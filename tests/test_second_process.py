"""A second process works ahead: the same outcomes with it, without it, and whatever becomes of it."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest

from hf_ckpt import second_process
from hf_ckpt.second_process import Take, may_fork, work_ahead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a command, on two cores."""
    monkeypatch.setattr(second_process, "_ALLOWED", [True])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(second_process.threading, "active_count", lambda: 1)


def work(number: int) -> tuple[int, int]:
    """Return a number and the process that was asked."""
    return number, os.getpid()


def tasks(count: int = 4, do: Callable[[int], object] = work) -> dict[int, Callable[[], object]]:
    return {number: partial(do, number) for number in range(count)}


def waited_for(take: Take, key: int) -> object:
    """Return the outcome of a task, once the second process, if there is one, has begun with its first."""
    process = getattr(take, "__self__", None)
    if process is not None:
        select.select([process._messages], [], [], 30)
    return take(key)


def is_gone(pid: int) -> bool:
    """Whether a process has ended and was waited for."""
    return not os.path.exists(f"/proc/{pid}")


def test_outcomes_come_from_a_second_process() -> None:
    with work_ahead(tasks()) as take:
        outcome = waited_for(take, 3)
        assert isinstance(outcome, tuple)
        number, pid = outcome
    assert number == 3
    assert pid != os.getpid()
    assert is_gone(pid)


def test_what_is_asked_for_first_is_worked_out_here() -> None:
    def slow(number: int) -> int:
        time.sleep(0.5)
        return number

    with work_ahead(tasks(2, slow)) as take:
        assert take(0) is None
        # The second process has it in hand, and is waited for.
        assert waited_for(take, 1) == 1
        # It was told that the first one is done here.
        assert take(0) is None


def test_the_second_process_does_something_before_all_tasks() -> None:
    done: list[int] = []

    with work_ahead({0: lambda: list(done)}, first=lambda: done.append(1)) as take:
        assert waited_for(take, 0) == [1]
    assert not done
    with work_ahead({0: lambda: [1]}, first=lambda: fail(0)) as take:
        assert waited_for(take, 0) is None


def test_an_unknown_key_is_worked_out_here() -> None:
    with work_ahead(tasks()) as take:
        assert take("other") is None


@pytest.mark.parametrize("reason", ["one core", "threads", "not a command", "no such system"])
def test_nobody_forks_without_a_core_or_among_threads(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match reason:
        case "one core":
            monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
        case "threads":
            monkeypatch.setattr(second_process.threading, "active_count", lambda: 2)
        case "not a command":
            monkeypatch.setattr(second_process, "_ALLOWED", [])
        case _:
            monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    with work_ahead(tasks()) as take:
        assert [take(key) for key in tasks()] == [None] * 4


def test_a_system_without_room_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", refused)
    with work_ahead(tasks()) as take:
        assert take(3) is None
    assert may_fork()


def test_one_second_process_at_a_time() -> None:
    with work_ahead(tasks()):
        assert not may_fork()
        with work_ahead(tasks()) as take:
            assert waited_for(take, 3) is None
    assert may_fork()


def die(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_what_a_dead_process_has_left_is_worked_out_here() -> None:
    with work_ahead(tasks(3, die)) as take:
        assert waited_for(take, 2) == 2
        assert take(1) is None
        assert take(0) is None


def test_a_stuck_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_process, "_PATIENCE_SECONDS", 0.2)
    with work_ahead({0: partial(time.sleep, 60)}) as take:
        started = time.monotonic()
        assert waited_for(take, 0) is None
        assert time.monotonic() - started < 10


def fail(number: int) -> int:
    raise ValueError(number)


def write(number: int) -> int:
    """Write on standard output, or for another number on standard error."""
    os.write(1 + number, b"text")
    return number


@pytest.mark.parametrize("do", [fail, write])
def test_what_fails_or_says_something_is_done_again_here(do: Callable[[int], object]) -> None:
    with work_ahead(tasks(2, do)) as take:
        assert waited_for(take, 0) is None
        assert take(1) is None


def test_a_second_process_writes_nothing_and_runs_no_exit_functions(capfd: pytest.CaptureFixture[str]) -> None:
    print("once", end="")
    with work_ahead(tasks(2, write)) as take:
        waited_for(take, 0)
    sys.stdout.flush()
    assert capfd.readouterr() == ("once", "")


def test_no_handle_is_left() -> None:
    def handles() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    before = handles()
    with work_ahead(tasks()) as take:
        waited_for(take, 3)
    assert handles() == before


def test_an_error_ends_the_second_process() -> None:
    pids: list[int] = []

    def asked() -> None:
        with work_ahead(tasks()) as take:
            outcome = waited_for(take, 3)
            assert isinstance(outcome, tuple)
            pids.append(outcome[1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked()
    assert all(map(is_gone, pids))
    assert may_fork()
