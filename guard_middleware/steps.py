"""Work that takes time, as steps that somebody else carries out: in a thread, or on an event loop.

What both faces of the guard do is written once, as a generator that yields its steps; it is sent what came of each, or
thrown what was raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from guard_middleware.core.commands import Ask, Finish, Operate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator


@dataclass(frozen=True, slots=True)
class Hear:
    """Wait until the caller's lease was granted or nobody wants it any more, at most so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell the store of this process and its endpoints."""


Step = Ask | Finish | Operate | Hear | Publish
"""What a face carries out; commands go to the store and give its `Reply`."""

S = TypeVar("S")
T = TypeVar("T")


def perform(steps: Generator[S, Any, T], do: Callable[[S], Any]) -> T:
    """Carry steps out, one after the other, in this thread."""
    come, error = None, None
    while True:
        try:
            step = steps.send(come) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # a generator's value is typed as Any
        try:
            come, error = do(step), None
        except BaseException as exc:  # noqa: BLE001  # whatever it is, the steps clean up after themselves
            come, error = None, exc


async def perform_async(steps: Generator[S, Any, T], do: Callable[[S], Awaitable[Any]]) -> T:
    """Carry steps out, one after the other, on the event loop."""
    come, error = None, None
    while True:
        try:
            step = steps.send(come) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # a generator's value is typed as Any
        try:
            come, error = await do(step), None
        except BaseException as exc:  # noqa: BLE001  # also a cancellation: the steps clean up after themselves
            come, error = None, _thrown_away(exc) or exc


def _thrown_away(exc: BaseException | None) -> GeneratorExit | None:
    """Whether the coroutine was thrown away, which a client library's own clean-up may have put another error over."""
    while exc is not None and not isinstance(exc, GeneratorExit):
        exc = exc.__context__
    return exc
