"""One deployment after the other on one Valkey and one model server, and what each made of its messages."""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.message import Message

from benchmarks.plan import MODEL, PROCESSES
from benchmarks.workers import dramatiq_workers
from guard_middleware import Guard, GuardSettings
from guard_middleware.testing.model_server import FakeEndpoint, ModelServer, use_of_ceiling
from guard_middleware.testing.valkey import DATABASES, EmbeddedValkey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from benchmarks.plan import Scenario, System
    from guard_middleware.testing.model_server import Request

SCRIPT_COMMANDS = ("evalsha", "eval", "fcall")
SLOW_US = 500
"""Scripts that take longer are looked at one by one."""
_SENDERS = 4
_LONGEST_S = 20.0
_SLACK = 12
"""How many times longer than at a full ceiling a system may take before it is given up."""
_CHUNK = 5_000


class UnfinishedError(RuntimeError):
    """A system did not get through its messages in a time that allows for twelve times as long as it could take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one system made of its messages.

    Attributes:
        ceiling_use: integral of the server's own count in flight over (ceiling x time), without one call's time at
            either end.
        messages_per_s: calls that the server ended, from its first one's arrival to its last one's end.
        calls_per_message: Redis script calls per message, from the start of the enqueueing to the last ack: all that
            the server ran (``evalsha``, ``eval``, ``fcall``), those of Dramatiq's enqueueing, fetching and acking, of
            its polls of an empty queue, and of the guard's beats included. Nothing is subtracted; the actors make none.
        retries_burned: retries that the messages had behind them when they were run, in all.
        server_max_in_flight: the most calls in flight that the server saw.
    """

    ceiling_use: float
    messages_per_s: float
    calls_per_message: float
    retries_burned: int
    server_max_in_flight: int


