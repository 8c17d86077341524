"""A store in trouble: nothing starts unguarded, the ceiling holds, nothing is lost, all resumes by itself (I12)."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from guard_middleware import GuardSettings
from guard_middleware.core.commands import Ask, Finish, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.errors import StoreUnavailable
from guard_middleware.heartbeat import Heartbeat
from guard_middleware.store.redis import RedisStore
from guard_middleware.testing.model_server import FakeEndpoint
from tests.fault.proxy import StoreProxy
from tests.support.deployment import Deployment, wait_until

pytestmark = pytest.mark.slow

LEASE_S = 1.5
HEARTBEAT_S = 0.5
QUICK = {"GUARD_LEASE_S": str(LEASE_S), "GUARD_HEARTBEAT_S": str(HEARTBEAT_S), "GUARD_STORE_TIMEOUT_S": "0.5"}


@pytest.fixture
def proxy(redis_url):
    """Between the guard and its store."""
    with StoreProxy(redis_url) as one:
        yield one


def options(ceiling, base_ms=20, **env):
    """One endpoint of this ceiling, and short leases."""
    return {
        "endpoints": [FakeEndpoint(name="chat", base_ms=base_ms), FakeEndpoint(name="embed")],
        "models": {"chat": {"max_concurrent_requests": ceiling, "reserve": 0}, "embed": {}},
        "env": {**QUICK, **env},
    }


@pytest.fixture
def own_deployment(own_valkey, tmp_path):
    """Make a deployment on a server that may be stopped, paused and emptied."""
    with ExitStack() as stack:
        yield lambda **given: stack.enter_context(Deployment(own_valkey.url, tmp_path, **given))


def most(deployment):
    """The most calls that the model server saw at once."""
    return deployment.server.stats()["chat"].most_in_flight


def calls_of(deployment):
    """When each call arrived and ended."""
    return [(one.t_start, one.t_end) for one in deployment.server.log() if one.number]


@contextmanager
def repeating(action, every_s):
    """Do something again and again until the block ends. Gives the list of what it returned."""
    over = threading.Event()
    returned = []

    def repeat():
        while not over.wait(every_s):
            returned.append(action())

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield returned
    finally:
        over.set()
        thread.join()


# ---------------------------------------------------------------------- scripts and data that vanish


def test_flushed_scripts_and_a_restart_with_data_are_not_noticed(own_deployment, own_valkey):
    """SCRIPT FLUSH every 200 ms under 100 messages, then a restart with its data: all run once, ceiling held."""
    deployment = own_deployment(**options(4, base_ms=40))
    deployment.start(processes=2, threads=6)
    ids = deployment.send("orchestrate", 100)
    with repeating(lambda: own_valkey.call("SCRIPT", "FLUSH"), 0.2) as flushes:
        deployment.wait_done(ids, 20)
    assert len(flushes) >= 3
    deployment.check_everything_once()
    # When the server restarts with its data while most of further 60 are parked
    more = deployment.send("orchestrate", 60)
    wait_until(lambda: len(deployment.done_ids()) > 115, 10)
    own_valkey.restart()
    # Then they all finish; a done-record that the application could not write is its own retry, not the guard's
    deployment.wait_done(more, 20)
    deployment.wait_idle()
    assert deployment.dead() == {}
    assert most(deployment) <= 4


def test_data_that_is_lost_holds_new_calls_until_those_that_run_are_known_again(own_deployment, own_valkey):
    """FLUSHALL while two long calls fill the ceiling: they are counted again, and no third starts beside them."""
    deployment = own_deployment(**options(2))
    deployment.start(processes=2, threads=4)
    deployment.send("orchestrate", 2, kwargs={"ms": 4_000})
    wait_until(lambda: deployment.server.stats()["chat"].in_flight == 2, 10)
    # When everything is gone, and new messages come at once
    own_valkey.call("FLUSHALL")
    flushed_at = time.time()
    more = deployment.send("orchestrate", 10)
    deployment.wait_done(more, 20)
    deployment.wait_idle()
    # Then the new ones waited for the old ones, and all of the old ones' leases were released
    ended = sorted(end for start, end in calls_of(deployment) if start < flushed_at)
    begun = min(start for start, _ in calls_of(deployment) if start > flushed_at)
    assert most(deployment) == 2
    assert begun >= ended[0]
    assert deployment.dead() == {}


def test_data_that_is_lost_holds_admissions_one_lease_time_at_most(own_deployment, own_valkey):
    """FLUSHALL with nothing running: the next call starts within a lease time and a beat, not later."""
    deployment = own_deployment(**options(2))
    deployment.start(processes=1, threads=4)
    first = deployment.send("orchestrate", 2)
    deployment.wait_done(first, 10)
    own_valkey.call("FLUSHALL")
    flushed_at = time.time()
    more = deployment.send("orchestrate", 4)
    deployment.wait_done(more, 10)
    begun = min(start for start, _ in calls_of(deployment) if start > flushed_at)
    assert begun - flushed_at <= LEASE_S + HEARTBEAT_S + 0.5
    assert most(deployment) <= 2
    deployment.wait_idle()


# ---------------------------------------------------------------------- calls longer than their lease


def test_calls_of_ten_lease_times_and_constant_load_never_exceed_the_ceiling(deploy):
    """Ceiling 2, one call of ten lease times and short ones all the while: the server never sees three at once."""
    deployment = deploy(**options(2, base_ms=50, GUARD_LEASE_S="0.8", GUARD_HEARTBEAT_S="0.25"))
    deployment.start(processes=2, threads=4)
    long = deployment.send("orchestrate", 1, kwargs={"ms": 8_000})
    wait_until(lambda: deployment.server.stats()["chat"].in_flight == 1, 10)
    while not deployment.done_ids()[long[0]]:
        short = deployment.send("orchestrate", 20)
        deployment.wait_done(short[:10], 15)
    deployment.wait_done(deployment.sent, 10)
    deployment.check_everything_once()
    stats = deployment.server.stats()["chat"]
    assert (stats.most_in_flight, stats.calls) == (2, len(deployment.sent))
    assert stats.use(2) > 0.6


def test_a_holder_without_its_store_exceeds_for_its_own_calls_only_and_is_counted_again(deploy, proxy):
    """The store is away for one of two processes for two lease times: at most its own calls too many, then none."""
    # Given two calls of the process behind the proxy, which fill the ceiling, and another one with waiters
    deployment = deploy(**options(2))
    deployment.start(threads=2, env={"GUARD_REDIS_URL": proxy.url})
    long = deployment.send("orchestrate", 2, kwargs={"ms": 10_000})
    wait_until(lambda: deployment.server.stats()["chat"].in_flight == 2, 10)
    deployment.start(threads=4)
    ids = deployment.send("orchestrate", 30, kwargs={"ms": 100})
    store = deployment.store()
    wait_until(lambda: sum(store.snapshot().endpoints["chat"].waiting.values()) >= 4, 10)
    # When its store is away
    proxy.cut()
    time.sleep(2 * LEASE_S)  # this long a time is what the claim is about
    proxy.serve()
    # Then its calls are counted again once it is back, beside those that have started meanwhile
    wait_until(lambda: store.snapshot().endpoints["chat"].in_flight == 4, 5)
    counted_at = time.time()
    assert deployment.server.stats()["chat"].in_flight == 4
    # And all finish: only the messages whose leases had ended may have run twice
    deployment.wait_done([*long, *ids], 20)
    deployment.wait_idle()
    assert deployment.dead() == {}
    assert max(deployment.done_ids()[one] for one in ids) == 1
    # And the excess was those two calls, until they ended; from the count on, nothing started above the ceiling
    calls = calls_of(deployment)
    at_start = [(at, sum(start <= at < end for start, end in calls)) for at, _ in calls]
    assert most(deployment) == 4
    assert max(count for at, count in at_start if at > counted_at) <= 2
    store.close()


# ---------------------------------------------------------------------- errors, cuts and silence


@pytest.mark.parametrize("errors", [("READONLY", "LOADING"), ("MISCONF", "OOM"), ("cut",)])
def test_trouble_of_seconds_starts_nothing_and_ends_by_itself(deploy, proxy, errors):
    """50 messages, ceiling 2, and a store that refuses, or is away, for some seconds: nothing starts meanwhile."""
    deployment = deploy(**options(2, base_ms=30, GUARD_REDIS_URL=proxy.url, GUARD_LEASE_S="6"))
    group = deployment.start(processes=2, threads=4)
    ids = deployment.send("answer", 50, args=(1,))
    for number, error in enumerate(errors):
        wait_until(lambda number=number: len(deployment.done_ids()) >= 5 + 15 * number, 15)
        # When the store is in trouble
        if error == "cut":
            proxy.cut()
        else:
            proxy.refuse(error)
        in_trouble_at = time.time()
        time.sleep(4 if error == "cut" else 2)  # this long a time is what the claim is about
        if error == "READONLY":
            proxy.hang_up()  # as the demoted server does in the end
        over_at = time.time()
        proxy.serve()
        # Then no call began in that time, but for those that had their permits already (of 15 in 0.25 s otherwise)
        starts = [start for start, _ in calls_of(deployment)]
        assert sum(in_trouble_at < start < over_at for start in starts) <= 2
        wait_until(lambda at=over_at: any(start > at for start, _ in calls_of(deployment)), 5)
    # And everything runs on by itself
    deployment.wait_done(ids, 15)
    deployment.check_everything_once(retries=0)
    assert most(deployment) == 2
    assert deployment.server.stats()["chat"].calls == 50
    assert group.log.count("guard.store_unavailable") >= 2 * len(errors)
    assert group.log.count("guard.store_back") >= 2 * len(errors)
    assert "Traceback" not in group.log


def test_four_processes_without_the_guards_store_never_count_for_themselves(deploy, proxy):
    """Four processes, ceiling 4, 60 messages, the guard's store cut twice: never more than 4, all run once."""
    deployment = deploy(**options(4, base_ms=30, GUARD_REDIS_URL=proxy.url, GUARD_LEASE_S="4"))
    deployment.start(processes=4, threads=4)
    ids = deployment.send("orchestrate", 60)
    for done in (10, 30):
        wait_until(lambda done=done: len(deployment.done_ids()) >= done, 15)
        proxy.cut()
        begun = deployment.server.stats()["chat"].calls
        time.sleep(1.5)  # this long a time is what the claim is about
        assert deployment.server.stats()["chat"].calls - begun <= 4  # those that had their permits already
        proxy.serve()
    deployment.wait_done(ids, 15)
    deployment.check_everything_once(retries=0)
    assert most(deployment) == 4


