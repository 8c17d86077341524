"""Replies that are lost after the server has executed the command: the same ids, the same effect, once (I11)."""

from __future__ import annotations

import os
import threading
import time
from unittest import mock

import pytest
from dramatiq.message import Message
from dramatiq.results.backends import RedisBackend

from guard_middleware import Guard, GuardSettings
from guard_middleware.errors import AdmissionDenied, StoreUnavailable
from guard_middleware.testing.model_server import FakeEndpoint
from tests.fault.proxy import StoreProxy
from tests.support.deployment import wait_until

pytestmark = pytest.mark.slow

DROPS = 50
CEILING = 3
# A lease time that no test lives to see: a permit that is left over stays, and is found.
QUICK = {"GUARD_LEASE_S": "90", "GUARD_HEARTBEAT_S": "0.5", "GUARD_STORE_TIMEOUT_S": "1"}


@pytest.fixture
def proxy(redis_url):
    """Between the guard and its store."""
    with StoreProxy(redis_url) as one:
        yield one


@pytest.fixture
def deployment(deploy, proxy):
    """Guards behind the proxy; broker and application reach the same database directly."""

    def make(**env):
        return deploy(
            endpoints=[FakeEndpoint(name="chat", base_ms=10), FakeEndpoint(name="embed")],
            models={"chat": {"max_concurrent_requests": CEILING, "reserve": 0}, "embed": {}},
            env={**QUICK, "GUARD_REDIS_URL": proxy.url, **env},
        )

    return make


def check_results(deployment, ids):
    """Each message's result is there, and is the one of an unguarded run (INV 5)."""
    backend = RedisBackend(url=deployment.redis_url, namespace=f"{deployment.broker_namespace}-results")
    for one in ids:
        message = Message(
            queue_name="orchestration", actor_name="answer", args=(), kwargs={}, options={}, message_id=one
        )
        assert backend.get_result(message) == 2
    backend.client.close()


def check_invariants(deployment, ids):
    """Everything ran once, without retries, never over the ceiling, with its result; and no permit is left."""
    deployment.wait_done(deployment.sent, 30)
    deployment.check_everything_once(retries=0)
    stats = deployment.server.stats()["chat"]
    assert stats.most_in_flight <= CEILING
    assert stats.calls == len(deployment.sent)  # nothing was called twice
    check_results(deployment, ids)
    store = deployment.store()
    assert sum(store.snapshot().endpoints["chat"].waiting.values()) == 0
    store.close()


def parked(deployment):
    """How many messages wait in lines of the broker's namespace: only parking puts them there."""
    store = deployment.store()
    try:
        lines = store.snapshot().lines
    finally:
        store.close()
    return sum(len(waiters) for line, waiters in lines.items() if line[1] == deployment.broker_namespace)


@pytest.mark.parametrize("script", ["admit", "finish"])
def test_dropped_replies_of_a_messages_own_commands_change_nothing(deployment, proxy, script):
    """50 lost replies of admit, or of finish, under a backlog: each message runs once, and no permit is left over."""
    # Given two workers behind the proxy, and more messages than permits
    running = deployment()
    running.start(processes=2, threads=6)
    proxy.drop_replies(script, times=DROPS)
    # When every other reply is lost after the command was carried out
    ids = running.send("answer", 150, args=(1,))
    wait_until(lambda: parked(running) > 0, 10, "nothing is parked: the broker's database was not recognised")
    # Then nobody notices
    check_invariants(running, ids)
    assert proxy.dropped[script] == DROPS


def test_dropped_replies_of_both_at_once_change_nothing(deployment, proxy):
    """50 lost replies each of admit, finish and beat in the same run, two processes."""
    running = deployment(GUARD_HEARTBEAT_S="0.1")
    running.start(processes=2, threads=6)
    for script in ("admit", "finish", "beat"):
        proxy.drop_replies(script, times=DROPS, chance=0.3)
    ids = running.send("answer", 200, args=(1,))
    check_invariants(running, ids)
    wait_until(lambda: proxy.dropped["beat"] == DROPS, 20)
    assert proxy.dropped["admit"] >= 20
    assert proxy.dropped["finish"] >= 30
    running.wait_idle()


def test_dropped_replies_of_beats_change_nothing(deployment, proxy):
    """50 lost replies of beats, which renew, give back and take: what a lost answer handed over still runs, once."""
    running = deployment(GUARD_HEARTBEAT_S="0.1")
    running.start(processes=2, threads=6)
    proxy.drop_replies("beat", times=DROPS, chance=0.7)
    ids = []
    while proxy.dropped["beat"] < DROPS:
        with running.guard.permit("chat", priority="interactive", cost=CEILING, timeout=10):
            ids += running.send("answer", 6, args=(1,))
            wait_until(lambda: parked(running) == 6, 10)
        running.wait_done(ids, 20)  # taken by beats: who freed the permits cannot run messages
    check_invariants(running, ids)


@pytest.mark.parametrize("script", ["configure", "operate"])
def test_dropped_replies_around_a_process_life_leave_nothing_behind(deployment, proxy, script):
    """50 lost replies of configure (a process comes) or operate (a caller gives up, a process goes)."""
    running = deployment()
    running.start(processes=1, threads=6)
    proxy.drop_replies(script, times=DROPS)
    ids = running.send("answer", 150, args=(1,))
    got = 0

    def come_and_go():
        """Callers of short-lived processes, some of which give up while they wait."""
        nonlocal got
        while proxy.dropped[script] < DROPS:
            guard = Guard(settings)
            try:
                with guard.permit("chat", priority="background_ingestion", timeout=0.05):
                    got += 1
            except (AdmissionDenied, StoreUnavailable):
                pass
            finally:
                guard.close()

    with mock.patch.dict(os.environ, running.settings_env()):
        settings = GuardSettings()
    deadline_s = time.monotonic() + 25
    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    assert proxy.dropped[script] == DROPS
    # Then only the worker is left at once, the messages ran as ever, nobody waits, nothing is leased
    store = running.store()
    wait_until(lambda: len(store.snapshot().processes) == 1, 1, "a process that said goodbye is still there")
    store.close()
    check_invariants(running, ids)
