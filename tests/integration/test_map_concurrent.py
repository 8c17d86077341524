"""Fan-out at one call site: results in order, the ceiling held and reached, and nothing left when something fails."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time

import httpx
import pytest

from guard_middleware import (
    AdmissionDenied,
    AsyncGuard,
    ConfigurationError,
    Guard,
    current_permit,
    map_concurrent,
    map_concurrent_sync,
    priority_scope,
)
from guard_middleware.core.commands import Action, Operate
from guard_middleware.permit import AsyncPermit, Permit
from guard_middleware.testing.model_server import FakeEndpoint
from tests.fault.proxy import StoreProxy
from tests.support.deployment import wait_until
from tests.support.faces import AT_ONCE_S, Truth, settings_of, until

APP = "tests.support.fanout_app"
HEARTBEAT_S = 8.0
"""So long that nothing which happens at once is explained by a beat."""
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}


class Fan:
    """One way to fan out: by which of the two functions, and with what kind of `fn`."""

    def __init__(self, is_sync, takes_coroutines):
        self.is_sync, self.takes_coroutines = is_sync, takes_coroutines

    def fn(self, body, seconds):
        """A function that takes so long with an item and then does something with it."""

        def function(item):
            time.sleep(seconds(item))
            return body(item)

        async def coroutine(item):
            await asyncio.sleep(seconds(item))
            return body(item)

        return coroutine if self.takes_coroutines else function

    def out(self, guard, fn, items, **options):
        """Fan out, from where no event loop runs."""
        if self.is_sync:
            return map_concurrent_sync(fn, items, guard=guard, **options)

        async def whole():
            face = AsyncGuard(guard=guard)
            try:
                return await map_concurrent(fn, items, guard=face, **options)
            finally:
                await face.leave_loop()

        return asyncio.run(whole())


FANS = {
    "map_concurrent of coroutines": Fan(is_sync=False, takes_coroutines=True),
    "map_concurrent of functions": Fan(is_sync=False, takes_coroutines=False),
    "map_concurrent_sync of functions": Fan(is_sync=True, takes_coroutines=False),
    "map_concurrent_sync of coroutines": Fan(is_sync=True, takes_coroutines=True),
}


@pytest.fixture(params=FANS)
def fan(request):
    """Each way to fan out."""
    return FANS[request.param]


class Scene:
    """A guard, another caller, and what the store says; leases and beats so long that they explain nothing."""

    def __init__(self, url, namespace, models, **fields):
        settings = settings_of(url, namespace, models, **{"lease_s": 30.0, "heartbeat_s": HEARTBEAT_S, **fields})
        self.guard, self.other, self.truth = Guard(settings), Guard(settings), Truth(settings)

    def close(self):
        for one in (self.guard, self.other, self.truth):
            one.close()


@pytest.fixture
def scene(redis_url, namespace, monkeypatch):
    """Make scenes, and see that each fan-out has left nothing behind."""
    monkeypatch.setattr("guard_middleware.threads._LISTEN_S", 0.02)  # a guard that closes waits for it
    made = []

    def make(models, url="", **fields):
        made.append(Scene(url or redis_url, namespace, models, **fields))
        return made[-1]

    yield make
    try:
        for one in made:
            wait_until(one.truth.nothing_left, AT_ONCE_S, "nothing is left")
    finally:
        for one in made:
            one.close()


class Counter:
    """How many run at once, in this process."""

    def __init__(self):
        self.begun, self.ended, self.most, self._lock = [], [], 0, threading.Lock()

    def begins(self, item):
        with self._lock:
            self.begun.append(item)
            self.most = max(self.most, len(self.begun) - len(self.ended))

    def ends(self, item):
        with self._lock:
            self.ended.append(item)


def ceiling(number):
    return {"chat": {"max_concurrent_requests": number}}


# ---------------------------------------------------------------------- what comes back, and how wide


def test_results_have_the_order_of_the_items_whatever_ends_first(scene, fan):
    """Later items end sooner; each ran under a permit of its own."""
    one = scene(ceiling(4))
    leases = []

    def body(item):
        leases.append(current_permit().lease)
        return item * 10

    fn = fan.fn(body, lambda item: 0.01 * (8 - item))
    assert fan.out(one.guard, fn, iter(range(8)), model="chat") == [item * 10 for item in range(8)]
    assert len(set(leases)) == 8


@pytest.mark.parametrize(("asked", "width"), [(None, 3), (2, 2), (50, 3)])
def test_as_many_run_at_once_as_are_asked_for_and_never_more_than_the_ceiling(scene, fan, asked, width):
    """Twelve items on a ceiling of 3: no worker more than that, so nobody ever stands in line."""
    one, counter, waiting = scene(ceiling(3)), Counter(), []
    fn = fan.fn(counter.ends, lambda item: counter.begins(item) or waiting.append(one.truth.waiting()) or 0.03)
    begun_s = time.monotonic()
    assert fan.out(one.guard, fn, range(12), model="chat", width=asked) == [None] * 12
    assert counter.most == width
    assert max(waiting) == 0
    assert sorted(counter.begun) == list(range(12))
    assert time.monotonic() - begun_s < 12 / width * 0.03 + 2


def test_the_width_is_that_of_the_ceiling_in_force_not_of_the_configured_one(scene, fan):
    """An operator's override of 2 on a configured 8."""
    one, counter = scene(ceiling(8)), Counter()
    one.guard.try_permit("chat").release()
    one.truth.store.operate(Operate(action=Action.OVERRIDE, target="chat", value=2))
    fan.out(one.guard, fan.fn(counter.ends, lambda item: counter.begins(item) or 0.03), range(8), model="chat")
    assert counter.most == 2


