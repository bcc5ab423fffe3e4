"""Ends this process, with a clear message, when another process of the run is gone.

A process that raises or is killed leaves the others in a collective: gloo raises something about a connection, NCCL
waits for minutes, and neither says why. So each process keeps one connection to rank 0. A connection that closes
without a farewell tells that its process is gone, whether or not a Python thread there still gets to run; nothing is
sent in between, and a process that is slow or stopped in a debugger stays connected.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_ckpt.exchange import exchange, num_processes

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
_GRACE_S = 15.0
"""How long this process may take to end by itself, in seconds: gloo raises at once, NCCL does not."""
_LAST_WORD_S = 1.0
"""How long an error of this process waits for news of another, in seconds."""
_FAREWELL = {"farewell": True}


_running: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """The connections of one process to the others of its run, and the thread that waits for them to close.

    Made by `start`.

    Args:
        peers: by rank, the connections: of rank 0 to all others, of the others to rank 0.
        rank: this process's.
    """

    def __init__(self, peers: dict[int, socket.socket], rank: int) -> None:
        self._peers = peers
        self._rank = rank
        self._lock = threading.Lock()
        self._is_over = False
        _running.add(self)
        atexit.register(self._end_of_process)
        # A daemon: it must not keep a process alive that has ended its work.
        self._thread = threading.Thread(target=self._run, name="hf_ckpt-watch", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Tell the other processes that this one stops training, and why."""
        self._say_and_close({"failed": self._rank, "reason": reason})

    def close(self) -> None:
        """Say farewell: this process has trained to the end."""
        self._say_and_close(_FAREWELL)

    def _end_of_process(self) -> None:
        # Set by the interpreter when an exception that nobody caught ends it.
        error = getattr(sys, "last_value", None)
        if error is None:
            self.close()
            return
        # The error may be about another process that is gone: why it is, is said first.
        self._thread.join(_LAST_WORD_S)
        self.fail(f"{type(error).__name__}: {error}")

    def _say_and_close(self, message: dict[str, Any]) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            for peer in self._peers.values():
                _send(peer, message)
                # The thread of this process wakes up by it, and the other side reads to the end.
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
        atexit.unregister(self._end_of_process)

    def _run(self) -> None:
        try:
            self._wait()
        finally:
            # Under the lock nobody is in the middle of a last word.
            with self._lock:
                for peer in self._peers.values():
                    peer.close()

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    message = _receive(self._peers[key.data])
                    selector.unregister(key.fileobj)
                    if self._is_over:
                        return
                    if message != _FAREWELL:
                        self._end(message or {"failed": key.data, "reason": None}, told_by=key.data)
                        return

    def _end(self, message: dict[str, Any], told_by: int) -> None:
        with self._lock:
            self._is_over = True
        for rank, peer in self._peers.items():
            if rank != told_by:
                _send(peer, message)
        reason = message["reason"] or "its process is gone (killed, or out of memory); its own output may tell more"
        logger.error(
            "Process %d has stopped: %s. Process %d cannot train on without it, and ends too.",
            *(message["failed"], reason.rstrip("."), self._rank),
        )
        time.sleep(_GRACE_S)
        # The main thread waits in a collective that nobody will join.
        os._exit(1)


def start() -> Watch | None:
    """Connect the processes of the default process group. Called by all of them together.

    Returns:
        The watch of this process; None where there is one process only, or where they cannot reach each other.
    """
    if num_processes() == 1:
        return None
    rank = dist.get_rank()
    listener = _listener() if rank == 0 else None
    # Whoever else finds the port does not know the token.
    offer = None if listener is None else (_addresses(), listener.getsockname()[1], secrets.token_hex(16))
    addresses, port, token = exchange(offer, "watching each other")[0] or ([], 0, "")
    if listener is None:
        peers = _connected(addresses, port, token, rank)
    else:
        with contextlib.closing(listener):
            peers = _accepted(listener, token, dist.get_world_size() - 1)
    return _watch_if_all(peers, rank)


def tell(error: Exception) -> None:
    """Tell the others of an error that ends training in this process, where no Python exception ends the process."""
    for watch in list(_running):
        watch.fail(str(error))


def report_failures(watch: Watch, model: nn.Module) -> Callable[[], None]:
    """Tell the others of an exception in the model's forward, before anybody handles it.

    Returns:
        A function that takes the hook off again.
    """
    return model.register_forward_hook(partial(_report, watch), always_call=True).remove


def _report(watch: Watch, module: nn.Module, args: Any, output: Any) -> None:
    error = sys.exception()
    # With an output, the exception is one that the caller is handling.
    if error is not None and output is None:
        watch.fail(f"{type(error).__name__}: {error}")


def _watch_if_all(peers: dict[int, socket.socket], rank: int) -> Watch | None:
    num_others = dist.get_world_size() - 1
    if all(exchange(len(peers) == (num_others if rank == 0 else 1), "watching each other")):
        return Watch(peers, rank)
    for peer in peers.values():
        peer.close()
    if rank == 0:
        logger.info("The processes cannot reach each other by TCP: when one fails, the others wait for their engine.")
    return None


def _is_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size())


def _listener() -> socket.socket:
    return socket.create_server(("127.0.0.1" if _is_one_machine() else "", 0), backlog=dist.get_world_size())


def _addresses() -> list[str]:
    """Return where other processes may find this one, the likeliest first."""
    if _is_one_machine():
        return ["127.0.0.1"]
    named = os.environ.get("MASTER_ADDR")
    return [*([named] if named else []), socket.gethostname(), "127.0.0.1"]


def _connected(addresses: list[str], port: int, token: str, rank: int) -> dict[int, socket.socket]:
    for address in addresses:
        try:
            peer = socket.create_connection((address, port), timeout=_CONNECT_S)
        except OSError:
            continue
        if _send(peer, {"rank": rank, "token": token}) and _receive(peer) == {"welcome": rank}:
            return {0: _kept_open(peer)}
        peer.close()
    return {}


def _accepted(listener: socket.socket, token: str, num_others: int) -> dict[int, socket.socket]:
    deadline = time.monotonic() + _CONNECT_S
    peers: dict[int, socket.socket] = {}
    while len(peers) < num_others and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            peer, _ = listener.accept()
        except TimeoutError:
            break
        peer.settimeout(_CONNECT_S)
        message = _receive(peer) or {}
        if message.get("token") != token or not _send(peer, {"welcome": message["rank"]}):
            peer.close()
            continue
        peers[message["rank"]] = _kept_open(peer)
    return peers


def _kept_open(peer: socket.socket) -> socket.socket:
    """Let the connection stay quiet for as long as a run takes, and notice a machine that has vanished."""
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return peer


def _send(peer: socket.socket, message: dict[str, Any]) -> bool:
    try:
        peer.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def _receive(peer: socket.socket) -> dict[str, Any] | None:
    """Return the next message, or None where the connection closed without one."""
    line = b""
    try:
        while not line.endswith(b"\n"):
            if not (byte := peer.recv(1)):
                return None
            line += byte
        message: dict[str, Any] = json.loads(line)
    except (OSError, ValueError):
        return None
    return message
