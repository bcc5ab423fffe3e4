"""The watch over the processes of a run, played by several in one process around one store."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from torch import nn
from torch.distributed import PrefixStore, Store, TCPStore

from hf_ckpt.distributed import watchdog as module
from hf_ckpt.distributed.watchdog import Watchdog
from hf_ckpt.errors import OtherProcessError
from hf_ckpt.patch.interrupted_run import train_call

pytestmark = [
    pytest.mark.core,
    pytest.mark.distributed,
    # Of Python 3.12: the threads are those of torch and of the watch, and the child uses none.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
PATIENCE_S = 20
"""Enough for what takes milliseconds on a machine that does nothing else."""
exit_for_real = os._exit
LEFT_EARLY = "it left training before its end; its own output may tell more."


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes with which watches wanted to end this process."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(module, "_LOOK_S", 0.02)
    monkeypatch.setattr(module, "_LINGER_S", 0.0)
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    yield codes
    for watch in list(module._running):
        watch.close()
        watch._thread.join(PATIENCE_S)


@pytest.fixture
def store() -> Store:
    launcher = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return PrefixStore("a run", launcher)


@pytest.fixture
def run(store: Store) -> list[Watchdog]:
    return [Watchdog(store, rank) for rank in range(3)]


def eventually(holds: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(holds())


class Trainer:
    """What a call of `train()` is known by."""

    callback_handler = None

    def train(self, body: Callable[[], object]) -> None:
        body()


def begin(*watches: Watchdog) -> None:
    for watch in watches:
        watch.begin(None)


# --- How a process is told. ---


def test_end_of_training_ends_nobody(run: list[Watchdog], ended: list[int], caplog: pytest.LogCaptureFixture) -> None:
    begin(*run)
    run[1].end()
    run[2].end()
    assert eventually(lambda: not run[1]._thread.is_alive())
    time.sleep(0.1)
    assert not run[0]._over.is_set()
    assert (ended, caplog.messages) == ([], [])


def test_process_that_fails_ends_the_others_in_its_words(
    run: list[Watchdog], ended: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    begin(*run)
    run[2].fail("ValueError: a layer failed. " + "x" * 10_000)
    # What another one says later has often come of it, and is not passed on.
    run[1].fail("RuntimeError: connection closed")
    assert eventually(lambda: ended == [1])
    (text,) = caplog.messages
    assert text.startswith("Process 2 has stopped: ValueError: a layer failed. xx")
    assert text.endswith("xx. Process 0 cannot train on without it, and ends too.")
    assert len(text) < 1200


def test_all_that_fail_at_once_are_ended_by_nobody(
    run: list[Watchdog], ended: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(*run)
    # No look is between the first and the last.
    monkeypatch.setattr(module, "_LOOK_S", PATIENCE_S)
    time.sleep(0.1)
    for watch in run:
        watch.fail("PlanMismatchError: all of them")
    for watch in run:
        watch._thread.join(PATIENCE_S)
    assert (ended, caplog.messages) == ([], [])


@pytest.mark.parametrize("leaver", [0, 1])
def test_process_that_ends_before_training_ends_only_those_that_train(
    run: list[Watchdog], ended: list[int], caplog: pytest.LogCaptureFixture, leaver: int
) -> None:
    run[2].begin(None)
    run[leaver]._end_of_process()
    other = run[1 - leaver]
    assert eventually(lambda: ended == [1])
    text = f"Process {leaver} has stopped: its process ended before training began; its own output may tell more."
    assert caplog.messages == [f"{text} Process 2 cannot train on without it, and ends too."]
    with pytest.raises(OtherProcessError) as refused:
        other.begin(None)
    assert str(refused.value) == f"{text} Process {1 - leaver} cannot train without it."


def test_process_that_ends_in_training_ends_the_others(
    run: list[Watchdog], ended: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    begin(*run)
    # As sys.exit does.
    run[1]._end_of_process()
    assert eventually(lambda: ended == [1, 1])
    assert caplog.messages[0].startswith(f"Process 1 has stopped: {LEFT_EARLY}")


def test_process_that_a_command_needs_is_needed_without_training(store: Store, ended: list[int]) -> None:
    run = [Watchdog(store, rank, outlasts_training=True) for rank in range(3)]
    run[1].begin(None)
    run[1].end()
    assert not run[1]._over.is_set()
    run[1]._end_of_process()
    assert eventually(lambda: ended == [1, 1])


def test_training_that_ends_while_another_process_fails_is_not_ended(
    run: list[Watchdog], ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 1.0)
    begin(*run[:2])
    run[1].fail("after the last collective")
    assert eventually(run[0]._over.is_set)
    run[0].end()
    run[0]._thread.join(PATIENCE_S)
    assert ended == []


def test_store_that_is_gone_ends_nobody(ended: list[int], caplog: pytest.LogCaptureFixture) -> None:
    launcher = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = Watchdog(TCPStore("127.0.0.1", launcher.port), 1)
    watch.begin(None)
    del launcher
    assert eventually(lambda: not watch._thread.is_alive())
    watch.fail("nobody hears it")
    assert not watch.is_alive(0)
    assert (ended, caplog.messages) == ([], [])


def test_model_that_is_copied_takes_no_watch_along(run: list[Watchdog]) -> None:
    model = nn.Linear(2, 2)
    run[1].report_failures(model)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in (*copies, model):
        with pytest.raises(TypeError):
            each("no tensor")
        assert run[1]._over.is_set() is (each is model)


# --- Training that is left while the process lives on. ---


def test_training_that_is_left_is_found_out(
    run: list[Watchdog], ended: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a notebook has it of another cell.
    monkeypatch.setattr(sys, "last_value", ValueError("stale"), raising=False)
    begin(run[0], run[2])

    def body() -> None:
        run[1].begin(train_call())
        assert not run[1]._over.wait(0.5)
        assert not run[1].has_left_training()
        raise KeyError("caught by the program")

    with pytest.raises(KeyError):
        Trainer().train(body)
    assert eventually(lambda: ended == [1, 1])
    assert caplog.messages[0].startswith(f"Process 1 has stopped: {LEFT_EARLY}")


def test_those_that_have_left_training_themselves_are_not_ended(
    run: list[Watchdog], ended: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError):
        Trainer().train(lambda: (run[0].begin(train_call()), {}["a layer"]))
    run[1].fail("the same")
    assert eventually(run[0]._over.is_set)
    run[0]._thread.join(PATIENCE_S)
    assert (ended, caplog.messages) == ([], [])


def test_exception_is_named_where_it_is_the_one_that_ended_training(
    run: list[Watchdog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOOK_S", PATIENCE_S)
    time.sleep(0.1)
    with pytest.raises(KeyError) as caught:
        Trainer().train(lambda: (run[1].begin(train_call()), {}["a layer"]))
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    run[1].leave()
    assert run[0]._stopped() == "Process 1 has stopped: KeyError: 'a layer'."


def test_training_that_ended_was_not_left(run: list[Watchdog]) -> None:
    def body() -> None:
        # A search for a batch size that fits begins anew in the same call.
        run[1].begin(train_call())
        run[1].begin(train_call())
        run[1].end()

    Trainer().train(body)
    assert not run[1].has_left_training()
    assert run[1]._over.is_set()


# --- Slow processes. ---


def test_process_is_alive_from_its_first_beat_until_it_is_silent_for_long(
    store: Store, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SILENCE_S", 1.0)
    first = Watchdog(store, 0)
    first.begin(None)
    assert not first.is_alive(1)
    second = Watchdog(store, 1)
    assert first.is_alive(1)
    time.sleep(1.2)
    assert first.is_alive(1)
    # Its thread ends, as when its process is stopped, or killed.
    second.close()
    second._thread.join(PATIENCE_S)
    assert first.is_alive(1)
    assert eventually(lambda: not first.is_alive(1))
    assert ended == []


def test_forked_child_says_nothing(run: list[Watchdog], ended: list[int]) -> None:
    begin(*run)
    child = os.fork()
    if not child:
        run[1].fail("a child")
        exit_for_real(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    time.sleep(0.2)
    assert not run[0]._store.check([run[0]._failure])
    assert ended == []
