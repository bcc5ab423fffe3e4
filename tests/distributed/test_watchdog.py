"""The watch over the processes of a run, played by several in one process around one store."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from hf_ckpt.distributed import watchdog as module
from hf_ckpt.distributed.connections import listen
from hf_ckpt.distributed.watchdog import Watchdog
from hf_ckpt.errors import OtherProcessError

pytestmark = [
    pytest.mark.core,
    pytest.mark.distributed,
    # Of Python 3.12: the threads are those of torch and of the watch, and the child uses none.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
PATIENCE_S = 20
"""Enough for what takes milliseconds on a machine that does nothing else."""
exit_for_real = os._exit


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes with which watches wanted to end this process."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(module, "_GRACE_S", 0.1)
    monkeypatch.setattr(module, "_LINGER_S", 0.1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    yield codes
    for watch in list(module._running):
        watch.close()
        watch._thread.join(PATIENCE_S)


@pytest.fixture
def store() -> Store:
    launcher = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return PrefixStore("a run", launcher)


def eventually(holds: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(holds())


def start(store: Store, rank: int, **options: Any) -> Watchdog:
    return Watchdog(store.clone(), rank, 3, **options)


def connected(store: Store, **options: Any) -> list[Watchdog]:
    run = [start(store, rank, **options) for rank in range(3)]
    assert all(watch.is_connected.wait(PATIENCE_S) for watch in run[1:])
    assert eventually(lambda: len(run[0]._peers) == 2)
    return run


def vanish(watch: Watchdog) -> None:
    """Close the connection as the system does when a process is killed."""
    watch._peers[0].socket.shutdown(socket.SHUT_RDWR)


def train(body: Callable[[], object]) -> None:
    """Run a function as the Trainer does: below its `train`."""
    namespace: dict[str, Any] = {"__name__": "transformers.trainer"}
    exec("def train(body):\n    body()", namespace)
    namespace["train"](body)


# --- How a process is told. ---


def test_farewell_ends_nobody(store: Store, ended: list[int], caplog: pytest.LogCaptureFixture) -> None:
    run = connected(store)
    for watch in run:
        watch.begin()
    run[1].end()
    run[2].end()
    assert eventually(lambda: not run[0]._peers)
    assert not run[0]._over.is_set()
    assert (ended, caplog.messages) == ([], [])


@pytest.mark.parametrize("is_training", [False, True])
def test_process_that_is_gone_ends_the_others(
    store: Store, ended: list[int], caplog: pytest.LogCaptureFixture, is_training: bool
) -> None:
    run = connected(store)
    for watch in run if is_training else []:
        watch.begin()
    vanish(run[1])
    # The one that has vanished sees the same of rank 0.
    assert eventually(lambda: len(ended) == 3)
    for rank in (0, 2):
        assert (
            "Process 1 has stopped: its process is gone (killed, or out of memory); its own output may tell more. "
            f"Process {rank} cannot train on without it, and ends too."
        ) in caplog.messages


def test_process_that_fails_ends_the_others_in_its_words(
    store: Store, ended: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    run = connected(store)
    for watch in run:
        watch.begin()
    run[2].fail("ValueError: a layer failed. " + "x" * 10_000)
    assert eventually(lambda: ended == [1, 1])
    assert (
        sum(text.startswith("Process 2 has stopped: ValueError: a layer failed. xx") for text in caplog.messages) == 2
    )


def test_all_that_fail_at_once_are_ended_by_nobody(
    store: Store, ended: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LINGER_S", PATIENCE_S)
    run = connected(store)
    for watch in run:
        watch.begin()
    for watch in run:
        watch.fail("PlanMismatchError: all of them")
    for watch in run:
        watch._thread.join(PATIENCE_S)
    assert (ended, caplog.messages) == ([], [])


@pytest.mark.parametrize("leaver", [0, 1])
def test_process_that_ends_before_training_ends_only_those_that_train(
    store: Store, ended: list[int], caplog: pytest.LogCaptureFixture, leaver: int
) -> None:
    run = connected(store)
    run[2].begin()
    run[leaver]._end_of_process()
    other = run[1 - leaver]
    assert eventually(lambda: other._lost is not None and ended == [1])
    text = f"Process {leaver} has stopped: its process ended before training began; its own output may tell more."
    assert caplog.messages == [f"{text} Process 2 cannot train on without it, and ends too."]
    with pytest.raises(OtherProcessError) as refused:
        other.begin()
    assert str(refused.value) == f"{text} Process {1 - leaver} cannot train without it."


def test_process_that_ends_in_training_ends_the_others(
    store: Store, ended: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    run = connected(store)
    for watch in run:
        watch.begin()
    # As sys.exit does.
    run[1]._end_of_process()
    assert eventually(lambda: ended == [1, 1])
    assert caplog.messages[0].startswith("Process 1 has stopped: it left training before its end; its own output may")


def test_process_that_a_command_needs_is_needed_without_training(store: Store, ended: list[int]) -> None:
    run = connected(store, outlasts_training=True)
    run[1].begin()
    run[1].end()
    assert not run[1]._over.is_set()
    run[1]._end_of_process()
    assert eventually(lambda: ended == [1, 1])


@pytest.mark.parametrize("is_command", [True, False])
def test_store_that_is_gone_before_rank_0_was_found_ends_who_needs_it(
    ended: list[int], caplog: pytest.LogCaptureFixture, is_command: bool
) -> None:
    launcher = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = Watchdog(TCPStore("127.0.0.1", launcher.port), 1, 3, outlasts_training=is_command)
    if not is_command:
        watch.begin()
    del launcher
    assert eventually(lambda: ended == [1])
    assert caplog.messages[0].startswith("Process 0 has stopped: its process is gone (killed, or out of memory); its")
    assert not watch.watches(0)


# --- Training that is left while the process lives on. ---


def test_training_that_is_left_is_found_out(
    store: Store, ended: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHECK_S", 0.05)
    # As a notebook has it of another cell.
    monkeypatch.setattr(sys, "last_value", ValueError("stale"), raising=False)
    run = connected(store)

    def body() -> None:
        for watch in run:
            watch.begin()
        assert not run[1]._over.wait(1)
        assert not run[1].has_left_training()
        raise KeyError("caught by the program")

    run[0]._check_training = run[2]._check_training = lambda: None  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        train(body)
    assert eventually(run[1]._over.is_set)
    assert run[1].has_left_training()
    assert eventually(lambda: not run[0]._thread.is_alive())
    assert "Process 1 has stopped: it left training before its end; its own output may tell more." in caplog.text
    # They have left it themselves by now, and wait for nobody.
    assert ended == []


def test_exception_is_named_where_it_is_the_one_that_ended_training(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = start(store, 1)

    def body() -> None:
        watch.begin()
        raise KeyError("a layer")

    with pytest.raises(KeyError) as caught:
        train(body)
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    assert watch.why_left() == "KeyError: 'a layer'"
    monkeypatch.setattr(sys, "last_value", ValueError("of another cell"))
    assert watch.why_left().startswith("it left training before its end")


def test_training_that_ended_was_not_left(store: Store) -> None:
    watch = start(store, 1)
    train(lambda: (watch.begin(), watch.end()))
    assert not watch.has_left_training()
    assert eventually(watch._over.is_set)


# --- Slow processes. ---


def test_silence_ends_nobody(store: Store, ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CONNECT_S", "_CHECK_S", "_POLL_S"):
        monkeypatch.setattr(module, name, 0.05)
    first = start(store, 0)
    second = start(store, 1)
    second.begin()
    assert second.is_connected.wait(PATIENCE_S)
    # Twenty times every timeout there is; the third one is still loading.
    time.sleep(1)
    third = start(store, 2)
    assert third.is_connected.wait(PATIENCE_S)
    time.sleep(1)
    assert ended == []
    assert len(first._peers) == 2
    assert all(watch.watches(rank) for watch in (first, second, third) for rank in range(3))


def test_process_that_is_not_watched_is_not_seen(store: Store) -> None:
    first = start(store, 0)
    assert not first.watches(2)
    start(store, 2)
    assert eventually(lambda: first.watches(2))


def test_forked_child_holds_no_connection_open(store: Store) -> None:
    run = connected(store)
    child = os.fork()
    if not child:
        exit_for_real(any(watch._waker.fileno() != -1 or watch._peers[0].socket.fileno() != -1 for watch in run[1:]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run[1]._peers[0].socket.fileno() != -1


# --- Strangers. ---

HELLO = {"rank": 1, "token": "wrong"}
LINES: dict[str, bytes] = {
    "garbage": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "not UTF-8": b"\xff\xfe\xfa\n",
    "wrong token": json.dumps(HELLO).encode() + b"\n",
    "token that is no text": b'{"rank": 1, "token": "\\ud800"}\n',
    "wrong token, then an end": json.dumps(HELLO).encode() + b'\n{"failed": 1, "reason": "me"}\n',
    "wrong types": b'{"rank": "1", "token": 5}\n',
    "a list": b"[1, 2]\n",
    "a number": b"1\n",
    "true for a rank": b'{"rank": true, "token": "x"}\n',
    "an end": b'{"failed": 1, "reason": "me"}\n',
    "a goodbye": b'{"goodbye": 1}\n',
    "unknown keys": b'{"rank": 1, "token": "x", "more": 1}\n',
    "nesting": b"[" * 16_000 + b"\n",
    "large number": b"9" * 16_000 + b"\n",
    "empty line": b"\n",
    "endless line": b"x" * 1_000_000,
}


def offered(store: Store) -> tuple[str, int, str]:
    (name,) = (f"hf_ckpt/watch/{number}" for number in (1,))
    store.wait([name])
    address, port, token = json.loads(store.get(name))
    return address, port, token


def is_closed(client: socket.socket) -> bool:
    client.settimeout(PATIENCE_S)
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def speak_slowly(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client.sendall(b"x")
            time.sleep(0.05)


@pytest.fixture
def connect(store: Store) -> Iterator[Callable[..., socket.socket]]:
    """Connects a stranger to rank 0, and lets it say something."""
    with contextlib.ExitStack() as opened:

        def open_one(said: bytes = b"") -> socket.socket:
            client = opened.enter_context(socket.create_connection(offered(store)[:2]))
            with contextlib.suppress(OSError):
                client.sendall(said)
            return client

        yield open_one


def test_strangers_are_shown_the_door_and_change_nothing(
    store: Store,
    connect: Callable[..., socket.socket],
    ended: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CONNECT_S", 1.0)
    caplog.set_level(logging.DEBUG)
    first = start(store, 0)
    address, _, token = offered(store)
    assert address == "127.0.0.1"
    waiting = [connect() for _ in range(4)]
    threading.Thread(target=speak_slowly, args=(waiting[0],), daemon=True).start()
    for name, line in LINES.items():
        assert is_closed(connect(line)), name
    # The right token for a rank that there is not.
    assert is_closed(connect(json.dumps({"rank": 7, "token": token}).encode() + b"\n"))
    assert not first._peers
    second = start(store, 1)
    assert second.is_connected.wait(PATIENCE_S)
    # A second one that calls itself so.
    assert is_closed(connect(json.dumps({"rank": 1, "token": token}).encode() + b"\n"))
    assert all(map(is_closed, waiting))
    third = start(store, 2)
    assert third.is_connected.wait(PATIENCE_S)
    # Nobody is expected any more.
    assert eventually(lambda: first._listener is None)
    with pytest.raises(ConnectionRefusedError):
        connect()
    for watch in (first, second, third):
        watch.begin()
        watch.end()
    assert (ended, caplog.messages) == ([], [])


def test_more_strangers_than_there_is_room_for_keep_nobody_out(
    store: Store, connect: Callable[..., socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_UNAUTHENTICATED", 4)
    start(store, 0)
    for _ in range(10):
        connect()
    assert start(store, 1).is_connected.wait(PATIENCE_S)


# --- Where it listens. ---


def bound(monkeypatch: pytest.MonkeyPatch, named: str) -> str | None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", named)
    listener = listen(3)
    if listener is None:
        return None
    with listener:
        return str(listener.getsockname()[0])


def test_listener_is_found_at_the_address_of_the_process_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bound(monkeypatch, "127.0.0.1") == "127.0.0.1"
    assert bound(monkeypatch, "localhost") in ("127.0.0.1", "::1")


@pytest.mark.parametrize("leads_to", ["127.0.1.1", "203.0.113.7", "0.0.0.0"])
def test_listener_takes_the_way_out_where_the_name_of_the_machine_does_not_help(
    monkeypatch: pytest.MonkeyPatch, leads_to: str
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (leads_to, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    address = bound(monkeypatch, "node-0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            expected = probe.getsockname()[0]
        except OSError:
            expected = None
    assert address == expected
    assert address != "0.0.0.0"
