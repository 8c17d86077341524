"""What the guard relies on in Dramatiq's private parts, as checks that run against whichever Dramatiq is imported.

Run as a program it does all of them and writes down what went wrong::

    python -m tests.support.layout redis://127.0.0.1:6379/0 report.json
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import dramatiq
from dramatiq import worker as dramatiq_worker
from dramatiq.asyncio import async_to_sync
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.composition import group
from dramatiq.message import Message
from dramatiq.middleware import (
    AgeLimit,
    GroupCallbacks,
    Interrupt,
    Middleware,
    MiddlewareError,
    Shutdown,
    SkipMessage,
    TimeLimitExceeded,
    default_middleware,
)
from dramatiq.rate_limits.backends import StubBackend as Barriers
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from guard_middleware.queueing import private
from tests.support.bench import Bench
from tests.support.deployment import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHECKS: dict[str, Callable[[World], None]] = {}


class World:
    """A broker in a namespace of its own, without any guard."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.namespace = f"l{uuid4().hex[:10]}"
        self.broker = RedisBroker(url=url, namespace=self.namespace)
        self.redis = self.broker.client

    def send(self, queue_name: str = "q", actor_name: str = "work", **options: Any) -> Message[Any]:
        """Enqueue one message."""
        message = Message(queue_name=queue_name, actor_name=actor_name, args=(), kwargs={}, options=options)
        return self.broker.enqueue(message)

    def ids(self, queue_name: str = "q") -> list[str]:
        """The ids in a queue's list."""
        return [one.decode() for one in self.redis.lrange(f"{self.namespace}:{queue_name}", 0, -1)]

    def payloads(self, queue_name: str = "q") -> dict[str, bytes]:
        """The messages of a queue, by id."""
        return {key.decode(): value for key, value in self.redis.hgetall(f"{self.namespace}:{queue_name}.msgs").items()}

    def acks(self, queue_name: str = "q") -> set[str]:
        """The ids that this broker has fetched and not acked."""
        found = self.redis.smembers(f"{self.namespace}:__acks__.{self.broker.broker_id}.{queue_name}")
        return {one.decode() for one in found}

    def fetched(self, queue_name: str = "q") -> tuple[Any, Any, str]:
        """Send one message and fetch it: its consumer, its proxy, its id."""
        sent = self.send(queue_name)
        consumer = self.broker.consume(queue_name, prefetch=5, timeout=10)
        proxy = next(consumer)
        assert proxy is not None
        return consumer, proxy, sent.options["redis_message_id"]

    @contextmanager
    def working(self, threads: int = 1) -> Iterator[dramatiq.Worker]:
        """A worker of this broker for the length of a block."""
        worker = dramatiq.Worker(self.broker, worker_timeout=20, worker_threads=threads)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop(timeout=5_000)


def check(function: Callable[[World], None]) -> Callable[[World], None]:
    """Add a check; its docstring is what must hold."""
    CHECKS[function.__name__] = function
    return function


# -- the keys of RedisBroker, which the scripts use ------------------------------------------------------------------


@check
def enqueue_writes_id_and_payload(world: World) -> None:
    """`<ns>:<queue>` is a list of redis_message_ids, `<ns>:<queue>.msgs` a hash from them to the encoded message."""
    sent = world.send()
    ident = sent.options["redis_message_id"]
    assert world.ids() == [ident]
    assert world.payloads() == {ident: sent.encode()}
    assert private.delivery_id_of(private.decode(world.payloads()[ident])) == ident


@check
def fetch_moves_the_id_into_this_workers_ack_set(world: World) -> None:
    """`<ns>:__acks__.<broker_id>.<queue>` is a set of what was fetched and not acked; the payload stays."""
    _, proxy, ident = world.fetched()
    assert world.ids() == []
    assert world.acks() == {ident}
    assert set(world.payloads()) == {ident}
    assert private.delivery_id_of(proxy) == ident
    assert private.namespace_of(world.broker) == world.namespace
    assert private.worker_id_of(world.broker) == world.broker.broker_id


@check
def ack_needs_the_id_in_the_ack_set(world: World) -> None:
    """An ack removes id and payload; of an id that is not in the ack set it does nothing at all (a parked message)."""
    consumer, proxy, ident = world.fetched()
    world.redis.srem(f"{world.namespace}:__acks__.{world.broker.broker_id}.q", ident)
    consumer.ack(proxy)
    assert set(world.payloads()) == {ident}
    world.redis.sadd(f"{world.namespace}:__acks__.{world.broker.broker_id}.q", ident)
    consumer.ack(proxy)
    assert world.payloads() == {}
    assert world.acks() == set()


