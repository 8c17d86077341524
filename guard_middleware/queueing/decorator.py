"""`guarded`: no body of a guarded actor starts without a live permit of its own delivery (I2)."""

from __future__ import annotations

import asyncio
import functools
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, overload

import dramatiq
from dramatiq.asyncio import async_to_sync

from guard_middleware.errors import ConfigurationError, GuardError
from guard_middleware.guard import Guard, default_guard
from guard_middleware.priority import Priority
from guard_middleware.queueing import options, private
from guard_middleware.queueing.delivery import WRAPPED, current_delivery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class MiddlewareMissing(GuardError):
    """A guarded actor was delivered to a worker whose broker has no `GuardMiddleware`."""


@overload
def guarded(target: dramatiq.Actor[..., Any], /, *, model: str) -> dramatiq.Actor[..., Any]: ...
@overload
def guarded(
    *, model: str, priority: Priority | str | None = None, cost: int = 1, **actor_options: Any
) -> Callable[[Callable[..., Any] | dramatiq.Actor[..., Any]], dramatiq.Actor[..., Any]]: ...
def guarded(
    target: Callable[..., Any] | dramatiq.Actor[..., Any] | None = None,
    /,
    *,
    model: str,
    priority: Priority | str | None = None,
    cost: int = 1,
    **actor_options: Any,
) -> Any:
    """Guard an actor: each run of it needs a permit for its model.

    Use it on top of an actor, or instead of ``@dramatiq.actor`` with that decorator's own options.

    Args:
        target: the actor, or the function to make one of.
        model: id of the endpoint that it calls.
        priority: of its messages, where neither the message nor a scope says otherwise.
        cost: units that one run needs.
        **actor_options: for ``dramatiq.actor``; only without an actor.

    Returns:
        The actor.

    Raises:
        ConfigurationError: if an option cannot be.
    """
    options.check_model(model)
    parsed = None if priority is None else Priority.parse(priority)
    if type(cost) is not int or cost < 1:  # a boolean is no number here
        msg = "cost must be a whole number of at least 1"
        raise ConfigurationError(msg)

    def decorate(found: Callable[..., Any] | dramatiq.Actor[..., Any]) -> dramatiq.Actor[..., Any]:
        if isinstance(found, dramatiq.Actor):
            if actor_options:
                names = ", ".join(sorted(actor_options))
                msg = f"the actor exists already: give {names} to @dramatiq.actor instead of to @guarded"
                raise ConfigurationError(msg)
            actor = found
        else:
            actor = dramatiq.actor(found, **actor_options)
        actor.options[options.MODEL] = model
        actor.options[options.COST] = cost
        if parsed is not None:
            actor.options[options.PRIORITY] = parsed.value
        wrap(actor)
        return actor

    return decorate if target is None else decorate(target)


def wrap(actor: dramatiq.Actor[..., Any]) -> None:
    """Put the guard around an actor's function, outside of Dramatiq's bridge to coroutines. Once is enough."""
    if getattr(actor.fn, WRAPPED, False):
        return
    fn = actor.fn
    coroutine = getattr(fn, "__wrapped__", None)
    if private.is_bridge(fn) and iscoroutinefunction(coroutine):
        fn = async_to_sync(_watched(coroutine))

    @functools.wraps(fn)
    def guarded_fn(*args: Any, **kwargs: Any) -> Any:
        delivery = current_delivery()
        if delivery is None or delivery.begun or delivery.actor_name != actor.actor_name:
            return _called(actor, fn, args, kwargs)
        delivery.begin()
        try:
            result = fn(*args, **kwargs)
        except BaseException as exc:
            delivery.end(exc)
            raise
        delivery.end(None)
        return result

    setattr(guarded_fn, WRAPPED, True)
    actor.fn = guarded_fn


def _watched(coroutine: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Note when an actor's coroutine really ends: it may outlive the interrupt that ended its actor (I5)."""

    @functools.wraps(coroutine)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        delivery = current_delivery()
        if delivery is None:
            return await coroutine(*args, **kwargs)
        if not delivery.coroutine_begins():
            raise asyncio.CancelledError
        try:
            return await coroutine(*args, **kwargs)
        finally:
            delivery.coroutine_ends()

    return watched


def _called(
    actor: dramatiq.Actor[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A guarded actor was called as a function: it stands in line as a caller, unless a worker should have asked."""
    if current_delivery() is None and private.on_worker_thread():
        msg = (
            f"actor {actor.actor_name!r} is guarded, and this message brought no permit for it: add GuardMiddleware() "
            "to the broker before the worker starts; from an unguarded actor, send to it instead of calling it"
        )
        raise MiddlewareMissing(msg)
    priority = actor.options.get(options.PRIORITY)
    with _guard_of(actor.broker).permit(
        actor.options[options.MODEL], priority=priority, cost=actor.options.get(options.COST, 1)
    ):
        return fn(*args, **kwargs)


def _guard_of(broker: dramatiq.Broker) -> Guard:
    """The guard of the broker's middleware, else one with the environment's configuration."""
    found = next((one.guard for one in broker.middleware if hasattr(one, "guard")), None)
    return found if isinstance(found, Guard) else default_guard()
