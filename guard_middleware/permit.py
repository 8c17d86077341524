"""A permit in somebody's hands: where to call, and how the call ended."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from guard_middleware.core.outcome import Classified, Outcome, classify_exception, classify_status

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from guard_middleware.config import EndpointConfig
    from guard_middleware.priority import Priority

_WORSE = (Outcome.IGNORED, Outcome.SUCCESS, Outcome.BENIGN, Outcome.NEUTRAL, Outcome.OVERLOAD)
"""From the least to the most that an outcome tells."""
UNUSED = Classified(outcome=Outcome.IGNORED, reason="not used")
"""What a permit under which no call was made ends with."""
_ABANDONED = Classified(outcome=Outcome.IGNORED, reason="abandoned")
_lending = threading.Lock()

_current: ContextVar[weakref.ref[Permit | AsyncPermit] | None] = ContextVar("guard_current_permit", default=None)


def _after_fork() -> None:
    global _lending  # noqa: PLW0603  # another thread of the parent may hold it
    _lending = threading.Lock()
    _current.set(None)


os.register_at_fork(after_in_child=_after_fork)  # a permit belongs to the process that has asked for it


def current_permit() -> Permit | AsyncPermit | None:
    """The permit under which this code runs, in a guarded actor or a ``with guard.permit(...)`` block; else `None`.

    It is visible in the actor's coroutines too, and in tasks and threads that were given a copy of the context.
    """
    permit = _present()
    while permit is not None and permit.released:  # the one around it may still be held
        permit = permit.outer
    return permit


def _present() -> Permit | AsyncPermit | None:
    found = _current.get()
    return None if found is None else found()


class _Permit:
    """What the permits of both faces have in common."""

    def __init__(
        self,
        *,
        endpoint: EndpointConfig,
        model: str,
        priority: Priority,
        cost: int,
        probe: bool,
        release: Callable[[Classified], Any],
        namespace: str,
        lease: str,
        give_up: Callable[[Classified], None] | None = None,
    ) -> None:
        """Keep what the face has found out.

        Args:
            endpoint: the endpoint chosen.
            model: id of the endpoint asked for.
            priority: the call's priority.
            cost: units.
            probe: the call is the breaker's probe.
            release: gives the lease back; a coroutine function in the asynchronous face.
            namespace: of the guard that gave it.
            lease: id of the lease; of the outer call's, if that one lends it.
            give_up: gives the lease back without waiting and without a lock; `None` if somebody else does that.
        """
        self.endpoint = endpoint
        self.model = model
        self.priority = priority
        self.cost = cost
        self.probe = probe
        self.namespace = namespace
        self.lease = lease
        self._release = release
        self._give_up = give_up
        self._recorded: Classified | None = None
        self._released = False
        self._pid = os.getpid()
        self._lent = False
        self.outer: Permit | AsyncPermit | None = None
        if give_up is not None:
            self._collected = weakref.finalize(self, give_up, _ABANDONED)
            self._collected.atexit = False

    def __repr__(self) -> str:
        """Ids and numbers only."""
        where = f"model={self.model!r} endpoint={self.endpoint.id!r}"
        return f"<{type(self).__name__} {where} priority={self.priority.value} cost={self.cost}>"

    def record(
        self,
        *,
        status: int | None = None,
        exception: BaseException | None = None,
        headers: object = None,
        body: str | bytes | None = None,
    ) -> Outcome:
        """Tell how a call under this permit ended, where no exception will.

        Of several records the one that says the most counts: an overload before a fault, before a success.

        Args:
            status: HTTP status of the answer.
            exception: what the client raised.
            headers: the answer's headers, for ``Retry-After``.
            body: the answer's body, where a 5xx may say that it is an overload. It is not kept.

        Returns:
            The outcome that was recorded.
        """
        now_s = time.time()
        extra = self.endpoint.overload_statuses
        if exception is not None:
            found = classify_exception(exception, now_epoch_s=now_s, extra_overload=extra)
        elif status is not None:
            found = classify_status(status, body_text=body, headers=headers, now_epoch_s=now_s, extra_overload=extra)
        else:
            found = Classified(outcome=Outcome.SUCCESS, reason="recorded")
        self.add(found)
        return found.outcome

    def add(self, ended: Classified) -> None:
        """Let an outcome count, beside what was recorded before: what says more stays."""
        self._recorded = _worse(self._recorded, ended)

    def verdict(self, exc: BaseException | None) -> Classified:
        """How the call ended, from what was recorded and the exception that left its block, if one did."""
        if exc is None:
            return self._recorded or Classified(outcome=Outcome.SUCCESS, reason="returned")
        found = classify_exception(exc, now_epoch_s=time.time(), extra_overload=self.endpoint.overload_statuses)
        return _worse(self._recorded, found)

    @property
    def released(self) -> bool:
        """Whether the permit was given back, or is another process's: a child that was forked under it has none."""
        return self._released or self._pid != os.getpid()

    def lend(self, model: str, cost: int, namespace: str) -> bool:
        """Lend it to a nested call on the same endpoint, one at a time. Returns whether it could be lent."""
        if self.model != model or self.cost < cost or self.namespace != namespace:
            return False
        with _lending:
            if self._lent or self.released:
                return False
            self._lent = True
            return True

    def take_back(self, ended: Classified | None = None) -> None:
        """The nested call is over. One that was never made says nothing of how this one ends."""
        self._lent = False
        if ended is not None and ended not in (UNUSED, _ABANDONED):
            self.add(ended)

    def end(self) -> None:
        """The lease has ended in another way: nobody can borrow it any more."""
        self._released = True

    def abandon(self) -> None:
        """Give the permit back without waiting: a beat does it. Takes no lock, so that a finalizer may call it."""
        mine = self._give_up is not None and self._pid == os.getpid()
        if mine and self._give_up is not None and self._collected.detach() is not None:
            self._released = True
            self._give_up(self._recorded or _ABANDONED)

    def _enter(self: Any) -> None:
        self.outer = _present()
        _current.set(weakref.ref(self))

    def _leave(self) -> None:
        _current.set(None if self.outer is None else weakref.ref(self.outer))

    def _settled(self) -> None:
        """Somebody has taken care of the lease: until then, and wherever it is cut off, the garbage collector would."""
        if self._give_up is not None:
            self._collected.detach()


