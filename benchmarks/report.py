"""Medians, the JSON file, and the tables with the aims beside the figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.plan import BOUND, GUARD, STOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.bench import Figures
    from benchmarks.plan import Plan, Scenario, System

AIM_CALLS = 5.0
AIM_ACQUIRE = 0.75
AIM_THROUGHPUT = 0.97
_DIGITS = 4


@dataclass(slots=True)
class Found:
    """What was measured; what the time did not allow for is not there.

    Attributes:
        singles: single figures, each time they were measured.
        runs: of each (scenario, system), round by round.
        callers: the same of the callers.
        interactive_wait_ms: see `benchmarks.waits`, and the next.
        release_to_start_ms: percentiles.
        processes: a row for each number of processes and system.
        backlogs: a row for each backlog and system.
        unfinished: what came to no end, a sentence each.
    """

    singles: dict[str, list[float]] = field(default_factory=dict)
    runs: dict[tuple[str, str], list[Figures]] = field(default_factory=dict)
    callers: dict[tuple[Scenario, System], list[dict[str, Any]]] = field(default_factory=dict)
    interactive_wait_ms: dict[str, float] | None = None
    release_to_start_ms: dict[str, float] | None = None
    processes: list[dict[str, Any]] = field(default_factory=list)
    backlogs: list[dict[str, Any]] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    def add_singles(self, found: Mapping[str, Sequence[float]] | None) -> None:
        """Remember single figures."""
        for name, values in (found or {}).items():
            self.singles.setdefault(name, []).extend(values)

    def add_run(self, key: tuple[str, str], figures: Figures | None) -> None:
        """Remember what a system made of a scenario."""
        if figures:
            self.runs.setdefault(key, []).append(figures)

    def add_callers(self, key: tuple[Scenario, System], figures: dict[str, Any] | None) -> None:
        """Remember what a system's callers made of a scenario."""
        if figures:
            self.callers.setdefault(key, []).append(figures)


def summary(plan: Plan, found: Found) -> dict[str, Any]:
    """All figures as they are written to the file: medians over the rounds; of ``server_max_in_flight`` the largest.

    ``of_bound`` is the median of the use of the ceiling over the bound's in the same round, ``of_better_stock`` over
    that of the better stock setting: null without those. Where calls take no time a ceiling cannot be used: there
    messages per second are compared.
    """
    return {
        **{name: round(median(values), _DIGITS) for name, values in found.singles.items()},
        "rounds": max(map(len, found.runs.values() or found.callers.values()), default=0),
        "scenarios": list(_scenarios(plan, found)),
        "callers": list(_callers(found)),
        "interactive_wait_ms": found.interactive_wait_ms,
        "release_to_start_ms": found.release_to_start_ms,
        "processes": [_rounded(row) for row in found.processes],
        "backlogs": [_rounded(row) for row in found.backlogs],
        "unfinished": found.unfinished,
    }


def _scenarios(plan: Plan, found: Found) -> Iterator[dict[str, Any]]:
    for scenario in plan.scenarios:
        worth = {
            system: [one.ceiling_use if scenario.service_ms else one.messages_per_s for one in figures]
            for (name, system), figures in found.runs.items()
            if name == scenario.name
        }
        stock = [worth[one.name] for one in STOCK if one.name in worth]
        better = [max(pair) for pair in zip(*stock, strict=False)] if len(stock) == len(STOCK) else []
        for system in plan.systems:
            figures = found.runs.get((scenario.name, system.name))
            if not figures:
                continue
            yield {
                "name": scenario.name,
                "system": system.name,
                "ceiling": scenario.ceiling,
                "messages": plan.messages(scenario),
                "ceiling_use": round(median(one.ceiling_use for one in figures), _DIGITS),
                "of_bound": _share(worth[system.name], worth.get(BOUND.name, [])),
                "of_better_stock": _share(worth[system.name], better),
                "messages_per_s": round(median(one.messages_per_s for one in figures), 1),
                "calls_per_message": round(median(one.calls_per_message for one in figures), _DIGITS),
                "retries_burned": median(one.retries_burned for one in figures),
                "server_max_in_flight": max(one.server_max_in_flight for one in figures),
            }


def _callers(found: Found) -> Iterator[dict[str, Any]]:
    bounds = {
        scenario: [one["ceiling_use"] for one in figures]
        for (scenario, system), figures in found.callers.items()
        if system.name == BOUND.name
    }
    for (scenario, system), figures in found.callers.items():
        most = max(one["server_max_in_flight"] for one in figures)
        yield {
            "name": scenario.name,
            "system": system.name,
            "ceiling": scenario.ceiling,
            "of_bound": _share([one["ceiling_use"] for one in figures], bounds.get(scenario, [])),
            **_rounded({name: median(one[name] for one in figures) for name in figures[0]}),
            "server_max_in_flight": most,
        }


def _share(values: Sequence[float], of: Sequence[float]) -> float | None:
    shares = [one / other for one, other in zip(values, of, strict=False) if other]
    return round(median(shares), _DIGITS) if shares else None


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in row.items()}


