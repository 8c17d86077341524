"""The one table at the end: both halves side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.demo.result import HalfResult


def comparison(unguarded: HalfResult, guarded: HalfResult, ceilings: Mapping[str, int], budget: int) -> str:
    """Return both halves in one table of text."""
    rows: list[tuple[str, Callable[[HalfResult], object]]] = [
        *(
            (f"most in flight at {name} (ceiling {ceiling})", lambda half, name=name: half.most_in_flight[name])
            for name, ceiling in ceilings.items()
        ),
        (f"most in flight on the host (budget {budget})", lambda half: half.most_together),
        ("deaths of the host", lambda half: half.deaths),
        ("messages sent", lambda half: half.sent),
        ("  done", lambda half: half.done),
        ("  unfinished: still waiting or to be retried", lambda half: half.unfinished),
        ("  dead-lettered", lambda half: half.dead_lettered),
        ("  lost", lambda half: half.lost),
        ("calls that reached the server", lambda half: half.calls),
        ("  failed", lambda half: half.failed_calls),
        ("retries burned", lambda half: half.retries),
        ("a question's wait for its call, p50", lambda half: half.wait_p50),
        ("a question's wait for its call, p99", lambda half: half.wait_p99),
        ("wall time", lambda half: f"{half.wall_s} s" + (" (cut off)" if half.cut_off else "")),
    ]
    cells = [("", "unguarded", "guarded"), *((name, str(of(unguarded)), str(of(guarded))) for name, of in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = [f"{name:<{widths[0]}}  {left:>{widths[1]}}  {right:>{widths[2]}}" for name, left, right in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
