"""What the guard costs by itself: one permit, and a worker whose actors are not guarded."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import redis
from dramatiq.rate_limits import ConcurrentRateLimiter
from dramatiq.rate_limits.backends import RedisBackend

from benchmarks.bench import UnfinishedError, app_environment, enqueue, left_in
from benchmarks.plan import MODEL, THREADS
from benchmarks.workers import Workers
from guard_middleware.core.commands import Ask, Configure, Finish, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import EndpointSpec, Published
from guard_middleware.holdings import new_id
from guard_middleware.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.bench import Bench

BLOCKS = 10
BLOCK = 500
TINY_MESSAGES = 5_000
_FIRST, _LAST = 0.9, 0.1
"""Shares of the backlog between which the throughput is measured: without the start and the end."""
_LONGEST_S = 60.0


def acquire_release(bench: Bench, blocks: int = BLOCKS, block: int = BLOCK) -> dict[str, float]:
    """Time of two PINGs over that of an acquire and a release, in alternating blocks on one client: median.

    Returns:
        ``acquire_release_vs_two_pings`` for the guard; ``acquire_release_vs_two_bare_pings`` against PINGs that are
        sent as directly as the store's own commands, past most of the client library; and
        ``stock_acquire_release_vs_two_pings`` for Dramatiq's ConcurrentRateLimiter.
    """
    store = RedisStore.from_url(bench.fresh_url(), f"b{uuid4().hex[:10]}")
    client, process = store.client, new_id()
    published = Published(endpoints=(EndpointSpec(id=MODEL, ceiling=4),))
    limiter = ConcurrentRateLimiter(RedisBackend(client=client), MODEL, limit=4)  # type: ignore[no-untyped-call]
    connection: Any = client.connection_pool.get_connection()

    def guard() -> None:
        ask = Ask(process=process, lease=new_id(), endpoint=MODEL, rank=0)
        if store.admit(ask).status is not Status.ADMITTED:
            msg = "a permit was refused although the endpoint is idle"
            raise UnfinishedError(msg)
        store.finish(Finish(process=process, lease=ask.lease, outcome=Outcome.SUCCESS, home=MODEL, rank=0))

    def stock() -> None:
        with limiter.acquire():
            pass

    def bare_ping() -> None:
        connection.send_packed_command(connection.pack_command("PING"))
        connection.read_response(disable_decoding=True)

    def pings() -> None:
        client.ping()
        client.ping()

    def bare_pings() -> None:
        bare_ping()
        bare_ping()

    ratios: dict[str, list[float]] = {"acquire_release": [], "stock": [], "bare": []}
    for number in range(blocks + 1):
        store.configure(Configure(process=process, published=published, first_start_hold_ms=0))  # and be alive
        guard_s, stock_s = _seconds(guard, block), _seconds(stock, block)
        pings_s, bare_s = _seconds(pings, block), _seconds(bare_pings, block)
        if number:  # the first block loads scripts and connects
            ratios["acquire_release"].append(pings_s / guard_s)
            ratios["stock"].append(pings_s / stock_s)
            ratios["bare"].append(bare_s / guard_s)
    client.connection_pool.release(connection)
    store.close()
    return {
        "acquire_release_vs_two_pings": median(ratios["acquire_release"]),
        "acquire_release_vs_two_bare_pings": median(ratios["bare"]),
        "stock_acquire_release_vs_two_pings": median(ratios["stock"]),
    }


def _seconds(what: Callable[[], None], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        what()
    return time.perf_counter() - began


def throughput_ratio(bench: Bench, messages: int, *, guard_first: bool) -> float:
    """Throughput of an unguarded actor on workers with the guard installed, over that without."""
    found = {}
    for kind in ("guard", "bound") if guard_first else ("bound", "guard"):
        found[kind] = _throughput(bench, kind, messages)
    return found["guard"] / found["bound"]


def _throughput(bench: Bench, kind: str, messages: int) -> float:
    """Messages per second in the middle of the backlog."""
    url, namespace = bench.fresh_url(), f"b{uuid4().hex[:10]}"
    enqueue(url, namespace, "tiny", "tiny", messages)
    environment = app_environment(url, namespace, kind, "http://127.0.0.1:9/v1", 4)
    with redis.Redis.from_url(url) as client, Workers(THREADS, "tiny", environment) as workers:
        workers.open_gate()
        began_at, began_with = 0.0, 0
        deadline = time.monotonic() + _LONGEST_S
        while True:
            left, now = left_in(client, namespace, "tiny"), time.monotonic()
            if not began_with and left <= messages * _FIRST:
                began_at, began_with = now, left
            if left <= messages * _LAST:
                return (began_with - left) / (now - began_at)
            workers.check()
            if now > deadline:
                msg = f"{left} of {messages} tiny messages are not done"
                raise UnfinishedError(msg)
            time.sleep(0.01)
