"""What the model server's own log tells about an outage: the burst before the trip, the probes, the ramp."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from guard_middleware.testing.model_server import FakeEndpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from guard_middleware.core.commands import EndpointSnapshot
    from guard_middleware.testing.model_server import ModelServer, Request
    from tests.support.deployment import Deployment, WorkerGroup

APP = "tests.support.breaker_app"
SLACK_S = 0.005
"""The store's clock has whole milliseconds, and is not the model server's."""
PROMPT_S = 1.5
"""How late the first call after a pause may come, on a machine that is busy with other things. A pause whose end nobody
noticed lasts until the next heartbeat, which is further away in these tests."""
START_S = 90
"""How long worker processes may take to start on such a machine."""
CALM = {"GUARD_HEARTBEAT_S": "4", "GUARD_LEASE_S": "15"}
"""Heartbeats too far apart to hide that a pause's end was not noticed."""


def cooldowns(base_s: float, most_s: float) -> dict[str, str]:
    """The environment for these cooldowns, and heartbeats that cannot end them."""
    return {**CALM, "MODEL_BREAKER_BASE_COOLDOWN_S": str(base_s), "MODEL_BREAKER_MAX_COOLDOWN_S": str(most_s)}


def serving(*names: str, ceiling: int, **endpoint: Any) -> dict[str, Any]:
    """A deployment's endpoints and models: these, alike, and those that the application's other actors name."""
    others = [name for name in ("chat", "embed") if name not in names]
    return {
        "endpoints": [*(FakeEndpoint(name=name, **endpoint) for name in names), *map(_idle, others)],
        "kill_at_end": True,
        "models": {**{name: {"max_concurrent_requests": ceiling} for name in names}, **{name: {} for name in others}},
    }


def _idle(name: str) -> FakeEndpoint:
    return FakeEndpoint(name=name)


def start_groups(deployment: Deployment, count: int, *, processes: int = 1, threads: int = 4) -> list[WorkerGroup]:
    """Start worker groups side by side, and wait until all are ready."""
    groups = [deployment.start(processes=processes, threads=threads, wait=False, module=APP) for _ in range(count)]
    return [group.wait_ready(processes, START_S) for group in groups]


def calls_of(server: ModelServer, endpoint: str = "chat") -> list[Request]:
    """The endpoint's calls, in the order in which they came."""
    return sorted((one for one in server.log() if one.number and one.endpoint == endpoint), key=lambda one: one.t_start)


def attempts_of(deployment: Deployment) -> list[dict[str, Any]]:
    """The requests that the workers have tried to make, with `id`, `at` and `pid`."""
    return [json.loads(entry) for entry in deployment.redis.lrange(f"{deployment.broker_namespace}:attempts", 0, -1)]


@contextmanager
def looking_at(deployment: Deployment, endpoint: str = "chat") -> Iterator[Any]:
    """A function that reads the endpoint's state in the guard's store and changes nothing."""
    store = deployment.store()

    def look() -> EndpointSnapshot:
        return store.snapshot().endpoints[endpoint]

    try:
        yield look
    finally:
        store.close()


@dataclass(frozen=True, slots=True)
class Outage:
    """One incident as the server saw it. Which call belongs where is told by the generation that it was let in under.

    Attributes:
        tripped_at: when the failure that tripped the breaker ended at the server; the store knew a little later.
        burst: what was let in before the breaker tripped.
        probes: what was let in between the trip and the close, the call that closed it included.
        after: what was let in after the close.
    """

    tripped_at: float
    burst: tuple[Request, ...]
    probes: tuple[Request, ...]
    after: tuple[Request, ...]

    def pauses(self) -> list[float]:
        """Seconds from the trip to the first probe, and from the end of each probe to the next one's start."""
        ends = [self.tripped_at, *(one.t_end for one in self.probes)]
        return [round(probe.t_start - end, 4) for end, probe in zip(ends, self.probes, strict=False)]


def generation_of(call: Request) -> int:
    """The breaker's generation in which a call was let in, as the worker told the server."""
    return int(call.priority)


def outage_in(calls: Sequence[Request], *, threshold: int = 1) -> Outage:
    """Split the calls of one incident.

    Args:
        calls: of one endpoint, in order of their starts, from the incident's first one to its close and further.
        threshold: how many failures trip the breaker.
    """
    first = min(map(generation_of, calls))
    burst = [one for one in calls if generation_of(one) == first]
    tripped_at = sorted(one.t_end for one in burst if one.status != HTTPStatus.OK)[threshold - 1]
    rest = [one for one in calls if generation_of(one) != first]
    closed_by = min(generation_of(one) for one in rest if one.status == HTTPStatus.OK)
    probes = [one for one in rest if generation_of(one) <= closed_by]
    after = [one for one in rest if generation_of(one) > closed_by]
    return Outage(tripped_at, tuple(burst), tuple(probes), tuple(after))


def series(base_s: float, most_s: float, count: int) -> list[float]:
    """The first so many cooldowns."""
    return [min(base_s * 2**trips, most_s) for trips in range(count)]


def check_invariants(deployment: Deployment, ceiling: int, *names: str, retries: int = 0) -> None:
    """Never over the ceiling, everything done once, no permit left in use, no retry burned by being postponed.

    Args:
        deployment: at its end.
        ceiling: of each of the endpoints.
        names: of the endpoints; "chat" if not given.
        retries: the most that any message may have, where calls failed that no breaker was open after.
    """
    stats = deployment.server.stats()
    for name in names or ("chat",):
        assert stats[name].most_in_flight <= ceiling, name
    assert all(request.number for request in deployment.server.log()), "no health URL was asked"
    deployment.check_everything_once(retries=retries)


def check_pauses(pauses: Sequence[float], expected: Sequence[float]) -> None:
    """Each pause lasted as long as it should, and ended by itself soon after."""
    assert len(pauses) == len(expected), pauses
    for pause, wanted in zip(pauses, expected, strict=True):
        assert wanted - SLACK_S <= pause <= wanted + PROMPT_S, (pauses, expected)


def check_one_at_a_time(probes: Sequence[Request]) -> None:
    """No probe began before the one before it had ended."""
    for earlier, later in pairwise(probes):
        assert later.t_start >= earlier.t_end - SLACK_S, (earlier, later)


def check_ramp(after: Sequence[Request]) -> None:
    """After the close one call was let in, and one more for each that came back well: no wave."""
    for call in after:
        open_then = sum(one.t_start <= call.t_start < one.t_end for one in after)
        well_then = sum(one.t_end <= call.t_start and one.status == HTTPStatus.OK for one in after)
        assert open_then <= 1 + well_then, (call, open_then, well_then)
