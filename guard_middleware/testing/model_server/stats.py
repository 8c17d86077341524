"""What the server says about itself: counts at one instant, and a log of requests. Plain values, and sums over them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Iterable

Ending = Literal["answered", "dropped", "reset", "cut", "abandoned"]
"""How a request ended: in full; closed or reset by the server without a byte of an answer; broken off in its middle;
or given up by the client."""


class Request(NamedTuple):
    """One line of the log.

    Attributes:
        t_start: when the whole request had arrived, in seconds since the epoch.
        t_end: when its answer had been sent or its connection was closed; 0.0 while it is open.
        endpoint: name of the endpoint.
        path: path of the request.
        status: status that was sent, or 0 if none was.
        ending: how it ended; "" while it is open.
        number: which call of its endpoint it was, from 1; 0 for a request that is no call (health, models, metrics).
        cost: of the header ``x-fake-cost``.
        message_id: of the header ``x-message-id``.
        priority: of the header ``x-priority``.
        user: of the body's field ``user``.
    """

    t_start: float
    t_end: float
    endpoint: str
    path: str
    status: int
    ending: Ending | Literal[""]
    number: int = 0
    cost: int = 0
    message_id: str = ""
    priority: str = ""
    user: str = ""

    @property
    def seconds(self) -> float:
        """How long it was open; 0.0 while it still is."""
        return max(0.0, self.t_end - self.t_start)


class TallyStats(BaseModel):
    """Counts of one endpoint, or of the whole host, at one instant.

    Attributes:
        calls: calls that have arrived (completions and embeddings; not health, models, metrics).
        in_flight: calls that are open: from the whole request's arrival until its answer has been sent in full or its
            connection is closed, also if the client gave it up long ago.
        most_in_flight: the most that were open at once.
        integral_s: calls in flight, integrated over time, in call seconds.
        cost: what the open calls cost together.
        most_cost: the most that open calls cost together at once.
        running: calls that the engine works on.
        most_running: the most of them at once.
        waiting: calls that wait inside the server.
        most_waiting: the most of them at once.
        statuses: how many calls ended with each status; ``dropped``, ``reset``, ``abandoned`` for those without one.
        most_by_priority: the most in flight at once for each value of ``x-priority`` ("" without one).
        first_at: when the first call came, in seconds since the epoch.
        last_at: when the last call ended; now, if one is open.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    calls: int
    in_flight: int
    most_in_flight: int
    integral_s: float
    cost: int
    most_cost: int
    running: int
    most_running: int
    waiting: int
    most_waiting: int
    statuses: dict[str, int]
    most_by_priority: dict[str, int]
    first_at: float | None
    last_at: float | None

    def use(self, ceiling: float) -> float:
        """Return the use of a ceiling from the first call's arrival to the last one's end: 1.0 if it was full.

        Args:
            ceiling: calls in flight that would have been full use.
        """
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at:
            return 0.0
        return self.integral_s / (ceiling * (self.last_at - self.first_at))


class ServerStats(BaseModel):
    """All counts of one server at one instant.

    Attributes:
        state: ``up``, ``dark`` or ``loading``.
        deaths: how often the host went dark.
        host: counts over all endpoints.
        endpoints: counts of each endpoint, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    state: str
    deaths: int
    host: TallyStats
    endpoints: dict[str, TallyStats]

    def __getitem__(self, name: str) -> TallyStats:
        """Return the counts of one endpoint."""
        return self.endpoints[name]


def use_of_ceiling(requests: Iterable[Request], ceiling: float, trim_s: float = 0.0) -> float:
    """Return how much of a ceiling was used, without so many seconds at both ends.

    The integral of the calls in flight over (ceiling x time), from the first arrival plus ``trim_s`` to the last end
    minus ``trim_s``. A trim of one call's time leaves out how the load came up and ran down.

    Args:
        requests: of the log; those that are no calls or have not ended are left out.
        ceiling: calls in flight that would have been full use.
        trim_s: seconds to leave out at either end.
    """
    calls = [request for request in requests if request.number and request.ending]
    if not calls:
        return 0.0
    begin = min(call.t_start for call in calls) + trim_s
    end = max(call.t_end for call in calls) - trim_s
    if end <= begin:
        return 0.0
    area = sum(max(0.0, min(call.t_end, end) - max(call.t_start, begin)) for call in calls)
    return area / (ceiling * (end - begin))