@check
def nack_needs_the_id_in_the_ack_set(world: World) -> None:
    """A nack moves the message to `.XQ` and `.XQ.msgs`; of an id that is not in the ack set it does nothing."""
    consumer, proxy, ident = world.fetched()
    world.redis.srem(f"{world.namespace}:__acks__.{world.broker.broker_id}.q", ident)
    consumer.nack(proxy)
    assert set(world.payloads()) == {ident}
    world.redis.sadd(f"{world.namespace}:__acks__.{world.broker.broker_id}.q", ident)
    private.reject(world.broker, "q", ident)
    assert world.payloads() == {}
    assert world.redis.zscore(f"{world.namespace}:q.XQ", ident)
    assert world.redis.hexists(f"{world.namespace}:q.XQ.msgs", ident)


@check
def requeue_needs_the_id_in_the_ack_set_and_goes_to_the_tail(world: World) -> None:
    """`do_requeue` pushes fetched ids to the tail of their queue, and passes over all others."""
    _, _, ident = world.fetched()
    second = world.send().options["redis_message_id"]
    private.requeue(world.broker, "q", [ident, "never-fetched", ""])
    assert world.ids() == [second, ident]
    assert world.acks() == set()


@check
def a_voided_proxy_can_do_nothing(world: World) -> None:
    """After `void`, ack, nack and requeue of the proxy leave the message alone, wherever it is."""
    consumer, proxy, ident = world.fetched()
    private.void(proxy)
    consumer.ack(proxy)
    consumer.nack(proxy)
    consumer.requeue([proxy])
    assert set(world.payloads()) == {ident}
    assert world.acks() == {ident}
    assert world.ids() == []


@check
def queue_size_counts_a_parked_message(world: World) -> None:
    """`qsize`, and with it `join`, counts payloads: a message in no list and no ack set is not forgotten."""
    _, _, ident = world.fetched()
    world.redis.srem(f"{world.namespace}:__acks__.{world.broker.broker_id}.q", ident)
    assert world.broker.do_qsize("q") == 1


@check
def flush_deletes_the_payload_of_a_parked_message(world: World) -> None:
    """After `flush` a parked id has no payload: the scripts tell ghosts by that."""
    _, _, ident = world.fetched()
    world.redis.srem(f"{world.namespace}:__acks__.{world.broker.broker_id}.q", ident)
    world.broker.declare_queue("q")
    world.broker.flush("q")
    assert world.payloads() == {}


@check
def every_enqueue_makes_a_new_delivery_id(world: World) -> None:
    """The same message enqueued twice has one message_id and two delivery ids."""
    message = Message(queue_name="q", actor_name="work", args=(), kwargs={}, options={"redis_message_id": "old"})
    both = [world.broker.enqueue(message), world.broker.enqueue(message)]
    assert {one.message_id for one in both} == {message.message_id}
    assert len({one.options["redis_message_id"] for one in both} | {"old"}) == 3


# -- the worker -------------------------------------------------------------------------------------------------------


@check
def a_pushed_message_comes_out_before_everything_fetched(world: World) -> None:
    """`private.push` puts the same kind of item as the consumer does, ahead of all actors' priorities."""
    dramatiq.actor(lambda: None, actor_name="urgent", broker=world.broker, priority=-(2**31), queue_name="q")
    worker = dramatiq.Worker(world.broker, worker_threads=1)
    assert isinstance(worker.work_queue, queue.PriorityQueue)
    thread = dramatiq_worker.ConsumerThread(
        broker=world.broker, queue_name="q", prefetch=2, work_queue=worker.work_queue, worker_timeout=10
    )
    fetched = private.decode(world.send(actor_name="urgent").encode())
    pushed = private.decode(world.send().encode())
    thread.handle_message(fetched)
    private.push(worker, pushed)
    private.push(worker, private.decode(world.send().encode()))  # two of one priority can be compared
    items = [worker.work_queue.get_nowait() for _ in range(3)]
    assert len({type(one) for one in items}) == 1
    messages = [one[1] if isinstance(one, tuple) else one.message for one in items]
    assert messages[2] is fetched
    assert pushed in messages[:2]


