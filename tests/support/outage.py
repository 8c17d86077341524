"""What the model server's own log tells about an outage: the burst before the trip, the probes, the ramp."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from guard_middleware.core.commands import EndpointSnapshot
    from guard_middleware.testing.model_server import ModelServer, Request
    from tests.support.deployment import Deployment, WorkerGroup

APP = "tests.support.breaker_app"
SLACK_S = 0.005
"""The store's clock has whole milliseconds, and is not the model server's."""
PROMPT_S = 1.0
"""How late the first call after a pause may come, on a machine that is busy with other things. A pause whose end nobody
noticed lasts until the next heartbeat, which is further away in these tests."""
CALM = {"GUARD_HEARTBEAT_S": "4", "GUARD_LEASE_S": "15"}
"""Heartbeats too far apart to hide that a pause's end was not noticed."""


def cooldowns(base_s: float, most_s: float) -> dict[str, str]:
    """The environment for these cooldowns, and heartbeats that cannot end them."""
    return {**CALM, "MODEL_BREAKER_BASE_COOLDOWN_S": str(base_s), "MODEL_BREAKER_MAX_COOLDOWN_S": str(most_s)}


def start_groups(deployment: Deployment, count: int, *, processes: int = 1, threads: int = 4) -> list[WorkerGroup]:
    """Start worker groups side by side, and wait until all are ready."""
    groups = [
        deployment.start(processes=processes, threads=threads, wait=False, module=APP) for _ in range(count)
    ]
    return [group.wait_ready(processes) for group in groups]


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
    """One incident as the server saw it.

    Attributes:
        burst: what was let in before the breaker tripped.
        probes: what came between the trip and the close, the call that closed it included.
        after: what came after the close.
    """

    burst: tuple[Request, ...]
    probes: tuple[Request, ...]
    after: tuple[Request, ...]

    def pauses(self) -> list[float]:
        """Seconds from the end of each failure to the next call's start: first from the one that tripped."""
        ends = [min(one.t_end for one in self.burst if one.status != 200), *(one.t_end for one in self.probes)]
        return [round(probe.t_start - end, 4) for end, probe in zip(ends, self.probes, strict=False)]


def outage_in(calls: Sequence[Request], *, base_s: float) -> Outage:
    """Split the calls of one incident: what came within half a first cooldown of the first failure was no probe.

    Args:
        calls: of one endpoint, in order of their starts, from the incident's first one.
        base_s: the first cooldown.
    """
    first_end = min(one.t_end for one in calls if one.status != 200)
    burst = [one for one in calls if one.t_start < first_end + base_s / 2]
    rest = list(calls[len(burst) :])
    closed = next((index for index, one in enumerate(rest) if one.status == 200), len(rest) - 1)
    return Outage(tuple(burst), tuple(rest[: closed + 1]), tuple(rest[closed + 1 :]))


def check_pauses(pauses: Sequence[float], expected: Sequence[float]) -> None:
    """Each pause lasted as long as it should, and ended by itself soon after."""
    assert len(pauses) == len(expected), pauses
    for pause, wanted in zip(pauses, expected, strict=True):
        assert wanted - SLACK_S <= pause <= wanted + PROMPT_S, (pauses, expected)


def check_one_at_a_time(probes: Sequence[Request]) -> None:
    """No probe began before the one before it had ended."""
    for earlier, later in zip(probes, probes[1:], strict=False):
        assert later.t_start >= earlier.t_end - SLACK_S, (earlier, later)


def check_ramp(after: Sequence[Request]) -> None:
    """After the close one call was let in, and one more for each that came back well: no wave."""
    for call in after:
        open_then = sum(one.t_start <= call.t_start < one.t_end for one in after)
        well_then = sum(one.t_end <= call.t_start and one.status == 200 for one in after)
        assert open_then <= 1 + well_then, (call, open_then, well_then)