class Bench:
    """The servers of one run, for the length of a ``with`` block."""

    def __init__(self) -> None:
        self.valkey = EmbeddedValkey(
            options={"slowlog-log-slower-than": str(SLOW_US), "slowlog-max-len": "10000", "latency-tracking": "yes"}
        )
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

    def _info(self, section: str) -> dict[str, str]:
        info = self.valkey.call("INFO", section)
        lines = info.decode().splitlines() if isinstance(info, bytes) else []
        return {name: values for name, _, values in (line.partition(":") for line in lines)}

    def script_calls(self) -> int:
        """How many scripts the store has run since it started, or since `forget_slow`."""
        found = self._info("commandstats")
        return sum(
            int(found[f"cmdstat_{name}"].partition("calls=")[2].partition(",")[0])
            for name in SCRIPT_COMMANDS
            if f"cmdstat_{name}" in found
        )

    def forget_slow(self) -> None:
        """Begin to count scripts and how long they take afresh."""
        self.valkey.call("CONFIG", "RESETSTAT")
        self.valkey.call("SLOWLOG", "RESET")

    def slow(self) -> dict[str, Any]:
        """How long the scripts took inside of the store, in ms, and the name of the slowest ("" if none took long).

        The percentiles are those of the guard's or of Dramatiq's scripts, whichever is the larger.
        """
        statistics = self._info("latencystats")
        texts = [statistics.get(f"latency_percentiles_usec_{name}", "") for name in SCRIPT_COMMANDS]
        found = [dict(one.split("=") for one in text.split(",")) for text in texts if text]
        rows: Any = self.valkey.call("SLOWLOG", "GET", "-1")
        slow = [(took_us, words) for _, _, took_us, words, *_ in rows if words[0].decode().lower() in SCRIPT_COMMANDS]
        longest_us, words = max(slow, default=(0, []))
        return {
            **{
                key: max((float(one[percentile]) / 1000 for one in found), default=None)
                for key, percentile in (("script_p99_ms", "p99"), ("script_p999_ms", "p99.9"))
            },
            "script_max_ms": longest_us / 1000 if slow else None,
            "slowest_script": _script_name(*words[:2]) if slow else "",
        }

    @contextmanager
    def deployment(self, scenario: Scenario, kind: str) -> Iterator[Deployment]:
        """An empty database and a fresh model server."""
        url, namespace = self.fresh_url(), f"b{uuid4().hex[:10]}"
        endpoint = FakeEndpoint(name=MODEL, base_ms=scenario.service_ms)
        with ModelServer([endpoint]) as server, redis.Redis.from_url(url) as client:
            yield Deployment(
                url=url,
                namespace=namespace,
                server=server,
                client=client,
                environment=app_environment(url, namespace, kind, server.url(MODEL), scenario),
            )

    def measure(self, scenario: Scenario, system: System, messages: int, processes: int = PROCESSES) -> Figures:
        """Run one system through a scenario.

        All its messages are enqueued before the workers, which have booted, are let in.

        Raises:
            UnfinishedError: if it does not get through them.
        """
        with self.deployment(scenario, system.kind) as one:
            environment = one.environment | {"BENCH_BACKOFF_MS": str(system.backoff_ms)}
            with dramatiq_workers(system.threads(scenario, processes), "calls", environment, processes) as workers:
                calls_before = self.script_calls()
                enqueue(one.url, one.namespace, "call", "calls", messages, guard_priority=system.priority)
                workers.open_gate()

                def is_done() -> bool:
                    workers.check()
                    return one.left("calls") == 0

                until(is_done, scenario, f"{system.name} in {scenario.name}")
                calls = self.script_calls() - calls_before
            log = one.calls()
            in_flight = one.server.stats()[MODEL].most_in_flight
        if len(log) != messages:
            msg = f"{system.name} in {scenario.name}: the server saw {len(log)} calls for {messages} messages"
            raise UnfinishedError(msg)
        return Figures(
            ceiling_use=use_of_ceiling(log, scenario.ceiling, trim_s=scenario.service_ms / 1000),
            messages_per_s=rate(log),
            calls_per_message=calls / messages,
            retries_burned=sum(int(request.user) for request in log),
            server_max_in_flight=in_flight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What one measurement has for itself.

    Attributes:
        url: of the database.
        namespace: of the broker and of the guard.
        server: the model server.
        client: of the database.
        environment: for `benchmarks.app` and `benchmarks.caller`, the guard's settings included.
    """

    url: str
    namespace: str
    server: ModelServer
    client: redis.Redis
    environment: dict[str, str]

    def guard(self) -> Guard:
        """A guard for this process, with the settings of the others."""
        return Guard(GuardSettings(**{key: value for key, value in self.environment.items() if key[:6] == "GUARD_"}))

    def left(self, queue: str) -> int:
        """Messages that are not done: queued, parked, delayed, or with a worker."""
        lengths: list[Any] = [self.client.hlen(f"{self.namespace}:{queue}{kind}.msgs") for kind in ("", ".DQ")]
        return int(sum(lengths))

    def not_parked(self, queue: str) -> int:
        """Messages that are queued or with a worker."""
        waiting: Any = self.client.llen(f"{self.namespace}:{queue}")
        fetched: list[Any] = [
            self.client.scard(key) for key in self.client.scan_iter(f"{self.namespace}:__acks__.*.{queue}")
        ]
        return int(waiting + sum(fetched))

    def ended(self) -> int:
        """Calls that the model server has ended."""
        return sum(self.server.stats()[MODEL].statuses.values())

    def calls(self) -> list[Request]:
        """The model server's log of the calls that have ended, in the order in which they did."""
        return [request for request in self.server.log() if request.number and request.ending]


def _script_name(command: bytes, script: bytes) -> str:
    """What a function does is the end of its name; what is called by its digest is Dramatiq's."""
    return script.decode().rpartition("_")[2] if command.lower() == b"fcall" else "dramatiq"


def app_environment(url: str, namespace: str, kind: str, base_url: str, scenario: Scenario) -> dict[str, str]:
    """The environment of `benchmarks.app` and `benchmarks.caller`, the guard's settings included."""
    models = [{"id": MODEL, "base_url": base_url, "max_concurrent_requests": scenario.ceiling}]
    return {
        "BENCH_KIND": kind,
        "BENCH_REDIS_URL": url,
        "BENCH_NAMESPACE": namespace,
        "BENCH_MODEL": MODEL,
        "BENCH_BASE_URL": base_url,
        "BENCH_CEILING": str(scenario.ceiling),
        "BENCH_SERVICE_MS": str(scenario.service_ms),
        "BENCH_BACKOFF_MS": "100",
        "GUARD_REDIS_URL": url,
        "GUARD_NAMESPACE": namespace,
        "GUARD_MODELS": json.dumps(models),
        "GUARD_FIRST_START_HOLD_S": "0",
    }


def message_for(actor: str, queue: str, *args: Any, **options: Any) -> Message[Any]:
    """A message as an application makes it."""
    return Message(queue_name=queue, actor_name=actor, args=args, kwargs={}, options=dict(options))


def enqueue(url: str, namespace: str, actor: str, queue: str, count: int, **options: Any) -> None:
    """Enqueue as an application does, from a few threads."""
    broker = RedisBroker(url=url, namespace=namespace)  # type: ignore[no-untyped-call]  # it has no annotations
    with ThreadPoolExecutor(_SENDERS) as pool:
        list(pool.map(lambda _: broker.enqueue(message_for(actor, queue, **options)), range(count)))
    broker.client.close()
    broker.client.connection_pool.disconnect()


def seed(one: Deployment, actor: str, queue: str, count: int, *args: Any, **options: Any) -> None:
    """Put messages where Dramatiq's enqueueing puts them, thousands in one transaction, without a script."""
    key = f"{one.namespace}:{queue}"
    for begin in range(0, count, _CHUNK):
        ids = [uuid4().hex for _ in range(min(_CHUNK, count - begin))]
        payloads = {name: message_for(actor, queue, *args, redis_message_id=name, **options).encode() for name in ids}
        with one.client.pipeline() as pipeline:
            pipeline.hset(f"{key}.msgs", mapping=payloads)  # type: ignore[arg-type]  # bytes are fine
            pipeline.rpush(key, *ids)
            pipeline.execute()


def until(is_done: Callable[[], bool], scenario: Scenario, what: str) -> None:
    """Wait, for several times as long as the scenario takes at a full ceiling.

    Raises:
        UnfinishedError: if it does not come.
    """
    deadline = time.monotonic() + _LONGEST_S + _SLACK * scenario.shortest_s
    while not is_done():
        if time.monotonic() > deadline:
            msg = f"{what}: not done in time"
            raise UnfinishedError(msg)
        time.sleep(0.02)


def rate(log: Sequence[Request]) -> float:
    """Calls per second, from the first one's arrival to the last one's end."""
    return len(log) / (max(call.t_end for call in log) - min(call.t_start for call in log))
