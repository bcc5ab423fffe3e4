"""Ends this process, with a clear message, when another process of the run is gone or has left training early.

A process that raises or is killed leaves the others in a collective: gloo raises something about a connection, NCCL
waits for minutes, and neither says why. So each process keeps one connection to rank 0. Where it closes without a
goodbye, the process is gone, whether or not a Python thread there still gets to run. Nothing is sent in between: a
process that is slow, or stopped in a debugger, stays connected. In a process that lives on but has left its training,
the watchdog's own thread sees that the Trainer no longer runs, and reports it to the others.

Nobody waits for a connection: each process makes its own when its watchdog starts, and is watched from then on.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from hf_ckpt.distributed.connections import Connection, Message, is_one_machine, listen
from hf_ckpt.errors import HFCkptError, OtherProcessError
from hf_ckpt.upstream.torch import default_store

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
"""How long whoever connects may take to prove itself, in seconds."""
_POLL_S = 0.05
"""How often a process asks the store where rank 0 listens, in seconds."""
_CHECK_S = 5.0
"""How often a process looks whether its training still runs, in seconds."""
_GRACE_S = 15.0
"""How long this process may take to end by itself, in seconds: gloo raises at once, NCCL does not."""
_LINGER_S = 1.0
"""How long a process that leaves training waits for news of another, in seconds."""
_NUM_TRIES = 3
_MAX_UNAUTHENTICATED = 64
_MAX_REASON = 1000
"""Characters of a reason: escaped as JSON they still make a line."""

_DIED = "its process is gone (killed, or out of memory); its own output may tell more"
_LEFT_EARLY = "it left training before its end; its own output may tell more"
_NEVER_BEGAN = "its process ended before training began; its own output may tell more"


_running: weakref.WeakSet[Watchdog] = weakref.WeakSet()


class Watchdog:
    """The connections of one process to the others of its run, and the thread that waits for them to close.

    `store` is shared by all processes of the run. This connection to it must be the watchdog's alone, for its thread
    uses it. With `outlasts_training` the process is needed until `close`, and not just until its training has ended.
    """

    def __init__(
        self, store: Store, rank: int, size: int, group: object = None, *, outlasts_training: bool = False
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._group = None if group is None else weakref.ref(group)
        self._outlasts_training = outlasts_training
        # Counted in the store, so that watches that follow each other are not mixed up.
        self._name = f"hf_ckpt/watch/{store.add(f'hf_ckpt/watches/{rank}', 1)}"
        self._token = ""
        self._peers: dict[int, Connection] = {}
        self._unauthenticated: list[Connection] = []
        self._listener: socket.socket | None = None
        self._trainings: list[_Training] = []
        self._lost: str | None = None
        self._next_check = 0.0
        self._num_missed = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.is_connected = threading.Event()
        """Set once this process is connected, to rank 0 or, on rank 0, to all others."""
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        _forget_in_forked_children()
        _running.add(self)
        atexit.register(self._end_of_process)
        # A daemon: it must not keep a process alive that has ended its work.
        self._thread = threading.Thread(target=self._run, name="hf_ckpt-watch", daemon=True)
        self._thread.start()

    # --- What this process does. ---

    def begin(self) -> None:
        """Note that training begins in the calling thread; raise `OtherProcessError` if another process has left."""
        if self._lost is not None:
            raise OtherProcessError(f"{self._lost} Process {self._rank} cannot train without it.")
        training = _Training.of_caller()
        if training not in self._trainings:
            self._trainings.append(training)

    def end(self) -> None:
        """Note that the training that began last has come to its end."""
        if self._trainings:
            self._trainings.pop()
        if not self._trainings and not self._outlasts_training:
            self.close()

    def fail(self, reason: str) -> None:
        """Send the other processes the reason why this one stops."""
        self._send_and_close({"failed": self._rank, "reason": reason[:_MAX_REASON]})

    def leave(self, reason: str) -> None:
        """Do the same where another process that is gone may be the reason: wait for the news of it first."""
        self._thread.join(_LINGER_S)
        self.fail(reason)

    def close(self) -> None:
        """Say goodbye: the others do not need this process any longer."""
        self._send_and_close({"goodbye": self._rank})

    def is_of(self, group: object) -> bool:
        """Whether this watchdog is in force for the processes of a group."""
        return not self._over.is_set() and (self._group is None or self._group() is group)

    def has_left_training(self) -> bool:
        """Whether training has begun here, and is neither ended nor running."""
        return any(not training.is_running() for training in self._trainings)

    def watches(self, rank: int) -> bool:
        """Whether this process would notice that another one is gone."""
        if self._over.is_set():
            return False
        try:
            return self._store.check([f"{self._name}/{other}" for other in {rank, self._rank} - {0}])
        except dist.DistError:
            return False

    def why_left(self) -> str:
        """Return why training was left, as far as that is known."""
        return next((why for training in self._trainings if (why := training.why_left())), _LEFT_EARLY)

    def _end_of_process(self) -> None:
        if not self._trainings and not self._outlasts_training:
            self._send_and_close({"left": self._rank})
        else:
            self.leave(self.why_left())
        # A thread that is at work in torch while the interpreter ends would abort the process.
        self._thread.join(_LINGER_S)

    def _send_and_close(self, message: Message) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
            for peer in self._peers.values():
                peer.send(message)
                peer.end()
            # Under the lock, under which the thread closes everything at its end.
            self._waker.send(b"\0")
        atexit.unregister(self._end_of_process)

    def forget(self) -> None:
        """Let go of everything in a forked child, of which the other processes know nothing."""
        # Another thread of the parent may have held the lock, which nobody here would ever open.
        self._over.set()
        atexit.unregister(self._end_of_process)
        # Not shut down: the parent still uses them, and while a child has them open they do not close with it.
        self._close_all()

    def _close_all(self) -> None:
        sockets = [connection.socket for connection in (*self._peers.values(), *self._unauthenticated)]
        for open_socket in (*sockets, self._listener, self._woken, self._waker):
            if open_socket is not None:
                open_socket.close()

    # --- What its thread does. ---

    def _run(self) -> None:
        try:
            if self._rank == 0:
                self._listen()
                self._wait()
            else:
                self._keep_connected()
        # The store ends with the run.
        except dist.DistError:
            is_needed = bool(self._trainings) or self._outlasts_training
            if is_needed and not self.is_connected.is_set():
                self._end({"failed": 0, "reason": _DIED})
        finally:
            # Whatever ended the watch of this process, the process itself goes on.
            self.close()
            # Under the lock nobody is in the middle of sending.
            with self._lock:
                self._selector.close()
                self._close_all()

    def _listen(self) -> None:
        self._listener = listen(self._size)
        if self._listener is None:
            self._store.set(self._name, json.dumps(None))
            return
        self._selector.register(self._listener, selectors.EVENT_READ)
        # Whoever else finds the port does not know the token.
        self._token = secrets.token_hex(16)
        address, port = self._listener.getsockname()[:2]
        self._store.set(self._name, json.dumps([address, port, self._token]))

    def _keep_connected(self) -> None:
        while not self._store.check([self._name]):
            if self._over.wait(_POLL_S):
                return
            self._check_training()
        offer = json.loads(self._store.get(self._name))
        for _ in range(_NUM_TRIES if offer is not None else 0):
            if not self._connect(*offer):
                break
            self._wait()
            if self._over.is_set() or self.is_connected.is_set():
                break
        if not self._over.is_set() and not self.is_connected.is_set():
            self._go_on_alone(offer)
        while not self._over.wait(_CHECK_S):
            self._check_training()

    def _connect(self, address: str, port: int, token: str) -> bool:
        try:
            hub = Connection(socket.create_connection((address, port), timeout=_CONNECT_S), _CONNECT_S)
        except OSError:
            return False
        hub.keep_open()
        with self._lock:
            if self._over.is_set():
                hub.socket.close()
                return True
            self._peers[0] = hub
        self._selector.register(hub.socket, selectors.EVENT_READ, hub)
        hub.send({"rank": self._rank, "token": token})
        return True

    def _go_on_alone(self, offer: list[Any] | None) -> None:
        """Go on without a connection to rank 0."""
        if offer is not None and is_one_machine(self._size):
            # Nothing stands between the processes of one machine.
            self._handle({"left": 0})
        else:
            logger.warning(
                "Process %d cannot reach process 0 by TCP%s: when one of them fails, the other waits for its engine.",
                self._rank,
                "" if offer is None else f" at {offer[0]}",
            )

    def _wait(self) -> None:
        """Read what comes until this process is closed, or has lost its connection to rank 0."""
        while not self._over.is_set():
            for key, _ in self._selector.select(min(_CONNECT_S, _CHECK_S)):
                if key.fileobj is self._listener:
                    self._accept(self._listener)
                # What came before in this round may have closed it.
                elif isinstance(key.data, Connection) and not key.data.is_dropped:
                    self._read(key.data)
            for newcomer in [found for found in self._unauthenticated if found.is_late()]:
                self._drop(newcomer)
            self._check_training()
            if self._rank and not self._peers:
                return

    def _accept(self, listener: socket.socket) -> None:
        try:
            newcomer = Connection(listener.accept()[0], _CONNECT_S)
        except OSError:
            # Gone again, or this process has too many files open: later, then.
            self._over.wait(_POLL_S)
            return
        if len(self._unauthenticated) >= _MAX_UNAUTHENTICATED:
            self._drop(self._unauthenticated[0])
        self._unauthenticated.append(newcomer)
        self._selector.register(newcomer.socket, selectors.EVENT_READ, newcomer)

    def _read(self, connection: Connection) -> None:
        for message in connection.messages():
            if message is None:
                self._drop(connection)
            elif connection in self._unauthenticated:
                self._authenticate(connection, message)
            else:
                self._handle(message, connection)
            # What came after the line for which it was closed is not read.
            if self._over.is_set() or connection.is_dropped:
                return

    def _authenticate(self, newcomer: Connection, message: Message) -> None:
        rank = message.get("rank", 0)
        token = str(message.get("token")).encode(errors="surrogatepass")
        is_true = secrets.compare_digest(token, self._token.encode())
        if not is_true or not 0 < rank < self._size or rank in self._peers:
            self._drop(newcomer)
            return
        self._unauthenticated.remove(newcomer)
        newcomer.keep_open()
        newcomer.is_authenticated = True
        with self._lock:
            if self._over.is_set():
                return
            self._peers[rank] = newcomer
        self._store.set(f"{self._name}/{rank}", "seen")
        newcomer.send({"welcome": rank})
        if len(self._peers) == self._size - 1 and self._listener is not None:
            self.is_connected.set()
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            for late in list(self._unauthenticated):
                self._drop(late)

    def _drop(self, connection: Connection) -> None:
        """Close a connection; one that closed without a goodbye was the end of its process."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.is_dropped = True
        if connection in self._unauthenticated:
            self._unauthenticated.remove(connection)
            return
        rank = next(number for number, peer in self._peers.items() if peer is connection)
        with self._lock:
            del self._peers[rank]
        if connection.is_authenticated and connection.is_closed and not connection.has_said_goodbye:
            self._end({"failed": rank, "reason": _DIED})

    def _handle(self, message: Message, sender: Connection | None = None) -> None:
        match message:
            case {"welcome": _} if sender is not None and self._rank:
                sender.is_authenticated = True
                self.is_connected.set()
            case {"goodbye": _} if sender is not None:
                sender.has_said_goodbye = True
            case {"left": rank}:
                if sender is not None:
                    sender.has_said_goodbye = True
                self._end({"failed": rank, "reason": _NEVER_BEGAN}, sender)
            case {"failed": _, "reason": _}:
                self._end(message, sender)

    def _end(self, message: Message, sender: Connection | None = None) -> None:
        rank, reason = message["failed"], message["reason"]
        for peer in self._peers.values():
            if peer is not sender:
                peer.send(message)
        is_needed = bool(self._trainings) or self._outlasts_training
        if not is_needed and reason != _DIED:
            # What runs here may need no other process: only training does.
            self._lost = f"Process {rank} has stopped: {reason.rstrip('.')}."
            return
        # All may stop for one reason, and then each of them says it.
        if self._over.wait(_LINGER_S / 2):
            return
        with self._lock:
            self._over.set()
        logger.error(
            "Process %d has stopped: %s. Process %d cannot train on without it, and ends too.",
            *(rank, reason.rstrip("."), self._rank),
        )
        time.sleep(_GRACE_S)
        if not self._outlasts_training and self.has_left_training():
            # It waits for nobody.
            return
        # The main thread waits in a collective that nobody will join.
        os._exit(1)

    def _check_training(self) -> None:
        """Report to the others once training has been left here."""
        if not self._trainings or self._outlasts_training or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _CHECK_S
        self._num_missed = self._num_missed + 1 if self.has_left_training() else 0
        # Twice, for the stack is read while it changes.
        if self._num_missed > 1:
            self.fail(self.why_left())


