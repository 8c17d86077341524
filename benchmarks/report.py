"""Medians, the JSON file, and the table with the aims beside the figures."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.plan import BOUND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.bench import Figures
    from benchmarks.plan import Plan

Runs = dict[tuple[str, str], list["Figures"]]
"""What was measured of each (scenario, system), round by round."""

AIM_CALLS = 5.0
AIM_ACQUIRE = 0.75
AIM_THROUGHPUT = 0.97
HEADS = ("scenario", "system", "use of ceiling", "of the bound", "calls/message", "retries burned", "most in flight")
_DIGITS = 4


def summary(plan: Plan, runs: Runs, micro: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """All figures as they are written to the file: medians over the rounds; of ``server_max_in_flight`` the largest.

    ``of_bound`` is the median of the use of the ceiling over the bound's in the same round; null without a bound.
    """
    rows = []
    for scenario in plan.scenarios:
        bounds = [one.ceiling_use for one in runs.get((scenario.name, BOUND.name), [])]
        for system in plan.systems:
            found = runs[scenario.name, system.name]
            shares = [one.ceiling_use / bound for one, bound in zip(found, bounds, strict=False) if bound]
            rows.append(
                {
                    "name": scenario.name,
                    "system": system.name,
                    "ceiling": scenario.ceiling,
                    "messages": plan.messages(scenario),
                    "ceiling_use": round(median(one.ceiling_use for one in found), _DIGITS),
                    "of_bound": round(median(shares), _DIGITS) if shares else None,
                    "calls_per_message": round(median(one.calls_per_message for one in found), _DIGITS),
                    "retries_burned": median(one.retries_burned for one in found),
                    "server_max_in_flight": max(one.server_max_in_flight for one in found),
                }
            )
    return {
        **{name: round(median(values), _DIGITS) for name, values in micro.items()},
        "rounds": max(len(found) for found in runs.values()),
        "scenarios": rows,
    }


def exceeded(report: Mapping[str, Any]) -> list[str]:
    """Where the guard let more calls through than the ceiling allows: a sentence each."""
    return [
        f"{row['system']} in {row['name']}: the server saw {row['server_max_in_flight']} calls in flight, "
        f"and the ceiling is {row['ceiling']}"
        for row in report["scenarios"]
        if row["system"].startswith("guard") and row["server_max_in_flight"] > row["ceiling"]
    ]


def lines(plan: Plan, report: Mapping[str, Any]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """The rows of the table of systems, and those of the table of single figures (figure, value, aim)."""
    aims = {scenario.name: scenario.aim_of_bound for scenario in plan.scenarios}
    rows: list[tuple[str, ...]] = []
    for row in report["scenarios"]:
        guard = row["system"] == "guard"
        share = "-" if row["of_bound"] is None else f"{row['of_bound']:.3f}"
        rows.append(
            (
                row["name"],
                row["system"],
                f"{row['ceiling_use']:.3f}",
                share + (f" (aim {aims[row['name']]})" if guard else ""),
                f"{row['calls_per_message']:.2f}" + (f" (aim {AIM_CALLS:g})" if guard else ""),
                f"{row['retries_burned']:g}" + (" (aim 0)" if guard else ""),
                f"{row['server_max_in_flight']} of {row['ceiling']}",
            )
        )
    single = {
        "acquire_release_vs_two_pings": ("acquire + release against two PINGs", f">= {AIM_ACQUIRE}"),
        "acquire_release_vs_two_bare_pings": ("... against two PINGs past the client library", "-"),
        "stock_acquire_release_vs_two_pings": ("... of ConcurrentRateLimiter, against two PINGs", "-"),
        "unguarded_throughput_ratio": ("unguarded actors, with the guard over without", f">= {AIM_THROUGHPUT}"),
    }
    figures: list[tuple[str, ...]] = [
        (title, f"{report[name]:.3f}", aim) for name, (title, aim) in single.items() if name in report
    ]
    return rows, figures


def show(plan: Plan, report: Mapping[str, Any]) -> None:
    """Print the tables, with rich if it is installed."""
    rows, figures = lines(plan, report)
    for heads, body in ((HEADS, rows), (("figure", "value", "aim"), figures)):
        if body:
            _print_table(heads, body)


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console  # noqa: PLC0415  # an extra
        from rich.table import Table  # noqa: PLC0415
    except ImportError:
        widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
        for row in (heads, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print()
        return
    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # Where the output is no terminal, it is a log: a table that is cut off says nothing.
    (console if console.is_terminal else Console(width=140)).print(table)
