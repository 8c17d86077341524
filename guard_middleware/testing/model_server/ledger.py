"""How the server counts for itself, since the truth about "how many at once" is the server's. Pure: time comes in."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from guard_middleware.testing.model_server.stats import Request, ServerStats, TallyStats

if TYPE_CHECKING:
    from collections.abc import Iterable

LOG_LENGTH = 200_000
"""So many requests are remembered; the oldest go first."""


class Level:
    """A number that goes up and down: its present and highest value, and its integral over time."""

    __slots__ = ("_changed_at", "_integral", "most", "now")

    def __init__(self, at: float, now: int = 0) -> None:
        self.now = now
        self.most = now
        self._integral = 0.0
        self._changed_at = at

    def change(self, by: int, at: float) -> None:
        """Move the level up or down."""
        self._integral += self.now * (at - self._changed_at)
        self._changed_at = at
        self.now += by
        self.most = max(self.most, self.now)

    def integral(self, at: float) -> float:
        """Return the area under the level until this instant, in units times seconds."""
        return self._integral + self.now * (at - self._changed_at)


class Tally:
    """Everything that is counted about one endpoint, or about the whole host.

    Args:
        at: seconds on the clock of all later calls.
    """

    def __init__(self, at: float) -> None:
        self.calls = Level(at)
        self.cost = Level(at)
        self.running = Level(at)
        self.waiting = Level(at)
        self.by_priority: dict[str, Level] = {}
        self.seen = 0
        self.statuses: Counter[str] = Counter()
        self.first_at: float | None = None
        self.last_at: float | None = None

    def open(self, cost: int, priority: str, at: float) -> None:
        """Count a call in."""
        self.seen += 1
        self.first_at = at if self.first_at is None else self.first_at
        self.calls.change(1, at)
        self.cost.change(cost, at)
        level = self.by_priority.get(priority)
        if level is None:
            level = self.by_priority[priority] = Level(at)
        level.change(1, at)

    def close(self, cost: int, priority: str, result: str, at: float) -> None:
        """Count a call out, with the status that it was given or the way in which it ended without one."""
        self.last_at = at
        self.calls.change(-1, at)
        self.cost.change(-cost, at)
        self.by_priority[priority].change(-1, at)
        self.statuses[result] += 1

    def restart(self, at: float) -> None:
        """Forget everything but what is open now."""
        self.seen = self.calls.now
        self.statuses.clear()
        self.first_at = at if self.calls.now else None
        self.last_at = None
        for name in ("calls", "cost", "running", "waiting"):
            setattr(self, name, Level(at, getattr(self, name).now))
        self.by_priority = {name: Level(at, level.now) for name, level in self.by_priority.items() if level.now}

    def snapshot(self, at: float, clock_offset: float) -> TallyStats:
        """Return the counts as they stand; instants become seconds since the epoch by adding ``clock_offset``."""
        last_at = at if self.calls.now else self.last_at
        return TallyStats(
            calls=self.seen,
            in_flight=self.calls.now,
            most_in_flight=self.calls.most,
            integral_s=self.calls.integral(at),
            cost=self.cost.now,
            most_cost=self.cost.most,
            running=self.running.now,
            most_running=self.running.most,
            waiting=self.waiting.now,
            most_waiting=self.waiting.most,
            statuses=dict(self.statuses),
            most_by_priority={name: level.most for name, level in self.by_priority.items()},
            first_at=None if self.first_at is None else self.first_at + clock_offset,
            last_at=None if last_at is None else last_at + clock_offset,
        )


class Log:
    """The last requests, oldest first; those that are still open come last.

    Args:
        length: how many ended requests to keep.
    """

    def __init__(self, length: int = LOG_LENGTH) -> None:
        self._ended: deque[Request] = deque(maxlen=length)
        self.forgotten = 0

    def add(self, request: Request) -> None:
        """Remember a request that has ended."""
        self.forgotten += len(self._ended) == self._ended.maxlen
        self._ended.append(request)

    def clear(self) -> None:
        """Forget all."""
        self._ended.clear()
        self.forgotten = 0

    def rows(self, still_open: Iterable[Request] = ()) -> list[Request]:
        """Return all requests in the order in which they ended, then the open ones."""
        return [*self._ended, *still_open]


class Ledger:
    """All tallies of one server: each endpoint's, and the host's over all of them.

    Args:
        names: of the endpoints.
        at: seconds on the clock of all later calls.
        clock_offset: what turns that clock into seconds since the epoch.
    """

    def __init__(self, names: Iterable[str], at: float, clock_offset: float) -> None:
        self._clock_offset = clock_offset
        self.host = Tally(at)
        self.endpoints = {name: Tally(at) for name in names}

    def open(self, endpoint: str, cost: int, priority: str, at: float) -> int:
        """Count a call in; return its number at its endpoint."""
        self.host.open(cost, priority, at)
        tally = self.endpoints[endpoint]
        tally.open(cost, priority, at)
        return tally.seen

    def close(self, endpoint: str, cost: int, priority: str, result: str, at: float) -> None:
        """Count a call out."""
        self.host.close(cost, priority, result, at)
        self.endpoints[endpoint].close(cost, priority, result, at)

    def seats(self, endpoint: str, running: int, waiting: int, at: float) -> None:
        """Note how many calls run and wait at an endpoint from now on."""
        tally = self.endpoints[endpoint]
        for part, value in (("running", running), ("waiting", waiting)):
            level = getattr(tally, part)
            by = value - level.now
            if by:
                level.change(by, at)
                getattr(self.host, part).change(by, at)

    def restart(self, at: float) -> None:
        """Forget everything but what is open now."""
        for tally in (self.host, *self.endpoints.values()):
            tally.restart(at)

    def snapshot(self, state: str, deaths: int, at: float) -> ServerStats:
        """Return all counts as they stand."""
        return ServerStats(
            state=state,
            deaths=deaths,
            host=self.host.snapshot(at, self._clock_offset),
            endpoints={name: tally.snapshot(at, self._clock_offset) for name, tally in self.endpoints.items()},
        )
