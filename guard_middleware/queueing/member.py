"""One worker of one broker in this process, as a member of the guard: it asks, parks, takes and finishes."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from dramatiq.errors import ActorNotFound
from dramatiq.middleware import Interrupt, SkipMessage

from guard_middleware.core.commands import Ask, Finish, Message, ParkAs, Reply, Status, Take
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.verdict import Reason
from guard_middleware.errors import StoreUnavailable
from guard_middleware.guard import never_admissible
from guard_middleware.holdings import new_id
from guard_middleware.observe import events
from guard_middleware.permit import Permit, set_current
from guard_middleware.priority import set_message_priority
from guard_middleware.queueing import low_queue, options, private
from guard_middleware.queueing.delivery import Delivery, current_delivery, set_current_delivery

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dramatiq import Broker, Worker
    from dramatiq.broker import MessageProxy

    from guard_middleware.core.outcome import Classified
    from guard_middleware.guard import Guard
    from guard_middleware.holdings import Holding
    from guard_middleware.queueing.options import CallOptions

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_ASIDE_MS = 1_000


@dataclass(slots=True)
class _Turn:
    """What a thread has asked for its present message, until that is processed.

    Attributes:
        thread: the worker thread.
        lease: id of the lease that it asked for.
        doubt: a command that may have moved the message, and whose answer has not been acted upon.
    """

    thread: threading.Thread
    lease: str
    doubt: Ask | Finish | None = None


class Member:
    """The state that belongs to a worker: ack sets, queues, idle threads, channel. One per (process, broker)."""

    def __init__(self, guard: Guard, broker: Broker, worker: Worker) -> None:
        self.guard = guard
        self.broker = broker
        self.worker = private.worker_id_of(broker)
        self._dramatiq = worker
        self._lock = threading.Lock()
        self._to_requeue: list[tuple[str, str]] = []
        self._turns: dict[int, _Turn] = {}
        self._in_message: set[int] = set()
        self._store = guard.make_store()
        self._low_queues = False
        self._parks: bool | None = None if private.namespace_of(broker) is not None else False
        self.heartbeat = guard.new_heartbeat(self, self._store)

    # -- life ------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Publish, find out whether messages can be parked, and begin to beat."""
        private.quiet_skips()
        for warning in [*self.guard.settings.warnings(), *self._server_warnings()]:
            events.warning("guard.check", warning=warning)
        try:
            self.parks()
        except StoreUnavailable as exc:
            events.warning("guard.store_unavailable", error=str(exc))
        self.heartbeat.start()

    def _server_warnings(self) -> list[str]:
        try:
            return self._store.check_server()
        except StoreUnavailable:
            return []

    def parks(self) -> bool:
        """Whether the broker's server and database also hold the guard's state, proved by a nonce.

        Raises:
            StoreUnavailable: it cannot be found out now.
        """
        if self._parks is None:
            self._parks = self._store.shares_server(private.client_of(self.broker))
        if not self._parks and not self._low_queues:
            low_queue.consume(self._dramatiq, self.broker)
            self._low_queues = True
        return self._parks

    def leave(self) -> None:
        """The worker is about to stop: take nothing more, give back what has not begun."""
        private.stop_fetching(self._dramatiq)
        self.heartbeat.leave()
        self._requeue_local()

    def stop(self) -> None:
        """The worker has stopped."""
        self._requeue_local()
        self.heartbeat.stop()

    # -- host of the heartbeat -------------------------------------------------------------------------------------

    def idle(self, *, ending: int = 0) -> int:
        """Worker threads that could run a message now: alive, not busy, and not spoken for by what was fetched.

        Args:
            ending: how many of the busy ones are about to be idle.
        """
        if self.heartbeat.leaving:
            return 0
        return private.idle_threads(self._dramatiq, self._in_message, ending=ending)

    def queues(self) -> tuple[tuple[str, str], ...]:
        """The queues into which messages can be taken now."""
        namespace = private.namespace_of(self.broker)
        if namespace is None or not self._parks:
            return ()
        return tuple((namespace, queue) for queue in private.consumed_queues(self._dramatiq))

    def deliver(self, takes: Iterable[tuple[Take, Holding | None]]) -> None:
        """Check each message as the consumer would, and give it to the next free thread."""
        for take, holding in takes:
            consumer = private.consumer_of(self._dramatiq, take.queue[1])
            if consumer is None or self.heartbeat.leaving:
                if holding is None:  # no beat names what has no permit
                    with self._lock:
                        self._to_requeue.append((take.queue[1], take.message_id))
                continue  # what has not begun goes back with a beat
            try:
                proxy = private.decode(take.payload)
            except Exception as exc:  # noqa: BLE001  # an encoder may raise anything
                events.error("guard.undecodable", queue=take.queue[1], error=type(exc).__name__)
                self._release(holding)
                private.reject(self.broker, take.queue[1], take.message_id)
                continue
            try:
                self.broker.get_actor(proxy.actor_name)
            except ActorNotFound as exc:
                proxy.fail()
                proxy.stuff_exception(exc)
                self._release(holding)
                consumer.post_process_message(proxy)
                continue
            private.hand_over(proxy, holding)
            private.push(self._dramatiq, proxy)

    def beaten(self) -> None:
        """Put back what left by the skip while the store was away, and release for threads that have died."""
        self._requeue_local()
        for ident, turn in list(self._turns.items()):
            if not turn.thread.is_alive():
                self._let_go_of(ident)
        if self._parks is None:  # the store was away when the worker booted
            with suppress(StoreUnavailable):
                self.parks()
                self.heartbeat.poke()

    def _let_go_of(self, ident: int) -> None:
        """Release what a thread asked for and did not finish: an interrupt can strike between any two lines (I5)."""
        turn = self._turns.get(ident)
        if turn is not None:
            self._release(self.heartbeat.holdings.find(turn.lease))
            self._turns.pop(ident, None)

    def _release(self, holding: Holding | None) -> None:
        """Release a lease without an outcome: now, while its message is unacked, or with a beat if that fails."""
        if holding is None:
            return
        finish = Finish(
            process=self.heartbeat.process,
            lease=holding.lease,
            outcome=Outcome.IGNORED,
            home=holding.home,
            rank=holding.rank,
            message=holding.message,
        )
        try:
            self.heartbeat.finish(finish)
        except Exception as exc:  # noqa: BLE001  # whatever it is, the lease ends
            events.debug("guard.release_later", endpoint=holding.endpoint, error=type(exc).__name__)
            self.heartbeat.finish_later(finish)
        self.heartbeat.poke(extra=1)  # the thread that would have run it can run another one

    # -- before the actor ------------------------------------------------------------------------------------------

    def before(self, proxy: MessageProxy) -> None:
        """Let a message start, or take it out of this thread's hands.

        Raises:
            GuardSkip: it was parked, postponed, or is not this worker's any more; or it is to be dead-lettered.
        """
        self._let_go_of(threading.get_ident())
        self._in_message.add(threading.get_ident())
        set_current_delivery(None)
        set_current(None)
        set_message_priority(None)
        try:
            self._admit(proxy)
        except SkipMessage:
            raise
        except Exception as exc:  # noqa: BLE001  # I2, I12: Dramatiq would swallow it and run the actor
            events.error("guard.admission_failed", actor=proxy.actor_name, error=type(exc).__name__)
            self._leave_aside_or_fail(proxy)

    def _admit(self, proxy: MessageProxy) -> None:
        try:
            asked = options.read(self.broker, proxy, self.guard)
        except options.InvalidOptions as exc:
            self._dead_letter(proxy, str(exc))
        if asked is None:
            set_message_priority(options.ambient_of(proxy))
            return
        set_message_priority(asked.priority)
        holding: Holding | None = private.handed_over(proxy)
        if holding is None:
            self._ask(proxy, asked, new_id(), confirm=False)
            return
        self._begin_turn(holding.lease)
        private.hand_over(proxy, None)  # from here on the turn knows of it
        match self.heartbeat.holdings.begin(holding, fresh_s=self.heartbeat.lease_s / 2):
            case True:
                self._start(proxy, asked, holding, probe=holding.probe)
            case False:
                self._ask(proxy, asked, holding.lease, confirm=True)
            case None:
                self._skip(proxy)

    def _begin_turn(self, lease: str) -> _Turn:
        turn = self._turns[threading.get_ident()] = _Turn(threading.current_thread(), lease)
        return turn

    def _ask(self, proxy: MessageProxy, asked: CallOptions, lease: str, *, confirm: bool) -> None:
        turn = self._begin_turn(lease)
        reply, holding = self._answer(proxy, asked, turn, confirm=confirm)
        match reply.status:
            case Status.ADMITTED if holding is not None:
                self._start(proxy, asked, holding, probe=reply.probe)
                turn.doubt = None
            case Status.IMPOSSIBLE:
                turn.doubt = None
                self._dead_letter(proxy, never_admissible(asked.model, asked.cost))
            case Status.REFUSED:
                turn.doubt = None
                self._postpone(proxy, reply)
            case _:
                events.debug("guard.deferred", endpoint=asked.model, priority=asked.priority.value, reason=reply.reason)
                self._skip(proxy)

    def _answer(
        self, proxy: MessageProxy, asked: CallOptions, turn: _Turn, *, confirm: bool
    ) -> tuple[Reply, Holding | None]:
        """Ask until there is an answer (I12), always with the same ids (I11).

        A time limit or a shutdown that strikes meanwhile is raised again once it is known what became of the message.
        """
        struck: Interrupt | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                turn.doubt = self._command(proxy, asked, turn.lease, confirm=confirm)
                reply, holding = self.heartbeat.admit(turn.doubt)
            except StoreUnavailable as exc:
                if struck is not None or self.heartbeat.leaving:
                    self._leave_aside(proxy)
                try:
                    events.debug("guard.store_unavailable", error=str(exc))
                    time.sleep(pause_s)
                except Interrupt as late:  # raised anywhere in this thread
                    struck = late
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            except Interrupt as exc:
                if struck is not None:
                    self._leave_aside(proxy)
                struck = exc
                continue
            break
        if struck is not None and holding is not None:
            self._release(holding)
            raise struck
        return reply, holding

    def _command(self, proxy: MessageProxy, asked: CallOptions, lease: str, *, confirm: bool) -> Ask:
        message = self._whereabouts(proxy)
        return Ask(
            process=self.heartbeat.process,
            lease=lease,
            endpoint=asked.model,
            rank=asked.priority.rank,
            cost=asked.cost,
            message=message,
            take=0 if self.heartbeat.leaving else 1,
            idle=self.idle(),
            deadline_ms=self._deadline_ms(proxy),
            confirm=confirm,
            slot=message is None,
        )

    def _whereabouts(self, proxy: MessageProxy) -> Message | None:
        delivery = private.delivery_id_of(proxy)
        namespace = private.namespace_of(self.broker)
        if namespace is None or not delivery or not self.parks():
            return None
        return Message(namespace=namespace, queue=proxy.queue_name, id=delivery, worker=self.worker)

    def _deadline_ms(self, proxy: MessageProxy) -> int:
        """When the message is too old for Dramatiq's age limit, with a second of margin; 0 for never or already."""
        limit = next((one for one in self.broker.middleware if type(one).__name__ == "AgeLimit"), None)
        actor = self.broker.get_actor(proxy.actor_name)
        default = getattr(limit, "max_age", None)
        max_age = proxy.options.get("max_age") or actor.options.get("max_age", default)
        if limit is None or not max_age:
            return 0
        deadline_ms = int(proxy.message_timestamp + max_age + 1_000)
        return deadline_ms if deadline_ms > time.time() * 1000 else 0

    def _start(self, proxy: MessageProxy, asked: CallOptions, holding: Holding, *, probe: bool) -> None:
        permit = Permit(
            endpoint=self.guard.settings.endpoint(holding.endpoint),
            model=asked.model,
            priority=asked.priority,
            cost=asked.cost,
            probe=probe,
            release=lambda _: None,  # the delivery releases its lease when the actor ends
            namespace=self.guard.settings.namespace,
        )
        set_current_delivery(Delivery(self, proxy, holding, permit))
        set_current(permit)

    def _skip(self, proxy: MessageProxy) -> NoReturn:
        """End this delivery: its message is somewhere else. The proxy can do nothing to it any more."""
        private.void(proxy)
        private.spare_ack(self._dramatiq, proxy)
        raise private.GuardSkip

    def _postpone(self, proxy: MessageProxy, reply: Reply) -> NoReturn:
        """End this delivery after a copy of its message has been stored, to come back later."""
        low_queue.postpone(self.broker, proxy, reply, stopping=lambda: self.heartbeat.leaving)
        private.mark_elsewhere(proxy)
        raise private.GuardSkip(reply.reason)

    def _leave_aside(self, proxy: MessageProxy) -> NoReturn:
        """End this delivery without an answer of the store; a beat, or the shutdown, puts the message back."""
        if not self._set_aside(proxy):
            self._postpone(proxy, Reply(status=Status.REFUSED, reason=Reason.RECOVERING, retry_after_ms=_ASIDE_MS))
        self._skip(proxy)

    def _leave_aside_or_fail(self, proxy: MessageProxy) -> NoReturn:
        """End this delivery whatever happens: what no broker takes back ends among the dead letters, not unguarded."""
        try:
            self._leave_aside(proxy)
        except SkipMessage:
            raise
        except Exception:  # noqa: BLE001  # Dramatiq would swallow it and run the actor
            self._dead_letter(proxy, "neither the store nor the broker answers while the worker stops")

    def _set_aside(self, proxy: MessageProxy) -> bool:
        """Let a beat put the message back. Returns whether this broker can."""
        turn = self._turns.pop(threading.get_ident(), None)
        if turn is not None:
            self.heartbeat.holdings.drop(turn.lease)
            self.heartbeat.abandon(turn.lease)
        delivery = private.delivery_id_of(proxy)
        if delivery:
            with self._lock:
                self._to_requeue.append((proxy.queue_name, delivery))
            private.void(proxy)
        return bool(delivery)

    def _dead_letter(self, proxy: MessageProxy, why: str) -> NoReturn:
        """Give a message that can never run to its broker's dead letters, with a clear reason; nothing starts."""
        events.error("guard.refused", actor=proxy.actor_name, why=why)
        proxy.fail()
        proxy.guard_skipped = True  # type: ignore[attr-defined]  # read by the log filter
        raise private.GuardSkip(why)

    def _requeue_local(self) -> None:
        with self._lock:
            waiting, self._to_requeue = self._to_requeue, []
        for queue, delivery in waiting:
            if self.heartbeat.holdings.has_message(queue, delivery):
                continue  # it had been parked after all, and has come back with a permit
            try:
                private.requeue(self.broker, queue, [delivery])
            except Exception as exc:  # noqa: BLE001  # the broker's client raises its own errors
                events.warning("guard.requeue_failed", queue=queue, error=type(exc).__name__)
                with self._lock:
                    self._to_requeue.append((queue, delivery))

    # -- after the actor -------------------------------------------------------------------------------------------

    def finish(self, proxy: MessageProxy, finish: Finish, verdict: Classified) -> bool:
        """Release a delivery's lease and take for this thread, which is about to be idle.

        An interrupt that strikes meanwhile ends here: the body has ended, so there is nothing left to interrupt.

        Returns:
            Whether the message is somewhere else now; then its proxy can do nothing to it any more.
        """
        if verdict.outcome is Outcome.OVERLOAD:
            events.warning("guard.overload", endpoint=finish.home, error=verdict.reason)
        turn = self._turns.get(threading.get_ident())
        if turn is not None:
            turn.doubt = finish
        reply = self._released(finish)
        if reply is None:  # whether it was parked is not known: a copy by Retries could be a second one
            is_elsewhere = finish.park is not ParkAs.NO and self._set_aside(proxy)
        else:
            is_elsewhere = reply.status in (Status.PARKED, Status.STOLEN, Status.GONE)
        if is_elsewhere:
            private.void(proxy)
        if turn is not None:
            turn.doubt = None
        return is_elsewhere

    def _released(self, finish: Finish) -> Reply | None:
        """Finish until there is an answer; what cannot wait is left to the beats."""
        struck = False
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return self.heartbeat.finish(self._taking(finish))
            except StoreUnavailable:
                if struck or self.heartbeat.leaving:
                    break
                try:
                    time.sleep(pause_s)
                except Interrupt:  # raised anywhere in this thread
                    struck = True
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except Interrupt:
                if struck:
                    break
                struck = True
            except Exception as exc:  # noqa: BLE001  # a fault of ours: released all the same
                events.error("guard.finish_failed", endpoint=finish.home, error=type(exc).__name__)
                break
        self.heartbeat.finish_later(finish)
        return None

    def _taking(self, finish: Finish) -> Finish:
        if self.heartbeat.leaving:
            return finish
        return replace(finish, take=1, idle=self.idle(ending=1))

    def after(self, proxy: MessageProxy, exception: BaseException | None) -> None:
        """The message is processed or skipped: what the wrapper never began ends here. It can be repeated."""
        ident = threading.get_ident()
        turn = self._turns.get(ident)
        if exception is not None and turn is not None and not private.is_elsewhere(proxy):
            self._resolve(proxy, turn)
        delivery = current_delivery()
        if delivery is not None:
            delivery.drop()
            if delivery.outlived:  # its coroutine ends the lease
                self._turns.pop(ident, None)
            set_current_delivery(None)
            set_current(None)
        elif turn is None:
            taken: Holding | None = private.handed_over(proxy)
            if taken is not None:
                self._give_up(proxy, taken)
            elif self.heartbeat.waiting and not self.heartbeat.leaving:
                self.heartbeat.poke(extra=1)
        self._let_go_of(ident)

    def acked(self) -> None:
        """This thread is done with its message."""
        self._in_message.discard(threading.get_ident())

    def _give_up(self, proxy: MessageProxy, taken: Holding) -> None:
        """Another middleware ended a taken message before the guard saw it."""
        if self.heartbeat.holdings.begin(taken, fresh_s=0) is None:
            private.void(proxy)  # it had been given back
        else:
            self._release(taken)

    def _resolve(self, proxy: MessageProxy, turn: _Turn) -> None:
        """An interrupt struck before an answer was acted upon: find out whether the message is somewhere else now.

        Otherwise Retries would store a copy beside the parked message.
        """
        try:
            if isinstance(turn.doubt, Ask):
                reply, _ = self.heartbeat.admit(replace(turn.doubt, take=0))
            elif isinstance(turn.doubt, Finish):
                reply = self.heartbeat.finish(turn.doubt)
            else:
                return
        except StoreUnavailable:
            self._set_aside(proxy)
            return
        turn.doubt = None
        if reply.status in (Status.PARKED, Status.GONE, Status.STOLEN):
            private.void(proxy)
