"""One worker of one broker in this process, as a member of the guard: it asks, parks, takes and finishes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NoReturn

from dramatiq.errors import ActorNotFound

from guard_middleware.core.commands import Ask, Finish, Message, Reply, Status, Take
from guard_middleware.core.outcome import Outcome
from guard_middleware.errors import StoreUnavailable
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


class Member:
    """The state that belongs to a worker: ack sets, queues, idle threads, channel. One per (process, broker)."""

    def __init__(self, guard: Guard, broker: Broker, worker: Worker) -> None:
        self.guard = guard
        self.broker = broker
        self.worker = private.worker_id_of(broker)
        self._dramatiq = worker
        self._lock = threading.Lock()
        self._busy: set[int] = set()
        self._taken: dict[tuple[str, str], Holding] = {}
        self._to_requeue: list[tuple[str, str]] = []
        self._asked: dict[int, tuple[threading.Thread, str]] = {}
        self._store = guard.make_store()
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
        if not self._parks:
            low_queue.consume(self._dramatiq, self.broker)
        return self._parks

    def leave(self) -> None:
        """The worker is about to stop: take nothing more, give back what has not begun."""
        private.pause_consumers(self._dramatiq)
        self.heartbeat.leave()
        self._requeue_local()

    def stop(self) -> None:
        """The worker has stopped."""
        self._requeue_local()
        self.heartbeat.stop()

    # -- host of the heartbeat -------------------------------------------------------------------------------------

    def idle(self) -> int:
        """Worker threads that could run a message now: alive, not busy, and not spoken for by what was fetched."""
        if self.heartbeat.leaving:
            return 0
        with self._lock:
            threads = private.running_threads(self._dramatiq)
            return max(0, len(threads - self._busy) - private.waiting_locally(self._dramatiq))

    def queues(self) -> tuple[tuple[str, str], ...]:
        """The queues into which messages can be taken now."""
        namespace = private.namespace_of(self.broker)
        if namespace is None or not self._parks:
            return ()
        return tuple((namespace, queue) for queue in private.consumed_queues(self._dramatiq))

    def deliver(self, takes: Iterable[tuple[Take, Holding | None]]) -> None:
        """Check each message as the consumer would, and give it to the next free thread."""
        for take, holding in takes:
            try:
                proxy = private.decode(take.payload)
            except Exception as exc:  # noqa: BLE001  # an encoder may raise anything
                events.error("guard.undecodable", queue=take.queue[1], error=type(exc).__name__)
                private.reject(self.broker, take.queue[1], take.message_id)
                self._release(holding)
                continue
            try:
                self.broker.get_actor(proxy.actor_name)
            except ActorNotFound as exc:
                proxy.fail()
                proxy.stuff_exception(exc)
                private.consumer_of(self._dramatiq, take.queue[1]).post_process_message(proxy)
                self._release(holding)
                continue
            if private.consumer_of(self._dramatiq, take.queue[1]) is None or self.heartbeat.leaving:
                continue  # what has not begun goes back with a beat
            if holding is not None:
                with self._lock:
                    self._taken[take.queue[1], take.message_id] = holding
            private.push(self._dramatiq, proxy)

    def beaten(self) -> None:
        """Put back what left by the skip while the store was away, and release for threads that have died."""
        self._requeue_local()
        with self._lock:
            dead = [ident for ident, (thread, _) in self._asked.items() if not thread.is_alive()]
        for ident in dead:
            self._let_go_of(ident)

    def _let_go_of(self, ident: int) -> None:
        """Release what a thread asked for and did not finish: an interrupt can strike between any two lines (I5)."""
        with self._lock:
            _, lease = self._asked.pop(ident, (None, ""))
        holding = self.heartbeat.holdings.find(lease)
        if holding is not None:
            self._release(holding)

    def _release(self, holding: Holding | None) -> None:
        if holding is not None:
            finish = Finish(
                process=self.heartbeat.process,
                lease=holding.lease,
                outcome=Outcome.IGNORED,
                home=holding.home,
                rank=holding.rank,
            )
            self.heartbeat.finish_later(finish)

    # -- before the actor ------------------------------------------------------------------------------------------

    def before(self, proxy: MessageProxy) -> None:
        """Let a message start, or take it out of this thread's hands.

        Raises:
            GuardSkip: it was parked, postponed, or is not this worker's any more; or it is to be dead-lettered.
        """
        self._let_go_of(threading.get_ident())
        with self._lock:
            self._busy.add(threading.get_ident())
        set_current_delivery(None)
        set_current(None)
        set_message_priority(None)
        try:
            asked = options.read(self.broker, proxy, self.guard)
        except options.InvalidOptions as exc:
            self._dead_letter(proxy, str(exc))
        if asked is None:
            set_message_priority(options.ambient_of(proxy))
            return
        set_message_priority(asked.priority)
        holding = self._pop_taken(proxy)
        if holding is None:
            self._ask(proxy, asked, new_id(), confirm=False)
            return
        self._note_asked(holding.lease)
        match self.heartbeat.holdings.begin(holding, fresh_s=self.heartbeat.lease_s / 2):
            case True:
                self._start(proxy, asked, holding, probe=False)
            case False:
                self._ask(proxy, asked, holding.lease, confirm=True)
            case None:
                self._skip(proxy)

    def _note_asked(self, lease: str) -> None:
        thread = threading.current_thread()
        with self._lock:
            self._asked[threading.get_ident()] = (thread, lease)

    def _pop_taken(self, proxy: MessageProxy) -> Holding | None:
        with self._lock:
            return self._taken.pop((proxy.queue_name, private.delivery_id_of(proxy)), None)

    def _ask(self, proxy: MessageProxy, asked: CallOptions, lease: str, *, confirm: bool) -> None:
        self._note_asked(lease)
        reply, holding = self._answer(proxy, asked, lease, confirm=confirm)
        match reply.status:
            case Status.ADMITTED if holding is not None:
                self._start(proxy, asked, holding, probe=reply.probe)
            case Status.IMPOSSIBLE:
                self._dead_letter(
                    proxy,
                    f"a call of cost {asked.cost} can never be admitted on {asked.model!r}: its ceiling, or the "
                    "budget of its GPU group without the others' floors, is smaller",
                )
            case Status.REFUSED:
                low_queue.postpone(self.broker, proxy, reply, stopping=lambda: self.heartbeat.leaving)
                proxy.options["store_results"] = False
                proxy.guard_skipped = True  # type: ignore[attr-defined]  # read by the log filter
                raise private.GuardSkip(reply.reason)
            case _:
                events.debug(
                    "guard.deferred", endpoint=asked.model, priority=asked.priority.value, reason=reply.reason
                )
                self._skip(proxy)

    def _answer(
        self, proxy: MessageProxy, asked: CallOptions, lease: str, *, confirm: bool
    ) -> tuple[Reply, Holding | None]:
        """Ask until there is an answer (I12), always with the same ids (I11).

        A time limit or a shutdown that strikes meanwhile is raised again once it is known what became of the message.
        """
        struck: BaseException | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                message = self._whereabouts(proxy)
                reply, holding = self.heartbeat.admit(self._command(proxy, asked, lease, message, confirm=confirm))
            except StoreUnavailable as exc:
                if struck is not None or self.heartbeat.leaving:
                    self._leave_aside(proxy, lease)
                try:
                    events.debug("guard.store_unavailable", error=str(exc))
                    time.sleep(pause_s)
                except BaseException as late:  # noqa: BLE001  # interrupts are raised anywhere in this thread
                    struck = late
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            except Exception as exc:  # noqa: BLE001  # I12: an ordinary exception here would let the actor run
                events.error("guard.admission_failed", endpoint=asked.model, error=type(exc).__name__)
                self._leave_aside(proxy, lease)
            except BaseException as exc:
                if struck is not None:
                    self._leave_aside(proxy, lease)
                struck = exc
                continue
            break
        if struck is not None and holding is not None:
            self._release(holding)
            raise struck
        return reply, holding

    def _command(
        self, proxy: MessageProxy, asked: CallOptions, lease: str, message: Message | None, *, confirm: bool
    ) -> Ask:
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
        )
        set_current_delivery(Delivery(self, proxy, holding, permit))
        set_current(permit)

    def _skip(self, proxy: MessageProxy) -> NoReturn:
        """End this delivery: its message is somewhere else. The proxy can do nothing to it any more."""
        private.void(proxy)
        raise private.GuardSkip

    def _leave_aside(self, proxy: MessageProxy, lease: str) -> NoReturn:
        """End this delivery without an answer of the store; a beat, or the shutdown, puts the message back."""
        with self._lock:
            self._to_requeue.append((proxy.queue_name, private.delivery_id_of(proxy)))
        self.heartbeat.holdings.drop(lease)
        self.heartbeat.abandon(lease)
        self._skip(proxy)

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
            try:
                private.requeue(self.broker, queue, [delivery])
            except Exception as exc:  # noqa: BLE001  # the broker's client raises its own errors
                events.warning("guard.requeue_failed", queue=queue, error=type(exc).__name__)
                with self._lock:
                    self._to_requeue.append((queue, delivery))

    # -- after the actor -------------------------------------------------------------------------------------------

    def finish(self, proxy: MessageProxy, finish: Finish, verdict: Classified) -> None:
        """Release a delivery's lease and take for this thread, which is about to be idle.

        Raises:
            GuardSkip: the message is somewhere else now.
        """
        if verdict.outcome is Outcome.OVERLOAD:
            events.warning("guard.overload", endpoint=finish.home, error=verdict.reason)
        reply = self._released(finish)
        if reply is not None and reply.status in (Status.PARKED, Status.STOLEN):
            self._skip(proxy)

    def _released(self, finish: Finish) -> Reply | None:
        """Finish until there is an answer; what cannot wait is left to the beats."""
        struck: BaseException | None = None
        pause_s = _FIRST_PAUSE_S
        reply = None
        while True:
            try:
                reply = self.heartbeat.finish(self._taking(finish))
            except StoreUnavailable:
                if struck is not None or self.heartbeat.leaving:
                    self.heartbeat.finish_later(finish)
                    break
                try:
                    time.sleep(pause_s)
                except BaseException as late:  # noqa: BLE001  # interrupts are raised anywhere in this thread
                    struck = late
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            except BaseException as exc:  # noqa: BLE001  # the same, or a fault of ours: released all the same
                if struck is not None or isinstance(exc, Exception):
                    self.heartbeat.finish_later(finish)
                    struck = struck or exc
                    break
                struck = exc
                continue
            break
        if struck is not None and not isinstance(struck, Exception):
            raise struck
        return reply

    def _taking(self, finish: Finish) -> Finish:
        if self.heartbeat.leaving:
            return finish
        return Finish(
            process=finish.process,
            lease=finish.lease,
            outcome=finish.outcome,
            retry_after_ms=finish.retry_after_ms,
            home=finish.home,
            rank=finish.rank,
            message=finish.message,
            park=finish.park,
            take=1,
            idle=self.idle(),
        )

    def after(self, proxy: MessageProxy) -> None:
        """The message is processed or skipped: what the wrapper never began ends here."""
        delivery = current_delivery()
        if delivery is not None:
            delivery.drop()
            set_current_delivery(None)
            set_current(None)
            if delivery.outlived:  # its coroutine ends the lease
                with self._lock:
                    self._asked.pop(threading.get_ident(), None)
            else:
                self._let_go_of(threading.get_ident())
            return
        self._let_go_of(threading.get_ident())
        taken = self._pop_taken(proxy)
        if taken is not None:
            self._release(taken)  # another middleware skipped it before the guard saw it
        elif self.heartbeat.waiting and not self.heartbeat.leaving:
            self.heartbeat.poke(extra=1)

    def acked(self) -> None:
        """This thread is idle again."""
        with self._lock:
            self._busy.discard(threading.get_ident())
