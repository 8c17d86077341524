"""The ways for a caller to keep to a ceiling, each as a function that makes one process's limiter.

A limiter is called for each call of the model server, and what it returns is held while the call lasts. All but the
guard's and redis-py's are packages of the extra ``bench``; docs/performance.md tells what each of them is.
"""

# ruff: noqa: PLC0415  # a package is loaded only where it is measured, and may be missing

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import redis

from guard_middleware import Guard, GuardSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Limiter = Callable[[], AbstractContextManager[Any]]

TIMEOUT_S = 60
"""How long a caller waits, and how long a permit of a package that has leases lives."""

_threads = threading.local()


def none(url: str, name: str, ceiling: int, service_ms: int) -> Limiter:
    """No limit, for the bound: as many callers as the ceiling allows calls."""
    del url, name, ceiling, service_ms
    return nullcontext


def guard(url: str, name: str, ceiling: int, service_ms: int) -> Limiter:
    """The guard's permits, with the settings of the environment."""
    del url, ceiling, service_ms
    made = Guard(GuardSettings())
    return lambda: made.permit(name, timeout=TIMEOUT_S)


def redis_locks(url: str, name: str, ceiling: int, service_ms: int) -> Limiter:
    """As many locks of redis-py as the ceiling allows calls: take one that is free, or wait for any."""
    del service_ms
    client = redis.Redis.from_url(url)

    @contextmanager
    def permit() -> Iterator[None]:
        locks = [client.lock(f"{name}:{number}", timeout=TIMEOUT_S) for number in range(ceiling)]
        random.shuffle(locks)
        mine = next((lock for lock in locks if lock.acquire(blocking=False)), None)
        if mine is None:
            mine = locks[0]
            mine.acquire()
        try:
            yield
        finally:
            mine.release()

    return permit


def py_redis_semaphore(url: str, name: str, ceiling: int, service_ms: int) -> Limiter:
    """py-redis-semaphore, which waits by BLPOP."""
    from redis_semaphore import Semaphore, SemaphoreConfig

    del service_ms
    client = redis.Redis.from_url(url)
    config = SemaphoreConfig(name=name, limit=ceiling, acquire_timeout=TIMEOUT_S)
    return lambda: Semaphore(client, config)


def concurrency_limit(url: str, name: str, ceiling: int, service_ms: int) -> Limiter:
    """concurrency-limit, which polls every 100 ms."""
    from concurrency_limit import LimitConfiguration, RedisConfiguration, limit

    del service_ms
    where = RedisConfiguration(connection_pool=redis.ConnectionPool.from_url(url))
    what = LimitConfiguration(key=name, limit=ceiling, limit_timeout=TIMEOUT_S)
    return lambda: limit(where, what)


def self_limiters(url: str, name: str, ceiling: int, service_ms: int) -> Limiter:
    """self-limiters, which waits by BLPOP; asynchronous only."""
    from self_limiters import Semaphore

    del service_ms
    return lambda: _synchronous(lambda: Semaphore(name, ceiling, max_sleep=TIMEOUT_S, redis_url=url))


def async_redis_rate_limiters(url: str, name: str, ceiling: int, service_ms: int) -> Limiter:
    """async-redis-rate-limiters, which waits by BLPOP; asynchronous only, so each thread has a manager of its own."""
    from async_redis_rate_limiters import DistributedSemaphoreManager

    del service_ms

    def make() -> Any:
        if not hasattr(_threads, "manager"):
            _threads.manager = DistributedSemaphoreManager(redis_url=url, redis_ttl=TIMEOUT_S)
        return _threads.manager.get_semaphore(name, ceiling)

    return lambda: _synchronous(make)


def limits(url: str, name: str, ceiling: int, service_ms: int) -> Limiter:
    """limits, which has no concurrency: as many calls per second as a full ceiling of usual calls makes."""
    from limits import RateLimitItemPerSecond
    from limits.storage import RedisStorage
    from limits.strategies import MovingWindowRateLimiter

    limiter = MovingWindowRateLimiter(RedisStorage(url))
    item = RateLimitItemPerSecond(ceiling * 1000 // service_ms)

    def permit() -> AbstractContextManager[None]:
        while not limiter.hit(item, name):
            time.sleep(max(0.001, limiter.get_window_stats(item, name).reset_time - time.time()))
        return nullcontext()

    return permit


@contextmanager
def _synchronous(make: Callable[[], Any]) -> Iterator[None]:
    """An asynchronous limiter on an event loop of this thread's own."""
    if not hasattr(_threads, "loop"):
        _threads.loop = asyncio.new_event_loop()
    run = _threads.loop.run_until_complete
    limiter = make()
    run(_entered(limiter))
    try:
        yield
    finally:
        run(_left(limiter))


async def _entered(limiter: Any) -> None:
    await limiter.__aenter__()


async def _left(limiter: Any) -> None:
    await limiter.__aexit__(None, None, None)


PACKAGES = {
    one.__name__: one
    for one in (py_redis_semaphore, concurrency_limit, self_limiters, async_redis_rate_limiters, limits)
}
LIMITERS = {"bound": none, "guard": guard, "redis_locks": redis_locks, **PACKAGES}