@check
def the_workers_threads_and_consumers_are_as_expected(world: World) -> None:
    """`workers`, `consumers`, their flags and consumers, for each queue and its delay queue."""
    gate, inside = threading.Event(), []

    def body() -> None:
        inside.append(private.on_worker_thread())
        gate.wait(10)

    dramatiq.actor(body, actor_name="work", broker=world.broker, queue_name="q")
    assert not private.on_worker_thread()
    with world.working(threads=2) as worker:
        assert set(worker.consumers) == {"q", "q.DQ"}
        wait_until(lambda: private.consumed_queues(worker) == ("q",), 5)
        assert isinstance(private.consumer_of(worker, "q"), dramatiq_worker.ConsumerThread)
        assert private.consumer_of(worker, "other") is None
        wait_until(lambda: private.idle_threads(worker) == 2, 5)
        world.send()
        wait_until(lambda: inside == [True], 5)
        assert private.idle_threads(worker) == 1
        assert private.idle_threads(worker, {1}, {1}) == 2
        gate.set()
        wait_until(lambda: private.idle_threads(worker) == 2, 5)
        assert private.threads_beside(worker) == 2
        assert private.threads_beside(worker, {worker.workers[0].ident}) == 1
        worker.pause()
        assert private.idle_threads(worker) == private.threads_beside(worker) == 0
        assert private.consumed_queues(worker) == ()
        worker.resume()


@check
def a_voided_delivery_is_acked_without_a_command(world: World) -> None:
    """The consumer's `ack` can be replaced on the object, and `queued_message_ids` is what it counts by."""
    dramatiq.actor(lambda: None, actor_name="work", broker=world.broker, queue_name="q")
    with world.working() as worker:
        wait_until(lambda: private.consumed_queues(worker) == ("q",), 5)
        thread = private.consumer_of(worker, "q")
        proxy = private.decode(world.send("other").encode())
        proxy._message.__dict__["queue_name"] = "q"
        thread.consumer.queued_message_ids.add(proxy.message_id)
        private.void(proxy)
        private.spare_ack(worker, proxy)
        sent, sound = [], world.broker._dispatch
        world.broker._dispatch = lambda command: (sent.append(command), sound(command))[1]
        thread.post_process_message(proxy)
        assert "ack" not in sent
        assert proxy.message_id not in thread.consumer.queued_message_ids


@check
def a_worker_that_stops_fetching_leaves_the_queue_alone(world: World) -> None:
    """A consumer that may prefetch nothing fetches nothing more; the delay queue's goes on."""
    dramatiq.actor(lambda: None, actor_name="work", broker=world.broker, queue_name="q")
    with world.working() as worker:
        wait_until(lambda: private.consumed_queues(worker) == ("q",), 5)
        private.stop_fetching(worker)
        consumer: Any = private.consumer_of(worker, "q").consumer
        polls = consumer.misses
        wait_until(lambda: consumer.misses > polls + 1, 5)  # what it had begun to fetch has come
        sent = world.send().options["redis_message_id"]
        delayed = world.broker.enqueue(
            Message(queue_name="q", actor_name="work", args=(), kwargs={}, options={}), delay=10
        )
        wait_until(lambda: len(world.ids()) == 2, 5)  # the delayed one was promoted
        assert world.ids()[0] == sent
        assert delayed.message_id in {private.decode(one).message_id for one in world.payloads().values()}


@check
def a_further_queue_is_consumed_in_spite_of_a_whitelist(world: World) -> None:
    """`consume_also` before the start and after it, for a worker that was told its queues."""
    worker = dramatiq.Worker(world.broker, queues={"q"}, worker_timeout=20, worker_threads=1)
    ran = []
    dramatiq.actor(lambda: ran.append(1), actor_name="work", broker=world.broker, queue_name="q")
    private.consume_also(worker, "q.low")
    worker.start()
    try:
        private.consume_also(worker, "q.lower")
        world.send("q.low")
        world.send("q.lower")
        wait_until(lambda: len(ran) == 2, 5)
    finally:
        worker.stop(timeout=5_000)


# -- hooks ------------------------------------------------------------------------------------------------------------


