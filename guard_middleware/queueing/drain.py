"""Drain: put every parked message back at the tail of its queue, so that the guard can be uninstalled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guard_middleware.core.commands import Action, Operate, Status
from guard_middleware.errors import GuardError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from guard_middleware.store.base import Store

_BATCH = 500


class DrainRefused(GuardError):
    """A guarded worker consumes the queue: it would park the messages again."""


def drain(store: Store, queues: Iterable[str], *, namespace: str = "dramatiq", force: bool = False) -> int:
    """Put the parked messages of queues back at their tails, in the order of the waiting line.

    Afterwards they are Dramatiq's to requeue, flush or join. It can be repeated.

    Args:
        store: the guard's store.
        queues: names of Dramatiq's queues.
        namespace: the broker's.
        force: also while a guarded worker of the queue beats.

    Returns:
        How many messages were put back.

    Raises:
        DrainRefused: a guarded worker of a queue beats; stop it first.
        StoreUnavailable: the store gave no answer; what was put back stays so.
    """
    moved = 0
    for queue in queues:
        while True:
            reply = store.operate(Operate(action=Action.DRAIN, queue=(namespace, queue), value=_BATCH, force=force))
            if reply.status is Status.REFUSED_ALIVE:
                msg = f"a guarded worker consumes {queue!r} and would park its messages again: stop it, or use --force"
                raise DrainRefused(msg)
            moved += reply.count
            if reply.count < _BATCH:
                break
    return moved
