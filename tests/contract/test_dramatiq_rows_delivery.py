"""Fetch, prefetch, priority, shutdown and crash (rows 32 to 41): where a message is, and who has its permit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress

import dramatiq.worker
import pytest
import redis
from dramatiq.errors import ConnectionClosed

from guard_middleware.errors import StoreUnavailable
from guard_middleware.testing.model_server import FakeEndpoint, Fault, Step
from tests.support.deployment import Deployment, wait_until


def test_row_32_a_prefetched_message_holds_no_permit(make_bench):
    """A message may sit prefetched for long: the permit is asked for when it starts, never when it is fetched."""
    # Given a worker whose only thread is busy, and guarded messages that it has fetched
    bench = make_bench()
    gate = bench.gate()
    busy = bench.actor(lambda: gate.wait(20), actor_name="busy", model=None)
    work = bench.actor(lambda: None, actor_name="work")
    worker = bench.start(threads=1)
    busy.send()
    wait_until(lambda: bench.begun, 5)
    messages = [work.send() for _ in range(2)]
    wait_until(lambda: worker.work_queue.qsize() > 0, 5)
    # When another process wants the permit, Then it gets it: nobody holds it
    assert bench.leases() == 0
    other = make_bench()
    twin = other.actor(lambda: None, actor_name="twin", queue_name="twin")
    other.start(threads=1)
    other.wait_ended(twin.send())
    gate.set()
    bench.wait_ended(*messages)
    bench.wait_idle()


def test_row_33_the_line_goes_by_priority_then_arrival_whatever_the_actors_priority(make_bench):
    """Dramatiq's priority orders only what one process has fetched; across waiters it is the line that decides."""
    # Given waiters of two queues in bad order, one of whose actors has the better priority of Dramatiq's
    bench = make_bench()
    order = []
    low = bench.actor(
        order.append, actor_name="low", queue_name="one", guard_priority="background_ingestion", priority=-5
    )
    high = bench.actor(order.append, actor_name="high", queue_name="two", guard_priority="interactive", priority=5)
    bench.start(threads=4)
    with bench.full():
        for index in range(3):
            low.send(f"low{index}")
            bench.wait_parked(index + 1, "one")
        for index in range(3):
            high.send(f"high{index}")
            bench.wait_parked(index + 1, "two")
    # When the one permit goes round, Then they run in the order of the line
    wait_until(lambda: len(order) == 6, 10)
    assert order == ["high0", "high1", "high2", "low0", "low1", "low2"]
    bench.wait_idle()


