"""What the guard costs by itself: one permit, and a worker whose actors are not guarded."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dramatiq.rate_limits import ConcurrentRateLimiter
from dramatiq.rate_limits.backends import RedisBackend

from benchmarks.bench import UnfinishedError, seed, until
from benchmarks.plan import MODEL, THREADS, Scenario
from benchmarks.stamps import read
from benchmarks.workers import dramatiq_workers
from guard_middleware.core.commands import Ask, Configure, Finish, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import EndpointSpec, Published
from guard_middleware.holdings import new_id
from guard_middleware.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.bench import Bench, Deployment
    from benchmarks.workers import Workers

BLOCKS = 10
BLOCK = 500
MESSAGES = 2_000
PAIRS = 11
IDLE = Scenario(name="idle", service_ms=0, ceiling=4, messages=0)
POLL_MS = 20
"""The longest pause of Dramatiq between two polls of a queue, so that the processes begin a batch together."""


def acquire_release(bench: Bench, block: int = BLOCK) -> dict[str, list[float]]:
    """Time of two PINGs over that of an acquire and a release, in alternating blocks on one client.

    Returns:
        One ratio for each block: ``acquire_release_vs_two_pings`` for the guard; ``acquire_release_vs_two_bare_pings``
        against PINGs that are sent as directly as the store's own commands, past most of the client library; and
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
        store.finish(Finish(process=process, lease=ask.lease, outcome=Outcome.SUCCESS, home=MODEL))

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

    ratios: dict[str, list[float]] = {}
    for number in range(BLOCKS + 1):
        store.configure(Configure(process=process, published=published, first_start_hold_ms=0))  # and be alive
        guard_s, stock_s = _seconds(guard, block), _seconds(stock, block)
        pings_s, bare_s = _seconds(pings, block), _seconds(bare_pings, block)
        if number:  # the first block loads scripts and connects
            for name, ratio in (
                ("acquire_release_vs_two_pings", pings_s / guard_s),
                ("acquire_release_vs_two_bare_pings", bare_s / guard_s),
                ("stock_acquire_release_vs_two_pings", pings_s / stock_s),
            ):
                ratios.setdefault(name, []).append(ratio)
    client.connection_pool.release(connection)
    store.close()
    return ratios


def _seconds(what: Callable[[], None], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        what()
    return time.perf_counter() - began


def unguarded(bench: Bench, messages: int, pairs: int = PAIRS) -> dict[str, list[float]]:
    """What an unguarded actor's workers are like with the guard installed, over what they are like without it.

    Both sets of workers live all the time, and get batches in turn, each put into the queue in one transaction. A batch
    takes from its first start to its last end, by the workers' own clocks.

    With Dramatiq's defaults the consumer thread would decide: it sleeps for 5 ms and more, up to 1 s, whenever as many
    messages are out as it may prefetch (16), and how often that happens is chance. Here it may prefetch a whole batch.

    Returns:
        One ratio for each pair of batches: ``unguarded_throughput_ratio``, of messages per second, and
        ``unguarded_cpu_ratio``, of messages per second of processor time, which hardly depends on what else runs.
    """
    settings = {"dramatiq_queue_prefetch": str(messages), "dramatiq_worker_timeout": str(POLL_MS)}
    ratios: dict[str, list[float]] = {}
    with ExitStack() as stack:
        sides = {}
        for kind in ("guard", "bound"):
            one = stack.enter_context(bench.deployment(IDLE, kind))
            workers = stack.enter_context(dramatiq_workers(THREADS, "tiny", one.environment | settings))
            workers.open_gate()
            sides[kind] = (one, workers)
        for number in range(pairs + 1):
            order = ("guard", "bound") if number % 2 else ("bound", "guard")
            found = {kind: _batch(*sides[kind], number, messages) for kind in order}
            if number:  # the first pair boots, connects and loads scripts
                for name, guard in found["guard"].items():
                    ratios.setdefault(f"unguarded_{name}_ratio", []).append(guard / found["bound"][name])
    return ratios


def _batch(one: Deployment, workers: Workers, number: int, messages: int) -> dict[str, float]:
    """Messages of one batch per second, and per second of processor time."""
    cpu_s = workers.cpu_s()
    seed(one, "tiny", "tiny", messages, number)

    def is_done() -> bool:
        workers.check()
        return one.left("tiny") == 0

    until(is_done, IDLE, f"batch {number} of tiny messages")
    stamp = read(workers.stamps(), number)
    if stamp.messages != messages:
        msg = f"{stamp.messages} of {messages} tiny messages ran"
        raise UnfinishedError(msg)
    found = {"throughput": messages / (stamp.last_at - stamp.first_at)}
    after_s = workers.cpu_s()
    if cpu_s is not None and after_s is not None:
        found["cpu"] = messages / (after_s - cpu_s)
    return found
