"""The application under measurement, run by Dramatiq's own command line. Everything comes from the environment.

Its actors touch no Redis, so that what the server counts is Dramatiq's and the guard's. How many retries a message has
burned goes to the model server, in the body's field ``user``.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage, Middleware
from dramatiq.rate_limits import ConcurrentRateLimiter
from dramatiq.rate_limits.backends import RedisBackend

from benchmarks.calling import GATE, MODEL, call_model, wait_at_gate
from benchmarks.stamps import Stamps
from guard_middleware import Guard, GuardMiddleware, GuardSettings, guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Broker, Worker

KIND = os.environ["BENCH_KIND"]
URL = os.environ["BENCH_REDIS_URL"]
CEILING = int(os.environ["BENCH_CEILING"])
BACKOFF_MS = int(os.environ["BENCH_BACKOFF_MS"])

stamps = Stamps()


class Gate(Middleware):
    """Lets no worker process begin before all of them have booted and the gate is opened."""

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:  # noqa: ARG002  # the hook's signature
        """Wait with the others."""
        stamps.open(GATE / f"stamps-{os.getpid()}")
        wait_at_gate()


_broker = RedisBroker(url=URL, namespace=os.environ["BENCH_NAMESPACE"])  # type: ignore[no-untyped-call]
if KIND == "guard":
    _broker.add_middleware(GuardMiddleware(Guard(GuardSettings())))
_broker.add_middleware(CurrentMessage())
_broker.add_middleware(Gate())
dramatiq.set_broker(_broker)


def work() -> None:
    """Call the model server for the present message."""
    message: Any = CurrentMessage.get_current_message()
    call_model(str(message.options.get("retries", 0)), message.message_id)


def limited(fn: Callable[[], None]) -> Callable[[], None]:
    """Dramatiq's own way: refuse by an exception inside of the actor, and let Retries come back later."""
    limiter = ConcurrentRateLimiter(RedisBackend(url=URL), MODEL, limit=CEILING)  # type: ignore[no-untyped-call]

    def call() -> None:
        with limiter.acquire():
            fn()

    return call


OPTIONS: dict[str, Any] = {
    "actor_name": "call",
    "queue_name": "calls",
    "max_retries": 1_000_000,
    "min_backoff": BACKOFF_MS,
    "max_backoff": BACKOFF_MS,
}
match KIND:
    case "guard":
        call = guarded(model=MODEL, **OPTIONS)(work)
    case "limiter":
        call = dramatiq.actor(limited(work), **OPTIONS)
    case _:
        call = dramatiq.actor(work, **OPTIONS)


@dramatiq.actor(queue_name="tiny")
def tiny(batch: int) -> None:
    """Next to no work, without a guard."""
    began = time.time()
    sum(range(100))
    stamps.note(batch, began, time.time())
