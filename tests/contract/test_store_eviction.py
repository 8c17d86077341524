"""A server that evicts keys is warned about at boot; it must not stop the guard for good."""

from __future__ import annotations

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
