"""A proxy between the guard and its store, which knows the guard's scripts and can do to them what networks do.

It stands in the guard's connections only: the broker's and the application's go to the server directly, so what a
test sees is what the guard makes of its own store's trouble.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from guard_middleware.store import scripts

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

LOOPBACK = "127.0.0.1"

_TOLD = {
    "READONLY": b"-READONLY You can't write against a read only replica.\r\n",
    "MISCONF": b"-MISCONF Valkey is configured to save RDB snapshots, but it's currently unable to persist.\r\n",
    "OOM": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "LOADING": b"-LOADING Valkey is loading the dataset in memory\r\n",
    "MASTERDOWN": b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.\r\n",
}
_DEAF = ("LOADING", "MASTERDOWN")
"""A server in these states serves nothing; in the others it only writes nothing."""
_ALWAYS_SERVED = ("HELLO", "AUTH", "SELECT", "CLIENT")
_READING = ("snapshot",)


class StoreProxy:
    """Listens on a loopback port of its own, and forwards to one server, command by command.

    Args:
        url: of the server, with the database: ``redis://[:password@]host:port/database``.
        seed: of the choice which replies are dropped.

    Attributes:
        executed: how many calls of each script the server has executed.
        dropped: how many of their replies were dropped.
        refused: how many commands got an error instead of being forwarded, by error.
    """

    def __init__(self, url: str, seed: int = 0) -> None:
        before, _, self._rest = url.removeprefix("redis://").rpartition("@")
        self._login = f"{before}@" if before else ""
        address, _, self._database = self._rest.partition("/")
        host, _, port = address.partition(":")
        self._server = (host, int(port))
        self._names = {function: script for script, function in scripts.library().functions.items()}
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._drops: dict[str, float] = {}
        self._most: dict[str, int] = {}
        self._refusal = ""
        self._cut = False
        self._delay_s = 0.0
        self.executed: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._listener = socket.create_server((LOOPBACK, 0), backlog=256)

    def __enter__(self) -> Self:
        """Begin to listen."""
        threading.Thread(target=self._accept_forever, name="proxy", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hang up everything."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    @property
    def url(self) -> str:
        """Where the guard connects, to reach the same database."""
        return f"redis://{self._login}{LOOPBACK}:{self._listener.getsockname()[1]}/{self._database}"

    # -- what can be done ------------------------------------------------------------------------------------------

    def drop_replies(self, script: str, *, times: int, chance: float = 0.5) -> None:
        """Let the server execute calls of a script, then hang up instead of answering: so often, with this chance."""
        with self._lock:
            self._drops[script] = chance
            self._most[script] = self.dropped[script] + times

    def refuse(self, error: str) -> None:
        """Answer as a server in trouble, until `serve`: READONLY, MISCONF or OOM to writes; LOADING to everything."""
        self._refusal = error

    def cut(self) -> None:
        """Hang up all connections, and take no new one until `serve`."""
        self._cut = True
        self.hang_up()

    def delay(self, seconds: float) -> None:
        """Let every command wait so long before it is forwarded, until `serve`."""
        self._delay_s = seconds

    def serve(self) -> None:
        """Forward everything again."""
        self._refusal, self._cut, self._delay_s = "", False, 0.0

    def hang_up(self) -> None:
        """Close every connection that is open now, as a server that was demoted may do."""
        with self._lock:
            there = list(self._open)
        for one in there:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    # -- how -------------------------------------------------------------------------------------------------------

    def _accept_forever(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._cut:
                client.close()
                continue
            threading.Thread(target=self._serve_one, args=(client,), name="proxy-connection", daemon=True).start()

    def _serve_one(self, client: socket.socket) -> None:
        with client, suppress(OSError, EOFError), socket.create_connection(self._server) as server:
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            try:
                with client.makefile("rb") as asked, server.makefile("rb") as answered:
                    self._converse(client, server, asked, answered)
            finally:
                with self._lock:
                    self._open -= {client, server}
                for one in (client, server):
                    with suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)

    def _converse(self, client: socket.socket, server: socket.socket, asked: BinaryIO, answered: BinaryIO) -> None:
        while not self._cut:
            raw, words = _command(asked)
            verb = words[0].upper().decode()
            script = self._names.get(words[1].decode(), "") if verb == "FCALL" else ""
            if self._delay_s:
                time.sleep(self._delay_s)
            if self._refuses(verb, script):
                client.sendall(_TOLD[self._refusal])
                continue
            server.sendall(raw)
            if verb == "SUBSCRIBE":
                threading.Thread(target=_pump, args=(client, server), name="proxy-pump", daemon=True).start()
                while some := answered.read1(65_536):
                    client.sendall(some)
                return
            reply = _reply(answered)
            if script and reply[:1] != b"-" and self._drops_this(script):
                return
            client.sendall(reply)

    def _refuses(self, verb: str, script: str) -> bool:
        error = self._refusal
        if not error or verb in _ALWAYS_SERVED:
            return False
        writes = verb in {"SET", "FCALL"} and script not in _READING
        if error in _DEAF or writes:
            with self._lock:
                self.refused[error] += 1
            return True
        return False

    def _drops_this(self, script: str) -> bool:
        with self._lock:
            self.executed[script] += 1
            if self.dropped[script] >= self._most.get(script, 0) or self._random.random() >= self._drops[script]:
                return False
            self.dropped[script] += 1
            return True


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    return line


def _exactly(stream: BinaryIO, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise EOFError
    return found


def _command(stream: BinaryIO) -> tuple[bytes, list[bytes]]:
    """One command as it came, and its words."""
    raw = _line(stream)
    words = []
    for _ in range(int(raw[1:])):
        head = _line(stream)
        body = _exactly(stream, int(head[1:]) + 2)
        raw += head + body
        words.append(body[:-2])
    return raw, words


def _reply(stream: BinaryIO) -> bytes:
    """One whole reply as it came, of either version of the protocol."""
    raw = _line(stream)
    kind = raw[:1]
    if kind in b"$=!" and not raw.startswith(b"$-1"):
        raw += _exactly(stream, int(raw[1:]) + 2)
    elif kind in b"*~>%":
        count = max(0, int(raw[1:])) * (2 if kind == b"%" else 1)
        raw += b"".join(_reply(stream) for _ in range(count))
    return raw


def _pump(client: socket.socket, server: socket.socket) -> None:
    """Forward what a subscriber says, until either side hangs up."""
    with suppress(OSError):
        while some := client.recv(65_536):
            server.sendall(some)
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