def test_no_item_asks_nobody(scene, fan):
    """An empty fan-out returns at once, without a store."""
    one = scene(ceiling(1), redis_url="redis://127.0.0.1:1/0")
    one.truth.nothing_left = lambda: True
    assert fan.out(one.guard, fan.fn(str, float), [], model="chat") == []


IMPOSSIBLE = [
    ({"model": "chat", "width": 0}, "width"),
    ({"model": "chat", "width": -1}, "width"),
    ({"model": "chat", "width": True}, "width"),
    ({"model": "chat", "width": 2.0}, "width"),
    ({}, "model is missing"),
    ({"model": "chatt"}, "chatt"),
    ({"model": "chat", "priority": "urgent"}, "urgent"),
    ({"model": "chat", "cost": 0}, "cost"),
    ({"model": "chat", "cost": 3}, "cost"),
    ({"model": "chat", "timeout": -1}, "timeout"),
]


def test_what_can_never_be_is_said_before_anything_runs(scene, fan):
    """Width, model, priority, cost and time-out; nothing begins."""
    one, counter = scene(ceiling(2)), Counter()
    for options, said in IMPOSSIBLE:
        with pytest.raises(ConfigurationError, match=said):
            fan.out(one.guard, fan.fn(counter.begins, lambda _: 0), [1, 2], **options)
    assert counter.begun == []


def test_a_function_that_returns_a_coroutine_is_awaited_under_its_permit_or_refused(scene):
    """`lambda item: client.ask(item)` is no coroutine function; its permits must cover what it returns."""
    one, leases = scene(ceiling(2)), []

    async def ask(item):
        await asyncio.sleep(0.01)
        leases.append(current_permit().lease)
        return item

    wrapped = lambda item: ask(item)  # noqa: E731, PLW0108  # what the claim is about
    assert FANS["map_concurrent of functions"].out(one.guard, wrapped, [1, 2, 3], model="chat") == [1, 2, 3]
    assert len(set(leases)) == 3
    with pytest.raises(TypeError, match="give the coroutine function itself"):
        map_concurrent_sync(wrapped, [1, 2, 3], model="chat", guard=one.guard)
    partial = functools.partial(ask)
    assert map_concurrent_sync(partial, [1, 2], model="chat", guard=one.guard) == [1, 2]


