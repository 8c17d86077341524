"""One worker of one broker in this process, as a member of the guard: its life, what it can run, what goes back."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from dramatiq.errors import ActorNotFound

from guard_middleware.core.commands import Finish, Message
from guard_middleware.core.outcome import Outcome
from guard_middleware.errors import StoreUnavailable
from guard_middleware.guard import warn_of
from guard_middleware.observe import events
from guard_middleware.queueing import low_queue, private
from guard_middleware.queueing.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dramatiq import Broker, Worker
    from dramatiq.broker import MessageProxy

    from guard_middleware.core.commands import Take
    from guard_middleware.guard import Guard
    from guard_middleware.holdings import Holding


class Member:
    """The state that belongs to a worker: ack sets, queues, idle threads, channel. One per (process, broker).

    Attributes:
        guard: the deployment's guard.
        broker: the worker's broker.
        dramatiq_worker: Dramatiq's worker itself.
        worker: the broker's id of the worker, which names the ack sets.
        heartbeat: its life line.
        turns: what its threads do with their messages.
    """

    def __init__(self, guard: Guard, broker: Broker, worker: Worker) -> None:
        self.guard = guard
        self.broker = broker
        self.dramatiq_worker = worker
        self.worker = private.worker_id_of(broker)
        self._lock = threading.Lock()
        self._to_requeue: list[tuple[str, str]] = []
        self._store = guard.make_store()
        self._low_queues = False
        self._parks: bool | None = None if private.namespace_of(broker) is not None else False
        self.heartbeat = guard.new_heartbeat(self, self._store)
        self.turns = Turns(self)

    # -- life ------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Publish, find out whether messages can be parked, and begin to beat."""
        private.quiet_skips()
        warn_of(self.guard.settings, self._store)
        try:
            self.parks()
        except StoreUnavailable as exc:
            events.warning("guard.store_unavailable", error=str(exc), store=str(self.guard.settings.redis_url))
        self.heartbeat.start()

    def parks(self) -> bool:
        """Whether the broker's server and database also hold the guard's state, proved by a nonce.

        Raises:
            StoreUnavailable: it cannot be found out now.
        """
        if self._parks is None:
            self._parks = self._store.shares_server(private.client_of(self.broker))
        if not self._parks and not self._low_queues:
            low_queue.consume(self.dramatiq_worker, self.broker)
            self._low_queues = True
        return self._parks

    def whereabouts(self, proxy: MessageProxy) -> Message | None:
        """Where a delivered message is, `None` if it cannot be parked.

        Raises:
            StoreUnavailable: it cannot be found out now whether it can.
        """
        delivery = private.delivery_id_of(proxy)
        namespace = private.namespace_of(self.broker)
        if namespace is None or not delivery or not self.parks():
            return None
        return Message(namespace=namespace, queue=proxy.queue_name, id=delivery, worker=self.worker)

    def leave(self) -> None:
        """The worker is about to stop: take nothing more, give back what has not begun."""
        private.stop_fetching(self.dramatiq_worker)
        self.heartbeat.leave()
        self._requeue()

    def stop(self) -> None:
        """The worker has stopped."""
        self._requeue()
        self.heartbeat.stop()

    # -- host of the heartbeat -------------------------------------------------------------------------------------

    def idle(self) -> int:
        """Worker threads that could run a message now: alive, not busy, and not spoken for by what was fetched.

        Those that are about to be idle are among them.
        """
        if self.heartbeat.leaving:
            return 0
        return private.idle_threads(self.dramatiq_worker, self.turns.in_message, self.turns.ending)

    def threads(self) -> int:
        """Worker threads that can run messages, whatever they do now."""
        return private.threads_beside(self.dramatiq_worker)

    def queues(self) -> tuple[tuple[str, str], ...]:
        """The queues into which messages can be taken now."""
        namespace = private.namespace_of(self.broker)
        if namespace is None or not self._parks:
            return ()
        return tuple((namespace, queue) for queue in private.consumed_queues(self.dramatiq_worker))

    def deliver(self, takes: Iterable[tuple[Take, Holding]]) -> None:
        """Check each message as the consumer would, and give it to the next free thread."""
        for take, holding in takes:
            consumer = private.consumer_of(self.dramatiq_worker, take.queue[1])
            if consumer is None or self.heartbeat.leaving:
                continue  # what has not begun goes back with a beat
            try:
                proxy = private.decode(take.payload)
            except Exception as exc:  # noqa: BLE001  # an encoder may raise anything
                events.error("guard.undecodable", queue=take.queue[1], error=type(exc).__name__)
                self.end(holding)
                private.reject(self.broker, take.queue[1], take.message_id)
                self.heartbeat.poke()  # the thread that would have run it is still idle
                continue
            try:
                self.broker.get_actor(proxy.actor_name)
            except ActorNotFound as exc:
                proxy.fail()
                proxy.stuff_exception(exc)
                self.end(holding)
                consumer.post_process_message(proxy)
                self.heartbeat.poke()  # as above
                continue
            private.hand_over(proxy, holding)
            private.push(self.dramatiq_worker, proxy)

    def beaten(self) -> None:
        """Put back what left by the skip while the store was away, and release for threads that have died."""
        self._requeue()
        self.turns.let_go_of_dead_threads()
        if self._parks is None:  # the store was away when the worker booted
            with suppress(StoreUnavailable):
                self.parks()
                self.heartbeat.poke()

    # -- what goes back --------------------------------------------------------------------------------------------

    def end(self, holding: Holding) -> None:
        """Release a lease without an outcome: now, while its message is unacked, or with a beat if that fails."""
        finish = Finish(
            process=self.heartbeat.process,
            lease=holding.lease,
            outcome=Outcome.IGNORED,
            home=holding.home,
            message=holding.message,
        )
        try:
            self.heartbeat.finish(finish)
        except Exception as exc:  # noqa: BLE001  # whatever it is, the lease ends
            events.debug("guard.release_later", endpoint=holding.endpoint, error=type(exc).__name__)
            self.heartbeat.finish_later(finish)

    def requeue_later(self, queue: str, delivery: str) -> None:
        """Let a beat, or the shutdown, put a fetched message back into its queue, by the id of its delivery."""
        with self._lock:
            self._to_requeue.append((queue, delivery))

    def _requeue(self) -> None:
        with self._lock:
            waiting, self._to_requeue = self._to_requeue, []
        for queue, delivery in waiting:
            if self.heartbeat.holdings.has_message(queue, delivery):
                continue  # it had been parked after all, and has come back with a permit
            try:
                private.requeue(self.broker, queue, [delivery])
            except Exception as exc:  # noqa: BLE001  # the broker's client raises its own errors
                events.warning("guard.requeue_failed", queue=queue, error=type(exc).__name__)
                self.requeue_later(queue, delivery)
