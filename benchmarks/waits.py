"""How long something waits although it could start: an interactive message, and the next call after a release."""

from __future__ import annotations

import time
from random import Random
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from dramatiq.brokers.redis import RedisBroker

from benchmarks.bench import UnfinishedError, message_for, seed
from benchmarks.plan import MODEL, THREADS, Scenario
from benchmarks.workers import dramatiq_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.bench import Bench

LOADED = Scenario(name="50ms_x4", service_ms=50, ceiling=4, messages=200)
RELEASED = Scenario(name="20ms_x1", service_ms=20, ceiling=1, messages=200)
POLL_MS = 10
"""Dramatiq's longest pause between two polls of an empty queue: its 1 s would hide everything else."""
BACKGROUND = 12
"""Background messages for each interactive one: more than the server can take meanwhile."""
NO_POLL_S = 30
_LONGEST_S = 60.0
_HELD_S = 0.02


def interactive(bench: Bench, messages: int) -> dict[str, float]:
    """From the sending of an interactive message to its arrival at the model server, in ms.

    One message after the other, so that the reserve's permit is free. ``p50`` and ``p99`` while more background work
    than the server can take waits for its permits; ``idle_p50`` and ``idle_p99`` of the same message to unguarded
    workers that have nothing else to do, which is Dramatiq's own share.
    """
    loaded = _interactive(bench, "guard", messages, background=BACKGROUND * messages)
    idle = _interactive(bench, "bound", messages, background=0)
    return _percentiles(loaded) | {f"idle_{name}": value for name, value in _percentiles(idle).items()}


def _interactive(bench: Bench, kind: str, messages: int, background: int) -> list[float]:
    chance = Random(1)
    with bench.deployment(LOADED, kind) as one:
        environment = one.environment | {"dramatiq_worker_timeout": str(POLL_MS)}
        with dramatiq_workers(THREADS, "calls", environment) as workers:
            seed(one, "call", "calls", background, guard_priority="background_ingestion")
            workers.open_gate()
            if background:
                _until(lambda: one.not_parked("calls") <= LOADED.ceiling, "the background is not parked")
            broker = RedisBroker(url=one.url, namespace=one.namespace)  # type: ignore[no-untyped-call]
            sent = {}
            for _ in range(messages):
                time.sleep(chance.uniform(0.0, 0.03))
                message = message_for("call", "calls", guard_priority="interactive")
                sent[message.message_id] = time.time()
                stored = broker.enqueue(message)
                key, name = f"{one.namespace}:calls.msgs", stored.options["redis_message_id"]
                _until(lambda: not one.client.hexists(key, name), "an interactive message is not done")  # noqa: B023
            if background and not one.left("calls"):
                msg = "the background was done before the last interactive message"
                raise UnfinishedError(msg)
            broker.client.close()
        arrived = {call.message_id: call.t_start for call in one.calls()}
    return [(arrived[name] - at) * 1000 for name, at in sent.items()]


def release_to_start(bench: Bench, releases: int) -> dict[str, float]:
    """From a release in this process to the arrival of the next call, of a worker in another process, in ms.

    Nothing but the guard's notification can tell the worker: heartbeats and Dramatiq's polls are 30 s apart. Meanwhile
    this process asks for its next permit, and gets it from the worker in the same way.
    """
    settings = {
        "dramatiq_worker_timeout": str(NO_POLL_S * 1000),
        "GUARD_HEARTBEAT_S": str(NO_POLL_S),
        "GUARD_LEASE_S": str(3 * NO_POLL_S),
    }
    with bench.deployment(RELEASED, "guard") as one:
        one.environment.update(settings)
        guard = one.guard()
        seed(one, "call", "calls", 3 * releases)  # some start before this process has asked again
        released_at = []
        try:
            with dramatiq_workers(THREADS, "calls", one.environment) as workers:
                permit = guard.permit(MODEL, priority="interactive")
                workers.open_gate()
                _until(lambda: one.not_parked("calls") == 0, "the messages are not parked")
                for _ in range(releases):
                    time.sleep(_HELD_S)
                    calls = one.ended()
                    released_at.append(time.time())
                    with permit:
                        pass
                    _until(lambda: one.server.stats()[MODEL].calls > calls, "no message came")  # noqa: B023
                    permit = guard.permit(MODEL, priority="interactive", timeout=_LONGEST_S)
                with permit:
                    pass
        finally:
            guard.close()
        arrived = sorted(call.t_start for call in one.calls())
    return _percentiles(_next_after(released_at, arrived))


def _next_after(released_at: Sequence[float], arrived: Sequence[float]) -> list[float]:
    """The time from each release to the first arrival after it, in ms."""
    return [(next(at for at in arrived if at > released) - released) * 1000 for released in released_at]


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    found = quantiles(values, n=100, method="inclusive")
    return {"p50": round(found[49], 2), "p99": round(found[98], 2)}


def _until(is_done: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + _LONGEST_S
    while not is_done():
        if time.monotonic() > deadline:
            raise UnfinishedError(what)
        time.sleep(0.002)
