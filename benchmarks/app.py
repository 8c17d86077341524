"""The application under measurement, run by Dramatiq's own command line. Everything comes from the environment.

Its actors touch no Redis, so that what the server counts is Dramatiq's and the guard's. How many retries a message has
burned goes to the model server, in the body's field ``user``.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage, Middleware
from dramatiq.rate_limits import ConcurrentRateLimiter
from dramatiq.rate_limits.backends import RedisBackend

from guard_middleware import Guard, GuardMiddleware, GuardSettings, guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Broker, Worker

KIND = os.environ["BENCH_KIND"]
URL = os.environ["BENCH_REDIS_URL"]
MODEL = os.environ["BENCH_MODEL"]
BASE_URL = urlsplit(os.environ["BENCH_BASE_URL"])
CEILING = int(os.environ["BENCH_CEILING"])
BACKOFF_MS = int(os.environ["BENCH_BACKOFF_MS"])
GATE = Path(os.environ["BENCH_GATE"])
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
CALL_TIMEOUT_S = 30


class Gate(Middleware):
    """Lets no worker process begin before all of them have booted and the gate is opened."""

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:  # noqa: ARG002  # the hook's signature
        """Say that this process is ready, and wait for the file that opens the gate."""
        (GATE / f"ready-{os.getpid()}").touch()
        while not (GATE / "open").exists():
            time.sleep(0.002)


_broker = RedisBroker(url=URL, namespace=os.environ["BENCH_NAMESPACE"])  # type: ignore[no-untyped-call]
if KIND == "guard":
    _broker.add_middleware(GuardMiddleware(Guard(GuardSettings())))
_broker.add_middleware(CurrentMessage())
_broker.add_middleware(Gate())
dramatiq.set_broker(_broker)

_connections = threading.local()


def call_model() -> None:
    """Make one request over this thread's own connection."""
    message: Any = CurrentMessage.get_current_message()
    connection = getattr(_connections, "mine", None)
    if connection is None:
        connection = http.client.HTTPConnection(str(BASE_URL.hostname), BASE_URL.port, timeout=CALL_TIMEOUT_S)
        _connections.mine = connection
    body = json.dumps(BODY | {"user": str(message.options.get("retries", 0))})
    connection.request("POST", f"{BASE_URL.path}/chat/completions", body, {"x-message-id": message.message_id})
    response = connection.getresponse()
    response.read()
    if response.status != http.HTTPStatus.OK:
        msg = f"the model server answered {response.status}"
        raise RuntimeError(msg)


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
        call = guarded(model=MODEL, **OPTIONS)(call_model)
    case "limiter":
        call = dramatiq.actor(limited(call_model), **OPTIONS)
    case _:
        call = dramatiq.actor(call_model, **OPTIONS)


@dramatiq.actor(queue_name="tiny")
def tiny() -> None:
    """Next to no work, without a guard."""
    sum(range(100))
