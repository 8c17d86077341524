"""The store in memory: the executable rule behind the Protocol, for one process and for tests."""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

from guard_middleware.core.reference import Reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from guard_middleware.core.commands import Ask, Beat, Configure, Finish, Operate, Reply, Snapshot
    from guard_middleware.core.serving import Serving
    from guard_middleware.core.state import Line, Parked


class MemoryStore:
    """Everything that the scripts do, under one lock (see `guard_middleware.store.base.Store`).

    Attributes:
        reference: the machine; tests look at its state, and at the broker beneath it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        """Begin empty.

        Args:
            clock: the time in seconds.
        """
        self.reference = _Notifying()
        self._clock = clock
        self._lock = threading.Lock()
        self._listeners: dict[str, list[MemoryWakeups]] = {}

    def _now_ms(self) -> int:
        return int(self._clock() * 1_000)

    def admit(self, command: Ask) -> Reply:
        """Lease a permit, park the message, wait, or refuse."""
        with self._lock:
            return self._told(self.reference.admit(command, self._now_ms()))

    def finish(self, command: Finish) -> Reply:
        """Release a lease, count its outcome, perhaps park, and take."""
        with self._lock:
            return self._told(self.reference.finish(command, self._now_ms()))

    def beat(self, command: Beat) -> Reply:
        """Renew, report, give back, assert, and take."""
        with self._lock:
            return self._told(self.reference.beat(command, self._now_ms()))

    def configure(self, command: Configure) -> Reply:
        """Publish a process's configuration."""
        with self._lock:
            return self._told(self.reference.configure(command, self._now_ms()))

    def operate(self, command: Operate) -> Reply:
        """Carry out an operator's wish."""
        with self._lock:
            return self._told(self.reference.operate(command, self._now_ms()))

    def snapshot(self) -> Snapshot:
        """Read everything, change nothing."""
        with self._lock:
            return self.reference.snapshot(self._now_ms())

    def check_server(self) -> list[str]:
        """There is no server of which anything could be said."""
        return []

    def shares_server(self, client: object) -> bool:  # noqa: ARG002  # the Protocol's
        """No broker keeps its messages here."""
        return False

    def wakeups(self, process: str) -> MemoryWakeups:
        """Listen to what this process is notified of."""
        with self._lock:
            listeners = self._listeners.setdefault(process, [])
            listeners.append(MemoryWakeups(listeners, self._lock))
            return listeners[-1]

    def close(self) -> None:
        """There is nothing to give up."""

    def _told(self, reply: Reply) -> Reply:
        for process, lease in self.reference.notices:
            for listener in self._listeners.get(process, ()):
                listener.put(lease)
        self.reference.notices.clear()
        return reply


class MemoryWakeups:
    """The notifications of one process."""

    def __init__(self, among: list[MemoryWakeups], lock: threading.Lock) -> None:
        self._among = among
        self._lock = lock
        self._heard: queue.SimpleQueue[str] = queue.SimpleQueue()

    def put(self, lease: str) -> None:
        """Notify: the id of a lease that a waiting caller was given, or ""."""
        self._heard.put(lease)

    def get(self, timeout_s: float) -> str | None:
        """Wait for the next notification, at most `timeout_s` seconds."""
        try:
            return self._heard.get(timeout=timeout_s) if timeout_s > 0 else self._heard.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Listen no more. Closing twice does nothing."""
        with self._lock:
            if self in self._among:
                self._among.remove(self)


class _Notifying(Reference):
    """The rule, with the notifications that the scripts publish: (process, lease id of its caller, or "")."""

    def __init__(self) -> None:
        super().__init__()
        self.notices: list[tuple[str, str]] = []

    def _let_go(self, serving: Serving, line: Line, waiter: str, parked: Parked, endpoint: str, runner: str) -> None:
        known = len(serving.woken)
        super()._let_go(serving, line, waiter, parked, endpoint, runner)
        if line[1:] == ("", ""):
            self.notices.append((runner, waiter))
        elif len(serving.woken) > known:
            self.notices.append((runner, ""))
