"""Stages of a run in several processes, played by threads around one store: who raises what, and who says it."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from hf_ckpt.distributed import store as module
from hf_ckpt.distributed import watchdog
from hf_ckpt.distributed.store import LaunchedProcesses
from hf_ckpt.errors import OtherProcessError, RecipeError

pytestmark = pytest.mark.distributed

Body = Callable[[int], None]


def processes(count: int, monkeypatch: pytest.MonkeyPatch) -> list[LaunchedProcesses]:
    """The processes of one run. Each has a connection of its own to the launcher's store."""
    launcher = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(
        module,
        "_join",
        lambda size, timeout_s: TCPStore("127.0.0.1", launcher.port, timeout=datetime.timedelta(seconds=timeout_s)),
    )
    found = []
    for rank in range(count):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(count))
        found.append(LaunchedProcesses(timeout_s=20))
    return found


def outcome(process: LaunchedProcesses, body: Body) -> Exception | None:
    try:
        with process.stage("reading"):
            body(process.rank)
    except Exception as error:  # noqa: BLE001
        return error
    return None


def outcomes(run: list[LaunchedProcesses], body: Body) -> list[Exception | None]:
    with ThreadPoolExecutor(len(run)) as pool:
        return list(pool.map(lambda process: outcome(process, body), run))


def fail_in(*ranks: int, text: str = "wrong") -> Body:
    def body(rank: int) -> None:
        if rank in ranks:
            raise RecipeError(text)

    return body


def test_one_process_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = LaunchedProcesses()
    with alone.stage("reading"):
        pass
    with pytest.raises(RecipeError, match="wrong") as failed, alone.stage("reading"):
        fail_in(0)(0)
    assert not alone.is_printed_by_another(failed.value)


def test_stages_that_succeed_end_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    run = processes(3, monkeypatch)
    for _ in range(3):
        assert outcomes(run, fail_in()) == [None] * 3


def test_error_in_one_process_is_raised_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    run = processes(3, monkeypatch)
    assert outcomes(run, fail_in()) == [None] * 3
    errors = outcomes(run, fail_in(1))
    assert [type(error) for error in errors] == [OtherProcessError, RecipeError, OtherProcessError]
    assert [str(error) for error in errors] == [
        "Process 1 failed while reading: wrong",
        "wrong",
        "Process 1 failed while reading: wrong",
    ]
    # The first process speaks in any case (`command`); of the others, the one that knows.
    assert [process.is_printed_by_another(error) for process, error in zip(run, errors, strict=True)] == [
        True,
        False,
        True,
    ]


def test_same_error_in_all_is_said_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    run = processes(3, monkeypatch)
    errors = outcomes(run, fail_in(0, 1, 2))
    assert [type(error) for error in errors] == [RecipeError] * 3
    assert [process.is_printed_by_another(error) for process, error in zip(run, errors, strict=True)] == [
        False,
        True,
        True,
    ]


def test_an_unforeseen_error_is_named_by_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> None:
        if rank == 1:
            raise MemoryError("no room")

    first, second = outcomes(processes(2, monkeypatch), body)
    assert str(first) == "Process 1 failed while reading: MemoryError: no room"
    assert isinstance(second, MemoryError)


def test_process_that_fails_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 1.0)
    # The other one never comes to the end of the stage, as in a collective without this one.
    _, second = processes(2, monkeypatch)
    error = outcome(second, fail_in(1))
    assert isinstance(error, RecipeError)
    assert not second.is_printed_by_another(error)


def test_process_that_is_gone_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = processes(2, monkeypatch)
    first.set_timeout(1)
    error = outcome(first, fail_in())
    assert isinstance(error, OtherProcessError)
    assert str(error) == (
        "Process 1 has not come to the end of reading within 1 s of this one, and is taken for lost. Its own output "
        "may tell more; if it is only slow, raise training.ddp_timeout."
    )


def test_different_values_are_refused_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    run = processes(3, monkeypatch)

    def check(process: LaunchedProcesses) -> str:
        process.check_same("same", "The model")
        with pytest.raises(RecipeError) as refused:
            process.check_same("there" if process.rank < 2 else "not there", "runs/base")
        assert process.is_printed_by_another(refused.value) is (process.rank != 0)
        return str(refused.value)

    with ThreadPoolExecutor(len(run)) as pool:
        said = set(pool.map(check, run))
    assert said == {
        "runs/base is there in process 0, but not there in process 2. All machines of a run need the same recipe, data "
        "and folders; a folder that they share is simplest."
    }


# --- While they are watched. ---


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which watches wanted to end this process."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    for name in ("_LOOK_S", "_LINGER_S", "_GRACE_S"):
        monkeypatch.setattr(watchdog, name, 0.1)
    return codes


def watched_outcomes(run: list[LaunchedProcesses], body: Body) -> list[Exception | None]:
    def watched(process: LaunchedProcesses) -> Exception | None:
        try:
            with process:
                if (error := outcome(process, body)) is not None:
                    raise error
        except Exception as raised:  # noqa: BLE001
            return raised
        return None

    with ThreadPoolExecutor(len(run)) as pool:
        found = list(pool.map(watched, run))
    for process in run:
        process._watchdog._thread.join(20)
    return found


def test_process_that_is_watched_is_waited_for_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch, ended: list[int]
) -> None:
    run = processes(2, monkeypatch)
    for process in run:
        process.set_timeout(0.1)
    assert watched_outcomes(run, lambda rank: time.sleep(2 * rank)) == [None, None]
    assert ended == []


def test_error_that_all_know_of_ends_nobody_else(monkeypatch: pytest.MonkeyPatch, ended: list[int]) -> None:
    errors = watched_outcomes(processes(2, monkeypatch), fail_in(1))
    assert [type(error) for error in errors] == [OtherProcessError, RecipeError]
    assert ended == []


def test_error_that_another_is_too_busy_to_hear_of_ends_it(
    monkeypatch: pytest.MonkeyPatch, ended: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.2)

    def body(rank: int) -> None:
        if rank == 1:
            raise RecipeError("wrong")
        # As in a collective that waits for the other one.
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)

    watched_outcomes(processes(2, monkeypatch), body)
    assert ended == [1]
    assert caplog.messages == ["Process 1 has stopped: wrong. Process 0 cannot train on without it, and ends too."]
