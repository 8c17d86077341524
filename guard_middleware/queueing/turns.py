"""What the threads of a worker do with their messages: ask for a permit before the actor, leave nothing after it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from dramatiq.middleware import Interrupt, SkipMessage

from guard_middleware.calls import never_admissible
from guard_middleware.core.commands import Ask, Finish, Reply, Status
from guard_middleware.core.values import NOWHERE
from guard_middleware.core.verdict import Reason
from guard_middleware.errors import StoreUnavailable
from guard_middleware.holdings import new_id
from guard_middleware.observe import events
from guard_middleware.pauses import Pauses
from guard_middleware.permit import Permit, set_current
from guard_middleware.priority import message_priority, set_message_priority
from guard_middleware.queueing import low_queue, options, private
from guard_middleware.queueing.delivery import WRAPPED, Delivery, current_delivery, set_current_delivery

if TYPE_CHECKING:
    from dramatiq.broker import MessageProxy

    from guard_middleware.holdings import Holding
    from guard_middleware.queueing.member import Member
    from guard_middleware.queueing.options import CallOptions

_ASIDE_MS = 1_000
_AGE_MARGIN_MS = 1_000


@dataclass(slots=True)
class Turn:
    """What a thread has asked for its present message, until that is processed.

    Attributes:
        thread: the worker thread.
        lease: id of the lease that it asked for.
        doubt: a command that may have moved the message, and whose answer has not been acted upon.
    """

    thread: threading.Thread
    lease: str
    doubt: Ask | Finish | None = None


class Turns:
    """The turns of a worker's threads, each of which has one message at a time.

    Attributes:
        member: whose threads.
        in_message: ids of the threads that have begun with a message and not acked it.
        ending: ids of those among them whose message is over: they are about to be idle.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.in_message: set[int] = set()
        self.ending: set[int] = set()
        self._broker = member.broker
        self._heartbeat = member.heartbeat
        self._turns: dict[int, Turn] = {}
        self._asked: set[int] = set()

    def mine(self) -> Turn | None:
        """The turn of the calling thread."""
        return self._turns.get(threading.get_ident())

    def let_go_of_dead_threads(self) -> None:
        """Release what threads have asked for that live no more."""
        for ident, turn in list(self._turns.items()):
            if not turn.thread.is_alive():
                self._let_go_of(ident)

    def _let_go_of(self, ident: int) -> None:
        """Release what a thread asked for and did not finish: an interrupt can strike between any two lines (I5)."""
        turn = self._turns.get(ident)
        if turn is not None:
            holding = self._heartbeat.holdings.find(turn.lease)
            if holding is not None:
                self.member.end(holding)
            self._turns.pop(ident, None)

    # -- before the actor ------------------------------------------------------------------------------------------

    def before(self, proxy: MessageProxy) -> None:
        """Let a message start, or take it out of this thread's hands.

        Raises:
            GuardSkip: it was parked, postponed, or is not this worker's any more; or it is to be dead-lettered.
        """
        ident = threading.get_ident()
        if ident in self._turns:
            self._let_go_of(ident)
        self.in_message.add(ident)
        self.ending.discard(ident)
        self._asked.discard(ident)  # an ack that failed has left them there
        if current_delivery() is not None:
            set_current_delivery(None)
            set_current(None)
        if options.is_unguarded(self._broker, private.message_of(proxy)):  # most of what a worker may have to do
            ambient = options.ambient_of(private.message_of(proxy))
            if ambient is not message_priority():
                set_message_priority(ambient)
            return
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
            asked = options.read(self._broker, proxy, self.member.guard)
        except options.InvalidOptions as exc:
            self._dead_letter(proxy, str(exc))
        if asked is None:
            return
        set_message_priority(asked.priority)
        holding: Holding | None = private.handed_over(proxy)
        if holding is None and self._heartbeat.leaving and private.delivery_id_of(proxy):
            self._leave_aside(proxy)  # the others run it: here it would hold the worker's end up, or be cut off
        if holding is None:
            self._ask(proxy, asked, new_id(), confirm=False)
            return
        self._begin(holding.lease)
        private.hand_over(proxy, None)  # from here on the turn knows of it
        is_other = holding.home != asked.model  # a deploy has given its actor another model since it was parked
        match self._heartbeat.holdings.begin(holding, fresh_s=0 if is_other else self._heartbeat.lease_s / 2):
            case True:
                self._start(proxy, asked, holding, probe=holding.probe)
            case False if is_other:
                self.member.end(holding)
                self._ask(proxy, asked, new_id(), confirm=False)
            case False if holding.endpoint == NOWHERE:  # its ask tells where it is, or that it can never run
                self.member.end(replace(holding, message=None))
                self._ask(proxy, asked, new_id(), confirm=False)
            case False:
                self._ask(proxy, asked, holding.lease, confirm=True)
            case None:
                self._skip(proxy)

    def _begin(self, lease: str) -> Turn:
        turn = self._turns[threading.get_ident()] = Turn(threading.current_thread(), lease)
        return turn

    def _ask(self, proxy: MessageProxy, asked: CallOptions, lease: str, *, confirm: bool) -> None:
        turn = self._begin(lease)
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
        self, proxy: MessageProxy, asked: CallOptions, turn: Turn, *, confirm: bool
    ) -> tuple[Reply, Holding | None]:
        """Ask until there is an answer (I12), always with the same ids (I11).

        A time limit or a shutdown that strikes meanwhile is raised again once it is known what became of the message.
        """
        struck: Interrupt | None = None
        pauses = Pauses()
        while True:
            try:
                turn.doubt = self._command(proxy, asked, turn.lease, confirm=confirm)
                reply, holding = self._heartbeat.admit(turn.doubt)
            except StoreUnavailable as exc:
                if struck is not None or self._heartbeat.leaving:
                    self._leave_aside(proxy)
                try:
                    events.debug("guard.store_unavailable", error=str(exc))
                    time.sleep(next(pauses))
                except Interrupt as late:  # raised anywhere in this thread
                    struck = late
                continue
            except Interrupt as exc:
                if struck is not None:
                    self._leave_aside(proxy)
                struck = exc
                continue
            break
        if struck is not None and holding is not None:
            self.member.end(holding)
            raise struck
        return reply, holding

    def _command(self, proxy: MessageProxy, asked: CallOptions, lease: str, *, confirm: bool) -> Ask:
        message = self.member.whereabouts(proxy)
        return Ask(
            process=self._heartbeat.process,
            lease=lease,
            endpoint=asked.model,
            rank=asked.priority.rank,
            cost=asked.cost,
            message=message,
            take=0 if self._heartbeat.leaving else 1,
            idle=self.member.idle(),
            deadline_ms=self._deadline_ms(proxy),
            confirm=confirm,
            slot=message is None,
        )

    def _deadline_ms(self, proxy: MessageProxy) -> int:
        """When the message is too old for Dramatiq's age limit, with a margin; 0 for never or already."""
        max_age_ms = private.max_age_of(self._broker, proxy)
        if max_age_ms is None:
            return 0
        deadline_ms = int(proxy.message_timestamp + max_age_ms + _AGE_MARGIN_MS)
        return deadline_ms if deadline_ms > time.time() * 1000 else 0

    def _start(self, proxy: MessageProxy, asked: CallOptions, holding: Holding, *, probe: bool) -> None:
        settings = self.member.guard.settings
        permit = Permit(
            endpoint=settings.endpoint(holding.endpoint),
            model=asked.model,
            priority=asked.priority,
            cost=asked.cost,
            probe=probe,
            release=lambda _: None,  # the delivery releases its lease when the actor ends
            namespace=settings.namespace,
            lease=holding.lease,
        )
        set_current_delivery(Delivery(self, proxy, holding, permit))
        set_current(permit)

    # -- instead of the actor --------------------------------------------------------------------------------------

    def _skip(self, proxy: MessageProxy) -> NoReturn:
        """End this delivery: its message is somewhere else. The proxy can do nothing to it any more."""
        private.void(proxy)
        private.spare_ack(self.member.dramatiq_worker, proxy)
        raise private.GuardSkip

    def _postpone(self, proxy: MessageProxy, reply: Reply) -> NoReturn:
        """End this delivery after a copy of its message has been stored, to come back later."""
        low_queue.postpone(self._broker, proxy, reply, stopping=lambda: self._heartbeat.leaving)
        private.mark_elsewhere(proxy)
        raise private.GuardSkip(reply.reason)

    def _leave_aside(self, proxy: MessageProxy) -> NoReturn:
        """End this delivery without an answer of the store; a beat, or the shutdown, puts the message back."""
        if not self.set_aside(proxy):
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

    def set_aside(self, proxy: MessageProxy) -> bool:
        """Let a beat put this thread's message back. Returns whether this broker can."""
        turn = self._turns.pop(threading.get_ident(), None)
        holding = self._heartbeat.holdings.find(turn.lease) if turn is not None else None
        if holding is not None:  # nobody begins under it; where the message is, its next ask says
            self.member.end(replace(holding, message=None))
        elif turn is not None:
            self._heartbeat.abandon(turn.lease)
        delivery = private.delivery_id_of(proxy)
        if delivery:
            self.member.requeue_later(proxy.queue_name, delivery)
            private.void(proxy)
        return bool(delivery)

    def _dead_letter(self, proxy: MessageProxy, why: str) -> NoReturn:
        """Give a message that can never run to its broker's dead letters, with a clear reason; nothing starts."""
        events.error("guard.refused", actor=proxy.actor_name, why=why)
        proxy.fail()
        proxy.guard_skipped = True  # type: ignore[attr-defined]  # read by the log filter
        raise private.GuardSkip(why)

    # -- after the actor -------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether this thread's message has been processed: what it enqueues now, it enqueues for other middleware."""
        return threading.get_ident() in self.ending

    def after(self, proxy: MessageProxy, exception: BaseException | None, *, skipped: bool = False) -> None:
        """The message is processed or skipped: what the wrapper never began ends here. It can be repeated."""
        ident = threading.get_ident()
        self._note_end(ident)
        turn = self._turns.get(ident)
        if turn is None and current_delivery() is None and private.handed_over(proxy) is None:  # not guarded
            if self._heartbeat.somebody_waits:
                self._take_for(ident)
            return
        if exception is not None and turn is not None and not private.is_elsewhere(proxy):
            self._resolve(proxy, turn)
        delivery = current_delivery()
        if delivery is not None:
            if skipped or delivery.begun or self._is_wrapped(proxy):
                delivery.drop()
            else:
                delivery.close(exception)
            if delivery.outlived:  # its coroutine ends the lease
                self._turns.pop(ident, None)
            set_current_delivery(None)
            set_current(None)
        elif turn is None:
            self._give_up(proxy, private.handed_over(proxy))
        if ident in self._turns:
            self._let_go_of(ident)

    def _is_wrapped(self, proxy: MessageProxy) -> bool:
        actor = self._broker.actors.get(proxy.actor_name)
        return actor is None or getattr(actor.fn, WRAPPED, False)

    def acked(self) -> None:
        """This thread is done with its message: it was perhaps notified of another while no thread was idle."""
        ident = threading.get_ident()
        if self._heartbeat.somebody_waits:
            self._take_for(ident)
            self._heartbeat.thread_is_idle()
            self._asked.discard(ident)
        self.in_message.discard(ident)
        self.ending.discard(ident)

    def ends(self, lease: str) -> int:
        """The calling thread is about to be idle.

        Args:
            lease: whose finish may bring it the next message.

        Returns:
            How many messages to take for it: one, or none.
        """
        holdings = self._heartbeat.holdings
        holdings.expect(lease, 1)  # first, or a beat takes for this thread, too
        self._note_end(threading.get_ident())
        if self._has_room(mine=1):
            return 1
        holdings.expect(lease)
        return 0

    def _note_end(self, ident: int) -> None:
        if ident in self.in_message:  # else another middleware has skipped the message before the guard saw it
            self.ending.add(ident)

    def _take_for(self, ident: int) -> None:
        """Let a beat take a message for a thread that is about to be idle, once, if one could go that has no thread."""
        if self._heartbeat.waiting and not self._heartbeat.leaving and ident not in self._asked and self._has_room():
            self._asked.add(ident)
            self._heartbeat.poke(extra=1)

    def _has_room(self, mine: int = 0) -> bool:
        """Whether more threads could begin soon than there are messages that need one, `mine` not counted.

        Otherwise the process would hold permits under which nobody runs.
        """
        soon_idle = private.threads_beside(self.member.dramatiq_worker, self.in_message - self.ending)
        return self._heartbeat.holdings.in_hand() - mine < soon_idle

    def _give_up(self, proxy: MessageProxy, taken: Holding) -> None:
        """Another middleware ended a taken message before the guard saw it."""
        if self._heartbeat.holdings.begin(taken, fresh_s=0) is None:
            private.void(proxy)  # it had been given back
        else:
            self.member.end(taken)

    def _resolve(self, proxy: MessageProxy, turn: Turn) -> None:
        """An interrupt struck before an answer was acted upon: find out whether the message is somewhere else now.

        Otherwise Retries would store a copy beside the parked message.
        """
        try:
            if isinstance(turn.doubt, Ask):
                reply, _ = self._heartbeat.admit(replace(turn.doubt, take=0))
            elif isinstance(turn.doubt, Finish):
                reply = self._heartbeat.finish(turn.doubt)
            else:
                return
        except StoreUnavailable:
            self.set_aside(proxy)
            return
        turn.doubt = None
        if reply.status in (Status.PARKED, Status.GONE, Status.STOLEN):
            private.void(proxy)
