"""What a process takes: as much as its threads can run, under a permit of the right endpoint, and each message once."""

from __future__ import annotations

import threading
import time

import pytest
from dramatiq.middleware import Middleware, TimeLimitExceeded

from guard_middleware import Guard, GuardSettings, current_permit
from guard_middleware.core.commands import Action, Operate
from tests.support.deployment import wait_until

WIDE = {"chat": {"max_concurrent_requests": 12, "reserve": 0}}


@pytest.mark.parametrize("plain", [0, 40], ids=["guarded alone", "among unguarded"])
def test_process_whose_threads_are_the_limit_takes_no_more_than_they_can_run(make_bench, plain):
    """Two threads at an endpoint of twelve, with a backlog: the ten permits that they cannot use stay free."""
    # Given a backlog that waits, and perhaps another one that the worker has fetched
    bench = make_bench(models=WIDE)
    leased = []

    def body():
        leased.append(bench.leases())
        time.sleep(0.02)

    work = bench.actor(body, actor_name="work")
    other = bench.actor(lambda: time.sleep(0.02), actor_name="other", model=None)
    bench.start(threads=2)
    bench.pause()
    messages = [work.send() for _ in range(40)]
    bench.wait_parked(40)
    messages += [other.send() for _ in range(plain)]
    # When they may go
    bench.resume()
    bench.wait_ended(*messages)
    # Then no more was leased than there are threads, but for one whose thread became busy meanwhile
    assert max(leased) <= 3, leased
    bench.wait_idle()
    assert set(bench.counts().values()) == {1}


def test_message_whose_actor_has_another_model_since_runs_under_a_permit_of_that(make_bench):
    """A deploy names another endpoint for an actor whose messages wait: the new one's ceiling holds for them."""
    # Given messages that wait at one endpoint, and the worker's end
    models = {"old": {"max_concurrent_requests": 4}, "new": {"max_concurrent_requests": 1}}
    before = make_bench(models=models)
    work = before.actor(lambda: None, model="old", actor_name="work")
    worker = before.start(threads=3)
    before.pause("old")
    messages = [work.send() for _ in range(4)]
    before.wait_parked(4)
    worker.stop(timeout=10_000)
    # When workers come whose actor names another endpoint, and the messages may go
    after = make_bench(models=models)
    ran_at = []

    def body():
        ran_at.append((current_permit().model, after.snapshot().leases[current_permit().lease][0]))
        time.sleep(0.05)

    after.actor(body, model="new", actor_name="work")
    after.start(threads=3)
    after.resume("old")
    after.wait_ended(*messages)
    # Then each ran once under its permit, and of what was remembered of them at the old one nothing is left
    assert ran_at == [("new", "new")] * 4
    assert after.most == 1
    after.wait_idle()
    assert after.store.client.keys(f"guard:{{{after.namespace}}}:parked:*") == []


def test_process_that_does_not_know_the_fallback_leaves_its_permits_to_those_who_do(make_bench, redis_url, namespace):
    """Half way through a deploy that adds one: what it cannot run goes back at each beat, and holds nothing meanwhile."""
    # Given a worker of the old configuration, a process of the new one, and a breaker that is open
    primary = {"max_concurrent_requests": 4, "reserve": 0, "base_url": "http://primary.invalid/v1"}
    bench = make_bench(models={"chat": primary}, heartbeat_s=1.0)
    work = bench.actor(lambda: None, actor_name="work")
    spare = {"id": "spare", "max_concurrent_requests": 2, "reserve": 0, "base_url": "http://spare.invalid/v1"}
    newer = Guard(
        GuardSettings(
            redis_url=redis_url,
            namespace=namespace,
            models=[{"id": "chat", **primary, "fallback": "spare", "fallback_other_model": True}, spare],
            config_revision=1,
            lease_s=30,
            heartbeat_s=1,
            first_start_hold_s=0,
        )
    )
    newer.heartbeat()
    bench.store.operate(Operate(action=Action.OPEN, target="chat", value=60_000))
    bench.start(threads=2)
    store, asks = bench.member.heartbeat.store, []
    sound = store.admit
    store.admit = lambda command: asks.append(sound(command)) or asks[-1]
    # When messages come that would go to the fallback
    messages = [work.send() for _ in range(4)]
    wait_until(lambda: len(asks) >= 8, 10, "asked, put back by a beat, and asked again")
    began, asked = time.monotonic(), len(asks)
    time.sleep(3)
    # Then it does not spin, and the fallback's permits are there for others
    assert len(asks) - asked <= 4 * (time.monotonic() - began + 2)
    for _ in range(3):
        newer.permit("spare", timeout=2).release()
    # And once the endpoint is open to it again, all run
    bench.store.operate(Operate(action=Action.CLOSE, target="chat"))
    bench.wait_ended(*messages, timeout_s=20)
    bench.wait_idle()
    newer.close()
    assert set(bench.counts().values()) == {1}


