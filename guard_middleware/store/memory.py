"""The store in memory: the executable rule behind the Protocol, for one process and for tests."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from guard_middleware.core.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from guard_middleware.core.commands import Ask, Beat, Configure, Finish, Operate, Reply, Snapshot


class MemoryStore:
    """Everything that the scripts do, under one lock (see `guard_middleware.store.base.Store`).

    Attributes:
        reference: the machine; tests look at its state, and at the broker beneath it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time, reference: Reference | None = None) -> None:
        """Begin empty.

        Args:
            clock: the time in seconds.
            reference: the machine to use, by default a new one.
        """
        self.reference = reference or Reference()
        self._clock = clock
        self._lock = threading.Lock()

    def _now_ms(self) -> int:
        return int(self._clock() * 1_000)

    def admit(self, command: Ask) -> Reply:
        """Lease a permit, park the message, wait, or refuse."""
        with self._lock:
            return self.reference.admit(command, self._now_ms())

    def finish(self, command: Finish) -> Reply:
        """Release a lease, count its outcome, perhaps park, and take."""
        with self._lock:
            return self.reference.finish(command, self._now_ms())

    def beat(self, command: Beat) -> Reply:
        """Renew, report, give back, assert, and take."""
        with self._lock:
            return self.reference.beat(command, self._now_ms())

    def configure(self, command: Configure) -> Reply:
        """Publish a process's configuration."""
        with self._lock:
            return self.reference.configure(command, self._now_ms())

    def operate(self, command: Operate) -> Reply:
        """Carry out an operator's wish."""
        with self._lock:
            return self.reference.operate(command, self._now_ms())

    def snapshot(self) -> Snapshot:
        """Read everything, change nothing."""
        with self._lock:
            return self.reference.snapshot(self._now_ms())

    def close(self) -> None:
        """There is nothing to give up."""
