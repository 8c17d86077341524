"""Everything that the guard needs of Dramatiq's private parts, in one place.

The keys of a `RedisBroker` (``<ns>:<queue>``, ``.msgs``, ``__acks__``) are used by the scripts. A contract test holds
both against the oldest and the newest supported Dramatiq.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from dramatiq import worker as dramatiq_worker
from dramatiq.broker import MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.message import Message
from dramatiq.middleware import SkipMessage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dramatiq import Broker, Worker

FIRST = -(2**40)
"""The local priority of a message that already has its permit: before everything that has not."""

SKIPPED = "Message %s was skipped."
"""What the worker logs for each skip, with all of the message's arguments."""


class GuardSkip(SkipMessage):
    """The delivery ends here without an outcome: its message is somewhere else, or is to be dead-lettered."""


def on_worker_thread() -> bool:
    """Whether this code runs on one of Dramatiq's worker threads."""
    return isinstance(threading.current_thread(), dramatiq_worker.WorkerThread)


def namespace_of(broker: Broker) -> str | None:
    """The key prefix of a Redis broker, `None` for any other broker."""
    return broker.namespace if isinstance(broker, RedisBroker) else None


def client_of(broker: Broker) -> Any:  # noqa: ANN401  # redis's client is the store's business, not ours
    """The Redis client of a Redis broker."""
    return broker.client if isinstance(broker, RedisBroker) else None


def worker_id_of(broker: Broker) -> str:
    """The id that names this process's ack sets, "" for brokers without them."""
    return broker.broker_id if isinstance(broker, RedisBroker) else ""


def delivery_id_of(proxy: MessageProxy) -> str:
    """The id of this delivery in Redis, "" if it has none."""
    found = proxy.options.get("redis_message_id")
    return found if isinstance(found, str) else ""


def void(proxy: MessageProxy) -> None:
    """Make sure that nothing can be done to the message through this proxy any more.

    Its id may come back in another delivery, so no stale proxy may ack, nack or requeue it; and a skipped message has
    no result.
    """
    proxy.options["redis_message_id"] = ""
    proxy.options["store_results"] = False
    proxy.guard_skipped = True  # type: ignore[attr-defined]  # read by the log filter


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


def running_threads(worker: Worker) -> set[int]:
    """Ids of the worker threads that live, run and are not paused."""
    return {
        thread.ident
        for thread in worker.workers
        if thread.ident is not None and thread.is_alive() and thread.running and not thread.paused
    }


def waiting_locally(worker: Worker) -> int:
    """How many messages the process has fetched and not begun."""
    return worker.work_queue.qsize()


def push(worker: Worker, proxy: MessageProxy) -> None:
    """Give a message to the next free worker thread, before everything that was fetched."""
    item_type = getattr(dramatiq_worker, "_WorkQueueItem", None)
    # Dramatiq before 2.1 queues plain pairs.
    worker.work_queue.put((FIRST, proxy) if item_type is None else item_type(FIRST, proxy))


def consumed_queues(worker: Worker) -> tuple[str, ...]:
    """The queues whose consumer lives, is not paused and has its connection: only there a message can be acked."""
    return tuple(
        name
        for name, thread in list(worker.consumers.items())
        if not name.endswith(".DQ") and thread.is_alive() and not thread.paused and thread.consumer is not None
    )


def consumer_of(worker: Worker, queue: str) -> Any:  # noqa: ANN401  # a private class of Dramatiq's
    """The consumer thread of a queue, `None` if there is none."""
    return worker.consumers.get(queue)


def pause_consumers(worker: Worker) -> None:
    """Fetch no more messages. The delay queues' consumers go on, so that Dramatiq's heartbeat does."""
    for name, thread in list(worker.consumers.items()):
        if not name.endswith(".DQ"):
            thread.pause()


def requeue(broker: Broker, queue: str, ids: Iterable[str]) -> None:
    """Put fetched messages back, by the ids of their deliveries. Ids that are not fetched any more are passed over."""
    if isinstance(broker, RedisBroker):
        broker.do_requeue(queue, *ids)


def reject(broker: Broker, queue: str, delivery_id: str) -> None:
    """Dead-letter a message that cannot even be decoded."""
    if isinstance(broker, RedisBroker):
        broker.do_nack(queue, delivery_id)


def consume_also(worker: Worker, queue: str) -> None:
    """Let a worker consume a further queue, also when it was started for some queues only."""
    if worker.consumer_whitelist:
        worker.consumer_whitelist.add(queue)
    worker.broker.declare_queue(queue)
