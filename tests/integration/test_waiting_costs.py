"""What waiting costs, and what it must not: the store's time, somebody else's permit, a place in the line, a thread.

That one full endpoint blocks nobody behind it is in ``test_ceiling.py``; that nobody comes back as a herd is in
``test_breaker_outage.py``; that background goes on under interactive traffic is in ``test_priority.py``.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

import pytest
from dramatiq.message import Message

from guard_middleware.core.commands import Action, Operate
from guard_middleware.testing.model_server import FakeEndpoint, Fault, Step
from tests.support.deployment import wait_until

pytestmark = pytest.mark.slow

APP = "tests.support.waiting_app"
SHORT_LEASES = {"GUARD_LEASE_S": "1.2", "GUARD_HEARTBEAT_S": "0.3"}
BEAT_S = 2
"""The usual time between two beats."""
QUICK = {"MODEL_BREAKER_BASE_COOLDOWN_S": "0.05", "MODEL_BREAKER_MAX_COOLDOWN_S": "0.05", "APP_MIN_BACKOFF_MS": "50"}


def serving(deploy, ceiling, base_ms=20, **env):
    """One endpoint without a reserve."""
    return deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=base_ms), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": ceiling, "reserve": 0}, "embed": {}},
        env=env,
    )


def chat_of(deployment):
    """The endpoint's state in the guard's store."""
    with closing(deployment.store()) as store:
        return store.snapshot().endpoints["chat"]


# ---------------------------------------------------------------------- calls that last longer than they should


def test_client_that_retries_by_itself_keeps_its_permit_and_fails_once(deploy, measured):
    """A time-out of 0.5 s that lasts 3 s: longer than a lease, three requests, one permit, one failure."""
    # Given a server that answers none of the first six requests, a breaker that three failures trip, and short leases
    deployment = serving(deploy, 2, MODEL_BREAKER_FAIL_THRESHOLD="3", **SHORT_LEASES, **QUICK)
    deployment.server.script([Step(calls=(1, 6), fault=Fault.HANG)])
    deployment.start(threads=6, module=APP)
    # When six messages come, whose client tries three times each
    deployment.send("with_sdk", 6)
    deployment.wait_done(deployment.sent, 30)
    # Then two had both permits for all of their tries, and nobody came in between
    calls = deployment.calls()
    first, later = calls[:6], calls[6:]
    tried = Counter(one.message_id for one in first)
    lasted = max(one.t_end for one in first) - first[0].t_start
    measured("two calls lasted, s", round(lasted, 2))
    assert lasted > 1.2 + 0.3
    assert sorted(tried.values()) == [3, 3]
    assert min(one.t_start for one in later) > sorted(one.t_end for one in first)[-2]
    assert deployment.server.stats()["chat"].most_in_flight == 2
    # ...and those were two failures, of which three would have tripped the breaker, and six requests are none
    assert chat_of(deployment).generation == 0
    deployment.check_everything_once(retries=1)
    assert {entry["id"] for entry in deployment.done() if entry["retries"]} == set(tried)


def threads_of(group):
    """How many threads live in each worker process."""
    return [len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in group.workers()]


def test_blocked_call_past_its_time_limit_keeps_its_permit_and_counts_as_one_time_out(deploy):
    """Both permits in calls that nothing can interrupt: renewed while they block, freed when they return, one trip."""
    # Given two threads, a time limit of 0.5 s, no time-out in the client, and a server that holds two calls for 3 s
    deployment = serving(deploy, 2, **SHORT_LEASES, **QUICK)
    deployment.server.script([Step(calls=(1, 2), fault=Fault.DROP, after_ms=3_000)])
    group = deployment.start(threads=2, module=APP)
    other = deployment.start(threads=2, module=APP)
    threads = [threads_of(one) for one in deployment.groups]
    # When eight messages come
    deployment.send("slow_limited", 8, kwargs={"ms": 10})
    wait_until(lambda: "Time limit exceeded" in group.log + other.log, 10, "the limit is over")
    deployment.wait_done(deployment.sent, 30)
    # Then nobody had a permit of the two before they came back, long after a lease and after the time limit
    calls = deployment.calls()
    held = calls[:2]
    assert [one.status for one in held] == [0, 0]
    assert min(one.t_start for one in calls[2:]) >= min(one.t_end for one in held)
    assert min(one.seconds for one in held) > 2.5
    assert deployment.server.stats()["chat"].most_in_flight == 2
    # ...and the late exceptions were one incident: one trip, one close
    assert chat_of(deployment).generation == 2
    # ...and no thread died of it
    assert [threads_of(one) for one in deployment.groups] == threads
    deployment.check_everything_once()


# ---------------------------------------------------------------------- messages that are delivered twice


def send_delayed(deployment, count, delay_ms):
    """Enqueue messages that are due later, as Dramatiq's own retries are."""
    ids = []
    for _ in range(count):
        message = Message(queue_name="orchestration", actor_name="orchestrate", args=(), kwargs={}, options={})
        deployment.broker.enqueue(message, delay=delay_ms)
        ids.append(message.message_id)
    return ids