@dataclass(frozen=True)
class _Training:
    """A training that runs in a thread of this process."""

    thread: int
    frame: int | None
    """Id of the frame of `Trainer.train`: the frame itself would keep a whole run alive. None without a Trainer."""
    code: CodeType | None
    """Of that frame, should another one get its id."""

    @classmethod
    def of_caller(cls) -> _Training:
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            module = str(frame.f_globals.get("__name__"))
            if frame.f_code.co_name == "train" and module.startswith("transformers.trainer"):
                return cls(threading.get_ident(), id(frame), frame.f_code)
        return cls(threading.get_ident(), None, None)

    def is_running(self) -> bool:
        """Whether it is on its thread's stack; always so where it is no Trainer's."""
        if self.frame is None:
            return True
        innermost = sys._current_frames().get(self.thread)
        return innermost is not None and any(
            id(frame) == self.frame and frame.f_code is self.code for frame, _ in traceback.walk_stack(innermost)
        )

    def why_left(self) -> str | None:
        """Return the exception that ended it, where nobody caught that."""
        error = getattr(sys, "last_value", None)
        if error is None or all(id(frame) != self.frame for frame, _ in traceback.walk_tb(error.__traceback__)):
            return None
        return f"{type(error).__name__}: {error}"


# --- The watchdogs of this process. ---


