"""TCP connections between the processes of a run: messages as lines of JSON, and where rank 0 listens."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

_MAX_LINE_BYTES = 16 * 2**10

Message = dict[str, Any]
# Keys and types of all that is ever sent.
_MESSAGES: Sequence[dict[str, type]] = (
    {"rank": int, "token": str},
    {"welcome": int},
    {"failed": int, "reason": str},
    {"left": int},
    {"goodbye": int},
)


class Connection:
    """One end of a TCP connection, on which whole lines are messages."""

    def __init__(self, connected: socket.socket, authenticate_within_s: float) -> None:
        self.socket = connected
        self.is_authenticated = False
        """Whether the other end has sent the token, or greeted this one."""
        self.is_closed = False
        """Whether the other end has closed it."""
        self.is_dropped = False
        """Whether this end has."""
        self.has_said_goodbye = False
        """Whether the other end said that it would close."""
        self._deadline = time.monotonic() + authenticate_within_s
        self._line = b""

    def is_late(self) -> bool:
        """Whether the time to authenticate is over."""
        return time.monotonic() > self._deadline

    def keep_open(self) -> None:
        """Let the connection be silent for as long as a run takes; keep-alive notices a machine that has vanished."""
        self.socket.settimeout(None)
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, seconds in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
                if hasattr(socket, option):
                    self.socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)

    def send(self, message: Message) -> None:
        """Send a message; nothing happens where the other end is gone."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def end(self) -> None:
        """Send nothing more."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def messages(self) -> Iterator[Message | None]:
        """Yield what has come; None when the other end has closed, or sends what is no message.

        To be called when the selector says that something has come: it does not wait then.
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
            yield _parse(line)
        if len(self._line) > _MAX_LINE_BYTES:
            yield None


def _parse(line: bytes) -> Message | None:
    try:
        found = json.loads(line)
    # What is not UTF-8 is a ValueError too.
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or {key: type(value) for key, value in found.items()} not in _MESSAGES:
        return None
    return found


def is_one_machine(size: int) -> bool:
    """Whether all processes of the run are on this machine, as the launcher says."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(size)


def listen(size: int) -> socket.socket | None:
    """Listen at the one address that the process group uses for this machine; None if it has none here."""
    for family, address in _addresses(size):
        with contextlib.suppress(OSError):
            return socket.create_server((address, 0), family=family, backlog=size)
    return None


def _addresses(size: int) -> Iterator[tuple[socket.AddressFamily, str]]:
    if is_one_machine(size):
        yield socket.AF_INET, "127.0.0.1"
        return
    named = os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(OSError):
        for family, *_, where in socket.getaddrinfo(named, None, type=socket.SOCK_STREAM):
            address = ipaddress.ip_address(where[0])
            # The name of a machine may lead to itself, where no other machine finds it; and 0.0.0.0 is all addresses.
            if not address.is_unspecified and (named in ("localhost", where[0]) or not address.is_loopback):
                yield family, str(where[0])
    # Nothing is sent to this address, which is nobody's: the socket's own is the one that others are reached by.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        yield socket.AF_INET, probe.getsockname()[0]