def test_the_synchronous_one_says_no_where_an_event_loop_runs(scene):
    """With a coroutine function it would need a loop of its own; nothing is left un-awaited."""
    one = scene(ceiling(2))

    async def fn(item):
        return item

    async def whole():
        map_concurrent_sync(fn, [1, 2], model="chat", guard=one.guard)

    with pytest.raises(RuntimeError, match="running event loop"):
        asyncio.run(whole())


def serving(deploy, number, base_ms=30, **fields):
    """One endpoint, and another one beside it."""
    return deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=base_ms), FakeEndpoint(name="embed", base_ms=base_ms)],
        models={
            "chat": {"max_concurrent_requests": number, "reserve": 0, **fields},
            "embed": {"max_concurrent_requests": 2, "reserve": 0},
        },
        env={"GUARD_LEASE_S": "30"},
    )


@pytest.fixture
def client():
    """For calls to the model server."""
    with httpx.Client(timeout=30, limits=httpx.Limits(max_connections=None)) as one:
        yield one


def asking(client, fan, ms=None):
    """A function that makes one call to the server under its permit."""

    def call(item):
        permit = current_permit()
        headers = {"x-message-id": str(item), "x-priority": permit.priority.value}
        if ms is not None:
            headers["x-fake-ms"] = str(ms)
        client.post(f"{permit.endpoint.base_url}/chat/completions", json=CHAT, headers=headers).raise_for_status()
        return item

    async def call_async(item):
        return await asyncio.to_thread(call, item)

    return call_async if fan.takes_coroutines else call


