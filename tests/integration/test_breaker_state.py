"""The breaker's state belongs to all processes: none that comes or goes, and no missing key, changes what it says."""

from __future__ import annotations

import signal
import time
from contextlib import closing

import pytest

from guard_middleware.store import keys
from guard_middleware.testing.model_server import Fault, Step
from tests.support.deployment import wait_until
from tests.support.outage import (
    APP,
    START_S,
    calls_of,
    check_invariants,
    check_pauses,
    check_ramp,
    cooldowns,
    looking_at,
    outage_in,
    serving,
    start_groups,
)

pytestmark = pytest.mark.slow

CHAT = serving("chat", ceiling=4, base_ms=20)


def test_processes_that_start_and_stop_change_nothing_about_a_pause(deploy, measured):
    """Five processes start and three stop while the breaker is open: its end stays one instant, kept by all."""
    # Given a breaker that a server has asked to stay open, for as long as some processes take to start on this machine
    deployment = deploy(**CHAT, env=cooldowns(0.2, 1.0))
    began_s = time.monotonic()
    start_groups(deployment, 1)
    pause_s = round(2 + 4 * (time.monotonic() - began_s))
    hint = {"retry-after": str(pause_s)}
    deployment.server.script([Step(calls=(1, 1), fault=Fault.STATUS, status=503, headers=hint)])
    ids = deployment.send("orchestrate")
    ends_at_ms, generations = [], set()
    with closing(deployment.store()) as store:

        def look():
            snapshot = store.snapshot()
            chat = snapshot.endpoints["chat"]
            if chat.breaker == "open":
                ends_at_ms.append(snapshot.at_ms + chat.open_for_ms)
                generations.add(chat.generation)
            return chat.breaker, len(snapshot.processes)

        wait_until(lambda: look()[0] == "open", 5, "open")
        ids += deployment.send("orchestrate", 20)
        # When five processes start, and three of the six stop
        for _ in range(5):
            deployment.start(threads=4, module=APP, wait=False)
        wait_until(lambda: look()[1] == 6, START_S, "all six are known")
        for group in deployment.groups[:3]:
            group.process.send_signal(signal.SIGTERM)
        assert look()[0] == "open", "all that happened while it was open"
        wait_until(lambda: look()[1] == 3, 30, "three have said goodbye")
    # Then every look at it saw the same end, and no call came before it; those who came late end it on time
    measured("looks", len(ends_at_ms))
    assert max(ends_at_ms) - min(ends_at_ms) == 0
    assert generations == {1}
    deployment.wait_done(ids, 15)
    outage = outage_in(calls_of(deployment.server))
    measured("pauses_s", outage.pauses())
    check_pauses(outage.pauses(), [pause_s])
    check_ramp(outage.after)
    check_invariants(deployment, 4)


def test_missing_state_means_closed(deploy):
    """What is kept of the endpoint is deleted while everything is parked: it is closed, and nothing raises."""
    deployment = deploy(**CHAT, env={**cooldowns(60, 60), "GUARD_HEARTBEAT_S": "0.5"})
    start_groups(deployment, 2)
    deployment.server.script([Step(calls=(1, 1), fault=Fault.STATUS, status=503)])
    ids = deployment.send("orchestrate")
    with looking_at(deployment) as look:
        wait_until(lambda: look().breaker == "open", 5, "open")
        ids += deployment.send("orchestrate", 20)
        wait_until(lambda: sum(look().waiting.values()) == 21, 5, "everything parked")
        # When its records are gone
        state = keys.state(keys.root(deployment.namespace))
        records = [name for name in deployment.redis.hkeys(state) if name.endswith(b":chat") and b"spec" not in name]
        assert deployment.redis.hdel(state, *records)
        # Then it is closed, with defaults, and the next heartbeat lets everything go
        assert (look().breaker, look().trips, look().generation) == ("closed", 0, 0)
        deployment.wait_done(ids, 10)
    check_invariants(deployment, 4)
    for group in deployment.groups:
        assert "guard.beat_failed" not in group.log
        assert "Traceback" not in group.log


def test_a_deleted_state_key_strands_no_message(deploy):
    """The whole state key is deleted while everything is parked: closed, with defaults, and every message runs."""
    deployment = deploy(**CHAT, env={**cooldowns(60, 60), "GUARD_HEARTBEAT_S": "0.5", "GUARD_LEASE_S": "2"})
    start_groups(deployment, 2)
    deployment.server.script([Step(calls=(1, 1), fault=Fault.STATUS, status=503)])
    ids = deployment.send("orchestrate")
    with looking_at(deployment) as look:
        wait_until(lambda: look().breaker == "open", 5, "open")
        ids += deployment.send("orchestrate", 20)
        wait_until(lambda: sum(look().waiting.values()) == 21, 5, "everything parked")
    # When it is gone, which costs one lease time before anybody is admitted again
    assert deployment.redis.delete(keys.state(keys.root(deployment.namespace)))
    deployment.wait_done(ids, 6)
    check_invariants(deployment, 4)


def test_failures_are_counted_over_processes_that_come_and_go(deploy):
    """Threshold 3: two failures in one process, which ends; the third, in a process started later, opens."""
    deployment = deploy(**CHAT, env={**cooldowns(0.5, 1.0), "MODEL_BREAKER_FAIL_THRESHOLD": "3"})
    deployment.server.script([Step(calls=(1, 3), fault=Fault.STATUS, status=503)])
    # Given two real failures in a first process, of messages that may not be retried
    (first,) = start_groups(deployment, 1)
    failed = deployment.send("orchestrate", 2, max_retries=0)
    wait_until(lambda: len(deployment.dead().get("orchestration", [])) == 2, 5, "two failures")
    with looking_at(deployment) as look:
        assert look().breaker == "closed"
        # When another process starts, and the first one ends
        start_groups(deployment, 1)
        first.terminate()
        (third,) = deployment.send("orchestrate")
        # Then the third failure opens
        wait_until(lambda: look().breaker == "open", 5, "open")
        assert (look().trips, look().generation) == (1, 1)
    deployment.wait_done([third], 5)
    check_pauses(outage_in(calls_of(deployment.server), threshold=3).pauses(), [0.5])
    # ...and the dead letters are the two that really failed
    deployment.wait_idle()
    assert sorted(deployment.dead()["orchestration"]) == sorted(failed)
    assert deployment.done_ids() == {third: 1}
