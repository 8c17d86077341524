"""Which statuses and exceptions trip a breaker, in the shapes that real clients in real workers raise them."""

from __future__ import annotations

from contextlib import closing

import pytest

from guard_middleware.testing.model_server import Fault, Step
from tests.support.outage import calls_of, cooldowns, looking_at, serving, start_groups

pytestmark = pytest.mark.slow

TRIPS = (408, 429, 502, 503, 504, 520, 524, 529)
DO_NOT_TRIP = (400, 401, 403, 404, 409, 413, 422, 425, 499, 500, 501)
SHAPES = ("httpx", "openai", "requests", "ollama", "status_code", "status", "cause")
TRANSPORT_TRIPS = {
    "dropped": {"fault": Fault.DROP},
    "reset": {"fault": Fault.RESET},
    "read_timeout": {"fault": Fault.HANG},
    "truncated": {"fault": Fault.TRUNCATE},
}
TRANSPORT_SHAPES = ("httpx", "openai", "requests", "cause", "httpx")
CALLERS_TRIP = ("refused", "dns")
CALLERS_DO_NOT = ("tls", "pool")
TIMES = 5


def shapes_from(number: int) -> list[str]:
    """Five of the shapes, beginning with another one each time."""
    return [SHAPES[(number + index) % len(SHAPES)] for index in range(TIMES)]


def test_each_failure_trips_or_does_not_in_every_shape_alike(deploy, measured):
    """Five equal failures in five shapes, threshold 3, one at a time: overloads trip at the third and keep it open."""
    # Given one endpoint for each failure, which its first five calls meet, by messages that may not be retried
    plan = {f"s{status}": ({"fault": Fault.STATUS, "status": status}, "") for status in (*TRIPS, *DO_NOT_TRIP)}
    plan |= {name: (fault, "") for name, fault in TRANSPORT_TRIPS.items()}
    plan |= {name: (None, name) for name in (*CALLERS_TRIP, *CALLERS_DO_NOT)}
    deployment = deploy(
        **serving(*plan, ceiling=1, base_ms=1),
        env={**cooldowns(0.05, 0.1), "MODEL_BREAKER_FAIL_THRESHOLD": "3", "APP_CLIENT_TIMEOUT_S": "0.4"},
    )
    steps = [Step(endpoint=name, times=TIMES, **fault) for name, (fault, _) in plan.items() if fault is not None]
    deployment.server.script(steps)
    sent = {}
    for number, (name, (_, trouble)) in enumerate(plan.items()):
        shapes = TRANSPORT_SHAPES if name in TRANSPORT_TRIPS or trouble else shapes_from(number)
        sent[name] = [
            deployment.send("ask_with", args=(shape, trouble, TIMES), guard_model=name, max_retries=0)[0]
            for shape in shapes
        ]
    # When three processes have worked on all of it
    start_groups(deployment, 2, threads=8)
    deployment.wait_idle(40)
    # Then an overload has tripped at the third, again with each of the two probes that met it, and closed with the
    # next: two messages failed before it, three were parked and are done. Everything else failed five times, and no
    # breaker moved.
    with closing(deployment.store()) as store:
        known = store.snapshot().endpoints
    tripping = {*(f"s{status}" for status in TRIPS), *TRANSPORT_TRIPS, *CALLERS_TRIP}
    assert {name: known[name].generation for name in plan} == {name: 4 if name in tripping else 0 for name in plan}
    done = deployment.done_ids()
    dead = set(deployment.dead()["orchestration"])
    for name, ids in sent.items():
        wanted = 3 if name in tripping else 0
        assert sum(done[one] for one in ids) == wanted, name
        assert {one for one in ids if not done[one]} == dead & set(ids), name
        if not plan[name][1]:
            assert len(calls_of(deployment.server, name)) == TIMES + wanted, name
    assert max(one.most_in_flight for one in deployment.server.stats().endpoints.values()) == 1


def test_bad_inputs_fail_alone_and_slow_nobody_down(deploy, measured):
    """20 messages that are too long, wrapped or not, among 80 good ones: no trip, no retry for the good, full speed."""
    deployment = deploy(
        **serving("chat", ceiling=4, base_ms=20),
        env={**cooldowns(0.5, 30), "MODEL_BREAKER_FAIL_THRESHOLD": "3"},
    )
    start_groups(deployment, 2)
    too_long = "This model's maximum context length is 512 tokens, however you requested 1451"
    bad_input = Step(contains="please", fault=Fault.STATUS, status=400, body={"error": too_long})
    deployment.server.script([bad_input, Step(calls=(1, 4), fault=Fault.SERVE, ms=300)])
    good = deployment.send("orchestrate", 40)
    bad = [deployment.send("ask_with", args=(("httpx", "cause")[index % 2],), max_retries=0)[0] for index in range(20)]
    good += deployment.send("orchestrate", 40)
    deployment.wait_idle(20)
    with looking_at(deployment) as look:
        seen = look()
        assert (seen.breaker, seen.trips, seen.generation, seen.limit) == ("closed", 0, 0, 4)
    stats = deployment.server.stats()["chat"]
    measured("use_of_ceiling", round(stats.use(4), 2))
    assert stats.statuses == {"200": 80, "400": 20}
    assert stats.most_in_flight == 4
    assert sorted(deployment.dead()["orchestration"]) == sorted(bad)
    assert deployment.done_ids() == dict.fromkeys(good, 1)
    assert all(entry["retries"] == 0 for entry in deployment.done())
