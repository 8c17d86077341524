"""Brokers that cannot park: a copy with a delay, in the same queue or in ``<queue>.low``."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from guard_middleware.core.verdict import DELAYS
from guard_middleware.observe import events
from guard_middleware.pauses import Pauses
from guard_middleware.queueing import options, private

if TYPE_CHECKING:
    from collections.abc import Callable

    from dramatiq import Broker, Worker
    from dramatiq.broker import MessageProxy

    from guard_middleware.core.commands import Reply

SUFFIX = ".low"
_SPREAD = 0.1
_LEAST_MS = 10


def low_queue_of(queue: str) -> str:
    """The low-priority queue that belongs to a queue."""
    return queue if queue.endswith(SUFFIX) else queue + SUFFIX


def consume(worker: Worker, broker: Broker) -> None:
    """Let a worker consume the low-priority queue of each queue that it consumes and that has guarded actors."""
    for actor in list(broker.actors.values()):
        queue = actor.queue_name
        if actor.options.get(options.MODEL) and private.may_consume(worker, queue):
            private.consume_also(worker, low_queue_of(queue))


def postpone(broker: Broker, proxy: MessageProxy, reply: Reply, *, stopping: Callable[[], bool]) -> None:
    """Store a copy of the message to come back later. The original may be acked once this returns (I3).

    Args:
        broker: where to store it.
        proxy: the delivery that may not start.
        reply: why not, and for how long.
        stopping: whether the worker shuts down.

    Raises:
        Exception: the broker's, if the worker shuts down before the copy is stored.
    """
    delay_ms = max(_LEAST_MS, reply.retry_after_ms)
    delay_ms += round(delay_ms * _SPREAD * random.random())  # noqa: S311  # later by chance, never earlier
    queue = proxy.queue_name
    if reply.reason not in DELAYS and not private.result_needs_queue(broker, proxy):
        queue = low_queue_of(queue)
    copy = private.copy_for(queue, proxy)
    pauses = Pauses()
    while True:
        try:
            broker.enqueue(copy, delay=delay_ms)
        except Exception as exc:
            if stopping():
                raise
            events.warning("guard.postpone_failed", queue=queue, error=type(exc).__name__)
            time.sleep(next(pauses))
        else:
            return
