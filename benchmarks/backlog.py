"""What a message costs while thousands of others wait."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from benchmarks.bench import UnfinishedError, seed, until
from benchmarks.plan import DEEP, MODEL
from benchmarks.workers import dramatiq_workers
from guard_middleware.core.commands import Action, Operate
from guard_middleware.testing.model_server import use_of_ceiling

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Deployment
    from benchmarks.plan import System

PARKS_PER_S = 500
"""The fewest that are waited for."""


def measure(bench: Bench, system: System, waiting: int, messages: int) -> dict[str, Any]:
    """Let so many messages wait, and look at the first that get through.

    For the guard every message is parked first, while the endpoint is paused. The others have no such place: their
    backlog is what stands in Dramatiq's queues.

    Args:
        bench: where.
        system: whose messages.
        waiting: how many wait when the first one starts.
        messages: how many of them are measured.

    Returns:
        ``calls_per_message``: the script calls until all waited over ``waiting``, and those until ``messages`` had got
        through over ``messages``. The enqueueing is done without scripts here, and counted as one call each.
        ``ceiling_use`` while they got through; memory of the largest worker after its boot and at the end; how long the
        scripts took meanwhile.
    """
    messages = min(messages, waiting)
    with bench.deployment(DEEP, system.kind) as one:
        environment = one.environment | {"BENCH_BACKOFF_MS": str(system.backoff_ms)}
        with (
            dramatiq_workers(system.threads(DEEP), "calls", environment) as workers,
            closing(one.guard().reader()) as store,
        ):
            bench.forget_slow()
            before_mb = workers.memory_mb()
            began = time.monotonic()
            seed(one, "call", "calls", waiting, guard_priority=system.priority)
            parked_s = None
            if system.kind == "guard":
                store.operate(Operate(action=Action.PAUSE, target=MODEL))
                workers.open_gate()
                _wait_parked(one, waiting)
                parked_s = time.monotonic() - began
            calls = waiting + bench.script_calls()
            if system.kind == "guard":
                store.operate(Operate(action=Action.RESUME, target=MODEL))
            workers.open_gate()

            def is_done() -> bool:
                workers.check()
                return one.ended() >= messages

            until(is_done, DEEP, f"{system.name} with {waiting} waiting")
            done, in_the_end = one.ended(), waiting + bench.script_calls()
            after_mb, slow = workers.memory_mb(), bench.slow()
        log = one.calls()[:messages]
        in_flight = one.server.stats()[MODEL].most_in_flight
    return {
        "backlog": waiting,
        "system": system.name,
        "ceiling": DEEP.ceiling,
        "calls_per_message": calls / waiting + (in_the_end - calls) / done,
        "ceiling_use": use_of_ceiling(log, DEEP.ceiling, trim_s=DEEP.service_ms / 1000),
        "server_max_in_flight": in_flight,
        "parked_s": parked_s,
        "worker_mb_before": before_mb,
        "worker_mb_after": after_mb,
        **slow,
    }


def _wait_parked(one: Deployment, waiting: int) -> None:
    deadline = time.monotonic() + 20 + waiting / PARKS_PER_S
    while left := one.not_parked("calls"):
        if time.monotonic() > deadline:
            msg = f"{left} of {waiting} messages are not parked"
            raise UnfinishedError(msg)
        time.sleep(0.05)