class Permit(_Permit):
    """The right to one call, or `cost` of them.

    Used as a context manager it is released when the block ends, and an exception that leaves the block is
    classified; a permit of a guarded actor is released by the actor's end. One that is dropped without a release goes
    back with the next beat.

    Attributes:
        endpoint: the endpoint chosen, the one asked for or its fallback: call its `base_url`.
        model: id of the endpoint asked for.
        priority: the call's priority.
        cost: units.
        probe: the call is the breaker's probe.
        namespace: of the guard that gave it.
        lease: id of its lease.
    """

    def release(self, exc: BaseException | None = None) -> None:
        """Give the permit back. A second call does nothing.

        Args:
            exc: the exception with which the call ended.
        """
        if not self.released:
            self._released = True
            self._release(self.verdict(exc))
            self._settled()

    def __enter__(self) -> Self:
        """Make this the current permit of the block."""
        self._enter()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release, and classify the exception that leaves the block."""
        self._leave()
        self.release(exc)


class AsyncPermit(_Permit):
    """The right to one call, or `cost` of them, for a task: as `Permit`, with ``async with`` and ``await``."""

    async def release(self, exc: BaseException | None = None) -> None:
        """Give the permit back. A second call does nothing.

        Args:
            exc: the exception with which the call ended.
        """
        if not self.released:
            self._released = True
            await self._release(self.verdict(exc))
            self._settled()

    async def __aenter__(self) -> Self:
        """Make this the current permit of the block."""
        self._enter()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release, and classify the exception that leaves the block."""
        self._leave()
        await self.release(exc)


def set_current(permit: Permit | None) -> None:
    """Make a permit the current one of this thread's context: the worker's hooks begin and end outside of a block."""
    _current.set(None if permit is None else weakref.ref(permit))


def _worse(first: Classified | None, second: Classified) -> Classified:
    if first is None:
        return second
    return max(first, second, key=lambda one: _WORSE.index(one.outcome))