@pytest.mark.slow
def test_the_server_counts_the_ceiling_over_two_fan_outs_at_once(deploy, client, fan, measured):
    """Two fan-outs of 40 items, each as wide as it likes, on a ceiling of 4: the server sees 4, and each item once."""
    deployment = serving(deploy, 4)
    results = []
    fn = asking(client, fan)
    threads = [
        threading.Thread(
            target=lambda first=first: results.append(
                fan.out(deployment.guard, fn, range(first, first + 40), model="chat", width=40)
            )
        )
        for first in (0, 40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == [list(range(40)), list(range(40, 80))]
    stats = deployment.server.stats()["chat"]
    measured("use", round(stats.use(4), 3))
    assert (stats.calls, stats.most_in_flight) == (80, 4)
    wait_until(lambda: not deployment.guard.snapshot().leases, AT_ONCE_S)


# ---------------------------------------------------------------------- what goes wrong


def test_the_first_failure_is_raised_when_the_running_calls_have_ended_and_nothing_more_begins(scene, fan, monkeypatch):
    """One fails while one runs and a third worker stands in line: no other begins, and the line is empty at once."""

    # Given workers that stand still for a moment once they have released: whoever waits has that permit by then
    async def async_release(self, exc=None, sound=AsyncPermit.release):
        await sound(self, exc)
        await asyncio.sleep(0.1)

    monkeypatch.setattr(
        Permit, "release", lambda self, exc=None, sound=Permit.release: (sound(self, exc), time.sleep(0.1))
    )
    monkeypatch.setattr(AsyncPermit, "release", async_release)
    one, counter = scene(ceiling(3)), Counter()
    held = one.other.permit("chat")

    def body(item):
        counter.ends(item)
        if item == counter.begun[0]:
            msg = "the first"
            raise ValueError(msg)
        msg = "later"
        raise KeyError(msg)

    def seconds(item):
        counter.begins(item)
        return 0.3 if item == counter.begun[0] else 0.7

    begun_s = time.monotonic()
    with pytest.raises(ValueError, match="the first"):
        fan.out(one.guard, fan.fn(body, seconds), range(20), model="chat", timeout=60)
    took_s = time.monotonic() - begun_s
    assert counter.begun == counter.ended
    assert len(counter.begun) == 2
    assert 0.7 <= took_s < 2.5 < HEARTBEAT_S
    wait_until(lambda: one.truth.waiting() == 0, AT_ONCE_S)
    assert set(one.truth.leases()) == {held.lease}
    held.release()


def test_workers_in_line_give_up_at_once_when_another_one_fails(scene, fan):
    """All but one stand in line, with a minute to go and no permit ever free: the failure is raised at once."""
    one, waiting = scene(ceiling(4)), []
    held = [one.other.permit("chat") for _ in range(3)]

    def body(item):
        waiting.append(one.truth.waiting())
        msg = "a fault"
        raise ValueError(msg)

    begun_s = time.monotonic()
    with pytest.raises(ValueError, match="a fault"):
        fan.out(one.guard, fan.fn(body, lambda _: 0.5), range(20), model="chat", timeout=60)
    assert time.monotonic() - begun_s < 2.5 < HEARTBEAT_S
    assert waiting == [3]
    wait_until(lambda: one.truth.waiting() == 0, AT_ONCE_S)
    assert len(one.truth.leases()) == 3
    for permit in held:
        permit.release()


def test_a_call_that_gets_no_permit_in_time_ends_the_fan_out(scene, fan):
    """Outside of any permit each call waits its time; then `AdmissionDenied`, and nothing is left."""
    one = scene(ceiling(1))
    held = one.other.permit("chat")
    with pytest.raises(AdmissionDenied) as caught:
        fan.out(one.guard, fan.fn(str, lambda _: 0), range(5), model="chat", timeout=0.3)
    assert caught.value.reason == "endpoint_full"
    wait_until(lambda: one.truth.waiting() == 0, AT_ONCE_S)
    held.release()


@pytest.mark.parametrize("name", ["map_concurrent of coroutines", "map_concurrent of functions"])
def test_a_cancelled_fan_out_leaves_nothing_and_its_threads_hold_their_permits_to_the_end(scene, name):
    """Cancelled twice: coroutines end at once; functions that run in threads keep their permits until they return."""
    one, counter, fan = scene(ceiling(3)), Counter(), FANS[name]
    held = one.other.permit("chat")
    fn = fan.fn(counter.ends, lambda item: counter.begins(item) or 0.8)

    async def whole():
        face = AsyncGuard(guard=one.guard)
        task = asyncio.create_task(map_concurrent(fn, range(20), model="chat", guard=face))
        await until(lambda: len(counter.begun) == 2 and one.truth.waiting() == 1)
        begun_s = time.monotonic()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.1)
            if not fan.takes_coroutines:
                assert len(one.truth.leases()) == 3
                assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        took_s = time.monotonic() - begun_s
        assert took_s < 0.75 if fan.takes_coroutines else 0.3 < took_s < 2
        assert set(one.truth.leases()) == {held.lease}
        await face.leave_loop()

    asyncio.run(whole())
    assert len(counter.begun) == 2
    wait_until(lambda: one.truth.waiting() == 0, AT_ONCE_S)
    held.release()


def test_an_interrupt_in_the_calling_thread_ends_the_fan_out(scene):
    """KeyboardInterrupt in the call that the calling thread makes: the others end what they run, nothing more begins."""
    one, counter = scene(ceiling(3)), Counter()
    caller = threading.current_thread()

    def fn(item):
        counter.begins(item)
        time.sleep(0.2)
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        time.sleep(0.2)
        counter.ends(item)

    with pytest.raises(KeyboardInterrupt):
        map_concurrent_sync(fn, range(20), model="chat", guard=one.guard)
    assert len(counter.begun) == 3
    assert len(counter.ended) == 2
    assert one.truth.leases() == {}


# ---------------------------------------------------------------------- priorities


def test_the_ambient_priority_is_that_of_each_call(scene, fan):
    """Of the scope in force, or the explicit one; in the tasks and threads that make the calls."""
    one = scene(ceiling(2))
    fn = fan.fn(lambda _: current_permit().priority.value, lambda _: 0)
    with priority_scope("background_ingestion"):
        assert set(fan.out(one.guard, fn, range(4), model="chat")) == {"background_ingestion"}
        assert set(fan.out(one.guard, fn, range(4), model="chat", priority="hydration")) == {"hydration"}
    assert set(fan.out(one.guard, fn, range(4), model="chat")) == {"orchestration"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map_concurrent of coroutines", "map_concurrent_sync of functions"])
def test_interactive_callers_go_ahead_of_a_saturating_background_fan_out(deploy, client, name):
    """The reserve is free for the first at once; the second has the next release; background never touches the reserve."""
    deployment, fan = serving(deploy, 4, reserve=1), FANS[name]
    guard, fn = deployment.guard, asking(client, fan, ms=1_500)
    interactive = asking(client, FANS["map_concurrent_sync of functions"], ms=2_500)
    background = threading.Thread(
        target=fan.out, args=(guard, fn, range(6)), kwargs={"model": "chat", "priority": "background_ingestion"}
    )
    background.start()
    wait_until(lambda: deployment.server.stats()["chat"].in_flight == 3, 10)

    def urgent(name):
        with guard.permit("chat", priority="interactive", timeout=10):
            interactive(name)

    threads = [threading.Thread(target=urgent, args=(f"urgent {number}",)) for number in range(2)]
    threads[0].start()
    wait_until(lambda: deployment.server.stats()["chat"].in_flight == 4, 10)
    threads[1].start()
    wait_until(lambda: guard.snapshot().endpoints["chat"].waiting.get(0), 10)
    assert deployment.server.stats()["chat"].statuses == {}, "the machine is too slow: a call has ended meanwhile"
    for thread in [*threads, background]:
        thread.join(20)
    calls = deployment.calls()
    names = [one.message_id for one in calls]
    # The first while all three that it found were running, the second right after the first of them ended
    assert names.index("urgent 0") == 3
    assert names.index("urgent 1") == 4
    first_end = min(one.t_end for one in calls[:3])
    assert first_end <= calls[4].t_start < first_end + 1
    assert len(calls) == 8
    stats = deployment.server.stats()["chat"]
    assert stats.most_in_flight <= 4
    assert stats.most_by_priority["background_ingestion"] == 3


# ---------------------------------------------------------------------- under a permit


def test_under_a_permit_the_first_call_uses_it_and_none_waits(scene, fan):
    """Ceiling 3, one held elsewhere: two at once, one of them under the outer lease; the model is the outer one's."""
    one, counter, leases = scene(ceiling(3)), Counter(), []
    held = one.other.permit("chat")

    def body(item):
        leases.append(current_permit().lease)
        counter.ends(item)

    with one.guard.permit("chat") as outer:
        begun_s = time.monotonic()
        fan.out(one.guard, fan.fn(body, lambda item: counter.begins(item) or 0.05), range(10))
        assert time.monotonic() - begun_s < AT_ONCE_S
        assert set(one.truth.leases()) == {held.lease, outer.lease}
    assert sorted(counter.begun) == list(range(10))
    assert counter.most == 2
    assert outer.lease in leases
    held.release()


def test_under_a_permit_all_items_go_through_it_where_nothing_else_is_free(scene, fan):
    """Ceiling 1: one after the other, in their order, under one lease."""
    one, counter = scene(ceiling(1)), Counter()
    with one.guard.permit("chat") as outer:
        fn = fan.fn(
            lambda item: counter.ends(item) or current_permit().lease, lambda item: counter.begins(item) or 0.01
        )
        assert fan.out(one.guard, fn, range(6), width=4) == [outer.lease] * 6
    assert counter.most == 1


@pytest.fixture
def proxy(redis_url):
    """Between the guard and its store."""
    with StoreProxy(redis_url) as one:
        yield one


def test_an_item_that_was_refused_late_is_done_by_whoever_can(proxy, scene, fan):
    """The refusals arrive when the calls under the outer permit are all over: their items are done under it after all."""
    one, elsewhere = scene(ceiling(3), url=proxy.url), scene(ceiling(3))
    held = elsewhere.other.permit("chat", cost=2)
    with one.guard.permit("chat") as outer:
        proxy.delay(0.05)
        fn = fan.fn(lambda _: current_permit().lease, lambda _: 0)
        assert fan.out(one.guard, fn, range(3)) == [outer.lease] * 3
        proxy.serve()
    held.release()


def test_under_a_permit_a_fan_out_that_is_refused_everything_is_denied(scene, fan):
    """Another endpoint, which is full: `AdmissionDenied` at once, with nothing begun."""
    one, counter = scene({**ceiling(1), "embed": {"max_concurrent_requests": 2}}), Counter()
    held = one.other.permit("embed", cost=2)
    with one.guard.permit("chat"):
        begun_s = time.monotonic()
        with pytest.raises(AdmissionDenied) as caught:
            fan.out(one.guard, fan.fn(counter.begins, lambda _: 0), range(4), model="embed")
        assert time.monotonic() - begun_s < AT_ONCE_S
        assert caught.value.model == "embed"
    assert counter.begun == []
    held.release()


ACTORS = pytest.mark.parametrize("actor", ["spread", "spread_async"])


def spreads(deployment):
    """What the fan-outs wrote down, by message."""
    entries = map(json.loads, deployment.redis.lrange(f"{deployment.broker_namespace}:spread", 0, -1))
    return {entry["id"]: entry for entry in entries}


@ACTORS
@pytest.mark.slow
def test_in_guarded_actors_fan_outs_share_the_ceiling_and_use_their_messages_permits(deploy, actor):
    """Six messages of eight calls each on a ceiling of 4: never more than 4, no waiting, each first call's own permit."""
    deployment = serving(deploy, 4, base_ms=30)
    deployment.start(processes=2, threads=4, module=APP)
    names = [[f"{number}/{item}" for item in range(8)] for number in range(6)]
    ids = [deployment.send(actor, 1, args=(some,), guard_priority="interactive")[0] for some in names]
    deployment.wait_done(ids, 20)
    deployment.check_everything_once(retries=0)
    stats = deployment.server.stats()["chat"]
    assert (stats.calls, stats.most_in_flight) == (48, 4)
    assert set(stats.most_by_priority) == {"interactive"}
    for message_id, some in zip(ids, names, strict=True):
        entry = spreads(deployment)[message_id]
        assert [name for name, _ in entry["results"]] == some
        assert entry["own"] in {lease for _, lease in entry["results"]}


@ACTORS
@pytest.mark.slow
def test_in_a_guarded_actor_the_width_is_what_is_to_be_had_without_waiting(deploy, actor):
    """Alone on a ceiling of 4 a message calls four at a time; with three held elsewhere, one at a time under its own."""
    deployment = serving(deploy, 4, base_ms=60)
    deployment.start(processes=1, threads=4, module=APP)
    [wide] = deployment.send(actor, 1, args=([f"wide/{item}" for item in range(12)],))
    deployment.wait_done([wide], 15)
    assert deployment.server.stats()["chat"].most_in_flight == 4
    assert len({lease for _, lease in spreads(deployment)[wide]["results"]}) > 4
    deployment.server.reset()
    held = deployment.guard.permit("chat", cost=3, timeout=5)
    [narrow] = deployment.send(actor, 1, args=([f"narrow/{item}" for item in range(5)],))
    deployment.wait_done([narrow], 15)
    assert deployment.server.stats()["chat"].most_in_flight == 1
    entry = spreads(deployment)[narrow]
    assert {lease for _, lease in entry["results"]} == {entry["own"]}
    held.release()
    deployment.check_everything_once(retries=0)


@ACTORS
@pytest.mark.slow
def test_in_a_guarded_actor_a_fan_out_that_is_refused_everything_parks_its_message(deploy, actor):
    """The other endpoint is full: the message waits in line without a permit and runs later, no retry is burned."""
    deployment = serving(deploy, 1, base_ms=20)
    deployment.start(processes=1, threads=4, module=APP)
    held = deployment.guard.permit("embed", cost=2)
    [refused] = deployment.send(actor, 1, args=(["a", "b", "c"], "embed"))
    deployment.wait_parked(1)
    others = deployment.send("orchestrate", 2)
    deployment.wait_done(others, 5)
    held.release()
    deployment.wait_done([refused], 10)
    assert deployment.server.stats()["embed"].calls == 3
    deployment.check_everything_once(retries=0)