def exceeded(report: Mapping[str, Any]) -> list[str]:
    """Where the guard let more calls through than the ceiling allows: a sentence each."""
    return [
        f"{row['system']} in {row.get('name', part)}: the server saw {row['server_max_in_flight']} calls in flight, "
        f"and the ceiling is {row['ceiling']}"
        for part in ("scenarios", "callers", "backlogs")
        for row in report.get(part, ())
        if row["system"].startswith(GUARD.name) and row["server_max_in_flight"] > row["ceiling"]
    ]


Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def tables(plan: Plan, report: Mapping[str, Any]) -> Iterator[Table]:
    """The tables to print, each with its title and heads; those without rows are left out."""
    yield _scenario_table(plan, report)
    yield (
        "callers without Dramatiq",
        ("scenario", "system", "use of ceiling", "of the bound", "wait p50, p99 ms", "most in flight"),
        [
            (
                row["name"],
                row["system"],
                _number(row["ceiling_use"]),
                _number(row["of_bound"]),
                f"{row['wait_p50_ms']:.1f}, {row['wait_p99_ms']:.1f}",
                f"{row['server_max_in_flight']} of {row['ceiling']}",
            )
            for row in report["callers"]
        ],
    )
    yield (
        "20 ms x 8, by worker processes",
        ("processes", "system", "use of ceiling", "calls/message", "most in flight"),
        [
            (
                str(row["processes"]),
                row["system"],
                _number(row["ceiling_use"]),
                _number(row["calls_per_message"], 2),
                str(row["server_max_in_flight"]),
            )
            for row in report["processes"]
        ],
    )
    yield (
        "backlogs, 20 ms x 8",
        ("waiting", "system", "use of ceiling", "calls/message", "worker MB", "script p99.9, max ms", "slowest"),
        [
            (
                f"{row['backlog']:,}",
                row["system"],
                _number(row["ceiling_use"]),
                _number(row["calls_per_message"], 2) + (f" (aim {AIM_CALLS:g})" if row["system"] == GUARD.name else ""),
                f"{_number(row['worker_mb_before'], 0)} -> {_number(row['worker_mb_after'], 0)}",
                f"{_number(row['script_p999_ms'], 2)}, {_number(row['script_max_ms'], 2)}",
                row["slowest_script"] or "-",
            )
            for row in report["backlogs"]
        ],
    )
    yield "single figures", ("figure", "value", "aim"), list(_single(report))


def _scenario_table(plan: Plan, report: Mapping[str, Any]) -> Table:
    aims = {scenario.name: scenario.aim_of_bound for scenario in plan.scenarios}
    heads = (
        "scenario",
        "system",
        "use of ceiling",
        "of the bound",
        "calls/message",
        "retries burned",
        "most in flight",
    )
    rows: list[tuple[str, ...]] = []
    for row in report["scenarios"]:
        guard = row["system"] == GUARD.name
        aim = aims[row["name"]]
        rows.append(
            (
                row["name"],
                row["system"],
                _number(row["ceiling_use"]),
                _number(row["of_bound"]) + (f" (aim {aim})" if guard and aim else ""),
                _number(row["calls_per_message"], 2) + (f" (aim {AIM_CALLS:g})" if guard else ""),
                f"{row['retries_burned']:g}" + (" (aim 0)" if guard else ""),
                f"{row['server_max_in_flight']} of {row['ceiling']}",
            )
        )
    return "messages", heads, rows


def _single(report: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    single = {
        "acquire_release_vs_two_pings": ("acquire + release against two PINGs", f">= {AIM_ACQUIRE}"),
        "acquire_release_vs_two_bare_pings": ("... against two PINGs past the client library", "-"),
        "stock_acquire_release_vs_two_pings": ("... of ConcurrentRateLimiter, against two PINGs", "-"),
        "unguarded_throughput_ratio": ("unguarded actors, with the guard over without", f">= {AIM_THROUGHPUT}"),
        "unguarded_cpu_ratio": ("... per second of processor time", "-"),
    }
    for name, (title, aim) in single.items():
        if name in report:
            yield title, _number(report[name]), aim
    for row in report["scenarios"]:
        if row["system"] == GUARD.name and row["of_better_stock"] is not None:
            yield f"{row['name']}: the guard over the better stock setting", _number(row["of_better_stock"], 2), "-"
    waits = report["interactive_wait_ms"]
    if waits:
        yield "interactive under background: p50, p99 ms", f"{waits['p50']}, {waits['p99']}", "as idle"
        yield "... unguarded, idle workers", f"{waits['idle_p50']}, {waits['idle_p99']}", "-"
    if waits := report["release_to_start_ms"]:
        yield "release to start in another process: p50, p99 ms", f"{waits['p50']}, {waits['p99']}", "-"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def show(plan: Plan, report: Mapping[str, Any]) -> None:
    """Print the tables, with rich if it is installed."""
    for title, heads, rows in tables(plan, report):
        if rows:
            _print_table(title, heads, rows)


def _print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console  # noqa: PLC0415  # an extra
        from rich.table import Table as RichTable  # noqa: PLC0415
    except ImportError:
        print(title)
        widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
        for row in (heads, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print()
        return
    table = RichTable(*heads, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    # Where the output is no terminal, it is a log: a table that is cut off says nothing.
    (console if console.is_terminal else Console(width=140)).print(table)
