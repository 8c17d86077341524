"""The two threads of a life line: one beats, the other listens to the process's own channel.

Neither ends because something went wrong: without them nothing is renewed, and nobody hears of a notification.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from guard_middleware.errors import GuardError, StoreUnavailable
from guard_middleware.observe import events
from guard_middleware.pauses import Pauses

if TYPE_CHECKING:
    from collections.abc import Callable

    from guard_middleware.store.base import Wakeups

_TIMER_SLACK_S = 0.001
_LISTEN_S = 0.2
_JOIN_S = 5.0


class Beats:
    """The beating thread: it beats at its interval, at an instant that a reply has named, and when it is poked.

    Args:
        beat: beats once, and asks for so many messages beyond the idle threads.
        every_s: the interval, in seconds.
        unavailable: is told that a beat was not answered.
    """

    def __init__(
        self, beat: Callable[[int], None], *, every_s: float, unavailable: Callable[[StoreUnavailable], None]
    ) -> None:
        self._beat = beat
        self._every_s = every_s
        self._unavailable = unavailable
        self._thread = threading.Thread(target=self._run, name="guard-beat", daemon=True)
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._timer_at_s = float("inf")
        self._extra = 0
        self._poked = False

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def poke(self, extra: int = 0) -> None:
        """Beat now, and ask for `extra` messages beyond the idle threads."""
        with self._lock:
            self._extra += extra
            self._poked = True
        self._woken.set()

    def beat_in(self, delay_ms: int) -> None:
        """Beat once so many milliseconds have passed, unless it does so by then anyway."""
        at_s = time.monotonic() + delay_ms / 1000 + _TIMER_SLACK_S
        with self._lock:
            if at_s >= self._timer_at_s:
                return
            self._timer_at_s = at_s
        self._woken.set()

    def stop(self) -> None:
        """Beat no more."""
        self._stop.set()
        self._woken.set()

    def join(self) -> None:
        """Wait for the thread's end, for a while."""
        _join(self._thread)

    def _run(self) -> None:
        next_beat_s = time.monotonic() + self._every_s
        pauses = Pauses()
        while not self._stop.is_set():
            extra = self._wait(next_beat_s)
            if extra is None or self._stop.is_set():
                continue
            began_s = time.monotonic()
            next_beat_s = began_s + self._every_s
            try:
                self._beat(extra)
                pauses.reset()
            except StoreUnavailable as exc:
                self._unavailable(exc)
                next_beat_s = began_s + min(next(pauses), self._every_s)
            except Exception as exc:  # noqa: BLE001  # a life line must not end because one beat went wrong
                # This package's own words hold no secrets; of others only the type is told (I13).
                detail = str(exc) if isinstance(exc, GuardError) else type(exc).__name__
                events.error("guard.beat_failed", error=type(exc).__name__, detail=detail)

    def _wait(self, next_beat_s: float) -> int | None:
        """Sleep until it is time to beat, or until somebody changes when that is.

        Returns:
            How many messages to ask for beyond the idle threads; `None` if it is not time to beat.
        """
        with self._lock:
            due_s = min(next_beat_s, self._timer_at_s)
        self._woken.wait(max(0.0, due_s - time.monotonic()))
        self._woken.clear()
        now_s = time.monotonic()
        with self._lock:
            if not self._poked and now_s < min(next_beat_s, self._timer_at_s):
                return None
            extra, self._extra, self._poked = self._extra, 0, False
            self._timer_at_s = float("inf")  # the answer names the next instant anew
            return extra


class Listening:
    """The listening thread: it passes on that a waiter was given something.

    Args:
        wakeups: connects to the process's own channel.
        poke: is called when a message may be taken, and when something may have been missed.
        unavailable: is told that the store cannot be listened to.
    """

    def __init__(
        self,
        wakeups: Callable[[], Wakeups],
        *,
        poke: Callable[[], None],
        unavailable: Callable[[StoreUnavailable], None],
    ) -> None:
        self._wakeups = wakeups
        self._poke = poke
        self._unavailable = unavailable
        self._thread = threading.Thread(target=self._run, name="guard-wake", daemon=True)
        self._stop = threading.Event()
        self._ears: dict[str, Callable[[], object]] = {}

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def hear(self, lease: str, granted: Callable[[], object]) -> None:
        """Call this when the lease of a waiting caller was granted, or when nobody listens any more.

        Args:
            lease: its id. Nothing is missed if this stands before the lease is asked for.
            granted: must not block; it is called from the listening thread.
        """
        self._ears[lease] = granted
        if self._stop.is_set():
            granted()

    def deafen(self, lease: str) -> None:
        """Nobody waits for this lease any more."""
        self._ears.pop(lease, None)

    def stop(self) -> None:
        """Listen no more, and let every waiting caller go."""
        self._stop.set()
        for lease in list(self._ears):
            self._tell(lease)

    def _tell(self, lease: str) -> None:
        granted = self._ears.get(lease)
        if granted is not None:
            try:
                granted()
            except RuntimeError:  # its event loop is closed
                self.deafen(lease)

    def join(self) -> None:
        """Wait for the thread's end, for a while."""
        _join(self._thread)

    def _run(self) -> None:
        pauses = Pauses()
        while not self._stop.is_set():
            try:
                wakeups = self._wakeups()
                try:
                    self._poke()  # what was missed while nobody listened
                    for waiting in list(self._ears):
                        self._tell(waiting)
                    while not self._stop.is_set():
                        lease = wakeups.get(_LISTEN_S)
                        pauses.reset()
                        if lease:
                            self._tell(lease)
                        elif lease is not None:
                            self._poke()
                finally:
                    wakeups.close()
            except Exception as exc:  # noqa: BLE001  # without this thread nobody hears of a notification again
                if isinstance(exc, StoreUnavailable):
                    self._unavailable(exc)
                else:
                    events.error("guard.listening_failed", error=type(exc).__name__)
                self._stop.wait(next(pauses))


def _join(thread: threading.Thread) -> None:
    """Wait for a thread's end, unless it never began or is this one."""
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(timeout=_JOIN_S)
