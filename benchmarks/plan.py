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
        aim_of_bound: the least use of the ceiling that the guard aims at, as a share of the bound's; none if 0.
    """

    name: str
    service_ms: int
    ceiling: int
    messages: int
    aim_of_bound: float = 0.0

    @property
    def shortest_s(self) -> float:
        """How long the messages take if the ceiling is always full, in seconds."""
        return self.messages * self.service_ms / 1000 / self.ceiling


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to keep to the ceiling.

    Attributes:
        name: of the system.
        kind: which middleware and actor the workers have (``guard``, ``bound`` or ``limiter``), or which limiter the
            callers have (see `benchmarks.limiters`).
        priority: of its messages.
        backoff_ms: of Dramatiq's Retries, shortest and longest.
    """

    name: str
    kind: str
    priority: str = "interactive"
    backoff_ms: int = 100

    def threads(self, scenario: Scenario, processes: int = PROCESSES) -> int:
        """Threads of each process: the bound has exactly as many in all as the ceiling allows calls."""
        return scenario.ceiling // processes if self.kind == "bound" else THREADS


SCENARIOS = (
    Scenario(name="50ms_x4", service_ms=50, ceiling=4, messages=400, aim_of_bound=0.98),
    Scenario(name="20ms_x8", service_ms=20, ceiling=8, messages=1_200, aim_of_bound=0.96),
    Scenario(name="500ms_x8", service_ms=500, ceiling=8, messages=128),
    Scenario(name="0ms_x64", service_ms=0, ceiling=64, messages=2_000),
)
DEEP = Scenario(name="20ms_x8", service_ms=20, ceiling=8, messages=1_000)
"""Of the backlogs: how many of their messages are measured."""
WIDE = Scenario(name="20ms_x8", service_ms=20, ceiling=8, messages=800)
"""Of the numbers of processes."""
CALLED = (
    Scenario(name="50ms_x4", service_ms=50, ceiling=4, messages=240),
    Scenario(name="20ms_x8", service_ms=20, ceiling=8, messages=800),
)
"""Of the callers; the messages are calls."""

BOUND = System(name="bound", kind="bound")
GUARD = System(name="guard", kind="guard")
STOCK = (
    System(name="stock_limiter_100ms", kind="limiter", backoff_ms=100),
    System(name="stock_limiter_20ms", kind="limiter", backoff_ms=20),
)
BACKGROUND = System(name="guard_background", kind="guard", priority="background_ingestion")
SYSTEMS = (BOUND, GUARD, BACKGROUND, *STOCK)

PARTS = ("micro", "scenarios", "callers", "waits", "processes", "backlogs")
BACKLOGS = (100, 10_000, 100_000)
PROCESS_COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the benchmarks.

    Attributes:
        rounds: how often micro figures, scenarios and callers are measured; the medians are reported.
        scale: share of each scenario's messages.
        scenarios: those to run, in order.
        systems: those to run in each of them, in order; of the backlogs, those among them.
        parts: what to measure.
        backlogs: how many messages wait.
        round_s: no further round begins that would probably end later, in seconds: on a busy machine there are fewer.
        longest_s: nothing begins later, in seconds.
    """

    rounds: int = 3
    scale: float = 1.0
    scenarios: tuple[Scenario, ...] = SCENARIOS
    systems: tuple[System, ...] = SYSTEMS
    parts: tuple[str, ...] = PARTS
    backlogs: tuple[int, ...] = BACKLOGS
    round_s: float = 960.0
    longest_s: float = 1_380.0

    def messages(self, scenario: Scenario) -> int:
        """How many messages each system gets in a scenario."""
        return max(4 * scenario.ceiling, round(scenario.messages * self.scale))


QUICK = Plan(
    rounds=1,
    scale=0.5,
    scenarios=SCENARIOS[:3],
    systems=(BOUND, GUARD, *STOCK),
    parts=("micro", "scenarios", "backlogs"),
    backlogs=(10_000,),
    longest_s=210.0,
)
"""What ``QUICK=1`` asks for."""
