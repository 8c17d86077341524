"""The pauses between attempts that go wrong."""

from __future__ import annotations

from collections.abc import Iterator

FIRST_S = 0.05
LONGEST_S = 1.0


class Pauses(Iterator[float]):
    """Pauses without end, in seconds: a short one first, each twice as long as the one before, up to the longest.

    Not a generator: an exception that is raised in the thread from outside would end that.
    """

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def __next__(self) -> float:
        """The pause before the next attempt."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, LONGEST_S)
        return pause_s

    def reset(self) -> None:
        """An attempt went well: begin with the short one again."""
        self._next_s = FIRST_S
