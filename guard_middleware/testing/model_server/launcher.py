"""The fake model server as tests use it: a child process, and a handle to ask it what it saw."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, Self

from guard_middleware.testing.model_server.config import FakeEndpoint, HostMemory, ServerConfig
from guard_middleware.testing.model_server.script import Script, Step
from guard_middleware.testing.model_server.stats import Request, ServerStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

LOOPBACK = "127.0.0.1"
_START_S = 20.0
_END_S = 5.0
_ASK_S = 30.0


class ModelServerError(RuntimeError):
    """The fake server did not start, refused what was asked of it, or did not come to what was waited for."""


class ModelServer:
    """A fake model server in a process of its own, from the start of a ``with`` block to its end.

    Args:
        endpoints: what it serves; one endpoint called "model" if nothing is said.
        host: the memory that all endpoints share.
        script: what goes wrong, counted from the start of the server; see also `script`.
        max_seconds: the process ends itself after so long, whatever happens to the test.

    Raises:
        pydantic.ValidationError: if the configuration cannot work.
    """

    def __init__(
        self,
        endpoints: Iterable[FakeEndpoint] = (FakeEndpoint(name="model"),),
        host: HostMemory | None = None,
        script: Script | Iterable[Step] = (),
        max_seconds: float = 900.0,
    ) -> None:
        self.config = ServerConfig(
            endpoints=tuple(endpoints),
            host=host or HostMemory(),
            script=script if isinstance(script, Script) else Script(steps=tuple(script)),
            max_seconds=max_seconds,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}
        self._control = 0

    def __enter__(self) -> Self:
        """Start the process; it listens when this returns."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the process."""
        self.stop()

    @property
    def pid(self) -> int:
        """The process that serves."""
        return self._running().pid

    @property
    def control_url(self) -> str:
        """URL of the port for statistics and scripts, which no fault touches."""
        return f"http://{LOOPBACK}:{self._control}"

    def start(self) -> None:
        """Start the process; it listens when this returns.

        Raises:
            ModelServerError: if it does not; it has then said why on stderr.
        """
        command = [sys.executable, "-m", "guard_middleware.testing.model_server", "--until-stdin-ends"]
        self._process = subprocess.Popen(
            [*command, "--config-json", self.config.model_dump_json(exclude_unset=True)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # an interrupted test can still ask what the server saw
            env=os.environ | {"PYTHONPATH": _import_path()},
        )
        line = _first_line(self._process.stdout)
        if not line:
            self.stop()
            msg = "the model server did not start; its stderr says why"
            raise ModelServerError(msg)
        where = json.loads(line)
        self._control, self._ports = where["control"], where["endpoints"]

    def stop(self) -> None:
        """End the process that this object started, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_S)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def port(self, name: str = "") -> int:
        """Return an endpoint's port.

        Args:
            name: of the endpoint; may be left out if there is only one.
        """
        if not name and len(self._ports) == 1:
            return next(iter(self._ports.values()))
        return self._ports[name]

    def url(self, name: str = "") -> str:
        """Return an endpoint's base URL for OpenAI clients, ``http://127.0.0.1:<port>/v1``."""
        return f"{self.root_url(name)}/v1"

    def root_url(self, name: str = "") -> str:
        """Return an endpoint's URL without ``/v1``, for health and metrics."""
        return f"http://{LOOPBACK}:{self.port(name)}"

    def stats(self) -> ServerStats:
        """Return what the server has counted until now."""
        return ServerStats.model_validate_json(self._ask("GET", "/_stats"))

    def log(self) -> list[Request]:
        """Return all requests since the last reset, in the order in which they ended, then those that are open.

        Raises:
            ModelServerError: if there were more than the server remembers: what is missing could be what matters.
        """
        answer = json.loads(self._ask("GET", "/_log"))
        if answer["forgotten"]:
            msg = f"the log has lost its oldest {answer['forgotten']} requests: reset() before what you want to look at"
            raise ModelServerError(msg)
        return [Request(*row) for row in answer["rows"]]

    def reset(self) -> None:
        """Begin to count afresh, with an empty log and no script. Calls that are open stay counted."""
        self._ask("POST", "/_reset")

    def script(self, steps: Iterable[Step] = (), starts: Literal["now", "first_call"] = "now") -> None:
        """Follow these steps from now on, instead of any earlier ones; call numbers begin again at 1.

        Args:
            steps: the first that matches a call decides it; none for a server that does nothing wrong.
            starts: when the clock of ``from_s`` and ``to_s`` starts.

        Raises:
            ModelServerError: if a step names an endpoint that is not there.
        """
        self._ask("POST", "/_script", Script(steps=tuple(steps), starts=starts).model_dump_json(exclude_unset=True))

    def kill_host(self) -> None:
        """Take the host down now, as a call above the edge would."""
        self._ask("POST", "/_die")

    def wait_until(self, condition: Callable[[ServerStats], object], timeout_s: float = 10.0) -> ServerStats:
        """Wait until the statistics fulfil a condition, and return them.

        Raises:
            ModelServerError: if they do not within the time; with the last ones.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            stats = self.stats()
            if condition(stats):
                return stats
            if time.monotonic() > deadline:
                msg = f"waited {timeout_s} s in vain; last: {stats!r}"
                raise ModelServerError(msg)
            time.sleep(0.01)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            msg = "the model server is not running: use it inside its `with` block"
            raise ModelServerError(msg)
        return self._process

    def _ask(self, method: str, path: str, body: str = "") -> bytes:
        self._running()
        connection = http.client.HTTPConnection(LOOPBACK, self._control, timeout=_ASK_S)
        try:
            connection.request(method, path, body.encode() or None)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            msg = f"{method} {path}: {response.status} {answer.decode()}"
            raise ModelServerError(msg)
        return answer


def _first_line(stream: IO[bytes] | None) -> bytes:
    """Return a line as soon as it comes; nothing if none comes in time."""
    if stream is None:
        return b""
    ready, _, _ = select.select([stream], [], [], _START_S)
    return stream.readline() if ready else b""


def _import_path() -> str:
    """Let the child import the very package that runs here, wherever the test was started."""
    root = str(Path(__file__).parents[3])
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
