"""What came of one half: reckoned from the server's log, the server's counts, and what Dramatiq still has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from guard_middleware.testing.model_server import Request, ServerStats

_OK = 200
_MS = 1000


@dataclass(frozen=True, slots=True, order=True)
class Wait:
    """A percentile of waits.

    Attributes:
        ms: milliseconds.
        at_least: it may be longer: questions that were never answered are among those that waited no longer, with the
            time that they had waited when the half ended.
    """

    ms: int
    at_least: bool

    def __str__(self) -> str:
        """The wait in words."""
        return f"{'> ' if self.at_least else ''}{self.ms:,} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfResult:
    """One half of the demo.

    Attributes:
        most_in_flight: the most calls that the server saw at once, by endpoint.
        most_together: the same over all endpoints.
        deaths: how often the host went dark.
        calls: calls that reached the server.
        failed_calls: those among them that were not answered with 200.
        sent: messages sent.
        done: messages whose call was answered with 200.
        dead_lettered: messages in the dead-letter queue that were not done.
        unfinished: messages that Dramatiq still has, waiting or to be retried, that were not done.
        lost: messages that are neither done nor anywhere.
        retries: retries that Dramatiq burned.
        wait_p50: from the sending of a question to the start of the call that answered it, the median.
        wait_p99: the same, of 99 in 100.
        wall_s: from the first message to the last one's end, or to the cut.
        cut_off: whether the half was cut before it ended by itself.
    """

    most_in_flight: dict[str, int]
    most_together: int
    deaths: int
    calls: int
    failed_calls: int
    sent: int
    done: int
    dead_lettered: int
    unfinished: int
    lost: int
    retries: int
    wait_p50: Wait
    wait_p99: Wait
    wall_s: float
    cut_off: bool


def reckon(
    *,
    sent: Mapping[str, int],
    questions: Collection[str],
    log: Iterable[Request],
    stats: ServerStats,
    kept: Collection[str],
    dead: Collection[str],
    retries: int,
    ended_at_s: float,
    wall_s: float,
    cut_off: bool,
) -> HalfResult:
    """Find out what became of each message.

    Args:
        sent: when each message was made, in milliseconds since the epoch, by message id.
        questions: ids of the interactive ones.
        log: the server's.
        stats: the server's.
        kept: ids of the messages that Dramatiq still has.
        dead: ids of those in its dead-letter queues.
        retries: that Dramatiq burned.
        ended_at_s: when the half ended, in seconds since the epoch.
        wall_s: how long it took.
        cut_off: whether it was cut off.
    """
    started_at_s: dict[str, float] = {}
    failed = 0
    for call in log:
        if call.status == _OK and call.ending == "answered":
            started_at_s.setdefault(call.message_id, call.t_start)
        else:
            failed += 1
    done = sent.keys() & started_at_s.keys()
    dead_lettered = (sent.keys() & set(dead)) - done
    unfinished = (sent.keys() & set(kept)) - done - dead_lettered
    waits = sorted(
        Wait(round(started_at_s.get(one, ended_at_s) * _MS - sent[one]), one not in started_at_s) for one in questions
    )
    return HalfResult(
        most_in_flight={name: tally.most_in_flight for name, tally in stats.endpoints.items()},
        most_together=stats.host.most_in_flight,
        deaths=stats.deaths,
        calls=stats.host.calls,
        failed_calls=failed,
        sent=len(sent),
        done=len(done),
        dead_lettered=len(dead_lettered),
        unfinished=len(unfinished),
        lost=len(sent) - len(done) - len(dead_lettered) - len(unfinished),
        retries=retries,
        wait_p50=_percentile(waits, 0.50),
        wait_p99=_percentile(waits, 0.99),
        wall_s=round(wall_s, 1),
        cut_off=cut_off,
    )


def broken_promises(guarded: HalfResult, ceilings: Mapping[str, int], budget: int) -> list[str]:
    """What the guarded half should not have done, in words; nothing if it kept every promise."""
    broken = [
        f"{most} calls in flight at {name}, whose ceiling is {ceilings[name]}"
        for name, most in guarded.most_in_flight.items()
        if most > ceilings[name]
    ]
    if guarded.most_together > budget:
        broken.append(f"{guarded.most_together} calls in flight on a host whose budget is {budget}")
    for count, what in (
        (guarded.deaths, "deaths of the host"),
        (guarded.lost, "messages lost"),
        (guarded.dead_lettered, "messages dead-lettered"),
        (guarded.unfinished, "messages unfinished"),
        (guarded.retries, "retries burned"),
    ):
        if count:
            broken.append(f"{count} {what}")
    return broken


def _percentile(waits: list[Wait], share: float) -> Wait:
    """The smallest wait that so large a share of all does not exceed, as far as is known."""
    if not waits:
        return Wait(0, at_least=False)
    upto = waits[: max(1, math.ceil(share * len(waits)))]
    return Wait(upto[-1].ms, any(one.at_least for one in upto))
