"""However a call ends, its permit comes back: nothing in use at the end, without any reset."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from guard_middleware.testing.model_server import FakeEndpoint, Fault, Step
from tests.support.deployment import wait_until

pytestmark = pytest.mark.slow

APP = "tests.support.sharing_app"
QUICK = {"MODEL_BREAKER_BASE_COOLDOWN_S": "0.05", "MODEL_BREAKER_MAX_COOLDOWN_S": "0.05", "APP_MIN_BACKOFF_MS": "50"}


def serving(deploy, ceiling, base_ms=20, **env):
    """One endpoint without a reserve, and short pauses."""
    return deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=base_ms), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": ceiling, "reserve": 0}, "embed": {}},
        env={**QUICK, **env},
    )


def everything_is_free(deployment, ceiling):
    """All permits can be had at once by a caller, and not one more."""
    store = deployment.store()
    chat = wait_until(lambda: (found := store.snapshot().endpoints["chat"]).limit == ceiling and found, 5)
    assert (chat.breaker, chat.in_flight, chat.waiting) == ("closed", 0, {})
    store.close()
    permits = [deployment.guard.try_permit("chat") for _ in range(ceiling + 1)]
    for permit in permits[:-1]:
        permit.release()
    assert permits[-1] is None


def test_every_kind_of_end_gives_the_permit_back(deploy, measured):
    """502, time-outs, faults before the call and unknown endpoints in continuous traffic: 0 in use."""
    # Given a ceiling of 10, and 150 messages of which 70 % go wrong at their first run
    deployment = serving(deploy, 10, MODEL_BREAKER_FAIL_THRESHOLD="3")
    group = deployment.start(processes=2, threads=8, module=APP)
    kinds = ["502"] * 45 + ["timeout"] * 30 + ["fault"] * 15 + ["unknown"] * 15 + ["fine"] * 45
    random.Random(19).shuffle(kinds)
    sent = {kind: [] for kind in kinds}
    # When they come in any order, and further fine ones behind them
    for kind in kinds:
        options = {"guard_model": "nobody's"} if kind == "unknown" else {}
        sent[kind] += deployment.send("mixed", 1, args=(kind,), **options)
    sent["fine"] += deployment.send("mixed", 20, args=("fine",))
    runnable = [one for kind, ids in sent.items() if kind != "unknown" for one in ids]
    deployment.wait_done(runnable, 30)
    # Then each ran to its end once, or was dead-lettered for the stated reason
    wait_until(lambda: len(deployment.dead().get("orchestration", [])) == 15, 5)
    deployment.wait_idle()
    assert deployment.done_ids() == Counter(runnable)
    assert {queue: set(ids) for queue, ids in deployment.dead().items()} == {"orchestration": set(sent["unknown"])}
    refused = [line for line in group.log.splitlines() if "guard.refused" in line]
    assert len(refused) == 15
    assert all("is no configured model; the nearest is" in line for line in refused)
    # And nothing is in use, without a reset
    stats = deployment.server.stats()["chat"]
    measured("statuses", dict(stats.statuses))
    assert stats.most_in_flight <= 10
    everything_is_free(deployment, 10)


def test_lost_release_is_made_good_under_continuous_traffic(deploy):
    """With the release call taken out, every permit comes back with its thread, and traffic goes on."""
    # Given workers whose actors' ends release nothing
    deployment = serving(deploy, 2, APP_FORGET_RELEASE="1", GUARD_LEASE_S="2", GUARD_HEARTBEAT_S="0.5")
    deployment.start(processes=2, threads=4, module=APP)
    # When messages come for longer than a lease lasts
    deployment.send("mixed", 60, args=("fine", 100))
    deployment.wait_done(deployment.sent, 30)
    # Then all have run, within the ceiling, and nothing is in use
    assert deployment.server.stats()["chat"].most_in_flight == 2
    deployment.check_everything_once()
    everything_is_free(deployment, 2)


def test_failing_first_calls_leak_nothing_through_parks_and_retries(deploy, measured):
    """503 to the first 4 calls of each message, then 200: parked, retried, done once, 0 in use."""
    # Given a ceiling of 4, and a server that sheds each message's first four calls
    deployment = serving(deploy, 4)
    deployment.start(processes=2, threads=4, module=APP)
    deployment.server.script([Step(message_calls=(1, 4), fault=Fault.STATUS, status=503)])
    ids = deployment.send("mixed", 15, args=("fine",))
    # When all have come through
    deployment.wait_done(ids, 30)
    # Then each ran once, with a retry at most where it had borne its share of the failures
    calls = Counter(one.message_id for one in deployment.calls())
    assert set(calls.values()) == {5}
    measured("most retries", max(entry["retries"] for entry in deployment.done()))
    deployment.check_everything_once(retries=2)
    assert deployment.server.stats()["chat"].most_in_flight <= 4
    # And all permits are there for the traffic that follows
    deployment.send("mixed", 12, args=("fine",), guard_priority="interactive")
    deployment.server.script()
    deployment.wait_done(deployment.sent, 10)
    deployment.wait_idle()
    everything_is_free(deployment, 4)


def test_one_id_delivered_twice_holds_two_permits_that_both_come_back(deploy):
    """A second delivery of a running id has a lease of its own; one more waits, and is dropped as done."""
    # Given a message that runs, on a ceiling of 3 of which another message has the last permit
    deployment = serving(deploy, 3)
    deployment.start(processes=1, threads=4, module=APP, wait=False)
    deployment.start(processes=1, threads=4, module=APP, wait=False)
    for group in deployment.groups:
        group.wait_ready(1)
    [twin] = deployment.send("mixed", 1, args=("fine", 2_000))
    deployment.send("mixed", 1, args=("fine", 2_500))
    wait_until(lambda: deployment.server.stats()["chat"].in_flight == 2, 10)
    [delivery] = [
        key
        for key, payload in deployment.redis.hgetall(f"{deployment.broker_namespace}:orchestration.msgs").items()
        if twin.encode() in payload
    ]
    # When the same id is delivered a second and a third time while it runs
    for most in (3, 3):
        deployment.redis.rpush(f"{deployment.broker_namespace}:orchestration", delivery)
        wait_until(lambda most=most: deployment.server.stats()["chat"].in_flight == most, 10)
    # Then the two that run are two leases
    store = deployment.store()
    leases = store.snapshot().leases
    assert len(leases) == 3
    assert len([one for one in deployment.calls() if one.message_id == twin]) == 2
    # And at the end nothing is in use, waits or is left in the broker
    deployment.wait_idle()
    wait_until(lambda: not any(store.snapshot().lines.values()), 5)
    store.close()
    assert deployment.dead() == {}
    assert deployment.server.stats()["chat"].most_in_flight == 3
    everything_is_free(deployment, 3)
