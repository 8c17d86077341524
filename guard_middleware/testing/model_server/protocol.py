"""HTTP/1.1 on one socket, with the manners of a server that may die: h11 reads, and what is written is ours to break.

An *exchange* is one request and what becomes of it. It is open from the moment the whole request has arrived until the
last byte of its answer is in the kernel's hands, or until its connection is closed.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal, Protocol, cast

import h11

if TYPE_CHECKING:
    from collections.abc import Iterable

    from guard_middleware.testing.model_server.stats import Ending

_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_LINGER_AND_RESET = struct.pack("ii", 1, 0)

JSON_TYPE = b"application/json"
EVENT_TYPE = b"text/event-stream; charset=utf-8"
TEXT_TYPE = b"text/plain; charset=utf-8"
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Service(Protocol):
    """What stands behind the connections of one port."""

    @property
    def is_open(self) -> bool:
        """Whether connections are kept after an answer."""

    def opened(self, connection: Connection) -> None:
        """A client has connected."""

    def closed(self, connection: Connection) -> None:
        """A connection is gone, for whatever reason."""

    def begin(self, exchange: Exchange) -> None:
        """A whole request has arrived."""

    def ended(self, exchange: Exchange) -> None:
        """An exchange is over; its ``status`` and ``ending`` are set."""


class Exchange:
    """One request, and the verbs that can become of it.

    Attributes:
        method: of the request.
        path: of the request, without its query.
        headers: of the request, names in lower case.
        body: of the request.
        keeps_alive: whether the client would go on using the connection.
        status: status sent, 0 as long as none is.
        ending: how it ended, "" as long as it has not.
    """

    __slots__ = ("_connection", "body", "ending", "headers", "keeps_alive", "method", "path", "status")

    def __init__(self, connection: Connection, head: h11.Request, body: bytes) -> None:
        self._connection = connection
        self.method = head.method.decode()
        self.path = head.target.decode("latin-1").partition("?")[0]
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        self.body = body
        self.keeps_alive = head.http_version == b"1.1" and self.headers.get("connection", "").lower() != "close"
        self.status = 0
        self.ending: Ending | Literal[""] = ""

    def respond(
        self, status: int, body: bytes, kind: bytes = JSON_TYPE, headers: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Send a whole answer."""
        self.status = status
        fields = [b"content-length: %d" % len(body)]
        fields += [f"{name}: {value}".encode("latin-1") for name, value in headers]
        self._connection.write(self._head(status, kind, fields) + body)
        self._connection.finish_when_sent()

    def start_stream(self) -> None:
        """Send the head of an answer that comes in server-sent events."""
        self.status = 200
        self._connection.write(self._head(200, EVENT_TYPE, [b"transfer-encoding: chunked"]))

    def send_chunk(self, data: bytes) -> None:
        """Send a piece of the body."""
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        """End the body in order."""
        self._connection.write(b"0\r\n\r\n")
        self._connection.finish_when_sent()

    def send_raw(self, data: bytes, status: int = 0) -> None:
        """Send bytes as they are, then close: what they are is the caller's affair."""
        self.status = status
        self._connection.write(data)
        self.close()

    def close(self) -> None:
        """Close the connection now, in order, after what has been written."""
        self._end("dropped")
        self._connection.close()

    def reset(self) -> None:
        """Reset the connection now."""
        self._end("reset")
        self._connection.reset()

    def _end(self, without_a_byte: Ending) -> None:
        self._connection.end(self, "cut" if self._connection.bytes_sent else without_a_byte)

    def _head(self, status: int, kind: bytes, fields: list[bytes]) -> bytes:
        lines = [b"HTTP/1.1 %d %b" % (status, _REASONS.get(status, b"")), b"content-type: " + kind, *fields]
        if not self.keeps_alive:
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"


class Connection(asyncio.Protocol):
    """One client's socket: reads requests, tells the service of each, writes what it is given.

    Args:
        service: what to tell.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._http = h11.Connection(h11.SERVER)
        self._head: h11.Request | None = None
        self._body: list[bytes] = []
        self._blocked = False
        self._finishing = False
        self.exchange: Exchange | None = None
        self.bytes_sent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the socket."""
        self._transport = cast("asyncio.Transport", transport)
        # With no bytes allowed in the buffer, pause_writing says at once whether the kernel has taken all.
        self._transport.set_write_buffer_limits(high=0)
        self._service.opened(self)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        self._http.receive_data(data)
        self._read()

    def eof_received(self) -> bool:
        """Count the client as gone at once: it closed its side, so nobody reads an answer any more."""
        self._client_gone()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Count the client as gone."""
        self._client_gone()
        self._service.closed(self)

    def pause_writing(self) -> None:
        """Remember that the kernel has not taken all bytes yet."""
        self._blocked = True

    def resume_writing(self) -> None:
        """Finish an answer that was waiting to be sent in full."""
        self._blocked = False
        if self._finishing:
            self.finish_when_sent()

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection is gone."""
        if not self._transport.is_closing():
            self.bytes_sent = True
            self._transport.write(data)

    def finish_when_sent(self) -> None:
        """End the exchange as soon as the kernel has all of it, then be ready for the next one."""
        exchange = self.exchange
        self._finishing = self._blocked
        if self._blocked or exchange is None:
            return
        self.end(exchange, "answered")
        if exchange.keeps_alive and self._service.is_open:
            self._next_request()
        else:
            self.close()

    def end(self, exchange: Exchange, ending: Ending) -> None:
        """Count an exchange as over, once."""
        if not exchange.ending:
            exchange.ending = ending
            self.exchange = None
            self.bytes_sent = False
            self._service.ended(exchange)

    def close(self) -> None:
        """Close in order, after what has been written."""
        self._transport.close()

    def reset(self) -> None:
        """Close with a reset."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_AND_RESET)
        self._transport.abort()

    def _client_gone(self) -> None:
        if self.exchange is not None:
            self.end(self.exchange, "abandoned")

    def _next_request(self) -> None:
        """Read a request from its beginning. h11 is never told what is sent, so each one gets a fresh reader."""
        unread, _ = self._http.trailing_data
        self._http = h11.Connection(h11.SERVER)
        if unread:
            self._http.receive_data(unread)
            self._read()

    def _read(self) -> None:
        """Tell the service of a request once it is here; only one at a time is open on a connection."""
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError:
                self.close()
                return
            if type(event) is h11.Request:
                self._head, self._body = event, []
                if self._http.they_are_waiting_for_100_continue:
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            elif type(event) is h11.Data:
                self._body.append(bytes(event.data))
            elif type(event) is h11.EndOfMessage and self._head is not None:
                self.exchange = Exchange(self, self._head, b"".join(self._body))
                # Two turns of the loop later: what has left by now is counted out before this request is counted in.
                # After one turn the ends that were in the same batch of news are known, in whichever order the kernel
                # listed them; after two also those that stood behind a request in the same socket.
                loop = asyncio.get_running_loop()
                loop.call_soon(loop.call_soon, self._service.begin, self.exchange)
                return
            else:
                return
