"""The host that dies: what runs on it, who waits inside its servers, and whether it is there at all. Pure.

States of a host::

    up --(a call would make more than the edge run)--> dark --dark_s--> loading --loading_s--> up
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from guard_middleware.testing.model_server.config import HostMemory

Key = TypeVar("Key")


class HostState(StrEnum):
    """Whether the host answers."""

    UP = "up"
    DARK = "dark"
    LOADING = "loading"


class Seating(StrEnum):
    """What becomes of a call that enters an engine."""

    RUNS = "runs"
    WAITS = "waits"
    KILLS = "kills"
    """It took the memory that was not there: the host is dark from now on, and everything on it is gone."""


class Host(Generic[Key]):
    """Who runs and who waits on one host, and when the host died last.

    Args:
        memory: knee, edge and times.
        max_num_seqs: for each endpoint the most calls that run at once, or ``None`` for no bound.
    """

    def __init__(self, memory: HostMemory, max_num_seqs: Mapping[str, int | None]) -> None:
        self._memory = memory
        self._max_num_seqs = max_num_seqs
        self._running: dict[str, dict[Key, int]] = {name: {} for name in max_num_seqs}
        self._waiting: dict[str, deque[tuple[Key, int]]] = {name: deque() for name in max_num_seqs}
        self._died_at: float | None = None
        self._load = 0
        self.deaths = 0

    @property
    def load(self) -> int:
        """The cost of all calls that run."""
        return self._load

    def running(self, endpoint: str) -> int:
        """How many calls run at the endpoint."""
        return len(self._running[endpoint])

    def waiting(self, endpoint: str) -> int:
        """How many calls wait inside the endpoint's server."""
        return len(self._waiting[endpoint])

    def state(self, now: float) -> HostState:
        """Tell whether the host answers at this instant."""
        if self._died_at is None or now >= self._died_at + self._memory.dark_s + self._memory.loading_s:
            return HostState.UP
        return HostState.DARK if now < self._died_at + self._memory.dark_s else HostState.LOADING

    def next_change_at(self, now: float) -> float | None:
        """Return when the state changes next by itself, or ``None`` if it will not."""
        if self._died_at is None:
            return None
        light_at = self._died_at + self._memory.dark_s
        edges = (light_at, light_at + self._memory.loading_s)
        return min((edge for edge in edges if edge > now), default=None)

    def enter(self, endpoint: str, key: Key, cost: int, now: float) -> Seating:
        """Let a call run, or wait if its server is full, or die of it."""
        limit = self._max_num_seqs[endpoint]
        if limit is not None and len(self._running[endpoint]) >= limit:
            self._waiting[endpoint].append((key, cost))
            return Seating.WAITS
        return self._seat(endpoint, key, cost, now)

    def leave(self, endpoint: str, key: Key, now: float) -> tuple[list[Key], bool]:
        """End a call that ran or waited, and seat those that waited for its place.

        Returns:
            The calls that begin to run, and whether seating them killed the host.
        """
        cost = self._running[endpoint].pop(key, None)
        if cost is None:
            self._waiting[endpoint] = deque(entry for entry in self._waiting[endpoint] if entry[0] != key)
        else:
            self._load -= cost
        return self._fill(endpoint, now)

    def die(self, now: float) -> None:
        """Go dark now: nothing runs and nobody waits any more."""
        self.deaths += 1
        self._died_at = now
        self._load = 0
        for name in self._running:
            self._running[name].clear()
            self._waiting[name].clear()

    def revive(self) -> None:
        """Be up at once, and forget earlier deaths."""
        self._died_at = None
        self.deaths = 0

    def _fill(self, endpoint: str, now: float) -> tuple[list[Key], bool]:
        limit = self._max_num_seqs[endpoint]
        waiting = self._waiting[endpoint]
        seated: list[Key] = []
        while waiting and (limit is None or len(self._running[endpoint]) < limit):
            key, cost = waiting.popleft()
            if self._seat(endpoint, key, cost, now) is Seating.KILLS:
                return [], True
            seated.append(key)
        return seated, False

    def _seat(self, endpoint: str, key: Key, cost: int, now: float) -> Seating:
        if self._memory.edge is not None and self._load + cost > self._memory.edge:
            self.die(now)
            return Seating.KILLS
        self._running[endpoint][key] = cost
        self._load += cost
        return Seating.RUNS
