"""The four priorities, their ranks, and the ambient priority of a block of code."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import TYPE_CHECKING

from guard_middleware.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Priority(StrEnum):
    """What kind of work a call belongs to. Lower rank goes first."""

    INTERACTIVE = "interactive"
    ORCHESTRATION = "orchestration"
    HYDRATION = "hydration"
    BACKGROUND_INGESTION = "background_ingestion"

    @property
    def rank(self) -> int:
        """0 for interactive, 1 for orchestration and hydration, 3 for background ingestion."""
        return _RANKS[self]

    @classmethod
    def parse(cls, value: object) -> Priority:
        """Read a priority from a member or its name.

        Raises:
            ConfigurationError: if it is neither; the message lists the names.
        """
        try:
            return cls(value)  # type: ignore[arg-type]  # an enum's constructor takes any value and checks it
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            msg = f"unknown priority {value!r}: use one of {names}"
            raise ConfigurationError(msg) from None


_RANKS = {
    Priority.INTERACTIVE: 0,
    Priority.ORCHESTRATION: 1,
    Priority.HYDRATION: 1,
    Priority.BACKGROUND_INGESTION: 3,
}

_scope: ContextVar[Priority | None] = ContextVar("guard_priority_scope", default=None)


def current_priority() -> Priority | None:
    """The priority of the innermost `priority_scope` in force here, or ``None`` outside of any."""
    return _scope.get()


@contextmanager
def priority_scope(priority: Priority | str) -> Iterator[Priority]:
    """Give everything that is sent or called inside the block this priority, unless it says otherwise.

    Args:
        priority: a `Priority` or its name.

    Raises:
        ConfigurationError: if the name is unknown.
    """
    parsed = Priority.parse(priority)
    token = _scope.set(parsed)
    try:
        yield parsed
    finally:
        _scope.reset(token)


_message: ContextVar[Priority | None] = ContextVar("guard_message_priority", default=None)


def message_priority() -> Priority | None:
    """The priority of the message that this thread processes, or processed last: its children inherit it."""
    return _message.get()


def set_message_priority(priority: Priority | None) -> None:
    """Note the priority of the message that this thread begins to process."""
    _message.set(priority)