def test_thread_that_ends_unguarded_work_has_at_once_what_becomes_free_after(make_bench):
    """The store was told that nobody is idle, and nothing guarded ends here that would tell it otherwise."""
    # Given a worker that beat while its only thread was busy with something else, and a message that waits
    bench = make_bench(heartbeat_s=8.0)
    gate = bench.gate()
    work = bench.actor(lambda: None, actor_name="work")
    other = bench.actor(lambda: gate.wait(20), actor_name="other", model=None)
    bench.start(threads=1)
    with bench.full():
        message = work.send()
        bench.wait_parked(1)
        other.send()
        wait_until(lambda: bench.begun, 5)
        bench.member.heartbeat.beat()
        assert bench.snapshot().processes[bench.member.heartbeat.process] == 0
        # When the thread is idle again, and then the permit is freed elsewhere
        gate.set()
        wait_until(lambda: bench.snapshot().processes[bench.member.heartbeat.process] == 1, 5)
    # Then the message has it, long before the next beat
    bench.wait_ended(message, timeout_s=4)
    bench.wait_idle()


def test_threads_that_end_while_a_beat_is_slow_take_one_message_each(make_bench, monkeypatch):
    """What they have asked for meanwhile does not pile up: one thread does not hold thirty permits."""
    # Given one thread, messages that wait for permits that are free, and a beat that lasts
    bench = make_bench(models={"chat": {"max_concurrent_requests": 30, "reserve": 0}}, heartbeat_s=8.0)
    gate, slow, beats, taken = bench.gate(), bench.gate(), [], []
    work = bench.actor(lambda: gate.wait(20), actor_name="work")
    other = bench.actor(lambda: None, actor_name="other", model=None)
    bench.start(threads=1)
    bench.pause()
    messages = [work.send() for _ in range(20)]
    bench.wait_parked(20)
    store = bench.member.heartbeat.store
    sound = store.beat

    def beat(command):
        beats.append(command)
        slow.wait(20)
        reply = sound(command)
        taken.append(len(reply.takes))
        return reply

    monkeypatch.setattr(store, "beat", beat)
    monkeypatch.setattr(bench.member, "idle", lambda: 0)  # it was composed while the thread was busy
    bench.member.heartbeat.poke()
    wait_until(lambda: beats, 5)
    monkeypatch.setattr(bench.member.heartbeat, "waiting", True)
    # When the thread ends message after message meanwhile
    bench.resume()
    bench.wait_ended(*[other.send() for _ in range(15)])
    slow.set()
    # Then it takes one
    wait_until(lambda: sum(taken) > 0, 5)
    monkeypatch.undo()
    assert max(taken) == 1, [(command.idle, command.take) for command in beats]
    gate.set()
    bench.wait_ended(*messages)
    bench.wait_idle()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("when", ["before", "after"])
def test_thread_that_dies_while_it_acks_leaves_the_count_of_the_others_right(make_bench, when):
    """Its task is unfinished for ever: the others are counted one by one."""
    # Given two threads, of which one dies in the hooks of its ack, on this or that side of the guard
    dying = threading.Event()

    class Deadly(Middleware):
        def after_ack(self, broker, message):
            if message.actor_name == "last":
                dying.set()
                raise TimeLimitExceeded

    deadly = Deadly()
    bench = make_bench(**{"after" if when == "before" else "before": [deadly]})
    work = bench.actor(lambda: None, actor_name="work")
    last = bench.actor(lambda: None, actor_name="last", model=None)
    worker = bench.start(threads=2)
    last.send()
    assert dying.wait(5)
    wait_until(lambda: sum(one.is_alive() for one in worker.workers) == 1, 5)
    # When a message waits, Then the other thread is known to be idle, and has it as soon as it may
    wait_until(lambda: bench.member.idle() == 1, 5)
    with bench.full():
        message = work.send()
        bench.wait_parked(1)
    bench.wait_ended(message)
    assert bench.count_of(message) == (1, 1)
    wait_until(lambda: bench.leases() == 0, 5)
