"""Worker processes of the demo, started by Dramatiq's own command line, and ended whatever happens to the demo."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from actors.demo.plan import QUEUES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from actors.demo.plan import Plan

ROOT = Path(__file__).parents[2]
_SHUTDOWN_MS = 3_000
_STOP_S = 10.0

# What becomes Dramatiq's master process: first ask to be killed when the demo ends without having stopped it, as its
# workers do when the master ends. (Linux only; elsewhere the workers of a killed demo go on.)
_LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the demo is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class WorkersDiedError(RuntimeError):
    """Workers ended by themselves; their log says why."""


class Workers:
    """Workers of an application, one command line for each queue, for the length of a ``with`` block.

    Args:
        application: module, or module and broker, as Dramatiq's command line takes it.
        plan: how many processes and threads.
        environment: variables for the workers, over those of this process.
        logs: folder for their logs.
    """

    def __init__(self, application: str, plan: Plan, environment: Mapping[str, str], logs: Path) -> None:
        self._application = application
        self._plan = plan
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        self._logs = logs
        self._masters: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        """Start them. They are not ready when this returns."""
        self._logs.mkdir(parents=True, exist_ok=True)
        try:
            for queue in QUEUES:
                with self._log(queue).open("wb") as log:
                    self._masters[queue] = self._start(queue, log)
        except BaseException:  # interrupted: there will be no exit from the block
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop them."""
        self.stop()

    @property
    def expected(self) -> int:
        """How many worker processes there will be."""
        return self._plan.processes * len(QUEUES)

    def check(self) -> None:
        """Make sure that all of them run.

        Raises:
            WorkersDiedError: if some do not.
        """
        for queue, master in self._masters.items():
            if master.poll() is not None:
                msg = f"the workers of {queue!r} ended with {master.returncode}: see {self._log(queue)}"
                raise WorkersDiedError(msg)

    def stop(self) -> None:
        """Let them finish what they do, for a few seconds, and end them. Nobody else's process is touched."""
        masters, self._masters = self._masters, {}
        for master in masters.values():
            master.terminate()
        for master in masters.values():
            try:
                master.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                # Its group is its own, and its number cannot be another's before it is waited for.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(master.pid, signal.SIGKILL)
                master.wait()

    def _start(self, queue: str, log: IO[bytes]) -> subprocess.Popen[bytes]:
        plan = self._plan
        dramatiq = [sys.executable, "-m", "dramatiq", self._application, "actors.demo.tally", "--queues", queue]
        sizes = ["--processes", str(plan.processes), "--threads", str(plan.threads)]
        patience = ["--worker-shutdown-timeout", str(_SHUTDOWN_MS)]
        return subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(os.getpid()), *dramatiq, *sizes, *patience],
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt is for the demo, which then stops its workers in order
        )

    def _log(self, queue: str) -> Path:
        return self._logs / f"{queue}.log"
