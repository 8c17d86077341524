"""Workers that die under load: nothing lost, the ceiling held, everything back within one lease time."""

from __future__ import annotations

import os
import signal
import time

import pytest

from guard_middleware.core.commands import Action, Operate
from guard_middleware.testing.model_server import FakeEndpoint
from tests.support.deployment import wait_until

pytestmark = pytest.mark.slow

LEASE_S = 3.0
QUICK = {
    "GUARD_LEASE_S": str(LEASE_S),
    "GUARD_HEARTBEAT_S": "0.5",
    # Dramatiq's own redelivery of what a killed worker had only fetched
    "APP_HEARTBEAT_TIMEOUT_MS": "2000",
    "APP_MAINTENANCE_CHANCE": "1000000",
}


def chat(deploy, ceiling=4, base_ms=50, *, kill_at_end=False, **env):
    """One endpoint, and short leases."""
    return deploy(
        kill_at_end=kill_at_end,
        endpoints=[FakeEndpoint(name="chat", base_ms=base_ms), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": ceiling, "reserve": 0}, "embed": {}},
        env={**QUICK, **env},
    )


def at_least_once(deployment, ids):
    """Every message ran, none is dead, nothing is left."""
    deployment.wait_done(ids, 40)
    deployment.wait_idle()
    assert deployment.dead() == {}
    assert set(ids) <= set(deployment.done_ids())


def test_killed_worker_loses_nothing_and_the_ceiling_holds(deploy):
    """SIGKILL of one of three worker groups under load: every message still runs, never more than 4 at once."""
    # Given three groups that saturate one endpoint
    deployment = chat(deploy)
    victim, *_ = [deployment.start(processes=1, threads=8) for _ in range(3)]
    ids = deployment.send("orchestrate", 300)
    wait_until(lambda: len(deployment.done_ids()) > 40, 20)
    # When one of them is killed
    victim.kill()
    # Then everything runs; only what the victim had in hand may have run twice; and the server never saw a fifth call
    at_least_once(deployment, ids)
    twice = [one for one, count in deployment.done_ids().items() if count > 1]
    assert len(twice) <= 8
    assert deployment.server.stats()["chat"].most_in_flight <= 4


def test_killed_workers_permits_and_messages_are_back_within_one_lease_time(deploy):
    """Two calls in flight, SIGKILL: their permits stay taken until the lease ends, not longer; then they go first."""
    # Given a ceiling of 2, filled by a worker, and ten messages of another one behind; Dramatiq redelivers much later
    deployment = chat(deploy, ceiling=2, APP_HEARTBEAT_TIMEOUT_MS="60000")
    victim = deployment.start(processes=1, threads=4)
    long = deployment.send("orchestrate", 2, kwargs={"ms": 4_000})
    wait_until(lambda: deployment.server.stats()["chat"].in_flight == 2, 10)
    deployment.start(processes=1, threads=4)
    short = deployment.send("orchestrate", 10, kwargs={"ms": 10})
    # When the first worker is killed
    victim.kill()
    killed_at = time.time()
    deployment.wait_done([*long, *short], 30)
    # Then nothing starts before the leases end; right after, the two that were killed start again, at their own places
    starts = sorted((one.t_start - killed_at, one.message_id) for one in deployment.server.log() if one.number)
    later = [(at, message) for at, message in starts if at > 0]
    assert {message for _, message in later[:2]} == set(long)
    assert all(LEASE_S - 0.7 <= at <= LEASE_S + 1.0 for at, _ in later[:2])
    assert {message for _, message in later[2:]} == set(short)


def test_poison_message_cannot_stop_the_others(deploy):
    """A message whose actor kills its worker, under a supervisor that restarts workers: one lease per delivery."""
    deployment = chat(deploy, ceiling=2)
    poison = deployment.send("poison", 1)
    ids = deployment.send("orchestrate", 20)
    deaths = f"{deployment.broker_namespace}:poison"
    for _ in range(3):
        before = deployment.redis.llen(deaths)
        group = deployment.start(processes=1, threads=4, wait=False)
        wait_until(lambda before=before: deployment.redis.llen(deaths) > before, 20, every_s=0.05)
        assert len(deployment.store().snapshot().leases) <= 2
        group.kill()
    # When the poison is taken out of the queue, everything else finishes
    for queue in ("orchestration",):
        for key in deployment.redis.hkeys(f"{deployment.broker_namespace}:{queue}.msgs"):
            if poison[0].encode() in deployment.redis.hget(f"{deployment.broker_namespace}:{queue}.msgs", key):
                deployment.redis.hdel(f"{deployment.broker_namespace}:{queue}.msgs", key)
    deployment.start(processes=1, threads=4)
    deployment.wait_done(ids, 40)
    deployment.wait_idle()


def test_sigterm_loses_nothing_and_runs_nothing_twice(deploy):
    """SIGTERM of one of three groups under load: every message runs exactly once."""
    deployment = chat(deploy)
    leaver, *_ = [deployment.start(processes=1, threads=8) for _ in range(3)]
    ids = deployment.send("orchestrate", 200)
    wait_until(lambda: len(deployment.done_ids()) > 30, 20)
    assert leaver.terminate() == 0
    deployment.wait_done(ids, 30)
    deployment.check_everything_once()
    assert deployment.server.stats()["chat"].most_in_flight <= 4


def test_everything_parked_and_all_workers_killed_then_one_drains(deploy):
    """All workers die while the breaker is open and everything is parked; a single new one drains it all."""
    deployment = chat(deploy, MODEL_BREAKER_BASE_COOLDOWN_S="2")
    group = deployment.start(processes=2, threads=8)
    deployment.send("orchestrate", 1, kwargs={"ms": 1})
    deployment.wait_done(deployment.sent, 10)
    deployment.server.script([{"fault": "status", "status": 503, "to_s": 3}])
    ids = deployment.send("orchestrate", 60)
    store = deployment.store()
    wait_until(lambda: sum(store.snapshot().endpoints["chat"].waiting.values()) >= 56, 10)
    group.kill()
    deployment.start(processes=1, threads=8)
    at_least_once(deployment, ids)


def test_busy_group_leaves_every_permit_to_the_other(deploy):
    """One worker group is busy with other work; the other group gets every permit, also of waiters both could run."""
    # Given work that is parked, and that both groups could run
    deployment = chat(deploy, ceiling=4, kill_at_end=True)
    deployment.start(processes=1, threads=4)
    deployment.start(processes=1, threads=8, queues=["orchestration"])
    store = deployment.store()
    store.operate(Operate(action=Action.PAUSE, target="chat"))
    ids = deployment.send("orchestrate", 100, kwargs={"ms": 50})
    wait_until(lambda: sum(map(len, store.snapshot().lines.values())) == 100, 10)
    # When all threads of one group are busy with other work for a minute, and the work may go on
    plain = deployment.send("plain", 4, kwargs={"ms": 60_000})
    wait_until(lambda: sorted(store.snapshot().processes.values()) == [0, 8], 10)
    store.operate(Operate(action=Action.RESUME, target="chat"))
    # Then all of it has run while that group is still busy, four at once
    deployment.wait_done(ids, 40)
    assert not set(plain) & set(deployment.done_ids())
    assert deployment.server.stats()["chat"].most_in_flight == 4
    store.close()


def test_killed_master_leaves_no_lease_behind(deploy):
    """SIGKILL of a worker process alone, its master alive: its permits are back within one lease time."""
    deployment = chat(deploy, ceiling=2)
    group = deployment.start(processes=1, threads=2)
    deployment.send("orchestrate", 2, kwargs={"ms": 60_000})
    wait_until(lambda: deployment.server.stats()["chat"].in_flight == 2, 10)
    for pid in group.workers():
        os.kill(pid, signal.SIGKILL)
    store = deployment.store()
    deployment.start(processes=1, threads=1, queues=["plain"])
    wait_until(lambda: not store.snapshot().leases, LEASE_S + 2)
