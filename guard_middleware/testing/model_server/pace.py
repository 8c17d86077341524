"""How fast calls progress on a host that they share: the engine's own clock, which slows down under load.

All calls share the host alike (egalitarian processor sharing): with a load above the knee each progresses at
``knee / load`` of its usual speed. Since all have the same speed at any instant, one clock of *work done* serves all
of them, and a call is done when that clock has advanced by its work. Pure: time comes in.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, TypeVar

Key = TypeVar("Key")

_HAIR_S = 1e-6
"""Timers may fire a hair early; work that is this close to done is done."""


class Pacer(Generic[Key]):
    """The work in progress on one host, and when each piece of it is done.

    Args:
        knee: load above which all slow down, or ``None`` for never.
        now: seconds on the clock of all later calls.
    """

    def __init__(self, knee: float | None, now: float) -> None:
        self._knee = knee
        self._speed = 1.0
        self._now = now
        self._work_done = 0.0
        self._due: list[tuple[float, int, Key]] = []
        self._order = count()
        self._valid: dict[Key, int] = {}

    def set_load(self, load: float, now: float) -> None:
        """Say how much runs from now on, which decides how fast everything goes."""
        self._advance(now)
        self._speed = 1.0 if self._knee is None or load <= self._knee else self._knee / load

    def add(self, key: Key, work_s: float, now: float) -> None:
        """Begin a piece of work that takes ``work_s`` seconds on a host that is not overloaded."""
        self._advance(now)
        number = next(self._order)
        self._valid[key] = number
        heapq.heappush(self._due, (self._work_done + work_s, number, key))

    def discard(self, key: Key) -> None:
        """Forget a piece of work, if there is one under this key."""
        self._valid.pop(key, None)

    def pop_done(self, now: float) -> list[Key]:
        """Return what is done by now, in order, and forget it."""
        self._advance(now)
        done: list[Key] = []
        while self._skip_forgotten() and self._due[0][0] <= self._work_done + _HAIR_S:
            _, _, key = heapq.heappop(self._due)
            del self._valid[key]
            done.append(key)
        return done

    def next_at(self) -> float | None:
        """Return when the next piece is done if the load stays as it is, or ``None`` if there is none."""
        if not self._skip_forgotten():
            return None
        return self._now + max(0.0, self._due[0][0] - self._work_done) / self._speed

    def _advance(self, now: float) -> None:
        self._work_done += (now - self._now) * self._speed
        self._now = now

    def _skip_forgotten(self) -> bool:
        """Drop forgotten pieces from the front; tell whether any piece is left."""
        while self._due and self._valid.get(self._due[0][2]) != self._due[0][1]:
            heapq.heappop(self._due)
        return bool(self._due)
