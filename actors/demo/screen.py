"""What is shown while a half runs: a table in place on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Group
    from rich.live import Live

_LINE_EVERY_S = 3.0
_COLUMNS = ("endpoint", "in flight", "most", "limit", "waiting: interactive\n/ orchestration\n/ background", "breaker")
_RANKS = (0, 1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRow:
    """One endpoint at one instant. The first two numbers are the server's own, the others the guard's.

    Attributes:
        name: id of the endpoint.
        in_flight: calls in flight.
        most: the most of them until now.
        limit: what applies now; `None` without a guard, and so on.
        waiting: waiting messages by rank.
        breaker: the breaker's state.
    """

    name: str
    in_flight: int
    most: int
    limit: int | None = None
    waiting: dict[int, int] = field(default_factory=dict)
    breaker: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row as texts."""
        guarded = self.limit is not None
        waiting = " / ".join(str(self.waiting.get(rank, 0)) for rank in _RANKS) if guarded else "-"
        limit = str(self.limit) if guarded else "none"
        return (self.name, str(self.in_flight), str(self.most), limit, waiting, self.breaker or "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A half at one instant.

    Attributes:
        half: which one.
        at_s: seconds since its first message.
        remaining: messages that Dramatiq still has.
        sent: messages sent until now.
        together: calls in flight over all endpoints.
        host: the host's state.
        deaths: how often it went dark.
        retries: retries burned.
        rows: the endpoints.
    """

    half: str
    at_s: float
    remaining: int
    sent: int
    together: int
    host: str
    deaths: int
    retries: int
    rows: tuple[EndpointRow, ...]

    def headline(self) -> str:
        """Everything that is not about one endpoint."""
        over = max(0, self.sent - self.remaining)  # a retry is stored before its predecessor is gone
        return (
            f"{self.half} {self.at_s:5.1f} s: {over} of {self.sent} messages over, "
            f"{self.together} in flight, host {self.host}, {self.deaths} deaths, {self.retries} retries"
        )

    def line(self) -> str:
        """The whole sample in one line."""
        rows = []
        for row in self.rows:
            name, in_flight, _, limit, waiting, breaker = row.cells()
            rows.append(f"{name} {in_flight} of {limit}, waiting {waiting}, breaker {breaker}")
        return " | ".join([self.headline(), *rows])


class Screen:
    """Shows samples for the length of a ``with`` block; the last one stays on the terminal."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._next_line_s = 0.0

    def __enter__(self) -> Self:
        """Take the terminal, if there is one."""
        if sys.stdout.isatty() and find_spec("rich"):
            from rich.live import Live  # noqa: PLC0415  # of the extra `cli`, which a demo can do without

            self._live = Live(auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Give the terminal back."""
        if self._live is not None:
            self._live.stop()

    def show(self, sample: Sample, *, last: bool = False) -> None:
        """Show a sample, if it is time for one.

        Args:
            sample: what to show.
            last: show it in any case.
        """
        if self._live is not None:
            self._live.update(_table(sample), refresh=True)
        elif last or time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + _LINE_EVERY_S
            print(sample.line(), flush=True)


def _table(sample: Sample) -> Group:
    from rich.console import Group  # noqa: PLC0415  # as above
    from rich.table import Table  # noqa: PLC0415  # as above

    table = Table()
    for number, name in enumerate(_COLUMNS):
        table.add_column(name, justify="right" if number else "left")
    for row in sample.rows:
        table.add_row(*row.cells())
    return Group(sample.headline(), table)
