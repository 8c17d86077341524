"""A probe that never settles: its holder dies or hangs, its message is dropped, the store goes away.

The server is healthy again in each of them, and nobody helps: after a stated time another message is the probe, and
never are two alive within that time.
"""

from __future__ import annotations

import time

import pytest

from guard_middleware.testing.model_server import Fault, HostMemory, Step
from tests.support.deployment import Deployment, wait_until
from tests.support.outage import (
    PROMPT_S,
    SLACK_S,
    attempts_of,
    calls_of,
    check_invariants,
    check_one_at_a_time,
    check_ramp,
    looking_at,
    outage_in,
    serving,
    start_groups,
)

pytestmark = pytest.mark.slow

LEASE_S = 1.5
HEARTBEAT_S = 0.4
COOLDOWN_S = 0.3
CEILING = 4
ENV = {
    "GUARD_LEASE_S": str(LEASE_S),
    "GUARD_HEARTBEAT_S": str(HEARTBEAT_S),
    "MODEL_BREAKER_BASE_COOLDOWN_S": str(COOLDOWN_S),
    "MODEL_BREAKER_MAX_COOLDOWN_S": str(COOLDOWN_S),
}
CHAT = {**serving("chat", ceiling=CEILING, base_ms=20), "host": HostMemory(dark_s=0, loading_s=0)}


def trip_and_probe(deployment, **probe) -> list[str]:
    """Warm up, trip the breaker with one call, park 30 messages, and let the next call, the probe, meet a fault."""
    start_groups(deployment, 2)
    deployment.wait_done(deployment.send("orchestrate", 5), 10)
    deployment.server.reset()
    slow = Step(calls=(3, 20), fault=Fault.SERVE, ms=150)
    deployment.server.script([Step(calls=(1, 1), fault=Fault.STATUS, status=503), Step(calls=(2, 2), **probe), slow])
    first = deployment.send("orchestrate")
    with looking_at(deployment) as look:  # the server's answer is out before the store knows of it
        wait_until(lambda: look().trips == 1, 10, "tripped")
    return [*first, *deployment.send("orchestrate", 30)]


def wait_for_probe(deployment):
    """Wait until the probe is open at the server, and return it."""
    deployment.server.wait_until(lambda stats: (stats["chat"].calls, stats["chat"].in_flight) == (2, 1))
    probe = calls_of(deployment.server)[-1]
    assert probe.number == 2
    return probe


def test_a_killed_holder_of_the_probe_is_replaced_within_one_lease_time(deploy, measured):
    """SIGKILL the worker that makes the probe: another message is the probe when the lease is over, not earlier."""
    # Given a probe that hangs in one of two worker groups
    deployment = deploy(**CHAT, env=ENV)
    ids = trip_and_probe(deployment, fault=Fault.HANG)
    probe = wait_for_probe(deployment)
    holder = next(one["pid"] for one in attempts_of(deployment) if one["id"] == probe.message_id)
    group = next(one for one in deployment.groups if holder in one.workers())
    # When its process is killed
    killed_at = time.time()
    group.kill()
    deployment.wait_done(ids, 15)
    # Then nobody probed while the lease could have been alive, and somebody did soon after
    calls = calls_of(deployment.server)
    second = calls[2]
    measured("next_probe_after_kill_s", round(second.t_start - killed_at, 3))
    assert second.t_start >= calls[0].t_end + COOLDOWN_S + LEASE_S - SLACK_S
    assert second.t_start <= killed_at + LEASE_S + HEARTBEAT_S + PROMPT_S
    check_one_at_a_time(calls[1:3])
    # ...and the dead worker's message ran with the others, once, above no ceiling
    check_ramp(calls[3:])
    check_invariants(deployment, CEILING)


