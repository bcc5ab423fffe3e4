"""Ends this process, with a clear message, when another process of the run is gone or has left training early.

A process that raises or is killed leaves the others in a collective: gloo raises something about a connection, NCCL
waits for minutes, and neither says why. So each process keeps one connection to rank 0. A connection that closes
without a farewell tells that its process is gone, whether or not a Python thread there still gets to run; nothing is
sent in between, and a process that is slow or stopped in a debugger stays connected. A process that lives on, but has
left its training, is found out by its own thread, which sees that the Trainer no longer runs, and tells the others.

Nobody waits for a connection: each process makes its own when it comes to where the watch starts, and is watched from
then on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import ipaddress
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store, _get_default_store

from hf_ckpt.errors import HFCkptError, OtherProcessError

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
"""How long whoever connects may take to prove itself, in seconds."""
_ASK_S = 0.2
"""How often a process asks the store where rank 0 listens, in seconds."""
_LOOK_S = 5.0
"""How often a process looks whether its training still runs, in seconds."""
_GRACE_S = 15.0
"""How long this process may take to end by itself, in seconds: gloo raises at once, NCCL does not."""
_LAST_WORD_S = 1.0
"""How long a process that leaves training waits for news of another, in seconds."""
_NUM_TRIES = 3
_MAX_STRANGERS = 64
_MAX_LINE_BYTES = 16 * 2**10
_MAX_REASON = 1000
"""Characters of a reason: escaped as JSON they still make a line."""

Message = dict[str, Any]
# Keys and types of all that is ever sent.
_MESSAGES: Sequence[dict[str, type]] = (
    {"rank": int, "token": str},
    {"welcome": int},
    {"failed": int, "reason": str},
    {"left": int},
    {"farewell": int},
)
_GONE = "its process is gone (killed, or out of memory); its own output may tell more"
_LEFT_EARLY = "it left training before its end; its own output may tell more"
_NEVER_BEGAN = "its process ended before training began; its own output may tell more"


_running: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """The connections of one process to the others of its run, and the thread that waits for them to close.

    Args:
        store: that all processes of the run share, with room for this watch alone; nobody else may use this connection
            to it, for the thread does.
        rank: this process's.
        size: how many processes there are.
        group: the process group of the run, where it is there already.
        outlasts_training: whether this process is needed until `close`, and not just until its training has ended.

    Attributes:
        is_connected: set once this process is connected, to rank 0 or, on rank 0, to all others.
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
        self._peers: dict[int, _Connection] = {}
        self._strangers: list[_Connection] = []
        self._listener: socket.socket | None = None
        self._trainings: list[_Training] = []
        self._lost: str | None = None
        self._next_look = 0.0
        self._num_missed = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.is_connected = threading.Event()
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
        """Note that training begins in the calling thread.

        Raises:
            OtherProcessError: another process has left already.
        """
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
        """Tell the other processes that this one stops, and why."""
        self._say_and_close({"failed": self._rank, "reason": reason[:_MAX_REASON]})

    def leave(self, reason: str) -> None:
        """Do the same where the reason may be another process that is gone: why it is, is said first."""
        self._thread.join(_LAST_WORD_S)
        self.fail(reason)

    def close(self) -> None:
        """Say farewell: the others need this process no more."""
        self._say_and_close({"farewell": self._rank})

    def is_of(self, group: object) -> bool:
        """Tell whether this watch is in force for the processes of a group."""
        return not self._over.is_set() and (self._group is None or self._group() is group)

    def has_left_training(self) -> bool:
        """Tell whether training has begun here, and is neither ended nor running."""
        return any(not training.is_running() for training in self._trainings)

    def sees(self, rank: int) -> bool:
        """Tell whether this process would be told if another one were gone."""
        if self._over.is_set():
            return False
        try:
            return self._store.check([f"{self._name}/{other}" for other in {rank, self._rank} - {0}])
        except dist.DistError:
            return False

    def why_left(self) -> str:
        """Return in words why training was left, as far as that is known."""
        return next((why for training in self._trainings if (why := training.why_left())), _LEFT_EARLY)

    def _end_of_process(self) -> None:
        if not self._trainings and not self._outlasts_training:
            self._say_and_close({"left": self._rank})
        else:
            self.leave(self.why_left())
        # A thread that is at work in torch while the interpreter ends would abort the process.
        self._thread.join(_LAST_WORD_S)

    def _say_and_close(self, message: Message) -> None:
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
        sockets = [connection.socket for connection in (*self._peers.values(), *self._strangers)]
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
                self._end({"failed": 0, "reason": _GONE})
        finally:
            # Whatever ended the watch of this process, the process itself goes on.
            self.close()
            # Under the lock nobody is in the middle of a last word.
            with self._lock:
                self._selector.close()
                self._close_all()

    def _listen(self) -> None:
        self._listener = _listener(self._size)
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
            if self._over.wait(_ASK_S):
                return
            self._look()
        offer = json.loads(self._store.get(self._name))
        for _ in range(_NUM_TRIES if offer is not None else 0):
            if not self._connect(*offer):
                break
            self._wait()
            if self._over.is_set() or self.is_connected.is_set():
                break
        if not self._over.is_set() and not self.is_connected.is_set():
            self._is_alone(offer)
        while not self._over.wait(_LOOK_S):
            self._look()

    def _connect(self, address: str, port: int, token: str) -> bool:
        try:
            hub = _Connection(socket.create_connection((address, port), timeout=_CONNECT_S))
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

    def _is_alone(self, offer: list[Any] | None) -> None:
        """Go on without a connection to rank 0."""
        if offer is not None and _is_one_machine(self._size):
            # Nothing stands between the processes of one machine.
            self._heed({"left": 0})
        else:
            logger.warning(
                "Process %d cannot reach process 0 by TCP%s: when one of them fails, the other waits for its engine.",
                self._rank,
                "" if offer is None else f" at {offer[0]}",
            )

    def _wait(self) -> None:
        """Listen until this process has said its last word, or has lost its connection to rank 0."""
        while not self._over.is_set():
            for key, _ in self._selector.select(min(_CONNECT_S, _LOOK_S)):
                if key.fileobj is self._listener:
                    self._admit(self._listener)
                # What came before in this round may have closed it.
                elif isinstance(key.data, _Connection) and not key.data.is_dropped:
                    self._read(key.data)
            for stranger in [found for found in self._strangers if found.is_late()]:
                self._drop(stranger)
            self._look()
            if self._rank and not self._peers:
                return

    def _admit(self, listener: socket.socket) -> None:
        try:
            stranger = _Connection(listener.accept()[0])
        except OSError:
            # Gone again, or this process has too many files open: later, then.
            self._over.wait(_ASK_S)
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(self._strangers[0])
        self._strangers.append(stranger)
        self._selector.register(stranger.socket, selectors.EVENT_READ, stranger)

    def _read(self, connection: _Connection) -> None:
        for message in connection.messages():
            if message is None:
                self._drop(connection)
            elif connection in self._strangers:
                self._get_to_know(connection, message)
            else:
                self._heed(message, connection)
            # Nothing more is heard of what is closed, whatever came with the line for which it was.
            if self._over.is_set() or connection.is_dropped:
                return

    def _get_to_know(self, stranger: _Connection, message: Message) -> None:
        rank = message.get("rank", 0)
        token = str(message.get("token")).encode(errors="surrogatepass")
        is_true = secrets.compare_digest(token, self._token.encode())
        if not is_true or not 0 < rank < self._size or rank in self._peers:
            self._drop(stranger)
            return
        self._strangers.remove(stranger)
        stranger.keep_open()
        stranger.is_known = True
        with self._lock:
            if self._over.is_set():
                return
            self._peers[rank] = stranger
        self._store.set(f"{self._name}/{rank}", "seen")
        stranger.send({"welcome": rank})
        if len(self._peers) == self._size - 1 and self._listener is not None:
            self.is_connected.set()
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            for late in list(self._strangers):
                self._drop(late)

    def _drop(self, connection: _Connection) -> None:
        """Close a connection; one that closed without a farewell was the end of its process."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.is_dropped = True
        if connection in self._strangers:
            self._strangers.remove(connection)
            return
        rank = next(number for number, peer in self._peers.items() if peer is connection)
        with self._lock:
            del self._peers[rank]
        if connection.is_known and connection.is_closed and not connection.has_said_farewell:
            self._end({"failed": rank, "reason": _GONE})

    def _heed(self, message: Message, told_by: _Connection | None = None) -> None:
        match message:
            case {"welcome": _} if told_by is not None and self._rank:
                told_by.is_known = True
                self.is_connected.set()
            case {"farewell": _} if told_by is not None:
                told_by.has_said_farewell = True
            case {"left": rank}:
                if told_by is not None:
                    told_by.has_said_farewell = True
                self._end({"failed": rank, "reason": _NEVER_BEGAN}, told_by)
            case {"failed": _, "reason": _}:
                self._end(message, told_by)

    def _end(self, message: Message, told_by: _Connection | None = None) -> None:
        rank, reason = message["failed"], message["reason"]
        for peer in self._peers.values():
            if peer is not told_by:
                peer.send(message)
        is_needed = bool(self._trainings) or self._outlasts_training
        if not is_needed and reason != _GONE:
            # What runs here may need no other process: only training does.
            self._lost = f"Process {rank} has stopped: {reason.rstrip('.')}."
            return
        # All may stop for one reason, and then each of them says it.
        if self._over.wait(_LAST_WORD_S / 2):
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

    def _look(self) -> None:
        """Tell the others once training has been left here."""
        if not self._trainings or self._outlasts_training or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_S
        self._num_missed = self._num_missed + 1 if self.has_left_training() else 0
        # Twice, for the stack is read while it changes.
        if self._num_missed > 1:
            self.fail(self.why_left())


@dataclass(frozen=True)
class _Training:
    """A training that runs in a thread of this process.

    Args:
        thread: its number.
        frame: of the Trainer's `train`, as an id, for a frame that is held on to keeps a whole run alive; None where
            training is no Trainer's.
        code: of that frame, should another one get its id.
    """

    thread: int
    frame: int | None
    code: CodeType | None

    @classmethod
    def of_caller(cls) -> _Training:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (
            frame.f_code.co_name == "train" and str(frame.f_globals.get("__name__")).startswith("transformers.trainer")
        ):
            frame = frame.f_back
        if frame is None:
            return cls(threading.get_ident(), None, None)
        return cls(threading.get_ident(), id(frame), frame.f_code)

    def is_running(self) -> bool:
        """Tell whether it is on its thread's stack; always so where it is no Trainer's."""
        if self.frame is None:
            return True
        frame = sys._current_frames().get(self.thread)
        while frame is not None:
            if id(frame) == self.frame and frame.f_code is self.code:
                return True
            frame = frame.f_back
        return False

    def why_left(self) -> str | None:
        """Return the exception that ended it, where nobody caught that; one of something else tells nothing."""
        error = getattr(sys, "last_value", None)
        if error is None or all(id(frame) != self.frame for frame, _ in traceback.walk_tb(error.__traceback__)):
            return None
        return f"{type(error).__name__}: {error}"


class _Connection:
    """One end of a connection, on which whole lines are messages.

    Attributes:
        is_known: whether the other end has proved itself.
        is_closed: whether the other end has closed it.
        is_dropped: whether this end has.
        has_said_farewell: whether the other end said that it would.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.is_known = self.is_closed = self.is_dropped = self.has_said_farewell = False
        self._deadline = time.monotonic() + _CONNECT_S
        self._line = b""

    def is_late(self) -> bool:
        """Tell whether the other end has had its time to prove itself."""
        return time.monotonic() > self._deadline

    def keep_open(self) -> None:
        """Let it stay quiet for as long as a run takes, and notice a machine that has vanished."""
        self.socket.settimeout(None)
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
                if hasattr(socket, option):
                    self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    def send(self, message: Message) -> None:
        """Send a message, if anybody is there."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def end(self) -> None:
        """Send nothing more."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def messages(self) -> Iterator[Message | None]:
        """Yield what has come, and None where no more is to be had or wanted of this end: it closed, or talks rubbish.

        Called when something has come, and so without waiting.
        """
        try:
            found = self.socket.recv(4096)
        except OSError:
            found = b""
        if not found:
            self.is_closed = True
            yield None
            return
        *lines, self._line = (self._line + found).split(b"\n")
        for line in lines:
            yield _message(line)
        if len(self._line) > _MAX_LINE_BYTES:
            yield None