def test_delayed_message_that_is_promoted_twice_holds_two_permits_that_both_come_back(deploy, measured):
    """Dramatiq may enqueue a due message twice: delivery is at least once, but never over the ceiling, nothing left."""
    # Given a broker whose every promotion is done twice, and permits that are in use when the copies come
    deployment = serving(deploy, 2, base_ms=40, APP_PROMOTE_TWICE="1")
    deployment.start(processes=2, threads=4, module=APP)
    busy = deployment.send("orchestrate", 30)
    delayed = send_delayed(deployment, 15, delay_ms=300)
    # When all have come
    wait_until(lambda: sum(deployment.done_ids()[one] for one in delayed) == 30, 30, "both copies of each")
    deployment.wait_done(busy, 10)
    deployment.wait_idle()
    # Then each copy ran under a permit of its own: no message more often than it was delivered, no third call at once
    counts = deployment.done_ids()
    assert {counts[one] for one in delayed} == {2}
    assert {counts[one] for one in busy} == {1}
    assert deployment.server.stats()["chat"].most_in_flight == 2
    together = sum(
        first.message_id == second.message_id and second.t_start < first.t_end
        for first, second in pairwise(sorted(deployment.calls(), key=lambda one: (one.message_id, one.t_start)))
    )
    measured("pairs that ran at the same time", together)
    # ...and all permits are free, none too many
    assert deployment.dead() == {}
    permits = [deployment.guard.try_permit("chat") for _ in range(3)]
    assert [one is not None for one in permits] == [True, True, False]
    for one in permits[:2]:
        one.release()


# ---------------------------------------------------------------------- a large backlog


def commands(deployment):
    """How many commands the guard has sent; the broker has no functions."""
    return deployment.redis.info("commandstats").get("cmdstat_fcall", {}).get("calls", 0)


