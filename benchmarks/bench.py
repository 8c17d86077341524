"""One deployment after the other on one Valkey and one model server, and what each made of its messages."""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.message import Message

from benchmarks.plan import MODEL
from benchmarks.workers import Workers
from guard_middleware.testing.model_server import FakeEndpoint, ModelServer, use_of_ceiling
from guard_middleware.testing.valkey import DATABASES, EmbeddedValkey

if TYPE_CHECKING:
    from types import TracebackType

    from benchmarks.plan import Scenario, System

SCRIPT_COMMANDS = ("evalsha", "eval", "fcall")
_SENDERS = 4
_LONGEST_S = 20.0
_SLACK = 12
"""How many times longer than at a full ceiling a system may take before it is given up."""


class UnfinishedError(RuntimeError):
    """A system did not get through its messages in a time that allows for twelve times as long as it could take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one system made of its messages.

    Attributes:
        ceiling_use: integral of the server's own count in flight over (ceiling x time), without one call's time at
            either end.
        calls_per_message: Redis script calls per message, from the start of the enqueueing to the last ack: all that
            the server ran (``evalsha``, ``eval``, ``fcall``), those of Dramatiq's enqueueing, fetching and acking, of
            its polls of an empty queue, and of the guard's beats included. Nothing is subtracted; the actors make none.
        retries_burned: retries that the messages had behind them when they were run, in all.
        server_max_in_flight: the most calls in flight that the server saw.
    """

    ceiling_use: float
    calls_per_message: float
    retries_burned: int
    server_max_in_flight: int


class Bench:
    """The servers of one run, for the length of a ``with`` block."""

    def __init__(self) -> None:
        self.valkey = EmbeddedValkey()
        self._stack = ExitStack()
        self._databases = itertools.cycle(range(1, DATABASES))

    def __enter__(self) -> Self:
        """Start the store."""
        self._stack.enter_context(self.valkey)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End it."""
        self._stack.close()

    def fresh_url(self) -> str:
        """URL of an empty database that nobody else uses."""
        database = next(self._databases)
        self.valkey.call("FLUSHDB", database=database)
        return self.valkey.database_url(database)

    def script_calls(self) -> int:
        """How many scripts the store has run since it started."""
        info = self.valkey.call("INFO", "commandstats")
        lines = info.decode().splitlines() if isinstance(info, bytes) else []
        found = 0
        for line in lines:
            name, _, values = line.partition(":")
            if name.removeprefix("cmdstat_") in SCRIPT_COMMANDS:
                found += int(values.partition("calls=")[2].partition(",")[0])
        return found

    def measure(self, scenario: Scenario, system: System, messages: int) -> Figures:
        """Run one system through a scenario.

        All its messages are enqueued before the workers, which have booted, are let in.

        Raises:
            UnfinishedError: if it does not get through them.
        """
        url, namespace = self.fresh_url(), f"b{uuid4().hex[:10]}"
        endpoint = FakeEndpoint(name=MODEL, base_ms=scenario.service_ms)
        with ModelServer([endpoint]) as server, redis.Redis.from_url(url) as client:
            environment = app_environment(url, namespace, system.kind, server.url(MODEL), scenario.ceiling)
            environment["BENCH_BACKOFF_MS"] = str(system.backoff_ms)
            with Workers(system.threads(scenario), "calls", environment) as workers:
                calls_before = self.script_calls()
                enqueue(url, namespace, "call", "calls", messages, guard_priority=system.priority)
                workers.open_gate()
                deadline = time.monotonic() + _LONGEST_S + _SLACK * scenario.shortest_s
                while left := left_in(client, namespace, "calls"):
                    workers.check()
                    if time.monotonic() > deadline:
                        msg = f"{system.name} in {scenario.name}: {left} of {messages} messages are not done"
                        raise UnfinishedError(msg)
                    time.sleep(0.05)
                calls = self.script_calls() - calls_before
            log = [request for request in server.log() if request.number]
            stats = server.stats()[MODEL]
        if len(log) != messages:
            msg = f"{system.name} in {scenario.name}: the server saw {len(log)} calls for {messages} messages"
            raise UnfinishedError(msg)
        return Figures(
            ceiling_use=use_of_ceiling(log, scenario.ceiling, trim_s=scenario.service_ms / 1000),
            calls_per_message=calls / messages,
            retries_burned=sum(int(request.user) for request in log),
            server_max_in_flight=stats.most_in_flight,
        )


def app_environment(url: str, namespace: str, kind: str, base_url: str, ceiling: int) -> dict[str, str]:
    """The environment of `benchmarks.app`, the guard's settings included."""
    models = [{"id": MODEL, "base_url": base_url, "max_concurrent_requests": ceiling}]
    return {
        "BENCH_KIND": kind,
        "BENCH_REDIS_URL": url,
        "BENCH_NAMESPACE": namespace,
        "BENCH_MODEL": MODEL,
        "BENCH_BASE_URL": base_url,
        "BENCH_CEILING": str(ceiling),
        "BENCH_BACKOFF_MS": "100",
        "GUARD_REDIS_URL": url,
        "GUARD_NAMESPACE": namespace,
        "GUARD_MODELS": json.dumps(models),
        "GUARD_FIRST_START_HOLD_S": "0",
    }


def enqueue(url: str, namespace: str, actor: str, queue: str, count: int, **options: Any) -> None:
    """Enqueue as an application does, from a few threads."""
    broker = RedisBroker(url=url, namespace=namespace)  # type: ignore[no-untyped-call]  # it has no annotations

    def send(_: int) -> None:
        message: Message[Any] = Message(queue_name=queue, actor_name=actor, args=(), kwargs={}, options=dict(options))
        broker.enqueue(message)

    with ThreadPoolExecutor(_SENDERS) as pool:
        list(pool.map(send, range(count)))
    broker.client.close()
    broker.client.connection_pool.disconnect()


def left_in(client: redis.Redis, namespace: str, queue: str) -> int:
    """Messages that are not done: queued, parked, delayed, or with a worker."""
    lengths: list[Any] = [client.hlen(f"{namespace}:{queue}{kind}.msgs") for kind in ("", ".DQ")]
    return sum(lengths)
