"""The admission rule over one endpoint and its GPU group, as pure decisions (DESIGN section 6, rules 1, 2, 4 to 6).

Who else waits (rule 3) is the business of the machine that knows the waiting lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from guard_middleware.core.breaker import Phase
from guard_middleware.core.values import BACKGROUND_RANK
from guard_middleware.core.verdict import Reason

if TYPE_CHECKING:
    from guard_middleware.core.breaker import Breaker
    from guard_middleware.core.values import EndpointSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A GPU group with a budget, seen from one of its endpoints.

    Attributes:
        budget: the most units in flight over all members.
        total: units in flight over all members.
        set_aside: unused floors of the *other* reserved members.
        floors: whole floors of the other reserved members.
        lent: of the total, units of a call in this group under which the call at hand is made: it may use them.
    """

    budget: int
    total: int
    set_aside: int
    floors: int
    lent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One endpoint at one instant.

    Attributes:
        spec: what applies of the configuration.
        ceiling: the ceiling in force: an operator's override, else the published one.
        paused: an operator has paused it.
        breaker: its breaker.
        probe_live: the probe's role is taken, or a unit is held for the probe.
        in_flight: units leased.
        present: units leased in the present generation.
        fraction: share of a limit that background may not take.
        group: its GPU group, `None` without a budget.
    """

    spec: EndpointSpec
    ceiling: int
    paused: bool
    breaker: Breaker
    probe_live: bool
    in_flight: int
    present: int
    fraction: float
    group: GroupView | None

    def phase(self, now_ms: int) -> Phase:
        """The breaker's state; an endpoint whose breaker is switched off counts as closed."""
        return self.breaker.phase(now_ms) if self.spec.breaker else Phase.CLOSED

    def ramp(self) -> int | None:
        """The most calls of the present generation during the ramp, `None` outside of it or without a breaker."""
        return self.breaker.ramp_limit() if self.spec.breaker else None

    def limit(self) -> int:
        """What applies now: min(ceiling, recovery ramp)."""
        ramp = self.ramp()
        return self.ceiling if ramp is None else min(self.ceiling, ramp)


def reserve_of(limit: int, fixed: int | None, fraction: float) -> int:
    """Units of a limit that background may not take; at least one is always left to it.

    Args:
        limit: the present limit, or a budget.
        fixed: the operator's own number, `None` for the fraction.
        fraction: share of the limit.
    """
    if limit <= 1:
        return 0
    wanted = max(1, math.floor(fraction * limit + 0.5)) if fixed is None else fixed
    return min(wanted, limit - 1)


def never_fits(view: View, cost: int) -> bool:
    """Rule 1: no state of this endpoint could ever admit such a call (an override or a ramp only delays)."""
    if cost > view.spec.ceiling:
        return True
    return view.group is not None and cost > view.group.budget - view.group.floors


def fits_alone(view: View, *, rank: int, cost: int, now_ms: int) -> bool:
    """Whether such a call would fit if nothing else were in flight, with what is in force and the reserve of its rank.

    If not, no release lets it go, only an operator, a new configuration or its ageing turn. Until then it holds nobody
    else up.
    """
    background = rank >= BACKGROUND_RANK and view.phase(now_ms) is Phase.CLOSED
    ceiling = view.ceiling
    if background:
        ceiling -= reserve_of(ceiling, view.spec.reserve, view.fraction)
    if cost > ceiling:
        return False
    if view.group is None:
        return True
    budget = view.group.budget
    if background:
        budget -= reserve_of(budget, None, view.fraction)
    return cost <= min(budget, view.group.budget - view.group.floors)


def endpoint_reason(view: View, *, rank: int, cost: int, aged: bool, now_ms: int) -> Reason | None:
    """Rules 2, 4 and the endpoint's half of 5: why this endpoint alone would not admit the call, if so.

    Args:
        view: the endpoint.
        rank: the call's rank.
        cost: its units.
        aged: it is the background call whose turn it is after the ageing time; the reserve does not apply.
        now_ms: the store's clock.
    """
    if view.paused:
        return Reason.PAUSED
    phase = view.phase(now_ms)
    if phase is Phase.OPEN:
        return Reason.BREAKER_OPEN
    if phase is Phase.HALF_OPEN:
        if view.probe_live:
            return Reason.PROBING
        return Reason.ENDPOINT_FULL if view.in_flight + cost > view.ceiling else None
    if _full(view, cost):
        return Reason.ENDPOINT_FULL
    if rank >= BACKGROUND_RANK and not aged and _touches_reserve(view, cost):
        return Reason.RESERVED
    return None


def _full(view: View, cost: int) -> bool:
    if view.in_flight + cost > view.ceiling:
        return True
    ramp = view.ramp()
    return ramp is not None and view.present > 0 and view.present + cost > ramp


def _touches_reserve(view: View, cost: int) -> bool:
    """Whether the call would leave less than the reserve, of the ceiling (all leases) or of the ramp (present ones)."""
    if view.in_flight + cost > view.ceiling - reserve_of(view.ceiling, view.spec.reserve, view.fraction):
        return True
    if view.ramp() is None or view.present == 0:  # alone, it may go: at the ramp's limit of one a wide call never fits
        return False
    limit = view.limit()
    return view.present + cost > limit - reserve_of(limit, view.spec.reserve, view.fraction)


def group_reason(view: View, *, rank: int, cost: int, aged: bool, now_ms: int) -> Reason | None:
    """Rule 6 and the budget's half of 5: why the GPU group would not admit the call, if so."""
    group = view.group
    if group is None:
        return None
    background = rank >= BACKGROUND_RANK and not aged and view.phase(now_ms) is Phase.CLOSED
    total = group.total + cost - min(cost, group.lent)
    if background and total > group.budget - reserve_of(group.budget, None, view.fraction):
        return Reason.RESERVED
    if total + group.set_aside > group.budget:
        return Reason.GROUP_FULL
    return None


def takes_from_others(view: View, cost: int) -> bool:
    """Whether the call would use what other endpoints of the group could have: beyond its own floor, and not lent."""
    if view.group is None or cost <= view.group.lent:
        return False
    return view.in_flight + cost > view.spec.floor