def _message(line: bytes) -> Message | None:
    """Return a line as a message, or None if it is none."""
    try:
        found = json.loads(line)
    # What is not UTF-8 is a ValueError too.
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or {key: type(value) for key, value in found.items()} not in _MESSAGES:
        return None
    return found


# --- Who watches. ---


def start() -> Watch | None:
    """Watch the other processes of the default process group from here on. Waits for nobody.

    Returns:
        The watch of this process, which may be there already; None where there is one process only.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    group = dist.group.WORLD
    for watch in list(_running):
        if watch.is_of(group):
            if not watch.has_left_training():
                return watch
            watch.fail(watch.why_left())
    return Watch(own(_get_default_store()), dist.get_rank(), dist.get_world_size(), group)


def own(store: Any) -> Store:
    """Return a connection to a store for the watch alone. Torch's stubs do not know that a store can be cloned."""
    cloned: Store = store.clone()
    return cloned


@contextmanager
def beginning() -> Iterator[Watch | None]:
    """Begin a training. An error of this package's within is raised in all processes: the training ends with it.

    Raises:
        OtherProcessError: another process has left already.
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


def sees(rank: int) -> bool:
    """Tell whether this process would be told if another one were gone."""
    return any(watch.sees(rank) for watch in list(_running))


def report_failures(watch: Watch, model: nn.Module) -> Callable[[], None]:
    """Tell the others of an exception in the model's forward, before anybody handles it.

    Returns:
        A function that takes the hook off again.
    """
    return model.register_forward_hook(functools.partial(_report, watch), always_call=True).remove


def _report(watch: Watch, module: nn.Module, args: Any, output: Any) -> None:
    error = sys.exception()
    # With an output, the exception is one that the caller is handling.
    if error is not None and output is None:
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


# --- Where rank 0 listens. ---


def _is_one_machine(size: int) -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == str(size)


def _listener(size: int) -> socket.socket | None:
    """Return a listener at the one address that the process group uses for this machine; None if it has none here."""
    for family, address in _addresses(size):
        with contextlib.suppress(OSError):
            return socket.create_server((address, 0), family=family, backlog=size)
    return None


def _addresses(size: int) -> Iterator[tuple[socket.AddressFamily, str]]:
    if _is_one_machine(size):
        yield socket.AF_INET, "127.0.0.1"
        return
    named = os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(OSError):
        for family, *_, where in socket.getaddrinfo(named, None, type=socket.SOCK_STREAM):
            address = ipaddress.ip_address(where[0])
            # The name of a machine may lead to itself, where no other machine finds it; and 0.0.0.0 is all addresses.
            if not address.is_unspecified and (named in ("localhost", where[0]) or not address.is_loopback):
                yield family, str(where[0])
    # Nothing is sent to this address, which is nobody's: it tells by which of its own this machine reaches others.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        yield socket.AF_INET, probe.getsockname()[0]