def start() -> Watchdog | None:
    """Watch the other processes of the default process group from here on, without waiting for them.

    Returns the watchdog of this process, which may be there already; None where there is one process only.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    group = dist.group.WORLD
    for watch in list(_running):
        if watch.is_of(group):
            if not watch.has_left_training():
                return watch
            watch.fail(watch.why_left())
    return Watchdog(clone_of(default_store()), dist.get_rank(), dist.get_world_size(), group)


def clone_of(store: Any) -> Store:
    """Return another connection to a store. Torch's stubs do not know that a store can be cloned."""
    cloned: Store = store.clone()
    return cloned


@contextmanager
def watched_training() -> Iterator[Watchdog | None]:
    """Begin a training. An error of this package's within is raised in all processes: the training ends with it.

    Raises `OtherProcessError` if another process has left already.
    """
    watch = start()
    if watch is None:
        yield None
        return
    watch.begin()
    try:
        yield watch
    except HFCkptError:
        watch.end()
        raise


def is_watched(rank: int) -> bool:
    """Whether this process would notice that another one is gone."""
    return any(watch.watches(rank) for watch in list(_running))


def report_failures(
    watch: Watchdog, model: nn.Module, is_handled: Callable[[BaseException], bool] | None = None
) -> Callable[[], None]:
    """Report an exception in the model's forward to the others, before anybody handles it. Returns what ends that.

    `is_handled` tells of an exception whether this process will go on, or tell of it itself.
    """
    return model.register_forward_hook(functools.partial(_report, watch, is_handled), always_call=True).remove


def _report(
    watch: Watchdog, is_handled: Callable[[BaseException], bool] | None, module: nn.Module, args: Any, output: Any
) -> None:
    error = sys.exception()
    # With an output, the exception is one that the caller is handling.
    if error is not None and output is None and not (is_handled is not None and is_handled(error)):
        watch.fail(f"{type(error).__name__}: {error}")


@functools.cache
def _forget_in_forked_children() -> None:
    """Keep forked children, such as those that load data, from holding connections open whose process is gone."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for watch in list(_running):
        watch.forget()
    _running.clear()
