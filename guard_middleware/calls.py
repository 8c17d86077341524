"""One call of a caller, from its ask to its release, as steps: what both faces have in common."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn

from guard_middleware.core.commands import Action, Ask, Finish, Operate, Reply, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.verdict import Reason
from guard_middleware.errors import AdmissionDenied, ConfigurationError, StoreUnavailable
from guard_middleware.observe import events
from guard_middleware.pauses import Pauses
from guard_middleware.permit import UNUSED
from guard_middleware.steps import Hear

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from guard_middleware.core.outcome import Classified
    from guard_middleware.heartbeat import Heartbeat
    from guard_middleware.holdings import Holding
    from guard_middleware.priority import Priority
    from guard_middleware.steps import Step


class CallOff:
    """A way to tell waiting callers that their permits are not wanted any more. Tasks or threads share it."""

    def __init__(self) -> None:
        self.over = False
        self._ears: dict[str, Callable[[], object]] = {}

    def hear(self, lease: str, wake: Callable[[], object]) -> None:
        """Wake the caller that waits for this lease when it is over."""
        self._ears[lease] = wake
        if self.over:
            wake()

    def deafen(self, lease: str) -> None:
        """The caller waits no more."""
        self._ears.pop(lease, None)

    def now(self) -> None:
        """Let everybody who waits give up."""
        self.over = True
        for wake in list(self._ears.values()):
            wake()


def acquire(
    heartbeat: Heartbeat, ask: Ask, priority: Priority, deadline_s: float, call_off: CallOff | None = None
) -> Generator[Step, Any, tuple[Holding, Reply]]:
    """Ask until there is a lease, or until the time is over; then leave nothing behind.

    Args:
        heartbeat: the life line of this process's callers.
        ask: what is asked for, with its id.
        priority: of the call, for the error.
        deadline_s: when to give up, as monotonic time.
        call_off: tells that it is not wanted any more.

    Returns:
        The lease, and the store's last reply.

    Raises:
        AdmissionDenied: there was none in time.
        ConfigurationError: there can never be one.
        StoreUnavailable: the store gave no answer in time.
    """
    pauses, reply = Pauses(), Reply(status=Status.REFUSED)
    withdraw = Operate(action=Action.WITHDRAW, target=ask.lease)
    try:
        while not (heartbeat.leaving or (call_off is not None and call_off.over)):
            try:
                reply, holding = yield from heartbeat.asking(ask)
            except StoreUnavailable:
                pause_s = next(pauses)
                if time.monotonic() + pause_s >= deadline_s:
                    raise
                yield Hear(pause_s)
                continue
            if holding is not None:
                return holding, reply
            left_s = deadline_s - time.monotonic()
            if reply.status is not Status.WAITING or left_s <= 0:
                break
            yield Hear(min(left_s, heartbeat.heartbeat_s))
        if ask.wait:  # before it is denied, so that who looks then finds nothing of it
            yield from heartbeat.operating(withdraw)
            heartbeat.holdings.settled(ask.lease)
    except GeneratorExit:  # thrown away: this may be the garbage collector, so no lock is taken
        heartbeat.give_up(withdraw)
        raise
    except BaseException as exc:
        # Where nothing waits, wrong configuration leaves nothing; all else may be in the line, or have a lease by now.
        if ask.wait or not isinstance(exc, ConfigurationError):
            heartbeat.operate_later(withdraw)
        heartbeat.abandon(ask.lease)
        raise
    _deny(ask, reply, priority)


def release(heartbeat: Heartbeat, holding: Holding, ended: Classified) -> Generator[Step, Any, None]:
    """Give a lease back, and tell how its call ended. If that cannot be done now, a beat does it."""
    finish = ending(heartbeat, holding, ended)
    try:
        yield from heartbeat.finishing(finish)
    except GeneratorExit:  # as in `acquire`
        heartbeat.give_up(finish)
        raise
    except BaseException as exc:
        heartbeat.finish_later(finish)
        if not isinstance(exc, StoreUnavailable):
            raise
    if ended.outcome is Outcome.OVERLOAD:
        events.warning("guard.overload", endpoint=holding.endpoint, error=ended.reason)


def give_back_unused(heartbeat: Heartbeat, lease: str) -> None:
    """Give a lease back under which no call was made, if there is one: the caller was cut off, or cannot use it."""
    holding = heartbeat.holdings.find(lease)
    if holding is not None:
        heartbeat.finish_later(ending(heartbeat, holding, UNUSED))


def ending(heartbeat: Heartbeat, holding: Holding, ended: Classified) -> Finish:
    """The command that ends a call."""
    return Finish(
        process=heartbeat.process,
        lease=holding.lease,
        outcome=ended.outcome,
        retry_after_ms=ended.retry_after_ms or 0,
        home=holding.home,
    )


def never_admissible(model: str, cost: int) -> str:
    """What to say of a call that no state of its endpoint could ever admit."""
    return (
        f"a call of cost {cost} can never be admitted on {model!r}: its ceiling, or the budget of its GPU group "
        "without the others' floors, is smaller; lower the cost or raise them"
    )


def _deny(ask: Ask, reply: Reply, priority: Priority) -> NoReturn:
    if reply.status is Status.IMPOSSIBLE:
        raise ConfigurationError(never_admissible(ask.endpoint, ask.cost))
    reason = reply.reason or Reason.ENDPOINT_FULL
    raise AdmissionDenied(ask.endpoint, priority.value, reason, reply.retry_after_ms)
