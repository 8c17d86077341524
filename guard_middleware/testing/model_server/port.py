"""One endpoint's port: it can be closed and opened again, and nobody else gets it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from typing import TYPE_CHECKING, Literal

from guard_middleware.testing.model_server.protocol import Connection

if TYPE_CHECKING:
    from collections.abc import Callable

    from guard_middleware.testing.model_server.protocol import Exchange

LOOPBACK = "127.0.0.1"
_ACCEPTED_AT_ONCE = 256
# What lets a listening socket stand beside our own placeholder, yet not beside somebody else's listening socket. BSD
# wants to be told more.
_SHARED = socket.SO_REUSEADDR if sys.platform == "linux" else socket.SO_REUSEPORT


class Port:
    """A listening socket that comes and goes, and the connections that came through it.

    Args:
        number: port to listen on, 0 for a free one.
        begin: called with each request that arrives.
        ended: called with each request that is over.
    """

    def __init__(self, number: int, begin: Callable[[Exchange], None], ended: Callable[[Exchange], None]) -> None:
        self.begin = begin
        self.ended = ended
        # Bound but never listening: clients are refused as if nobody were there, and yet no other process can be given
        # the port while ours is closed.
        self._placeholder = _bound(number)
        self.number: int = self._placeholder.getsockname()[1]
        self._listener: socket.socket | None = None
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def is_open(self) -> bool:
        """Whether new connections are let in, and old ones kept after their answer."""
        return self._listener is not None

    def open(self) -> None:
        """Listen, if it does not yet."""
        if self._listener is None:
            self._listener = _bound(self.number)
            self._listener.listen(socket.SOMAXCONN)
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def shut(self, open_calls: Literal["keep", "drop", "reset"]) -> None:
        """Refuse connections from now on, close idle ones, and do to open calls as told."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in tuple(self._connections):
            if connection.exchange is None:
                connection.close()
            elif open_calls == "drop":
                connection.exchange.close()
            elif open_calls == "reset":
                connection.exchange.reset()

    def give_up(self) -> None:
        """Close for good: whoever wants the port may have it."""
        self.shut("reset")
        self._placeholder.close()

    def opened(self, connection: Connection) -> None:
        """Take a connection, or reset it if the port was closed before it was let in."""
        self._connections.add(connection)
        if not self.is_open:
            connection.reset()

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            for _ in range(_ACCEPTED_AT_ONCE):
                accepted, _ = listener.accept()
                accepted.setblocking(False)
                task = loop.create_task(loop.connect_accepted_socket(lambda: Connection(self), accepted))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)


def _bound(number: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, _SHARED, 1)
    sock.setblocking(False)
    try:
        sock.bind((LOOPBACK, number))
    except OSError as exc:
        sock.close()
        raise OSError(exc.errno, f"port {number}: {os.strerror(exc.errno or 0)}") from exc
    return sock
