"""What the command line says of a snapshot: texts alone, nothing is read or changed here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guard_middleware.config_parse import nearest, shown
from guard_middleware.core.admission import reserve_of
from guard_middleware.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Iterator

    from guard_middleware.config import GuardSettings
    from guard_middleware.core.commands import EndpointSnapshot, Snapshot

DRAMATIQ = "dramatiq"
"""The namespace of a `RedisBroker` that was given none."""
_FIRST = 200
"""How many waiters of a line a snapshot names."""


def status(snapshot: Snapshot, settings: GuardSettings) -> str:
    """Each endpoint and group on a line of its own, and what is parked for endpoints that nobody serves now."""
    lines = [_endpoint(one, settings) for one in snapshot.endpoints.values()]
    lines += [f"group {group}: {total} of {budget}" for group, (total, budget) in snapshot.groups.items()]
    left = list(_left_behind(snapshot))
    if not snapshot.endpoints:
        asked = "" if left else ": are GUARD_REDIS_URL and GUARD_NAMESPACE those of the workers?"
        lines.append(f"no live process has published an endpoint{asked}")
    return "\n".join([*lines, *left])


def _endpoint(one: EndpointSnapshot, settings: GuardSettings) -> str:
    kept = _kept_from_background(one, settings)
    reserve = f" ({kept} kept from background)" if kept else ""
    breaker = "paused" if one.paused else one.breaker
    rest = f" for {one.open_for_ms / 1000:.1f} s" if one.open_for_ms else ""
    waiting = ", ".join(f"{count} {_priorities(rank)}" for rank, count in sorted(one.waiting.items())) or "nobody"
    return f"{one.id}: {one.in_flight} in flight of {one.limit}{reserve}, breaker {breaker}{rest}, waiting: {waiting}"


def _priorities(rank: int) -> str:
    """The names of the priorities of a rank."""
    return "+".join(one.value for one in Priority if one.rank == rank) or f"of rank {rank}"


def _kept_from_background(one: EndpointSnapshot, settings: GuardSettings) -> int:
    """The reserve, as far as these settings tell: only of models that they name."""
    model = next((model for model in settings.models if model.id == one.id), None)
    if model is None:
        return 0
    fixed = settings.kg_llm_priority_reserve if model.reserve is None else model.reserve
    return reserve_of(one.limit, fixed, settings.kg_llm_priority_reserve_fraction)


def _left_behind(snapshot: Snapshot) -> Iterator[str]:
    """Parked messages of endpoints that no live process has published."""
    for (endpoint, namespace, queue), waiters in sorted(snapshot.lines.items()):
        if queue and waiters and endpoint not in snapshot.endpoints:
            count = f"{len(waiters)}{' or more' if len(waiters) >= _FIRST else ''}"
            option = "" if namespace == DRAMATIQ else f" --broker-namespace {namespace}"
            yield (
                f"{endpoint}: {count} parked in queue {queue!r}, and no live worker: start one, "
                f"or `python -m guard_middleware drain {queue}{option}`"
            )


def nothing_waits(snapshot: Snapshot, queue: str, namespace: str) -> str:
    """That a queue has no parked messages, and which ones have."""
    others = sorted(
        name if space == namespace else f"{name} (--broker-namespace {space})"
        for space, name in {(space, name) for (_, space, name), waiters in snapshot.lines.items() if name and waiters}
    )
    if not others:
        return f"no message waits for queue {queue!r}, nor for any other queue"
    return f"no message waits for queue {queue!r}; the queues with parked messages are: {', '.join(others)}"


def unknown_model(model: str, snapshot: Snapshot) -> str:
    """That neither the settings nor a live process know a model, and the nearest that one knows."""
    close = nearest(model, snapshot.endpoints)
    if close is None:
        return (
            f"{shown(model)} is not known here: no models are configured and no live process has published an "
            "endpoint: set GUARD_MODELS as for the workers, or start one"
        )
    return f"{shown(model)} is no endpoint of a live process; the nearest is {shown(close)}"