def test_a_probe_that_hangs_passes_its_role_on_and_keeps_its_permit(deploy, measured):
    """The actor never ends: after the role's deadline one other message probes, and the old call goes on counting."""
    # Given a probe that hangs, and a role that stays 1 s with one call
    deployment = deploy(**CHAT, env={**ENV, "APP_PROBE_DEADLINE_MS": "1000", "APP_CLIENT_TIMEOUT_S": "60"})
    ids = trip_and_probe(deployment, fault=Fault.HANG)
    probe = wait_for_probe(deployment)
    # When nothing is done about it
    others = [one for one in ids if one != probe.message_id]
    deployment.wait_done(others, 15)
    # Then the role passed on when it was over, and not earlier
    calls = calls_of(deployment.server)
    second = next(one for one in calls if one.number == 3)
    measured("next_probe_after_s", round(second.t_start - probe.t_start, 3))
    assert second.t_start >= calls[0].t_end + COOLDOWN_S + 1.0 - SLACK_S
    assert second.t_start <= probe.t_start + 1.0 + HEARTBEAT_S + PROMPT_S
    with looking_at(deployment) as look:
        wait_until(lambda: (look().breaker, look().in_flight) == ("closed", 1), 5, "only the old call is left")
    assert deployment.server.stats()["chat"].most_in_flight == CEILING, "the old call took part of the ceiling"
    # ...and when the old call ends at last, badly, that moves nothing, and its message is tried again
    deployment.server.kill_host()
    deployment.wait_done(ids, 10)
    with looking_at(deployment) as look:
        assert (look().breaker, look().trips) == ("closed", 0)
    check_invariants(deployment, CEILING, retries=1)


def test_a_probe_dropped_by_another_middleware_gives_its_role_back_at_once(deploy, measured):
    """A middleware after the guard skips the probe: no request was made, and the next message probes right away."""
    slow = {"MODEL_BREAKER_BASE_COOLDOWN_S": "1", "MODEL_BREAKER_MAX_COOLDOWN_S": "1", "GUARD_LEASE_S": "10"}
    deployment = deploy(**CHAT, env={**ENV, **slow})
    start_groups(deployment, 2)
    deployment.wait_done(deployment.send("orchestrate", 5), 10)
    deployment.server.reset()
    deployment.server.script([Step(calls=(1, 1), fault=Fault.STATUS, status=503)])
    deployment.send("orchestrate")
    with looking_at(deployment) as look:
        wait_until(lambda: look().breaker != "closed", 5, "tripped")
    # When the next message that the guard lets through, the probe, is dropped
    deployment.redis.set(f"{deployment.broker_namespace}:drop", 1)
    deployment.send("orchestrate", 30)
    wait_until(lambda: deployment.redis.llen(f"{deployment.broker_namespace}:dropped"), 5, "dropped")
    dropped = deployment.redis.lindex(f"{deployment.broker_namespace}:dropped", 0).decode()
    deployment.sent.remove(dropped)
    deployment.wait_done(deployment.sent, 10)
    # Then the breaker closed with the next one, without waiting for any lease or deadline
    calls = calls_of(deployment.server)
    measured("next_probe_after_pause_s", round(calls[1].t_start - calls[0].t_end - 1.0, 3))
    assert 1.0 - SLACK_S <= calls[1].t_start - calls[0].t_end <= 1.0 + PROMPT_S
    check_ramp(calls[2:])
    assert dropped not in {one.message_id for one in calls}
    assert len(calls) == 1 + 30, "the refused one, and each that was not dropped"
    check_invariants(deployment, CEILING)


def test_a_store_lost_while_the_probe_runs_costs_no_message_and_no_second_probe(own_valkey, tmp_path, measured):
    """The store is killed after the grant and is back only after the probe's end: everything drains, without help."""
    # Given a probe that takes 0.6 s, on a store of this test's own
    with Deployment(own_valkey.url, tmp_path, **CHAT, env={**ENV, "APP_RECORD_LATER": "1"}) as deployment:
        ids = trip_and_probe(deployment, fault=Fault.SERVE, ms=600)
        wait_for_probe(deployment)
        # When the store is gone until the probe has long been answered
        own_valkey.kill()
        deployment.server.wait_until(lambda stats: stats["chat"].in_flight == 0)
        own_valkey.restart(keep_data=True)
        back_at = time.time()
        deployment.wait_done(ids, 25)
        # Then the probe's outcome was not lost: it alone closed the breaker, late
        calls = calls_of(deployment.server)
        outage = outage_in(calls)
        measured("next_call_after_return_s", round(calls[2].t_start - back_at, 3))
        assert [one.number for one in outage.probes] == [2]
        assert all(one.t_start >= back_at - SLACK_S for one in outage.after)
        check_ramp(outage.after)
        check_invariants(deployment, CEILING)
