"""Everything that the guard needs of Dramatiq's private parts, in one place.

The keys of a `RedisBroker` (``<ns>:<queue>``, ``.msgs``, ``__acks__``) are used by the scripts. A contract test holds
both against the oldest and the newest supported Dramatiq.
"""

from __future__ import annotations

import logging
import threading
from math import isfinite
from typing import TYPE_CHECKING, Any

from dramatiq import worker as dramatiq_worker
from dramatiq.asyncio import async_to_sync, get_event_loop_thread
from dramatiq.broker import MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.message import Message
from dramatiq.middleware import AgeLimit, AsyncIO, MiddlewareError, SkipMessage
from dramatiq.results import Results

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from dramatiq import Broker, Worker

KEYED_BY_QUEUE = frozenset({"pipe_target", "group_completion_uuid"})
"""Options of a message whose result somebody else looks for, under a key that contains the queue's name."""

FIRST = -(2**40)
"""The local priority of a message that already has its permit: before everything that has not."""

SKIPPED = "Message %s was skipped."
"""What the worker logs for each skip, with all of the message's arguments."""


ELSEWHERE = "guard_elsewhere"
"""Marks a proxy whose message is somewhere else: in the waiting line, with another worker, or stored as a copy."""


class GuardSkip(SkipMessage):
    """The delivery ends here without an outcome: its message is somewhere else, or is to be dead-lettered."""


class Elsewhere(MiddlewareError):
    """The message is somewhere else already: nothing may store a copy of it."""


def on_worker_thread() -> bool:
    """Whether this code runs on one of Dramatiq's worker threads."""
    return isinstance(threading.current_thread(), dramatiq_worker.WorkerThread)


def is_bridge(fn: Any) -> bool:  # what an actor's function is, Dramatiq leaves open
    """Whether a function is Dramatiq's own bridge to a coroutine, and not somebody's wrapper around one."""
    return getattr(fn, "__code__", None) in async_to_sync.__code__.co_consts


def lacks_event_loop(broker: Broker, fn: Any) -> bool:
    """Whether an actor's function is a coroutine that its broker has no event loop for: each message would fail."""
    if not is_bridge(fn) and not is_bridge(getattr(fn, "__wrapped__", None)):  # the guard's own wrapper is around it
        return False
    return get_event_loop_thread() is None and not any(isinstance(one, AsyncIO) for one in broker.middleware)


def namespace_of(broker: Broker) -> str | None:
    """The key prefix of a Redis broker, `None` for any other broker."""
    return broker.namespace if isinstance(broker, RedisBroker) else None


def client_of(broker: Broker) -> Any:  # redis's client is the store's business, not ours
    """The Redis client of a Redis broker."""
    return broker.client if isinstance(broker, RedisBroker) else None


def worker_id_of(broker: Broker) -> str:
    """The id that names this process's ack sets, "" for brokers without them."""
    return broker.broker_id if isinstance(broker, RedisBroker) else ""


def delivery_id_of(proxy: MessageProxy) -> str:
    """The id of this delivery in Redis, "" if it has none."""
    found = proxy.options.get("redis_message_id")
    return found if isinstance(found, str) else ""


def max_age_of(broker: Broker, proxy: MessageProxy) -> int | None:
    """The age at which Dramatiq's age limit drops a message, in milliseconds; `None` for never."""
    limit = next((one for one in broker.middleware if isinstance(one, AgeLimit)), None)
    if limit is None:
        return None
    actor = broker.get_actor(proxy.actor_name)
    max_age = proxy.options.get("max_age") or actor.options.get("max_age", limit.max_age)
    plain = isinstance(max_age, int | float) and isfinite(max_age) and isinstance(proxy.message_timestamp, int | float)
    return int(max_age) if plain and max_age else None  # what it cannot compare is that limit's own business


def result_needs_queue(broker: Broker, proxy: MessageProxy) -> bool:
    """Whether somebody looks for the message's result, whose key contains the queue's name."""
    if any(proxy.options.get(name) for name in KEYED_BY_QUEUE):
        return True
    results = next((one for one in broker.middleware if isinstance(one, Results)), None)
    default = results is not None and results.store_results
    actor = broker.get_actor(proxy.actor_name)
    return bool(proxy.options.get("store_results", actor.options.get("store_results", default)))


def copy_for(queue: str, proxy: MessageProxy) -> Message[Any]:
    """A copy of a delivered message, with the same id, to be enqueued in a queue."""
    return proxy._message.copy(queue_name=queue)  # noqa: SLF001  # Dramatiq offers no other way to the message


def void(proxy: MessageProxy) -> None:
    """Make sure that nothing can be done to the message through this proxy any more.

    Its id may come back in another delivery, so no stale proxy may ack, nack or requeue it.
    """
    mark_elsewhere(proxy)
    proxy.options["redis_message_id"] = ""


def mark_elsewhere(proxy: MessageProxy) -> None:
    """Note that the message is somewhere else: this delivery has no result, and leaves no copy behind."""
    proxy.options[ELSEWHERE] = True
    proxy.options["store_results"] = False
    proxy.guard_skipped = True  # type: ignore[attr-defined]  # read by the log filter


def spare_ack(worker: Worker, proxy: MessageProxy) -> None:
    """Let the worker end a voided delivery without a call to the broker: there is no id that it could acknowledge.

    Dramatiq would send an ack of "" for it. A consumer that connects anew is another one, so this is asked each time.
    """
    consumer: Any = getattr(worker.consumers.get(proxy.queue_name), "consumer", None)
    if consumer is None or not isinstance(worker.broker, RedisBroker) or "ack" in vars(consumer):
        return
    acknowledge = consumer.ack

    def ack(message: MessageProxy) -> None:
        if is_elsewhere(message) and not delivery_id_of(message):
            consumer.queued_message_ids.discard(message.message_id)
        else:
            acknowledge(message)

    consumer.ack = ack


