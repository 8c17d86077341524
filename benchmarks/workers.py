"""Worker processes, started by Dramatiq's own command line, which wait at a gate and end with the measurement."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.plan import PROCESSES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

ROOT = Path(__file__).parents[1]
_BOOT_S = 60.0
_STOP_S = 10.0

# What becomes Dramatiq's master process: first ask to be ended when the benchmark ends without having done so, as its
# workers do when the master ends. (Linux only; elsewhere the workers of a killed benchmark go on.)
_LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the benchmark is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class WorkersError(RuntimeError):
    """Workers did not boot or ended by themselves; the message has the end of their log."""


class Workers:
    """Workers of `benchmarks.app`, for the length of a ``with`` block. They begin when the gate is opened.

    Args:
        threads: of each process.
        queue: the one that they consume.
        environment: variables for the application, over those of this process.
    """

    def __init__(self, threads: int, queue: str, environment: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="guard-bench-"))
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "BENCH_GATE": str(self._folder), **environment}
        sizes = ["--processes", str(PROCESSES), "--threads", str(threads), "--queues", queue]
        self._command = [sys.executable, "-m", "dramatiq", "benchmarks.app", *sizes]
        self._master: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start them; all wait at the gate when this returns."""
        try:
            with (self._folder / "log").open("wb") as log:
                self._master = subprocess.Popen(
                    [sys.executable, "-c", _LAUNCH, str(os.getpid()), *self._command],
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # an interrupt is for the benchmark, which then ends its workers
                )
            self._wait_at_gate()
        except BaseException:  # interrupted: there will be no exit from the block
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End them."""
        self.stop()

    def _wait_at_gate(self) -> None:
        deadline = time.monotonic() + _BOOT_S
        while len(list(self._folder.glob("ready-*"))) < PROCESSES:
            self.check()
            if time.monotonic() > deadline:
                msg = f"the workers did not boot within {_BOOT_S} s: {self._log()}"
                raise WorkersError(msg)
            time.sleep(0.02)

    def open_gate(self) -> None:
        """Let them begin."""
        (self._folder / "open").touch()

    def check(self) -> None:
        """Make sure that they run.

        Raises:
            WorkersError: if they do not.
        """
        if self._master is not None and self._master.poll() is not None:
            msg = f"the workers ended with {self._master.returncode}: {self._log()}"
            raise WorkersError(msg)

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2_000:]

    def stop(self) -> None:
        """Kill them: what they were started for is over, and nobody else uses their namespace or their database."""
        master, self._master = self._master, None
        if master is not None:
            # The group is their own, and its number cannot be another's before the master is waited for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(master.pid, signal.SIGKILL)
            master.wait(_STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)