def cpu_seconds(pids):
    """Processor time that these processes have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def test_large_backlog_costs_nothing_while_it_waits_and_two_commands_each_when_it_goes(deploy, measured):
    """1,500 messages behind one permit: no requeue, no polling, no processor time; and the permit is never idle."""
    # Given one permit, 16 threads in two processes, and 1,500 messages that are all in line
    deployment = serving(deploy, 1, base_ms=20)
    group = deployment.start(processes=2, threads=8, module=APP)
    with closing(deployment.store()) as store:
        store.operate(Operate(action=Action.PAUSE, target="chat"))
        deployment.send("orchestrate", 1_500)
        deployment.wait_parked(1_500, timeout_s=30)
        workers = group.workers()
        # ...and no thread is still ending its last message
        wait_until(lambda: list(store.snapshot().processes.values()) == [8, 8], 3 * BEAT_S)
        # When nobody may start
        used, sent, since = cpu_seconds(workers), commands(deployment), time.monotonic()
        time.sleep(3)
        seconds = time.monotonic() - since
        used, sent = cpu_seconds(workers) - used, commands(deployment) - sent
        # Then the guard's share are its beats, and the processes sleep
        measured("commands a minute while all wait", round(sent * 60 / seconds))
        measured("of one processor while all wait", round(used / seconds, 3))
        assert sent <= 2 * (seconds / BEAT_S + 1)
        assert used / seconds < 0.5
        # When they may
        store.operate(Operate(action=Action.RESUME, target="chat"))
        deployment.server.wait_until(lambda stats: stats["chat"].calls > 10)
        begun, sent = deployment.server.stats()["chat"].calls, commands(deployment)
        time.sleep(3)
        done, sent = deployment.server.stats()["chat"].calls - begun, commands(deployment) - sent
        waiting = chat_of(deployment).waiting
    # Then each cost the release that takes it and little more, and none went back into its queue
    measured("commands for each message that goes", round(sent / done, 2))
    assert done > 30
    assert sum(waiting.values()) > 1_000
    assert deployment.redis.llen(f"{deployment.broker_namespace}:orchestration") == 0
    assert 0.9 * done <= sent <= 1.5 * done + 10
    # ...and the permit was in use all the time but for moments
    calls = deployment.calls()
    gaps = [later.t_start - earlier.t_end for earlier, later in pairwise(calls) if later.t_end]
    measured("idle between two calls, ms", [round(1000 * one, 1) for one in (median(gaps), max(gaps))])
    assert median(gaps) < 0.03
    assert quantiles(gaps, n=20)[-1] < 0.1
    assert deployment.server.stats()["chat"].most_in_flight == 1


# ---------------------------------------------------------------------- equals


def in_line(deployment, store):
    """The messages that wait at the endpoint, in their order; no more than 200, which is what a snapshot shows."""
    deliveries = store.snapshot().lines["chat", deployment.broker_namespace, "orchestration"]
    payloads = deployment.redis.hgetall(f"{deployment.broker_namespace}:orchestration.msgs")
    return [json.loads(payloads[one.encode()])["message_id"] for one in deliveries]


def test_among_equals_nobody_waits_much_longer_than_in_order_of_arrival(deploy, measured):
    """200 wait, 100 more come: each starts about where it came, and no newcomer before those that waited."""
    # Given a ceiling of 4, 12 threads in three processes that all want it, and 200 equal messages in line
    deployment = serving(deploy, 4, base_ms=20)
    for _ in range(3):
        deployment.start(threads=4, module=APP, wait=False)
    for group in deployment.groups:
        group.wait_ready(1)
    with closing(deployment.store()) as store:
        store.operate(Operate(action=Action.PAUSE, target="chat"))
        deployment.send("orchestrate", 200)
        deployment.wait_parked(200)
        came = in_line(deployment, store)
        # When they may go, and others come behind them
        store.operate(Operate(action=Action.RESUME, target="chat"))
    newcomers = set(deployment.send("orchestrate", 100))
    deployment.wait_done(deployment.sent, 40)
    # Then each of them started at its own place, but for what was in the threads' hands at one moment
    calls = deployment.calls()
    went = {one.message_id: place for place, one in enumerate(calls)}
    late = [went[one] - place for place, one in enumerate(came)]
    measured("most places late", max(late))
    measured("first newcomer's place", min(went[one] for one in newcomers))
    assert sorted(came) == sorted(set(deployment.sent) - newcomers)
    assert max(late) <= 12
    assert min(went[one] for one in newcomers) >= 200 - 12
    # ...so the longest wait is that of the last in line, for whom the others were served at full width
    began = calls[0].t_start
    waits = [calls[went[one]].t_start - began for one in came]
    measured("longest wait, and when the line was through, s", [round(max(waits), 2), round(waits[-1], 2)])
    assert max(waits) <= 1.2 * waits[-1] + 0.1
    assert deployment.server.stats()["chat"].most_in_flight == 4
    deployment.check_everything_once()
