"""Threads that call the model server through a limiter, without Dramatiq."""

from __future__ import annotations

from statistics import quantiles
from typing import TYPE_CHECKING, Any

from benchmarks.bench import UnfinishedError, rate, until
from benchmarks.limiters import LIMITERS, PACKAGES
from benchmarks.plan import MODEL, System
from benchmarks.workers import callers
from guard_middleware.testing.model_server import use_of_ceiling

if TYPE_CHECKING:
    from benchmarks.bench import Bench
    from benchmarks.plan import Scenario

SYSTEMS = tuple(System(name=name, kind=name) for name in LIMITERS)


def missing(system: System) -> str:
    """Why a system's package cannot be measured here, "" if it can."""
    make = PACKAGES.get(system.kind)
    try:
        if make is not None:
            make("redis://127.0.0.1/0", MODEL, 1, 1)  # connects to nothing yet
    except ImportError as exc:
        return str(exc)
    return ""


def measure(bench: Bench, scenario: Scenario, system: System, calls: int) -> dict[str, Any]:
    """Let two processes of callers make so many calls, each with its own permit.

    Raises:
        UnfinishedError: if they do not get through them.
    """
    with bench.deployment(scenario, system.kind) as one:
        with callers(system.threads(scenario), calls, one.environment) as workers:
            workers.open_gate()
            until(workers.done, scenario, f"callers, {system.name} in {scenario.name}")
        log = one.calls()
        in_flight = one.server.stats()[MODEL].most_in_flight
    if len(log) != calls:
        msg = f"callers, {system.name} in {scenario.name}: the server saw {len(log)} of {calls} calls"
        raise UnfinishedError(msg)
    waits = quantiles([float(call.user) for call in log], n=100, method="inclusive")
    return {
        "ceiling_use": use_of_ceiling(log, scenario.ceiling, trim_s=scenario.service_ms / 1000),
        "calls_per_s": rate(log),
        "wait_p50_ms": waits[49],
        "wait_p99_ms": waits[98],
        "server_max_in_flight": in_flight,
    }
