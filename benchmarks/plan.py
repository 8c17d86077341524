"""What is measured: the scenarios, the systems side by side, and how much work each gets."""

from __future__ import annotations

from dataclasses import dataclass

PROCESSES = 2
THREADS = 8
MODEL = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One model server and the load on it.

    Attributes:
        name: of the scenario.
        service_ms: how long the server takes for a call.
        ceiling: the most calls in flight that it is to see.
        messages: how many messages each system gets.
        aim_of_bound: the least use of the ceiling that the guard aims at, as a share of the bound's.
    """

    name: str
    service_ms: int
    ceiling: int
    messages: int
    aim_of_bound: float

    @property
    def shortest_s(self) -> float:
        """How long the messages take if the ceiling is always full, in seconds."""
        return self.messages * self.service_ms / 1000 / self.ceiling


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to keep to the ceiling.

    Attributes:
        name: of the system.
        kind: which middleware and actor the workers have: ``guard``, ``bound`` or ``limiter``.
        priority: of its messages.
        backoff_ms: of Dramatiq's Retries, shortest and longest.
    """

    name: str
    kind: str
    priority: str = "interactive"
    backoff_ms: int = 100

    def threads(self, scenario: Scenario) -> int:
        """Worker threads of each process: the bound has exactly as many in all as the ceiling allows calls."""
        return scenario.ceiling // PROCESSES if self.kind == "bound" else THREADS


SCENARIOS = (
    Scenario(name="50ms_x4", service_ms=50, ceiling=4, messages=400, aim_of_bound=0.98),
    Scenario(name="20ms_x8", service_ms=20, ceiling=8, messages=1_200, aim_of_bound=0.96),
)

BOUND = System(name="bound", kind="bound")
SYSTEMS = (
    BOUND,
    System(name="guard", kind="guard"),
    System(name="guard_background", kind="guard", priority="background_ingestion"),
    System(name="stock_limiter_100ms", kind="limiter", backoff_ms=100),
    System(name="stock_limiter_20ms", kind="limiter", backoff_ms=20),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the benchmarks.

    Attributes:
        rounds: how often everything is measured; the medians are reported.
        longest_s: no further round begins that would probably end later, in seconds: on a busy machine there are fewer.
        scale: share of each scenario's messages.
        scenarios: those to run, in order.
        systems: those to run in each of them, in order.
        micro: whether to measure the micro figures too.
    """

    rounds: int = 3
    longest_s: float = 345.0
    scale: float = 1.0
    scenarios: tuple[Scenario, ...] = SCENARIOS
    systems: tuple[System, ...] = SYSTEMS
    micro: bool = True

    def messages(self, scenario: Scenario) -> int:
        """How many messages each system gets in a scenario."""
        return max(4 * scenario.ceiling, round(scenario.messages * self.scale))