class Recorder(Middleware):
    """Writes down hooks under a name, and does what it is told in its before-hook."""

    def __init__(self, name: str, log: list[str], before: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.log = log
        self.act = before

    def before_process_message(self, broker: Any, message: Any) -> None:
        self.log.append(f"before {self.name}")
        self.act()

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self.log.append(f"after {self.name}")

    def after_skip_message(self, broker: Any, message: Any) -> None:
        self.log.append(f"skip {self.name}")

    def before_ack(self, broker: Any, message: Any) -> None:
        self.log.append(f"ack {self.name}")


class FirstRecorder(Recorder):
    """A class of its own: Dramatiq warns about two of one class."""


def processed(world: World, log: list[str], before: Callable[[], None] = lambda: None) -> list[str]:
    """Let one message through two recorders, the second of which acts, and return what was recorded."""
    world.broker.add_middleware(FirstRecorder("one", log))
    world.broker.add_middleware(Recorder("two", log, before))
    dramatiq.actor(lambda: log.append("actor"), actor_name="work", broker=world.broker, queue_name="q")
    with world.working():
        world.send()
        wait_until(lambda: "ack two" in log, 5)
        wait_until(lambda: world.payloads() == {}, 5)
    return log


@check
def hooks_run_in_order_and_back(world: World) -> None:
    """Before in order, after in reverse, then the ack."""
    assert processed(world, []) == [
        "before one", "before two", "actor", "after two", "after one", "ack one", "ack two",
    ]  # fmt: skip


@check
def a_skip_runs_every_skip_hook_and_acks(world: World) -> None:
    """SkipMessage ends processing; after_skip_message runs on all middleware; the message is acked."""

    def skip() -> None:
        raise SkipMessage

    assert processed(world, [], skip) == ["before one", "before two", "skip two", "skip one", "ack one", "ack two"]


@check
def an_ordinary_exception_in_a_hook_is_swallowed(world: World) -> None:
    """emit_before lets only MiddlewareError through: after anything else the actor runs."""

    def fail() -> None:
        raise RuntimeError

    assert "actor" in processed(world, [], fail)
    assert issubclass(SkipMessage, MiddlewareError)
    assert issubclass(private.GuardSkip, SkipMessage)


@check
def the_default_middleware_is_what_the_guard_expects_before_itself(world: World) -> None:
    """AgeLimit, TimeLimit, ShutdownNotifications, Callbacks, Pipelines, Retries; interrupts have one base class."""
    names = [one.__name__ for one in default_middleware]
    assert names == ["AgeLimit", "TimeLimit", "ShutdownNotifications", "Callbacks", "Pipelines", "Retries"]
    assert issubclass(TimeLimitExceeded, Interrupt)
    assert issubclass(Shutdown, Interrupt)
    assert not issubclass(Interrupt, Exception)
    assert AgeLimit(max_age=7).max_age == 7


@check
def a_worker_boots_and_ends_in_the_expected_order(world: World) -> None:
    """before_worker_boot comes before any thread, after_worker_boot when consumers exist; then the shutdown's two."""
    log = []

    class Life(Middleware):
        def before_worker_boot(self, broker: Any, worker: Any) -> None:
            log.append(("boot", len(worker.workers), len(worker.consumers)))

        def after_worker_boot(self, broker: Any, worker: Any) -> None:
            log.append(("booted", len(worker.workers), sorted(worker.consumers)))

        def before_worker_shutdown(self, broker: Any, worker: Any) -> None:
            log.append(("stop", all(one.running for one in worker.workers)))

        def after_worker_shutdown(self, broker: Any, worker: Any) -> None:
            log.append(("stopped", any(one.is_alive() for one in worker.workers)))

    world.broker.add_middleware(Life())
    world.broker.declare_queue("q")
    with world.working() as worker:
        wait_until(lambda: all(one.running for one in worker.workers), 5)
    assert log == [("boot", 0, 0), ("booted", 1, ["q", "q.DQ"]), ("stop", True), ("stopped", False)]


@check
def a_middleware_error_before_enqueue_stores_nothing(world: World) -> None:
    """`before_enqueue` can refuse: the guard refuses wrong options, and copies of a message that stands in line."""

    class Refuses(Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: Any) -> None:
            raise private.Elsewhere

    world.broker.add_middleware(Refuses())
    try:
        world.send()
    except private.Elsewhere:
        assert world.payloads() == {}
        assert world.ids() == []
        return
    msg = "the enqueue was not refused"
    raise AssertionError(msg)


@check
def the_skip_warning_is_the_one_that_the_filter_drops(world: World) -> None:
    """Logger, text and first argument of the worker's warning about a skip."""
    records = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, keep = logging.getLogger("dramatiq.worker.WorkerThread"), Keep()
    logger.addHandler(keep)

    def skip() -> None:
        raise SkipMessage

    try:
        processed(world, [], skip)
        (record,) = [one for one in records if one.levelno == logging.WARNING]
        assert record.msg == private.SKIPPED
        assert private.SkipFilter().filter(record)
        private.mark_elsewhere(record.args[0])
        assert not private.SkipFilter().filter(record)
    finally:
        logger.removeHandler(keep)


# -- results, composition, proxies ------------------------------------------------------------------------------------


@check
def an_option_on_the_proxy_keeps_a_skip_from_storing_none(world: World) -> None:
    """Results looks at the message's own `store_results` first."""
    backend = RedisBackend(client=world.redis, namespace=f"{world.namespace}-r")
    world.broker.add_middleware(Results(backend=backend, store_results=True))
    acked = threading.Event()

    class Skips(Middleware):
        def before_process_message(self, broker: Any, message: Any) -> None:
            private.mark_elsewhere(message)
            raise SkipMessage

        def after_ack(self, broker: Any, message: Any) -> None:
            acked.set()

    world.broker.add_middleware(Skips())
    dramatiq.actor(lambda: None, actor_name="work", broker=world.broker, queue_name="q")
    with world.working():
        sent = world.send()
        assert acked.wait(5)
    assert not world.redis.exists(backend.build_message_key(sent))


@check
def groups_and_pipelines_mark_their_members(world: World) -> None:
    """The options by which the guard knows that somebody looks for a message under its queue's name."""
    broker = StubBroker()
    broker.add_middleware(GroupCallbacks(Barriers()))
    work = dramatiq.actor(lambda *_: None, actor_name="work", broker=broker)
    assert "pipe_target" in (work.message() | work.message()).messages[0].options
    whole = group([work.message()], broker=broker)
    whole.add_completion_callback(work.message())
    whole.run()
    sent = Message.decode(broker.queues["default"].get_nowait())
    assert "group_completion_uuid" in sent.options
    assert {"pipe_target", "group_completion_uuid"} == private.KEYED_BY_QUEUE


@check
def a_proxy_shows_its_message_and_takes_marks(world: World) -> None:
    """`_message`, `failed`, `options` shared with the message, and attributes of our own."""
    message = Message(queue_name="q", actor_name="work", args=("secret",), kwargs={}, options={"a": 1})
    proxy = private.decode(message.encode())
    assert proxy._message == message
    assert proxy.failed is False
    proxy.fail()
    assert proxy.failed is True
    private.void(proxy)
    assert proxy.options is proxy._message.options
    assert private.is_elsewhere(proxy)
    assert private.is_elsewhere(proxy.copy(options={"b": 2}))
    assert not private.is_elsewhere(message)


@check
def an_async_actors_coroutine_can_be_found(world: World) -> None:
    """`async_to_sync` leaves the coroutine function in `__wrapped__`."""

    async def body() -> None: ...

    assert async_to_sync(body).__wrapped__ is body
    assert dramatiq.actor(body, actor_name="a", broker=world.broker).fn.__wrapped__ is body


# -- all together -----------------------------------------------------------------------------------------------------


@check
def messages_are_parked_taken_and_give_their_results(world: World) -> None:
    """A small deployment: twelve messages through a ceiling of 1, coroutines and retries among them."""
    with Bench(world.url, world.namespace, coroutines=True) as bench:
        attempts = []

        def body(number: int) -> int:
            if number == 3 and not attempts:
                attempts.append(1)
                raise ValueError
            return number + 1

        async def coroutine(number: int) -> int:
            return number + 1

        work = bench.actor(body, actor_name="work", store_results=True, max_retries=1)
        run = bench.actor(coroutine, actor_name="run", store_results=True, queue_name="async")
        bench.start(threads=3)
        assert bench.member.parks()
        with bench.full():
            sent = [(work if number % 2 else run).send(number) for number in range(12)]
            bench.wait_parked(12)
        for number, message in enumerate(sent):
            assert message.get_result(backend=bench.backend, block=True, timeout=10_000) == number + 1
        bench.wait_idle()
        assert bench.most == 1
        assert bench.dead() == []
        assert bench.threads_alive()
        assert sorted(bench.ended) == sorted(one.message_id for one in sent)


def main(url: str, report: str) -> None:
    """Do every check, and write name -> what went wrong, "" for nothing; and which Dramatiq it was."""
    found = {}
    for name, function in CHECKS.items():
        world = World(url)
        try:
            function(world)
        except Exception:  # noqa: BLE001  # a failed check must not hide the others
            found[name] = traceback.format_exc()
        else:
            found[name] = ""
        finally:
            world.redis.connection_pool.disconnect()
    about = {"version": dramatiq.__version__, "from": str(Path(dramatiq.__file__).parent), "checks": found}
    Path(report).write_text(json.dumps(about))


if __name__ == "__main__":
    main(*sys.argv[1:])
