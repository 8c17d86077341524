"""A server that evicts keys is warned about at boot; it must not stop the guard for good."""

from __future__ import annotations

from contextlib import closing

import pytest

from guard_middleware import AdmissionDenied
from guard_middleware.core.commands import Action, Ask, Beat, Configure, Operate, Status
from guard_middleware.core.values import EndpointSpec, Published, Rules
from guard_middleware.store import keys
from guard_middleware.store.redis import RedisStore
from tests.contract.store_sides import ENDPOINT, PROCESS, RedisSide


def test_evicted_record_of_a_lease_stops_nobody(redis_url, namespace):
    """A lease whose record is gone ends at its time, cost and all, and everything goes on."""
    # Given a lease of cost 3 whose record the server has evicted
    store = RedisStore.from_url(redis_url, namespace)
    store.set_clock(1_000_000)
    published = Published(endpoints=(EndpointSpec(id="e", ceiling=4),))
    store.configure(Configure(process="p", published=published, first_start_hold_ms=0))
    assert store.admit(Ask(process="p", lease="l", endpoint="e", rank=1, cost=3)).status is Status.ADMITTED
    store.client.delete(f"guard:{{{namespace}}}:lease:l")
    # When its time is over
    for now_ms in range(1_003_000, 1_020_000, 3_000):
        store.set_clock(now_ms)
        assert store.beat(Beat(process="p", id=f"b{now_ms}")).status is Status.DONE
    # Then all of the ceiling is there again
    reply = store.admit(Ask(process="p", lease="m", endpoint="e", rank=1, cost=4))
    assert reply.status is Status.ADMITTED
    store.close()


@pytest.fixture(params=[1, 3], ids=["cost 1", "cost 3"])
def held(request, redis_url, namespace):
    """A waiting message for which a unit of its cost is held for the process "q", whose record the server has evicted."""
    with closing(RedisSide(namespace, redis_url)) as side:
        cost = request.param
        side.boot(EndpointSpec(id=ENDPOINT, ceiling=cost + 1), EndpointSpec(id="other", ceiling=2))
        side.configure(EndpointSpec(id=ENDPOINT, ceiling=cost), EndpointSpec(id="other", ceiling=2), process="q")
        side.beat(process="q", idle=1)
        side.ask("l-first", cost=cost)
        message = side.deliver()
        assert side.ask(message=message, cost=cost, idle=0).status is Status.PARKED
        assert side.finish("l-first", idle=0).woken == ("q",)
        assert side.client.delete(keys.lease(keys.root(namespace), "hold:q")) == 1
        yield side, message, cost


@pytest.mark.parametrize("verb", ["ask", "finish", "beat", "configure", "goodbye"])
@pytest.mark.parametrize("swept", [False, True], ids=["first", "after a sweep"])
def test_evicted_record_of_a_hold_stops_nobody(held, verb, swept):
    """Whatever the process asks next is answered, and what was held for it is there for whoever is idle."""
    # Given a hold without a record, perhaps ended by a command of another process
    side, message, cost = held
    if swept:
        side.pass_time(Rules().hold_ms)
        assert side.beat().status is Status.DONE
    # When its process speaks, Then it is answered
    say = {
        "ask": lambda: side.ask(process="q", endpoint="other", idle=0),
        "finish": lambda: side.finish("l-never", process="q", idle=0),
        "beat": lambda: side.beat(process="q"),
        "configure": lambda: side.configure(EndpointSpec(id=ENDPOINT, ceiling=cost), process="q"),
        "goodbye": lambda: side.store.operate(Operate(action=Action.FORGET, target="q")),
    }[verb]
    answers = {"ask": Status.ADMITTED, "finish": Status.FINISHED}
    assert say().status is answers.get(verb, Status.DONE)
    # And its units are free, or held anew if a thread of it is idle as far as anybody knows
    is_held_anew = verb == "configure" and not swept
    assert side.store.snapshot().endpoints[ENDPOINT].in_flight == (cost if is_held_anew else 0)
    assert say().status is answers.get(verb, Status.DONE)
    # And whoever is idle gets the message
    side.pass_time(Rules().hold_ms)
    assert [take.message_id for take in side.beat(take=1, idle=1).takes] == [message.id]


def test_evicted_record_of_a_hold_whose_process_dies_stops_nobody(held):
    """Whoever sweeps it is answered, and what it published goes with it."""
    # Given a hold without a record, When its process says no more
    side, _, cost = held
    assert side.store.snapshot().endpoints[ENDPOINT].ceiling == cost
    for _ in range(5):
        side.pass_time(3_000)
        assert side.beat().status is Status.DONE
    # Then it is forgotten, and all of the other's ceiling is there
    snapshot = side.store.snapshot()
    assert (set(snapshot.processes), snapshot.endpoints[ENDPOINT].ceiling) == ({PROCESS}, cost + 1)
    assert side.client.hkeys(keys.published(keys.root(side.store._namespace))) == [PROCESS.encode()]
    assert side.ask(cost=cost + 1).status is Status.ADMITTED


@pytest.mark.parametrize("evicted", [1, 3], ids=["of one", "of all"])
def test_evicted_record_of_a_parked_message_stops_nobody_and_the_message_runs(make_bench, evicted):
    """Every verb goes on, for this endpoint and for others; who has no record is let go by the place in the line."""
    # Given messages that wait, and have no records any more
    bench = make_bench(models={"chat": {"max_concurrent_requests": 1}, "other": {"max_concurrent_requests": 4}})
    work = bench.actor(lambda: None, actor_name="work")
    bench.start(threads=2)
    bench.pause()
    messages = [work.send() for _ in range(3)]
    ids = bench.wait_parked(3)
    records = f"guard:{{{bench.namespace}}}:parked:chat\x1f{bench.namespace}\x1fdefault"
    assert bench.store.client.hdel(records, *ids[:evicted]) == evicted
    # When every verb is used, Then it is answered
    bench.guard.permit("other", timeout=3).release()
    with pytest.raises(AdmissionDenied, match="paused"):
        bench.guard.permit("chat", timeout=0.2)
    bench.member.heartbeat.configure()
    bench.member.heartbeat.beat()
    assert sorted(bench.parked()) == sorted(ids)
    assert sum(bench.snapshot().endpoints["chat"].waiting.values()) == 3
    # And once they may, all run, once each
    bench.resume()
    bench.wait_ended(*messages)
    bench.wait_idle()
    assert set(bench.counts().values()) == {1}
    assert bench.most == 1
    assert bench.dead() == []
