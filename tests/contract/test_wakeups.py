"""Who is woken, and when: one release wakes one, nobody waits beside a free permit, no wake-up is indispensable (I9).

The rule itself is in ``tests/unit/test_reference_serving.py``. Here are the parts that a rule does not have: channels
of a real server, threads that listen, timers that run, and a second process.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from statistics import median

import pytest
import redis

from guard_middleware import AdmissionDenied, Guard, GuardSettings
from guard_middleware.core.commands import Action, Operate, Status
from guard_middleware.core.values import EndpointSpec
from guard_middleware.store import keys
from guard_middleware.store.redis import RedisStore
from guard_middleware.threads import Beats
from tests.contract.store_sides import ENDPOINT, PROCESS, RedisSide
from tests.support.deployment import ROOT, wait_until

FAR = {"heartbeat_s": 30, "lease_s": 90}
"""Heartbeats so far apart that none of them explains anything."""
SOON_S = 1.0
"""Of what needs no heartbeat, on a machine that is busy with other things."""


@pytest.fixture
def side(redis_url, namespace):
    """The store's verbs on the session's server."""
    with closing(RedisSide(namespace, redis_url)) as side:
        yield side


@pytest.fixture
def make_guard(redis_url, namespace):
    """Guards of one deployment; to the store each is a process of its own."""
    with ExitStack() as stack:

        def make(ceiling=1, *, hears=True, **settings):
            guard = Guard(
                GuardSettings(
                    **{
                        "redis_url": redis_url,
                        "namespace": namespace,
                        "models": [{"id": "chat", "max_concurrent_requests": ceiling, "reserve": 0}],
                        "first_start_hold_s": 0,
                        **FAR,
                        **settings,
                    }
                )
            )
            stack.callback(guard.close)
            if hears:
                wait_listening(redis_url, namespace, guard.heartbeat().process)
            return guard

        yield make


def wait_listening(redis_url, namespace, process):
    """Wait until a process hears its notifications: one that was sent before costs a heartbeat."""
    channel = keys.wake(keys.root(namespace), process)
    with redis.Redis.from_url(redis_url) as client:
        wait_until(lambda: dict(client.pubsub_numsub(channel))[channel.encode()], 10, "it listens")


class Waiter(threading.Thread):
    """A caller that stands in line, and notes when it got its permit; it holds it until told to let go."""

    def __init__(self, guard, timeout=20):
        super().__init__(daemon=True)
        self.guard, self.timeout, self.got_at, self.failed = guard, timeout, None, None
        self.let_go = threading.Event()
        self.start()

    def run(self):
        try:
            with self.guard.permit("chat", timeout=self.timeout):
                self.got_at = time.monotonic()
                self.let_go.wait(20)
        except Exception as exc:  # noqa: BLE001  # shown by the test
            self.failed = exc

    def end(self):
        self.let_go.set()
        self.join(20)
        assert self.failed is None


def stand_in_line(guard, count):
    """Wait until so many callers stand in line."""
    wait_until(lambda: sum(guard.snapshot().endpoints["chat"].waiting.values()) == count, 10, f"{count} in line")


# ---------------------------------------------------------------------- who is woken


def test_one_release_notifies_one_of_ten_processes(side):
    """Ten idle processes listen, ten messages wait, one permit comes back: one channel has one notification."""
    # Given a full endpoint whose holder can run nothing itself, and ten processes with an idle thread each
    names = [f"r{number}" for number in range(10)]
    side.boot()
    side.ask("l-holder")
    for name in names:
        side.configure(process=name)
        side.beat(process=name, idle=1)
    for _ in names:
        side.ask(message=side.deliver(), take=0, idle=-1)
    side.beat(idle=0, queues=())
    with ExitStack() as stack:
        channels = {name: stack.enter_context(closing(side.store.wakeups(name))) for name in [PROCESS, *names]}
        # When the permit comes back
        (woken,) = side.finish("l-holder").woken
        # Then one was told, once, and it is the one for whom the unit is kept
        assert channels[woken].get(5) == ""
        assert {name: channel.get(0.02) for name, channel in channels.items()} == dict.fromkeys(channels)
    assert len(side.beat(process=woken, take=1, idle=1).takes) == 1


@pytest.mark.parametrize("at_once", [1, 3, 5])
def test_permits_that_come_back_at_once_start_as_many_callers_in_as_many_processes(make_guard, at_once):
    """Five processes wait, k units are freed by one command: k start at once, without a heartbeat; nobody else."""
    # Given a call that holds k of the units, another that holds the rest, and a waiting caller in each of 5 processes
    holder = make_guard(5)
    permit = holder.permit("chat", cost=at_once)
    rest = holder.permit("chat", cost=5 - at_once) if at_once < 5 else None
    waiters = []
    for number in range(5):
        waiters.append(Waiter(make_guard(5)))
        stand_in_line(holder, number + 1)
    # When the units come back
    released_at = time.monotonic()
    permit.release()
    # Then the first k in the line have a unit each, soon
    wait_until(lambda: all(one.got_at for one in waiters[:at_once]), 10)
    assert max(one.got_at for one in waiters[:at_once]) - released_at < SOON_S
    assert [one.got_at for one in waiters[at_once:]] == [None] * (5 - at_once)
    if rest is not None:
        rest.release()
    for one in waiters:
        one.end()


def test_permits_that_come_back_at_once_start_messages_in_all_workers_that_are_idle(make_bench):
    """Four units freed by one command, two workers with two idle threads each: four bodies run, two in each."""
    # Given two workers, of which each may run half of what fits, and messages parked by both of them
    models = {"chat": {"max_concurrent_requests": 4, "reserve": 0}}
    benches = [make_bench(models=models, **FAR) for _ in range(2)]
    holder = benches[0]
    actors = []
    for bench in benches:
        gate = bench.gate()
        actors.append(bench.actor(lambda gate=gate: gate.wait(20), actor_name="work", queue_name="work"))
    with holder.full():
        for bench in benches:
            bench.start(threads=2)
        for _ in range(6):
            actors[0].send()
        holder.wait_parked(6)
        released_at = time.monotonic()
    # Then as many as there are units run, in both workers, long before any heartbeat
    wait_until(lambda: [len(bench.begun) for bench in benches] == [2, 2], SOON_S, "two bodies in each worker")
    assert time.monotonic() - released_at < SOON_S
    assert len(holder.snapshot().leases) == 4


# ---------------------------------------------------------------------- wake-ups that are lost


class Deaf:
    """A channel that drops everything."""

    def get(self, timeout_s):
        time.sleep(timeout_s)

    def close(self):
        """Nothing is open."""


@pytest.mark.parametrize("waiter", ["caller", "worker"])
def test_dropped_notification_costs_at_most_a_heartbeat(make_guard, make_bench, monkeypatch, waiter):
    """Every wake-up is lost: whoever waits still starts with the next beat, each time."""
    # Given a waiter that hears nothing, and beats 0.5 s apart
    heartbeat = {"heartbeat_s": 0.5, "lease_s": 30}
    holder = make_guard(**heartbeat)
    monkeypatch.setattr(RedisStore, "wakeups", lambda *_: Deaf())
    deaf = make_guard(hears=False, **heartbeat)
    bench = make_bench(models={"chat": {"max_concurrent_requests": 1, "reserve": 0}}, **heartbeat)
    actor = bench.actor(lambda: None, actor_name="work", queue_name="work")
    if waiter == "worker":
        bench.start(threads=2)
    delays = []
    # When a permit comes back to it several times
    for _ in range(3):
        permit = holder.permit("chat", timeout=5)
        if waiter == "caller":
            one = Waiter(deaf)
            stand_in_line(holder, 1)
        else:
            actor.send()
            bench.wait_parked(1)
        begun, released_at = len(bench.begun), time.monotonic()
        permit.release()
        if waiter == "caller":
            wait_until(lambda one=one: one.got_at, 10)
            delays.append(one.got_at - released_at)
            one.end()
        else:
            wait_until(lambda begun=begun: len(bench.begun) > begun, 10, every_s=0.002)
            delays.append(time.monotonic() - released_at)
    # Then no wait was longer than the time between two beats
    assert max(delays) < 0.5 + SOON_S, delays


def test_caller_that_was_granted_a_permit_before_its_process_listened_has_it_when_it_listens(make_guard, monkeypatch):
    """What was sent before the subscription is made up for by it, for callers as for messages."""
    # Given a process that has just started, and whose subscription takes 0.3 s
    holder = make_guard()
    permit = holder.permit("chat")
    subscribe = RedisStore.wakeups
    monkeypatch.setattr(RedisStore, "wakeups", lambda self, process: (time.sleep(0.3), subscribe(self, process))[1])
    waiter = Waiter(make_guard(hears=False), timeout=1.8)
    stand_in_line(holder, 1)
    # When its caller is given the permit meanwhile
    permit.release()
    released_at = time.monotonic()
    # Then it has it as soon as its process listens, not a heartbeat later
    wait_until(lambda: waiter.got_at or waiter.failed, 5)
    waiter.end()
    assert waiter.got_at - released_at < 0.3 + SOON_S


# ---------------------------------------------------------------------- timers


class Counted:
    """A beating thread whose beats are counted, and come only when somebody wants them."""

    def __init__(self):
        self.at = []
        self.beats = Beats(lambda _: self.at.append(time.monotonic()), every_s=30, unavailable=lambda _: None)

    def __enter__(self):
        self.beats.start()
        return self

    def __exit__(self, *_):
        self.beats.stop()
        self.beats.join()


@pytest.mark.parametrize("order", [[20_000, 60], [60, 20_000], [20_000, 60, 25_000]])
def test_far_timer_neither_hides_nor_replaces_a_near_one(order):
    """Whatever the order in which replies name them: the nearest instant is the one that is waited for."""
    with Counted() as counted:
        named_at = time.monotonic()
        for delay_ms in order:
            counted.beats.beat_in(delay_ms)
        wait_until(lambda: counted.at, SOON_S, "the near instant")
        assert counted.at[0] - named_at >= 0.06


def test_far_timer_never_hides_a_notification():
    """A timer for in 20 s is set, again and again: each poke is a beat at once, and the last timer stands."""
    with Counted() as counted:
        for number in range(1, 6):
            counted.beats.beat_in(20_000)
            counted.beats.poke()
            counted.beats.beat_in(25_000)
            wait_until(lambda number=number: len(counted.at) == number, SOON_S, f"beat {number}")
        counted.beats.beat_in(40)
        wait_until(lambda: len(counted.at) == 6, SOON_S, "the near instant")


def test_timer_for_the_next_regular_beat_adds_none():
    """While all wait, each answer names an instant one interval ahead: the beats come singly, not in pairs."""
    every_s, lasts_s = 0.05, 1.0
    counted = Counted()
    counted.beats = Beats(
        lambda _: (counted.at.append(time.monotonic()), counted.beats.beat_in(round(every_s * 1_000))),
        every_s=every_s,
        unavailable=lambda _: None,
    )
    with counted:
        time.sleep(lasts_s)
    assert 2 <= len(counted.at) <= (counted.at[-1] - counted.at[0]) / every_s + 1.5


def test_worker_that_waits_for_a_far_cooldown_starts_at_once_what_is_free_before(make_bench, make_guard):
    """One endpoint is closed for 20 s. A release at another, and a short cooldown at a third, are not overslept."""
    # Given a worker with a message parked at each of three endpoints, two of them with breakers forced open
    models = {name: {"max_concurrent_requests": 1, "reserve": 0} for name in ("chat", "near", "far")}
    bench = make_bench(models=models, **FAR)
    holder = make_guard(models=[{"id": name, **fields} for name, fields in models.items()])
    actors = {name: bench.actor(lambda: None, model=name, actor_name=name, queue_name="work") for name in models}
    permit = holder.permit("chat")
    bench.start(threads=4)
    bench.store.operate(Operate(action=Action.OPEN, target="far", value=20_000))
    bench.store.operate(Operate(action=Action.OPEN, target="near", value=600))
    opened_at = time.monotonic()
    messages = {}
    for name in ("far", "near", "chat"):
        messages[name] = actors[name].send()
        bench.wait_parked(len(messages))
    # When another process releases
    permit.release()
    # Then its message starts now, the one of the short cooldown at its end, and the other waits on
    bench.wait_ended(messages["chat"], timeout_s=SOON_S)
    bench.wait_ended(messages["near"], timeout_s=0.6 + SOON_S)
    assert time.monotonic() - opened_at >= 0.6
    assert bench.count_of(messages["far"]) == (0, 0)
    bench.store.operate(Operate(action=Action.CLOSE, target="far"))
    bench.wait_idle()


# ---------------------------------------------------------------------- newcomers


def test_newcomers_never_get_the_unit_of_a_process_that_was_woken(make_bench, make_guard):
    """Four callers hammer at the endpoint while a permit is handed over: it goes to the waiter, and nobody is over."""
    # Given one unit, a worker that takes its time to come for it (2 s at most), and callers that never stand in line
    bench = make_bench(models={"chat": {"max_concurrent_requests": 1, "reserve": 0}}, hold_ms=2_000, **FAR)
    holder, newcomer = make_guard(hold_ms=2_000), make_guard(hold_ms=2_000)
    lock, running, most, order = threading.Lock(), [0], [0], []

    def call(who, seconds=0.002):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            order.append(who)
        time.sleep(seconds)
        with lock:
            running[0] -= 1

    actor = bench.actor(lambda: call("waiter"), actor_name="work", queue_name="work")
    bench.start(threads=1)
    is_over = threading.Event()

    def hammer():
        while not is_over.is_set():
            permit = newcomer.try_permit("chat")
            if permit is not None:
                with permit:
                    call("newcomer")

    threads = [threading.Thread(target=hammer, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    # When the holder lets go, twenty times, while a message waits
    handed_over = []
    try:
        for number in range(20):
            permit = holder.permit("chat", timeout=10)
            actor.send()
            bench.wait_parked(1)
            with lock:
                since = len(order)
            permit.release()
            wait_until(lambda number=number: len(bench.ended) > number, 10, every_s=0.002)
            handed_over.append(order[since])
    finally:
        is_over.set()
        for thread in threads:
            thread.join(10)
    # Then the message was the first each time, newcomers got what was left, and never two ran
    assert handed_over == ["waiter"] * 20
    assert "newcomer" in order
    assert most == [1]


def test_unit_that_is_kept_for_a_woken_process_counts_until_it_comes(side):
    """Three units freed, one process woken for them: who asks meanwhile gets the two that nobody waits for."""
    side.boot(EndpointSpec(id=ENDPOINT, ceiling=3, reserve=0))
    side.configure(EndpointSpec(id=ENDPOINT, ceiling=3, reserve=0), process="q")
    side.beat(process="q", queues=())
    side.ask("l-all", process="q", cost=3)
    waiting = side.deliver()
    side.ask("l-parked", message=waiting, take=0, idle=1)
    assert side.finish("l-all", process="q").woken == (PROCESS,)
    newcomers = [side.ask(process="q", rank=0) for _ in range(3)]
    assert [one.status for one in newcomers] == [Status.ADMITTED, Status.ADMITTED, Status.REFUSED]
    assert [one.message_id for one in side.beat(take=1, idle=1).takes] == [waiting.id]
    assert side.store.snapshot().endpoints[ENDPOINT].in_flight == 3


# ---------------------------------------------------------------------- no waiter beside a free permit


def test_interleaved_asks_releases_and_waits_leave_nobody_waiting_beside_a_free_permit(make_guard):
    """A thousand acquisitions by six threads of three processes, some of which give up: nobody is forgotten."""
    # Given one unit, beats that come too late for anything, and asks that meet releases at every distance
    guards = [make_guard() for _ in range(3)]
    holders, most, longest, failed = [0], [0], [0.0], []
    lock = threading.Lock()

    def work(guard, seed):
        chance = random.Random(seed)
        try:
            for _ in range(170):
                asked_at = time.monotonic()
                match chance.choice(["wait", "wait", "try", "give up"]):
                    case "try":
                        permit = guard.try_permit("chat")
                    case "give up":
                        try:
                            permit = guard.permit("chat", timeout=chance.random() * 0.004)
                        except AdmissionDenied:
                            permit = None
                    case _:  # a wake-up that was lost would last until a heartbeat: 30 s
                        permit = guard.permit("chat", timeout=10)
                if permit is None:
                    continue
                with lock:
                    longest[0] = max(longest[0], time.monotonic() - asked_at)
                    holders[0] += 1
                    most[0] = max(most[0], holders[0])
                if chance.random() < 0.3:
                    time.sleep(chance.random() * 0.001)
                with lock:
                    holders[0] -= 1
                permit.release()
        except Exception as exc:  # noqa: BLE001  # shown below
            failed.append(exc)

    threads = [threading.Thread(target=work, args=(guards[n % 3], n), daemon=True) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    # Then everybody who waited was served without a heartbeat, one at a time, and nothing is left
    assert failed == []
    assert most == [1]
    assert longest[0] < 5
    wait_until(lambda: not guards[0].snapshot().leases, 5)
    assert guards[0].snapshot().endpoints["chat"].waiting == {}


# ---------------------------------------------------------------------- how long a hand-over takes


def commands(client):
    """How many commands the server has got, without this one."""
    return client.info("stats")["total_commands_processed"]


def wait_until_quiet(client):
    """Wait until nobody but the one who looks has sent a command for a tenth of a second."""

    def is_quiet():
        before = commands(client)
        time.sleep(0.1)
        return commands(client) == before + 1

    wait_until(is_quiet, 10, "nobody sends anything")


def test_waiting_caller_asks_nothing_until_it_is_told(make_guard, side, redis_url, namespace):
    """No polling: while it stands in line for a second, its process sends no command."""
    holder, other = make_guard(**FAR), make_guard(**FAR)
    permit = holder.permit("chat")
    waiter = Waiter(other)
    stand_in_line(holder, 1)
    for guard in (holder, other):
        wait_listening(redis_url, namespace, guard.heartbeat().process)
    wait_until_quiet(side.client)  # after the beats that listening begins with
    before = commands(side.client)
    waiter.join(1.0)
    assert commands(side.client) - before == 1  # the question itself
    permit.release()
    waiter.end()


@pytest.mark.slow
def test_permit_is_in_the_other_process_soon_after_its_release(make_guard, redis_url, namespace, record_property):
    """A hundred hand-overs, none of them late, with beats 30 s apart: so only notifications can do it.

    The 99th percentile on a quiet machine is `make bench`'s to say; here others run beside it.
    """
    rounds, tries = 100, 3
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GUARD_REDIS_URL": redis_url,
        "GUARD_NAMESPACE": namespace,
        "GUARD_MODELS": json.dumps([{"id": "chat", "max_concurrent_requests": 1, "reserve": 0}]),
        "GUARD_FIRST_START_HOLD_S": "0",
        "GUARD_HEARTBEAT_S": "30",
        "GUARD_LEASE_S": "90",
    }
    guard, found = make_guard(), []
    command = [sys.executable, "-m", "tests.support.hand_over"]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            wait_listening(redis_url, namespace, other.stdout.readline().strip())
            # The best of three: what else the machine does meanwhile is no property of the guard.
            for _ in range(tries):
                waits = []
                for _ in range(rounds):
                    permit = guard.permit("chat", timeout=20)
                    other.stdin.write("\n")
                    other.stdin.flush()
                    wait_until(lambda: guard.snapshot().endpoints["chat"].waiting, 10, every_s=0.001)
                    released_at = time.monotonic()
                    permit.release()
                    waits.append(float(other.stdout.readline()) - released_at)
                assert min(waits) > 0
                assert max(waits) < 5
                found.append(median(waits))
                if found[-1] < 0.05:
                    break
        finally:
            other.kill()
    record_property("median wait, s", round(min(found), 4))
    assert min(found) < 0.05, found
