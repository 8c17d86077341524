"""The processes under measurement, which wait at a gate and end with the measurement."""

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
    from collections.abc import Mapping, Sequence
    from types import TracebackType

ROOT = Path(__file__).parents[1]
_BOOT_S = 60.0
_STOP_S = 10.0

# What becomes Dramatiq's master process, or a caller: first ask to be ended when the benchmark ends without having done
# so, as Dramatiq's workers do when the master ends. (Linux only; elsewhere those of a killed benchmark go on.)
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
    """Processes did not boot or ended by themselves; the message has the end of their log."""


class Workers:
    """Processes under measurement, for the length of a ``with`` block. They begin when the gate is opened.

    Args:
        commands: what to start, as arguments of Python.
        processes: how many come to the gate.
        environment: variables for them, over those of this process.
    """

    def __init__(self, commands: Sequence[Sequence[str]], processes: int, environment: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="guard-bench-"))
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "BENCH_GATE": str(self._folder), **environment}
        self._commands = commands
        self._processes = processes
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Start them; all wait at the gate when this returns."""
        try:
            with (self._folder / "log").open("ab") as log:
                for command in self._commands:
                    self._started.append(
                        subprocess.Popen(
                            [sys.executable, "-c", _LAUNCH, str(os.getpid()), sys.executable, *command],
                            cwd=ROOT,
                            env=self._environment,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,  # an interrupt is for the benchmark, which then ends its workers
                        )
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
        while len(self.pids()) < self._processes:
            self.check()
            if time.monotonic() > deadline:
                msg = f"the workers did not boot within {_BOOT_S} s: {self._log()}"
                raise WorkersError(msg)
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Process ids of those that have come to the gate."""
        return [int(path.name.partition("-")[2]) for path in self._folder.glob("ready-*")]

    def stamps(self) -> list[Path]:
        """The files with their stamps."""
        return list(self._folder.glob("stamps-*"))

    def memory_mb(self) -> float | None:
        """Resident memory of the largest of them, in MB; `None` where there is no ``/proc``."""
        sizes = [_proc(pid, "status").partition("VmRSS:")[2].split() for pid in self.pids()]
        return max((int(words[0]) / 1024 for words in sizes if words), default=None)

    def cpu_s(self) -> float | None:
        """Processor time that they have used, in seconds; `None` where there is no ``/proc``."""
        fields = [_proc(pid, "stat").rpartition(")")[2].split() for pid in self.pids()]
        if not all(fields):
            return None
        return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")

    def open_gate(self) -> None:
        """Let them begin."""
        (self._folder / "open").touch()

    def done(self) -> bool:
        """Whether all have ended well by themselves, as callers do.

        Raises:
            WorkersError: if one has ended otherwise.
        """
        codes = [one.poll() for one in self._started]
        if any(codes):
            msg = f"the workers ended with {codes}: {self._log()}"
            raise WorkersError(msg)
        return None not in codes

    def check(self) -> None:
        """Make sure that they run.

        Raises:
            WorkersError: if they do not.
        """
        if self.done():
            msg = f"the workers have ended: {self._log()}"
            raise WorkersError(msg)

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2_000:]

    def stop(self) -> None:
        """Kill them: what they were started for is over, and nobody else uses their namespace or their database."""
        started, self._started = self._started, []
        for one in started:
            if one.returncode == 0:  # a caller that is done; the number of its group may be another's by now
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
        for one in started:
            one.wait(_STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)


def dramatiq_workers(threads: int, queue: str, environment: Mapping[str, str], processes: int = PROCESSES) -> Workers:
    """Workers of `benchmarks.app`, started by Dramatiq's own command line.

    Args:
        threads: of each process.
        queue: the one that they consume.
        environment: variables for the application.
        processes: how many.
    """
    sizes = ["--processes", str(processes), "--threads", str(threads), "--queues", queue]
    return Workers([["-m", "dramatiq", "benchmarks.app", *sizes]], processes, environment)


def callers(threads: int, calls: int, environment: Mapping[str, str]) -> Workers:
    """Processes of `benchmarks.caller`, which end once they have made their calls.

    Args:
        threads: of each process.
        calls: of all processes together.
        environment: variables for them.
    """
    shares = [calls // PROCESSES + (number < calls % PROCESSES) for number in range(PROCESSES)]
    return Workers([["-m", "benchmarks.caller", str(threads), str(share)] for share in shares], PROCESSES, environment)


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""