def test_nobodys_message_goes_back_because_the_store_stood_still(own_deployment, own_valkey):
    """The server is stopped for two lease times under long calls: each runs once, and every permit comes home."""
    deployment = own_deployment(**options(3))
    deployment.start(processes=2, threads=4)
    long = deployment.send("orchestrate", 3, kwargs={"ms": 5_000})
    wait_until(lambda: deployment.server.stats()["chat"].in_flight == 3, 10)
    more = deployment.send("orchestrate", 6)
    store = deployment.store()
    wait_until(lambda: sum(store.snapshot().endpoints["chat"].waiting.values()) == 6, 10)
    own_valkey.pause()
    time.sleep(2 * LEASE_S)  # this long a time is what the claim is about
    own_valkey.resume()
    deployment.wait_done([*long, *more], 15)
    deployment.check_everything_once(retries=0)
    stats = deployment.server.stats()["chat"]
    assert (stats.most_in_flight, stats.calls) == (3, 9)
    store.close()


def test_a_real_server_that_refuses_is_unavailable_and_changes_nothing(own_valkey, namespace):
    """Out of memory, or demoted to a replica: one error, the same state, and the next command works."""
    settings = GuardSettings(redis_url=own_valkey.url, namespace=namespace, first_start_hold_s=0)
    store = RedisStore.from_url(own_valkey.url, namespace, timeout_s=1)
    heartbeat = Heartbeat(store, lambda: settings.published(("chat",)), first_start_hold_ms=0)
    heartbeat.configure()

    def ask(lease):
        return Ask(process=heartbeat.process, lease=lease, endpoint="chat", rank=1, cost=1)

    assert store.admit(ask("first")).status is Status.ADMITTED
    finish = Finish(process=heartbeat.process, lease="first", outcome=Outcome.SUCCESS, home="chat")
    before = store.snapshot().leases
    # Out of memory: no lease is given. (A release would be carried out, and all of it: it frees memory first.)
    own_valkey.call("CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(StoreUnavailable):
        store.admit(ask("out-of-memory"))
    own_valkey.call("CONFIG", "SET", "maxmemory", 0)
    assert store.snapshot().leases == before
    # Demoted to a replica: neither is a lease given nor one released
    own_valkey.call("REPLICAOF", "127.0.0.1", 1)
    for command in (lambda: store.admit(ask("demoted")), lambda: store.finish(finish)):
        with pytest.raises(StoreUnavailable):
            command()
    own_valkey.call("REPLICAOF", "NO", "ONE")
    assert store.snapshot().leases == before
    # And afterwards all goes on
    assert store.admit(ask("second")).status is Status.ADMITTED
    assert store.finish(finish).status is Status.FINISHED
    assert set(store.snapshot().leases) == {"second"}
    store.close()
