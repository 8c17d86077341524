"""The options ``guard_model``, ``guard_priority`` and ``guard_cost`` on actors and messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dramatiq.errors import ActorNotFound
from dramatiq.middleware import MiddlewareError

from guard_middleware.errors import ConfigurationError
from guard_middleware.priority import Priority, current_priority, message_priority

if TYPE_CHECKING:
    from dramatiq import Broker
    from dramatiq.broker import MessageProxy
    from dramatiq.message import Message

    from guard_middleware.guard import Guard

MODEL = "guard_model"
PRIORITY = "guard_priority"
COST = "guard_cost"
NAMES = frozenset({MODEL, PRIORITY, COST})


class InvalidOptions(ConfigurationError, MiddlewareError):
    """An option cannot be. Dramatiq lets this one through, so that `send` itself fails and nothing starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What a message asks for.

    Attributes:
        model: id of the endpoint.
        priority: its priority.
        cost: units.
    """

    model: str
    priority: Priority
    cost: int


def read(broker: Broker, message: Message[Any] | MessageProxy, guard: Guard) -> CallOptions | None:
    """What a message asks for: its own options before its actor's.

    Returns:
        `None` if it is not guarded.

    Raises:
        InvalidOptions: if an option cannot be; the message says which and what to do.
    """
    actor = _actor_options(broker, message)
    model = message.options.get(MODEL, actor.get(MODEL))
    if model is None:
        return None
    priority = message.options.get(PRIORITY, actor.get(PRIORITY))
    cost = message.options.get(COST, actor.get(COST, 1))
    try:
        check_model(model)
        guard.know(model)
        return CallOptions(
            model=model,
            priority=Priority.ORCHESTRATION if priority is None else Priority.parse(priority),
            cost=guard.settings.check_cost(cost),
        )
    except ConfigurationError as exc:
        msg = f"message to actor {message.actor_name!r}: {exc}"
        raise InvalidOptions(msg) from None


def is_unguarded(broker: Broker, message: Message[Any]) -> bool:
    """Whether neither a message nor its actor names an endpoint."""
    actor = broker.actors.get(message.actor_name)
    return actor is not None and actor.options.get(MODEL) is None and message.options.get(MODEL) is None


def ambient_of(message: Message[Any]) -> Priority | None:
    """The priority that an unguarded message carries for its children's sake, if it is one."""
    carried = message.options.get(PRIORITY)
    if carried is None:
        return None
    try:
        return Priority.parse(carried)
    except ConfigurationError:
        return None


def check_model(model: object) -> None:
    """Refuse what cannot be the id of an endpoint.

    Raises:
        ConfigurationError: if it is not a text.
    """
    if not isinstance(model, str) or not model:
        msg = f"{MODEL} must be the id of an endpoint, a text; got {type(model).__name__}"
        raise ConfigurationError(msg)


def stamp(broker: Broker, message: Message[Any], guard: Guard) -> None:
    """Write a message's priority into it as it is sent: it is decided here, once.

    Its explicit option; else the `priority_scope` in force; else the better of its actor's own and that of the message
    being processed. A message to an unguarded actor carries the ambient priority on, for its children's sake.

    Raises:
        InvalidOptions: if an option of the message cannot be.
    """
    asked = read(broker, message, guard)
    if PRIORITY in message.options:
        return
    scope = current_priority()
    ambient = message_priority()
    if scope is None and asked is not None:
        own = _actor_options(broker, message).get(PRIORITY)
        known = [one for one in (ambient, None if own is None else Priority.parse(own)) if one is not None]
        message.options[PRIORITY] = min(known, key=lambda one: one.rank, default=Priority.ORCHESTRATION).value
    elif scope is not None or ambient is not None:
        message.options[PRIORITY] = (scope or ambient or Priority.ORCHESTRATION).value


def _actor_options(broker: Broker, message: Message[Any] | MessageProxy) -> dict[str, Any]:
    try:
        return broker.get_actor(message.actor_name).options
    except ActorNotFound:
        return {}