@pytest.mark.slow
def test_row_36_a_worker_that_stops_gives_back_its_permits_and_leaves_everything_to_the_others(redis_url, tmp_path):
    """SIGTERM in the middle of work: what runs ends and releases, what was taken or fetched goes on elsewhere, once."""
    with Deployment(
        redis_url,
        tmp_path,
        endpoints=[FakeEndpoint(name="chat", base_ms=150), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": 3}, "embed": {}},
        env={"GUARD_LEASE_S": "60", "dramatiq_worker_timeout": "100"},
    ) as deployment:
        # Given two worker groups that share a backlog; leases live so long that expiry explains nothing
        first = deployment.start(processes=1, threads=4, queues=["orchestration"])
        deployment.start(processes=1, threads=4, queues=["orchestration"])
        ids = deployment.send("orchestrate", 60)
        wait_until(lambda: len(deployment.done()) > 6, 20)
        # When one is told to stop
        assert first.terminate(20) == 0
        # Then its process is gone from the store with everything it held, and the other one ends the work
        assert "Worker has been shut down" in first.log
        assert len(deployment.guard.snapshot().processes) == 1  # the other worker's
        deployment.wait_done(ids, 30)
        deployment.check_everything_once()
        assert deployment.server.stats()["chat"].most_in_flight <= 3


@pytest.mark.slow
def test_row_37_what_a_killed_worker_held_is_back_within_a_lease_and_can_be_admitted_anew(redis_url, tmp_path):
    """Dramatiq brings a dead worker's messages back after a minute and by chance; what held permits, a lease later."""
    with Deployment(
        redis_url,
        tmp_path,
        endpoints=[FakeEndpoint(name="chat", base_ms=50), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": 2}, "embed": {}},
        # What was only prefetched is Dramatiq's to bring back: here after 4 s and at every command
        env={
            "GUARD_LEASE_S": "1.5",
            "GUARD_HEARTBEAT_S": "0.3",
            "APP_HEARTBEAT_TIMEOUT_MS": "4000",
            "APP_MAINTENANCE_CHANCE": "1000000",
            "dramatiq_worker_timeout": "100",
        },
    ) as deployment:
        # Given a worker that is killed while two calls hold the permits and others are parked
        deployment.server.script([Step(fault=Fault.SERVE, ms=60_000, calls=(1, 2))])
        victim = deployment.start(processes=1, threads=6, queues=["orchestration"])
        held = deployment.send("orchestrate", 2)
        wait_until(lambda: deployment.server.stats()["chat"].in_flight == 2, 10)
        ids = deployment.send("orchestrate", 6)
        store = deployment.store()
        wait_until(lambda: sum(map(len, store.snapshot().lines.values())) >= 4, 10)
        victim.kill()
        killed_at = time.monotonic()
        # When nobody but the store's clock is left, Then the permits are free within one lease time...
        wait_until(lambda: not store.snapshot().leases, 4)
        assert time.monotonic() - killed_at < 3.5
        # ...and another worker runs everything; what had begun runs again, under new permits
        deployment.server.reset()
        deployment.start(processes=1, threads=2, queues=["orchestration"])
        deployment.wait_done([*held, *ids], 30)
        deployment.check_everything_once()
        assert deployment.server.stats()["chat"].most_in_flight <= 2
        store.close()


WHERE = """
local ns, root, queue = ARGV[1], ARGV[2], ARGV[3]
local wrong = {}
for _, id in ipairs(redis.call("HKEYS", ns .. ":" .. queue .. ".msgs")) do
  local places = 0
  for _, one in ipairs(redis.call("LRANGE", ns .. ":" .. queue, 0, -1)) do
    if one == id then places = places + 1 end
  end
  for _, key in ipairs(redis.call("KEYS", ns .. ":__acks__.*." .. queue)) do
    places = places + redis.call("SISMEMBER", key, id)
  end
  for _, key in ipairs(redis.call("KEYS", root .. "line:*")) do
    if redis.call("ZSCORE", key, id) then places = places + 1 end
  end
  for _, member in ipairs(redis.call("ZRANGE", root .. "held_back", 0, -1)) do
    if member:sub(-#id) == id then places = places + 1 end
  end
  if places ~= 1 then wrong[#wrong + 1] = id .. " is in " .. places .. " places" end
end
return wrong
"""
"""Every message that the broker has is in its queue's list, in one ack set, or in one waiting line: in exactly one."""


def test_row_38_a_message_is_in_exactly_one_place_at_every_instant(make_bench, redis_url, namespace):
    """Ack and enqueue are two commands in Dramatiq; park and take are one each: never two copies, never none."""
    bench = make_bench(models={"chat": {"max_concurrent_requests": 2}})
    twin = make_bench(models={"chat": {"max_concurrent_requests": 2}})
    for one in (bench, twin):
        one.actor(lambda: time.sleep(0.001), actor_name="work")
    work = bench.broker.get_actor("work")
    found, looks, over = [], [], threading.Event()
    root = f"guard:{{{namespace}}}:"

    def look():
        with redis.Redis.from_url(redis_url) as client:
            script = client.register_script(WHERE)
            while not over.is_set():
                found.extend(script(args=[namespace, root, "default"]))
                looks.append(1)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        bench.start(threads=3)
        twin.start(threads=3)
        messages = [work.send() for _ in range(150)]
        wait_until(lambda: len(bench.ended) + len(twin.ended) >= 150, 20)
        bench.wait_idle()
    finally:
        over.set()
        watcher.join()
    assert found == []
    assert len(looks) > 50
    assert Counter([*bench.ended, *twin.ended]) == Counter(one.message_id for one in messages)


def test_row_38_a_lost_reply_neither_loses_nor_doubles_the_message(make_bench, monkeypatch):
    """The connection breaks after the store has parked the message: the hook asks again and learns of it."""
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work", max_retries=0)
    bench.start(threads=1)
    store = bench.member.heartbeat.store
    lost = []
    for verb in ("admit", "finish"):
        sound = getattr(store, verb)

        def deaf(command, sound=sound, verb=verb):
            reply = sound(command)
            if lost.count(verb) < 2:
                lost.append(verb)
                msg = "the reply is lost"
                raise StoreUnavailable(msg)
            return reply

        monkeypatch.setattr(store, verb, deaf)
    with bench.full():
        message = work.send()
        bench.wait_parked(1)
        wait_until(lambda: bench.worker.work_queue.unfinished_tasks == 0, 5)
    bench.wait_ended(message)
    bench.wait_idle()
    assert lost == ["admit", "admit", "finish", "finish"]
    assert bench.count_of(message) == (1, 1)


def test_row_39_a_waiter_is_never_given_to_a_worker_of_other_queues(make_bench):
    """A message taken by a worker that lacks its actor would be dead-lettered: it is only handed to its own queue's."""
    # Given a waiter of one queue, and an idle worker of another queue of the same endpoint
    bench, other = make_bench(), make_bench()
    work = bench.actor(lambda: None, actor_name="work", queue_name="one")
    stranger = other.actor(lambda: None, actor_name="stranger", queue_name="two")
    bench.start(threads=1)
    other.start(threads=4)
    with bench.full():
        message = work.send()
        bench.wait_parked(1, "one")
        bench.workers.pop().stop()
        worker = other.worker
    # When the permit is free and only the stranger is idle, Then the waiter stays where it is
    other.wait_ended(stranger.send())
    wait_until(lambda: bench.leases() == 0, 5)
    assert len(bench.parked("one")) == 1
    assert worker.work_queue.unfinished_tasks == 0
    # ...until a worker of its own queue comes
    bench.start(threads=1)
    bench.wait_ended(message)
    bench.wait_idle()
    assert bench.dead() == []


def test_row_39_a_taken_message_of_an_unknown_actor_is_dead_lettered_as_ever_and_its_permit_returned(make_bench):
    """As at the consumer: an unknown actor's message goes to the dead letters, and nobody keeps a permit for it."""
    # Given two workers of one queue, of which the second does not know the actor
    bench, other = make_bench(), make_bench()
    work = bench.actor(lambda: None, actor_name="work")
    known = other.actor(lambda: None, actor_name="known")
    bench.start(threads=1)
    with bench.full():
        message = work.send()
        bench.wait_parked(1)
        bench.workers.pop().stop()
        # When the second takes it
        other.start(threads=1)
    wait_until(lambda: [one.message_id for one in other.dead()] == [message.message_id], 5)
    # Then its permit is free for the next at once
    other.wait_ended(known.send())
    other.wait_idle()
    assert bench.count_of(message) == (0, 0)


def test_row_41_the_permit_is_back_before_the_ack_which_may_be_retried_for_ever(make_bench, monkeypatch):
    """Dramatiq repeats an ack that fails until the broker is back: meanwhile the permit must be free for others."""
    # Given a broker connection that fails at the ack of one message
    monkeypatch.setattr(dramatiq.worker, "POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.05)
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work")
    worker = bench.start(threads=2)
    consumer = wait_until(lambda: worker.consumers["default"].consumer, 5)
    sound = consumer.ack
    broken, tries, ident = bench.gate(), [], []

    def ack(message):
        if not broken.is_set() and message.message_id == ident[0]:
            tries.append(1)
            msg = "gone"
            raise ConnectionClosed(Exception(msg))
        sound(message)

    monkeypatch.setattr(consumer, "ack", ack)
    first = work.message()
    ident.append(first.message_id)
    bench.broker.enqueue(first)
    wait_until(lambda: len(tries) >= 2, 5)
    # When it is not acked yet, Then its permit is free and the next message runs
    assert bench.leases() == 0
    second = work.send()
    bench.wait_ended(second)
    broken.set()
    bench.wait_idle()
    assert bench.count_of(first) == bench.count_of(second) == (1, 1)


def test_row_41_a_thread_whose_ack_failed_for_good_is_idle_again(make_bench, monkeypatch):
    """If the ack ends in an error that Dramatiq only logs, the thread goes on: it counts as idle, and takes."""
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work")
    plain = bench.actor(lambda: None, actor_name="plain", model=None, queue_name="plain")
    worker = bench.start(threads=1)
    consumer = wait_until(lambda: worker.consumers["plain"].consumer, 5)

    def ack(message):
        raise redis.TimeoutError

    monkeypatch.setattr(consumer, "ack", ack)
    bench.wait_ended(plain.send())
    wait_until(lambda: bench.member.idle() == 1, 5)
    with bench.full(), suppress(AssertionError):
        message = work.send()
        bench.wait_parked(1)
    bench.wait_ended(message)
    wait_until(lambda: bench.leases() == 0, 5)


def test_row_12_32_a_message_that_no_thread_had_time_for_comes_again_and_runs_once(make_bench, monkeypatch):
    """Taken, not begun within a beat, given back and taken again: what stands in the work queue twice runs once."""
    # Given a worker with all threads busy that takes all the same, as one does whose threads became busy meanwhile
    bench = make_bench(models={"chat": {"max_concurrent_requests": 3}}, heartbeat_s=0.1)
    gate, hold = bench.gate(), bench.gate()
    busy = bench.actor(lambda: gate.wait(20), actor_name="busy", model=None)
    work = bench.actor(lambda: hold.wait(20), actor_name="work")
    worker = bench.start(threads=3)
    with bench.full():
        message = work.send()
        bench.wait_parked(1)
        for _ in range(3):
            busy.send()
        wait_until(lambda: len(bench.begun) == 3, 5)
    monkeypatch.setattr(bench.member, "idle", lambda **_: 1)
    takes = []
    sound = bench.member.deliver
    monkeypatch.setattr(bench.member, "deliver", lambda found: (takes.append(1), sound(found)))
    # When it has come and gone a few times
    wait_until(lambda: len(takes) >= 3, 10)
    assert worker.work_queue.qsize() >= 1
    monkeypatch.undo()
    gate.set()
    # Then one thread runs it, while the others are free to
    wait_until(lambda: bench.count_of(message)[0] == 1, 5)
    wait_until(lambda: bench.member.idle() == 2, 5)
    hold.set()
    bench.wait_idle()
    assert bench.count_of(message) == (1, 1)
