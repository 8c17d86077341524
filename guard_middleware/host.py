"""Whom a heartbeat serves: a worker, or nobody but callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from guard_middleware.core.commands import Take
    from guard_middleware.holdings import Holding


class Host(Protocol):
    """Whom a heartbeat serves."""

    worker: str
    """The broker's id of the worker, which names the ack sets; "" for plain processes."""

    def idle(self) -> int:
        """How many threads could run a message now, those already asked for not counted."""
        ...

    def threads(self) -> int:
        """How many threads can run messages at all."""
        ...

    def queues(self) -> tuple[tuple[str, str], ...]:
        """The queues consumed now, as (namespace, queue)."""
        ...

    def deliver(self, takes: Iterable[tuple[Take, Holding]]) -> None:
        """Run what was handed over."""
        ...

    def beaten(self) -> None:
        """Do what belongs to every beat: called after each one that was answered."""
        ...


class NoWorker:
    """The host of a plain process: callers only."""

    worker = ""

    def idle(self) -> int:
        """No message can be handed over."""
        return 0

    def threads(self) -> int:
        """No message can be handed over."""
        return 0

    def queues(self) -> tuple[tuple[str, str], ...]:
        """No queue is consumed."""
        return ()

    def deliver(self, takes: Iterable[tuple[Take, Holding]]) -> None:
        """Nothing was asked for, so nothing comes."""

    def beaten(self) -> None:
        """Nothing belongs to a beat here."""
