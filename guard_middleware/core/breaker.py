"""The circuit breaker of one endpoint, as pure transitions.

States and what leads from one to the next:

    closed ──(threshold consecutive overloads of the present generation)──▶ open
    open ──(the cooldown is over; nothing is written)──▶ half_open
    half_open ──(the probe ends in success or benign)──▶ closed, with a ramp
    half_open ──(the probe ends in overload)──▶ open, with the next cooldown

Each trip and each close begins a new generation. A lease carries the generation in which it was admitted, and
only an outcome of the present one moves the breaker (I7): what was in flight when it tripped counts once.

After closing, the ramp is self-clocked as in TCP's slow start (V. Jacobson, "Congestion Avoidance and Control",
1988): one call, and one more for each that came back well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from guard_middleware.core.outcome import Outcome

if TYPE_CHECKING:
    from guard_middleware.core.values import EndpointSpec, Rules

NO_RAMP = -1
FIRST_MEAN_MS = 1_000
"""The mean length of a call before the first one has ended."""


class Phase(StrEnum):
    """The state that people see."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """The whole state of one breaker.

    Attributes:
        generation: grows by one with each trip and each close.
        open_until_ms: end of the cooldown; 0 while closed.
        trips: trips since the escalation was last forgotten.
        fails: consecutive overloads in the present generation.
        probe: lease id of the probe, "" if there is none.
        probe_until_ms: when the probe's role passes on.
        ramp: costs that came back well since the close, or `NO_RAMP` at the full limit.
    """

    generation: int = 0
    open_until_ms: int = 0
    trips: int = 0
    fails: int = 0
    probe: str = ""
    probe_until_ms: int = 0
    ramp: int = NO_RAMP

    def phase(self, now_ms: int) -> Phase:
        """The state at an instant. Nobody needs to write anything for an open breaker to become half-open."""
        if self.open_until_ms == 0:
            return Phase.CLOSED
        return Phase.OPEN if now_ms < self.open_until_ms else Phase.HALF_OPEN

    def ramp_limit(self) -> int | None:
        """The most calls of the present generation during the ramp, `None` outside of it."""
        return None if self.ramp == NO_RAMP else 1 + self.ramp


def cooldown_ms(spec: EndpointSpec, trips: int) -> int:
    """The pause after the trip number `trips` (1 for the first) in a row, in milliseconds.

    ``base x factor^(trips-1)``, capped. The exponent is bounded, so that no float overflows.
    """
    grown = spec.base_cooldown_ms * spec.backoff_factor ** min(trips - 1, 64)
    return math.floor(min(grown, spec.max_cooldown_ms))


def trip(state: Breaker, spec: EndpointSpec, rules: Rules, *, retry_after_ms: int, now_ms: int) -> Breaker:
    """Open, for the next cooldown or as long as the server asked, whichever is longer."""
    trips = state.trips + 1
    pause = max(cooldown_ms(spec, trips), min(retry_after_ms, rules.retry_after_cap_ms))
    return Breaker(generation=state.generation + 1, open_until_ms=max(state.open_until_ms, now_ms + pause), trips=trips)


def close(state: Breaker, *, full_limit: int) -> Breaker:
    """Close, and begin the ramp at one call; at a limit of one it ends where it begins."""
    return _ramped(replace(Breaker(generation=state.generation + 1, trips=state.trips), ramp=0), full_limit)


def settle(
    state: Breaker,
    spec: EndpointSpec,
    rules: Rules,
    outcome: Outcome,
    *,
    lease: str,
    generation: int,
    cost: int,
    retry_after_ms: int,
    full_limit: int,
    now_ms: int,
) -> tuple[Breaker, bool]:
    """Apply how a call ended.

    Args:
        state: the breaker before.
        spec: the endpoint's cooldowns and threshold.
        rules: the cap on the server's hints.
        outcome: how the call ended.
        lease: id of its lease.
        generation: generation in which the lease was given.
        cost: units that it held.
        retry_after_ms: the server's hint, 0 for none.
        full_limit: where the ramp ends.
        now_ms: the store's clock.

    Returns:
        The breaker after, and whether this overload is to be counted against the message that made the call: it
        was the probe, or the first failure of its generation.
    """
    if not spec.breaker or generation != state.generation:
        return state, False
    phase = state.phase(now_ms)
    if phase is Phase.CLOSED:
        return _settle_closed(state, spec, rules, outcome, cost, retry_after_ms, full_limit, now_ms)
    if lease != state.probe:
        return state, False
    match outcome:
        case Outcome.SUCCESS | Outcome.BENIGN:
            return close(state, full_limit=full_limit), False
        case Outcome.OVERLOAD:
            return trip(state, spec, rules, retry_after_ms=retry_after_ms, now_ms=now_ms), True
        case _:
            return replace(state, probe="", probe_until_ms=0), False


def _settle_closed(
    state: Breaker,
    spec: EndpointSpec,
    rules: Rules,
    outcome: Outcome,
    cost: int,
    retry_after_ms: int,
    full_limit: int,
    now_ms: int,
) -> tuple[Breaker, bool]:
    match outcome:
        case Outcome.SUCCESS | Outcome.BENIGN:
            return _ramped(_well(state, cost), full_limit), False
        case Outcome.OVERLOAD:
            first = state.fails == 0
            if state.fails + 1 >= spec.fail_threshold:
                return trip(state, spec, rules, retry_after_ms=retry_after_ms, now_ms=now_ms), first
            return replace(state, fails=state.fails + 1), first
        case _:
            return state, False


def _well(state: Breaker, cost: int) -> Breaker:
    ramp = state.ramp if state.ramp == NO_RAMP else state.ramp + cost
    return replace(state, fails=0, ramp=ramp)


def _ramped(state: Breaker, full_limit: int) -> Breaker:
    """End the ramp, and only then forget the escalation, once it has reached the full limit."""
    if state.ramp != NO_RAMP and 1 + state.ramp >= full_limit:
        return replace(state, ramp=NO_RAMP, trips=0)
    return state


def role_ms(rules: Rules, mean_ms: int) -> int:
    """How long the probe's role stays with one call, in milliseconds."""
    return max(rules.probe_deadline_ms, 4 * (mean_ms or FIRST_MEAN_MS))


def smoothed(mean_ms: int, sample_ms: int) -> int:
    """The mean length of an endpoint's calls after one more, smoothed with weight 1/8 (as TCP's round-trip time)."""
    if mean_ms == 0:
        return max(1, sample_ms)
    return max(1, math.floor(mean_ms + (sample_ms - mean_ms) / 8 + 0.5))
