"""One box under two servers, or under two knobs that multiply: what the host can take is what it gets."""

from __future__ import annotations

import re

import pytest

from guard_middleware.core.commands import Action, Operate
from guard_middleware.testing.model_server import FakeEndpoint, HostMemory
from tests.support.deployment import wait_until

pytestmark = pytest.mark.slow


def test_two_knobs_that_multiply_cause_no_timeout(deploy, measured):
    """3 processes of 4 threads before a server of 4, which slows in proportion: no call takes too long."""
    # Given a call time of 400 ms, of 1,200 ms if all 12 threads called at once, and clients that give up after 1,100
    deployment = deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=400), FakeEndpoint(name="embed")],
        host=HostMemory(knee=4),
        models={"chat": {"max_concurrent_requests": 4, "reserve": 0}, "embed": {}},
        env={"APP_CLIENT_TIMEOUT_S": "1.1"},
    )
    deployment.start(processes=3, threads=4)
    # When all have work all the time
    deployment.send("orchestrate", 40)
    deployment.wait_done(deployment.sent, 30)
    # Then no call was slowed, given up, or repeated
    stats = deployment.server.stats()["chat"]
    measured("longest call, s", round(max(one.seconds for one in deployment.calls()), 3))
    assert stats.statuses == {"200": 40}
    assert stats.most_in_flight == 4
    deployment.check_everything_once()


def test_error_without_a_text_is_told_and_classified_by_its_type(deploy):
    """A `ReadTimeout("")` is an overload, trips the breaker, and stands in the log by its type's name."""
    # Given a breaker that stays open for a moment
    deployment = deploy(
        kill_at_end=True,
        models={"chat": {"max_concurrent_requests": 4}, "embed": {}},
        env={"MODEL_BREAKER_BASE_COOLDOWN_S": "0.3"},
    )
    group = deployment.start(threads=4, module="tests.support.sharing_app")
    # When an actor's client raises one
    deployment.send("mixed", 1, args=("empty",))
    deployment.wait_done(deployment.sent, 10)
    # Then the log names the type, the breaker has been open, and the message has run again without a retry burned
    told = [line for line in group.log.splitlines() if "guard.overload" in line]
    assert len(told) == 1
    assert re.search(r"error='[\w.]*ReadTimeout'", told[0])
    store = deployment.store()
    assert store.snapshot().endpoints["chat"].generation >= 1
    store.close()
    deployment.check_everything_once(retries=0)


def waiting(store, endpoint):
    """The messages that are parked in the lines of an endpoint."""
    return [one for line, ids in store.snapshot().lines.items() if line[0] == endpoint for one in ids]


def test_two_endpoints_on_one_gpu_never_hold_more_than_its_budget_together(deploy, measured):
    """Costs 2 and 1 under a budget of 6, on a host that fails either endpoint above it: it never does."""
    # Given chat (ceiling 4, cost 2) and embed (ceiling 8, cost 1) on one GPU of 6
    deployment = deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=60), FakeEndpoint(name="embed", base_ms=60)],
        host=HostMemory(oom_above=6),
        models={
            "chat": {"max_concurrent_requests": 4, "gpu_group": "gpu", "reserve": 0},
            "embed": {"max_concurrent_requests": 8, "gpu_group": "gpu", "reserve": 0},
        },
        env={"GPU_CONCURRENCY_BUDGETS": '{"gpu": 6}'},
    )
    deployment.start(processes=3, threads=8)
    store = deployment.store()
    # And far more work for both than fits, which arrives by turns, 16 messages each, while both are paused
    for endpoint in ("chat", "embed"):
        store.operate(Operate(action=Action.PAUSE, target=endpoint))
    for number in range(1, 6):
        deployment.send("orchestrate", 16, guard_cost=2)
        wait_until(lambda number=number: len(waiting(store, "chat")) == 16 * number, 10)
        deployment.send("embed", 16, guard_priority="orchestration")
        wait_until(lambda number=number: len(waiting(store, "embed")) == 16 * number, 10)
    # When they go on
    for endpoint in ("chat", "embed"):
        store.operate(Operate(action=Action.RESUME, target=endpoint))
    deployment.wait_done(deployment.sent, 30)
    # Then the host counted a cost of 6 and never more, and failed nobody
    stats = deployment.server.stats()
    measured("calls in flight times seconds", round(stats.host.integral_s, 2))
    assert stats.host.most_cost == 6
    assert stats["chat"].most_in_flight == 2
    assert {**stats["chat"].statuses, **stats["embed"].statuses} == {"200": 80}
    # And neither starved: each had its part of every fifth of the calls
    calls = sorted((one for one in deployment.server.log() if one.number), key=lambda one: one.t_start)
    parts = [[one.endpoint for one in calls[at : at + 32]].count("chat") for at in range(0, 160, 32)]
    measured("chat calls in each fifth", parts)
    assert min(parts) >= 4
    assert max(parts) <= 28
    # And all permits went back to both
    deployment.check_everything_once()
    wait_until(lambda: store.snapshot().groups == {"gpu": (0, 6)}, 5)
    assert all(one.in_flight == 0 for one in store.snapshot().endpoints.values())
    store.close()
