"""A server that evicts keys is warned about at boot; it must not stop the guard for good."""

from __future__ import annotations

import pytest

from guard_middleware import AdmissionDenied
from guard_middleware.core.commands import Ask, Beat, Configure, Status
from guard_middleware.core.values import EndpointSpec, Published
from guard_middleware.store.redis import RedisStore


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
