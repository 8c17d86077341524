"""One guarded delivery on a worker thread: from its permit to its release, exactly once (I5)."""

from __future__ import annotations

import threading
import time
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

from dramatiq.middleware import Interrupt

from guard_middleware.core.commands import Finish, ParkAs, Status
from guard_middleware.core.outcome import Classified, Outcome
from guard_middleware.errors import StoreUnavailable, denial_in
from guard_middleware.observe import events
from guard_middleware.pauses import Pauses
from guard_middleware.queueing import private

if TYPE_CHECKING:
    from dramatiq.broker import MessageProxy

    from guard_middleware.core.commands import Reply
    from guard_middleware.holdings import Holding
    from guard_middleware.permit import Permit
    from guard_middleware.queueing.turns import Turns

WRAPPED = "__guarded__"
"""The mark of an actor's function that begins and ends its deliveries itself."""
_CUT_OFF = Classified(outcome=Outcome.IGNORED, reason="cut off")


class Delivery:
    """A message that may run: its lease, its permit, and how far it has come.

    The wrapper around the actor's function begins and ends it. A coroutine that goes on after its actor was
    interrupted keeps the lease until it ends: it still loads the server.
    """

    def __init__(self, turns: Turns, proxy: MessageProxy, holding: Holding, permit: Permit) -> None:
        self.proxy = proxy
        self.holding = holding
        self.permit = permit
        self.actor_name: str = proxy.actor_name
        self.begun = False
        self._turns = turns
        self._member = turns.member
        self._heartbeat = turns.member.heartbeat
        self._lock = threading.Lock()
        self._coroutines = 0
        self._ended: Finish | None = None

    def begin(self) -> None:
        """The body starts."""
        self.begun = True

    def end(self, exc: BaseException | None) -> None:
        """The body has ended: release, tell the outcome, take.

        An interrupt that strikes now ends here: there is nothing left to interrupt. What it cut short is repeated.

        Raises:
            GuardSkip: the message was parked again, or somebody else has it: this run leaves nothing behind.
        """
        try:
            is_elsewhere = self._end(exc)
        except Interrupt:
            is_elsewhere = self._end(exc)
        if is_elsewhere:
            raise private.GuardSkip

    def _end(self, exc: BaseException | None) -> bool:
        verdict = self.permit.verdict(exc)
        if denial_in(exc):  # somebody else's capacity: no evidence about this endpoint
            verdict = Classified(outcome=Outcome.IGNORED, reason="AdmissionDenied")
        return self._finish(verdict, self._park(exc, verdict))

    def drop(self) -> None:
        """The delivery is over without an end of the body: somebody skipped the message, failed, or interrupted."""
        if self._ended is None:
            self._finish(_CUT_OFF, ParkAs.NO)

    def close(self, exc: BaseException | None) -> None:
        """The body of an actor has ended that is not decorated, so that nothing stands around it but the hooks."""
        if self._ended is None:
            self._finish(self.permit.verdict(exc), ParkAs.NO)

    def _park(self, exc: BaseException | None, verdict: Classified) -> ParkAs:
        if exc is None or self.holding.message is None:
            return ParkAs.NO
        if denial_in(exc):
            return ParkAs.DENIED
        return ParkAs.OVERLOADED if verdict.outcome is Outcome.OVERLOAD else ParkAs.NO

    def _finish(self, verdict: Classified, park: ParkAs) -> bool:
        """Returns whether the message is somewhere else now. A second call repeats the first one (I11)."""
        finish = Finish(
            process=self._heartbeat.process,
            lease=self.holding.lease,
            outcome=verdict.outcome,
            retry_after_ms=verdict.retry_after_ms or 0,
            home=self.holding.home,
            message=self.holding.message,
            park=park,
        )
        with self._lock:
            if self._ended is None:
                self._ended = finish
            still_running = self._coroutines > 0
        self.permit.end()
        return not still_running and self._release(self._ended, verdict)

    def _release(self, finish: Finish, verdict: Classified) -> bool:
        """Release the lease and take for this thread, which is about to be idle.

        Returns:
            Whether the message is somewhere else now; then its proxy can do nothing to it any more.
        """
        if verdict.outcome is Outcome.OVERLOAD:
            events.warning("guard.overload", endpoint=finish.home, error=verdict.reason)
        turn = self._turns.mine()
        if turn is not None:
            turn.doubt = finish
        reply = self._answer(finish)
        if reply is None:  # whether it was parked is not known: a copy by Retries could be a second one
            is_elsewhere = finish.park is not ParkAs.NO and self._turns.set_aside(self.proxy)
        else:
            is_elsewhere = reply.status in (Status.PARKED, Status.STOLEN, Status.GONE)
        if is_elsewhere:
            private.void(self.proxy)
        if turn is not None:
            turn.doubt = None
        return is_elsewhere

    def _answer(self, finish: Finish) -> Reply | None:
        """Finish until there is an answer; what cannot wait is left to the beats.

        An interrupt that strikes meanwhile ends here: the body has ended, so there is nothing left to interrupt.
        """
        struck = False
        pauses = Pauses()
        while True:
            try:
                return self._heartbeat.finish(self._taking(finish))
            except StoreUnavailable:
                if struck or self._heartbeat.leaving:
                    break
                try:
                    time.sleep(next(pauses))
                except Interrupt:  # raised anywhere in this thread
                    struck = True
            except Interrupt:
                if struck:
                    break
                struck = True
            except Exception as exc:  # noqa: BLE001  # a fault of ours: released all the same
                events.error("guard.finish_failed", endpoint=finish.home, error=type(exc).__name__)
                break
        self._heartbeat.finish_later(finish)
        return None

    def _taking(self, finish: Finish) -> Finish:
        if self._heartbeat.leaving:
            return finish
        take = self._turns.ends(finish.lease)
        return replace(finish, take=take, idle=self._member.idle())

    @property
    def outlived(self) -> bool:
        """Whether a coroutine of the actor still runs."""
        with self._lock:
            return self._coroutines > 0

    def coroutine_begins(self) -> bool:
        """A coroutine of the actor starts on the event loop. Returns whether it may: its actor may have ended (I2)."""
        with self._lock:
            if self._ended is not None:
                return False
            self._coroutines += 1
            return True

    def coroutine_ends(self) -> None:
        """It has ended; if the actor ended before it, the lease ends now."""
        with self._lock:
            self._coroutines -= 1
            late = self._ended if self._coroutines == 0 else None
        if late is not None:
            self._heartbeat.finish_later(late)


_current: ContextVar[Delivery | None] = ContextVar("guard_current_delivery", default=None)


def current_delivery() -> Delivery | None:
    """The guarded delivery that this thread processes."""
    return _current.get()


def set_current_delivery(delivery: Delivery | None) -> None:
    """Note which delivery this thread processes."""
    _current.set(delivery)
