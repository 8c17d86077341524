"""Workers in this process, over a real broker and a real store: for tests that have to look inside, or reach in."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import ActorNotFound
from dramatiq.message import Message
from dramatiq.middleware import AsyncIO, CurrentMessage, GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend as RateLimits
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend, StubBackend

from guard_middleware import Guard, GuardMiddleware, GuardSettings, current_permit, guarded
from guard_middleware.core.commands import Action, Operate
from guard_middleware.queueing.middleware import member_of
from guard_middleware.store.redis import RedisStore
from tests.support.deployment import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self

    from dramatiq import Actor, Broker, Middleware

    from guard_middleware.core.commands import Snapshot
    from guard_middleware.queueing.member import Member

LEASE_S = 30.0
"""So long that nothing in a test is explained by a lease that ran out."""
HEARTBEAT_S = 0.5


class Bench:
    """One broker, its workers, and the guard's store; what ran is counted by the actors' bodies themselves.

    Args:
        redis_url: of the broker.
        namespace: of Dramatiq's keys and of the guard's.
        guard_url: of the guard's store; the broker's own if not given.
        models: fields of each endpoint, by id.
        before: middleware between the default ones and the guard.
        after: middleware between the guard and CurrentMessage.
        is_guarded: False for the same broker and actors without a guard, to compare with.
        stub: use a StubBroker, which cannot park.
        coroutines: run Dramatiq's event loop, of which a process has one, for async actors.
        settings: further fields of the guard's settings.
    """

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        *,
        guard_url: str = "",
        models: dict[str, dict[str, Any]] | None = None,
        before: Sequence[Middleware] = (),
        after: Sequence[Middleware] = (),
        is_guarded: bool = True,
        stub: bool = False,
        coroutines: bool = False,
        **settings: Any,
    ) -> None:
        self.namespace = namespace
        self.models = models or {"chat": {"max_concurrent_requests": 1}}
        self.settings = GuardSettings(
            **{
                "redis_url": guard_url or redis_url,
                "namespace": namespace,
                "models": [{"id": name, **fields} for name, fields in self.models.items()],
                "first_start_hold_s": 0,
                "lease_s": LEASE_S,
                "heartbeat_s": HEARTBEAT_S,
                **settings,
            }
        )
        self.store = RedisStore.from_url(guard_url or redis_url, namespace, timeout_s=5)
        self.guard = Guard(self.settings)
        self.is_guarded = is_guarded
        self.broker: Broker = StubBroker() if stub else RedisBroker(url=redis_url, namespace=namespace)
        self.backend = StubBackend() if stub else RedisBackend(url=redis_url, namespace=f"{namespace}-results")
        self._rates = RateLimits(url=redis_url)
        self.broker.add_middleware(Results(backend=self.backend))
        self.broker.add_middleware(GroupCallbacks(self._rates))
        if coroutines:
            self.broker.add_middleware(AsyncIO())
        for one in before:
            self.broker.add_middleware(one)
        if is_guarded:
            self.broker.add_middleware(GuardMiddleware(self.guard))
        for one in after:
            self.broker.add_middleware(one)
        self.broker.add_middleware(CurrentMessage())
        self.workers: list[dramatiq.Worker] = []
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.most = 0
        self._running = 0
        self._lock = threading.Lock()
        self._gates: list[threading.Event] = []

    def __enter__(self) -> Self:
        """Nothing runs before `start`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Open every gate, end the workers, and hang up."""
        for gate in self._gates:
            gate.set()
        for worker in self.workers:
            worker.stop(timeout=10_000)
        self.guard.close()
        self.store.close()
        for user in (self.broker, self.backend, self._rates):
            client = getattr(user, "client", None)
            if client is not None and not isinstance(user, StubBroker):
                client.connection_pool.disconnect()

    # -- actors ------------------------------------------------------------------------------------------------------

    def actor(
        self,
        fn: Callable[..., Any] | None = None,
        *,
        model: str | None = "chat",
        guard_priority: str | None = None,
        **options: Any,
    ) -> Any:
        """Declare an actor whose body counts itself: guarded, unless `model` is `None`."""

        def declare(body: Callable[..., Any]) -> Actor[..., Any]:
            counted = self._counted_async(body, model) if iscoroutinefunction(body) else self._counted(body, model)
            declared = dramatiq.actor(counted, broker=self.broker, **{"min_backoff": 10, "max_backoff": 50, **options})
            if model is not None and self.is_guarded:
                guarded(model=model, priority=guard_priority)(declared)
            return declared

        return declare if fn is None else declare(fn)

    def _counted(self, body: Callable[..., Any], model: str | None) -> Callable[..., Any]:
        @functools.wraps(body)
        def counted(*args: Any, **kwargs: Any) -> Any:
            message_id = self._begins(model)
            try:
                result = body(*args, **kwargs)
            finally:
                self._ends(model)
            self.ended.append(message_id)
            return result

        return counted

    def _counted_async(self, body: Callable[..., Any], model: str | None) -> Callable[..., Any]:
        @functools.wraps(body)
        async def counted(*args: Any, **kwargs: Any) -> Any:
            message_id = self._begins(model)
            try:
                result = await body(*args, **kwargs)
            finally:
                self._ends(model)
            self.ended.append(message_id)
            return result

        return counted

    def _begins(self, model: str | None) -> str:
        message = CurrentMessage.get_current_message()
        with self._lock:
            self.begun.append(message.message_id)
            if model is not None:
                self._running += 1
                self.most = max(self.most, self._running)
        if model is not None and self.is_guarded:
            assert current_permit() is not None, "I2: a guarded body runs without a permit"
        return message.message_id

    def _ends(self, model: str | None) -> None:
        if model is not None:
            with self._lock:
                self._running -= 1

    def gate(self) -> threading.Event:
        """An event that actors may wait for; it is set at the latest when the test ends."""
        gate = threading.Event()
        self._gates.append(gate)
        return gate

    # -- workers -----------------------------------------------------------------------------------------------------

    def start(self, *, threads: int = 2, queues: set[str] | None = None, worker_timeout: int = 50) -> dramatiq.Worker:
        """Start a worker as Dramatiq's CLI does."""
        worker = dramatiq.Worker(self.broker, worker_timeout=worker_timeout, worker_threads=threads, queues=queues)
        self.workers.append(worker)
        worker.start()
        if self.is_guarded:
            wait_until(lambda: self.member.heartbeat.process in self.snapshot().processes, 5, "the worker has reported")
        return worker

    @property
    def worker(self) -> dramatiq.Worker:
        """The first worker."""
        return self.workers[0]

    @property
    def member(self) -> Member:
        """This process's member for the broker."""
        member = member_of(self.broker)
        assert member is not None
        return member

    def member_is_gone(self) -> bool:
        """Whether this process has no member for the broker any more."""
        return member_of(self.broker) is None

    def threads_alive(self) -> bool:
        """Whether all worker threads live."""
        return all(thread.is_alive() for worker in self.workers for thread in worker.workers)

    # -- the store ---------------------------------------------------------------------------------------------------

    @contextmanager
    def full(self, model: str = "chat") -> Iterator[None]:
        """Let a caller hold the whole ceiling of an endpoint for the length of a block."""
        ceiling = self.settings.endpoint(model).ceiling(self.settings.model_max_concurrent_requests)
        with self.guard.permit(model, cost=ceiling, priority="interactive", timeout=10):
            yield

    def pause(self, model: str = "chat") -> None:
        """Let nothing start at an endpoint, as an operator does: what is delivered parks."""
        self.store.operate(Operate(action=Action.PAUSE, target=model))

    def resume(self, model: str = "chat") -> None:
        """Go on after `pause`."""
        self.store.operate(Operate(action=Action.RESUME, target=model))

    def snapshot(self) -> Snapshot:
        """The store's state."""
        return self.store.snapshot()

    def leases(self) -> int:
        """How many leases are live."""
        return len(self.snapshot().leases)

    def parked(self, queue: str | None = None) -> list[str]:
        """Ids of the deliveries that stand in waiting lines, of one queue or of all."""
        return [
            one
            for (_, namespace, name), ids in self.snapshot().lines.items()
            if namespace and (queue is None or name == queue)
            for one in ids
        ]

    def wait_parked(self, count: int, queue: str | None = None) -> list[str]:
        """Wait until so many messages stand in line."""
        wait_until(lambda: len(self.parked(queue)) == count, 10, f"{count} parked")
        return self.parked(queue)

    # -- the broker --------------------------------------------------------------------------------------------------

    def count_of(self, message: Message[Any]) -> tuple[int, int]:
        """How often a message's body has begun, and has ended by returning."""
        return self.begun.count(message.message_id), self.ended.count(message.message_id)

    def wait_ended(self, *messages: Message[Any], timeout_s: float = 10) -> None:
        """Wait until all of these have run to their end."""
        wanted = {one.message_id for one in messages}
        wait_until(lambda: wanted <= set(self.ended), timeout_s, "all have run")

    def stored(self, queue: str | None = None) -> list[Message[Any]]:
        """Every message that the broker still has, of a queue or of all: parked and fetched ones included.

        A StubBroker tells only how many those are.
        """
        names = [queue, f"{queue}.DQ"] if queue else [*self.broker.queues, *self.broker.delay_queues]
        if isinstance(self.broker, StubBroker):
            return [one for name in set(names) for one in [None] * self.broker.queues[name].unfinished_tasks]
        with self.broker.client.pipeline(transaction=True) as pipe:  # a message may be on its way between two of them
            for name in sorted(set(names)):
                pipe.hvals(f"{self.namespace}:{name}.msgs")
            return [Message.decode(one) for found in pipe.execute() for one in found]

    def dead(self) -> list[Message[Any]]:
        """Every dead-lettered message."""
        if isinstance(self.broker, StubBroker):
            return [one._message for one in self.broker.dead_letters]
        found = []
        for name in sorted(self.broker.queues):
            found += self.broker.client.hvals(f"{self.namespace}:{name}.XQ.msgs")
        return [Message.decode(one) for one in found]

    def wait_idle(self, timeout_s: float = 10) -> None:
        """Wait until the broker has nothing left, nothing is leased and nobody waits."""

        def idle() -> bool:
            snapshot = self.snapshot()
            return not (self.stored() or snapshot.leases or any(snapshot.lines.values()))

        try:
            wait_until(idle, timeout_s)
        except AssertionError:
            snapshot = self.snapshot()
            msg = f"not idle: stored={self.stored()} leases={snapshot.leases} lines={snapshot.lines}"
            raise AssertionError(msg) from None

    def counts(self) -> Counter[str]:
        """How often each message has run to its end."""
        return Counter(self.ended)


def interruptible_wait(gate: threading.Event, seconds: float = 20) -> bool:
    """Wait in small steps, so that an exception that is raised in this thread arrives."""
    return any(gate.wait(0.005) for _ in range(int(seconds / 0.005)))


async def stubborn_wait(gate: threading.Event) -> None:
    """Wait in a coroutine that does not let itself be cancelled."""
    while not gate.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


def knows(broker: Broker, actor_name: str) -> bool:
    """Whether an actor is declared on a broker."""
    try:
        broker.get_actor(actor_name)
    except ActorNotFound:
        return False
    return True