def is_elsewhere(message: Message[Any] | MessageProxy) -> bool:
    """Whether a message was marked so."""
    return ELSEWHERE in message.options


class SkipFilter(logging.Filter):
    """Drops the worker's warning about our own skips: it prints all of a message's arguments (I13)."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let everything through but our own skips."""
        if record.msg != SKIPPED or not isinstance(record.args, tuple) or not record.args:
            return True
        return not getattr(record.args[0], "guard_skipped", False)


_skip_filter = SkipFilter()


def quiet_skips() -> None:
    """Install the filter for our own skips, once per process."""
    logger = logging.getLogger("dramatiq.worker.WorkerThread")
    if _skip_filter not in logger.filters:
        logger.addFilter(_skip_filter)


def decode(payload: bytes) -> MessageProxy:
    """Make a delivery of a parked message.

    Raises:
        dramatiq.DecodeError: if its encoder cannot read it.
    """
    return MessageProxy(Message.decode(payload))


def idle_threads(
    worker: Worker, in_message: AbstractSet[int | None] = frozenset(), ending: AbstractSet[int | None] = frozenset()
) -> int:
    """How many worker threads could begin a message now, those that what was fetched will need not counted.

    A task is unfinished from the moment it is put into the work queue until its message has been acked; for good, if
    its thread died in between. Where one did, those that live and what is queued are counted instead, although a task
    is neither for a moment.

    Args:
        worker: whose threads.
        in_message: ids of the threads that have begun with a message and not acked it.
        ending: ids of those among them that are about to be idle.
    """
    able = busy = dead = 0
    for thread in worker.workers:
        if not thread.is_alive():
            dead += 1
        elif thread.running and not thread.paused:
            able += 1
            busy += thread.ident in in_message and thread.ident not in ending
    if not dead:
        return max(0, able - max(0, worker.work_queue.unfinished_tasks - len(ending)))
    return max(0, able - busy - worker.work_queue.qsize())


def threads_beside(worker: Worker, busy: AbstractSet[int | None] = frozenset()) -> int:
    """How many worker threads could begin a message, those with these ids not counted."""
    return sum(
        thread.ident not in busy and thread.is_alive() and thread.running and not thread.paused
        for thread in worker.workers
    )


def message_of(proxy: MessageProxy) -> Message[Any]:
    """The message itself: a proxy looks up each attribute there by way of an error."""
    return proxy._message  # noqa: SLF001  # one of the private parts that this module is for


def hand_over(proxy: MessageProxy, holding: object) -> None:
    """Send a message's permit along with it. A message that is given back and comes again, comes with another one."""
    proxy.guard_holding = holding  # type: ignore[attr-defined]


def handed_over(proxy: MessageProxy) -> Any:  # the queue of work is untyped as to this
    """The permit that came with a message, `None` if there is none."""
    return vars(proxy).get("guard_holding")  # not by getattr: a proxy asks its message for what it does not have


def push(worker: Worker, proxy: MessageProxy) -> None:
    """Give a message to the next free worker thread, before everything that was fetched."""
    item_type: Any = getattr(dramatiq_worker, "_WorkQueueItem", None)
    item: Any = (FIRST, proxy) if item_type is None else item_type(FIRST, proxy)  # before 2.1 a plain pair
    worker.work_queue.put(item)


def consumed_queues(worker: Worker) -> tuple[str, ...]:
    """The queues whose consumer lives, is not paused and has its connection: only there a message can be acked."""
    return tuple(
        name
        for name, thread in list(worker.consumers.items())
        if not name.endswith(".DQ") and thread.is_alive() and not thread.paused and thread.consumer is not None
    )


def consumer_of(worker: Worker, queue: str) -> Any:  # a private class of Dramatiq's
    """The consumer thread of a queue, `None` if there is none."""
    return worker.consumers.get(queue)


def stop_fetching(worker: Worker) -> None:
    """Fetch no more messages. The delay queues' consumers go on, so that Dramatiq's heartbeat does.

    A consumer that was paused would sleep for three seconds before it noticed that the worker stops; one that may
    prefetch nothing goes on polling.
    """
    for name, thread in list(worker.consumers.items()):
        if isinstance(thread.broker, RedisBroker) and not name.endswith(".DQ"):
            thread.prefetch = 0
            consumer: Any = thread.consumer
            if consumer is not None:
                consumer.prefetch = 0


def requeue(broker: Broker, queue: str, ids: Iterable[str]) -> None:
    """Put fetched messages back, by the ids of their deliveries. Ids that are not fetched any more are passed over."""
    if isinstance(broker, RedisBroker):
        broker.do_requeue(queue, *ids)


def reject(broker: Broker, queue: str, delivery_id: str) -> None:
    """Dead-letter a message that cannot even be decoded."""
    if isinstance(broker, RedisBroker):
        broker.do_nack(queue, delivery_id)


def may_consume(worker: Worker, queue: str) -> bool:
    """Whether a worker was started for all queues, or for this one among others."""
    return not worker.consumer_whitelist or queue in worker.consumer_whitelist


def consume_also(worker: Worker, queue: str) -> None:
    """Let a worker consume a further queue, also when it was started for some queues only."""
    if worker.consumer_whitelist:
        worker.consumer_whitelist.add(queue)
    worker.broker.declare_queue(queue)
