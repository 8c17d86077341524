"""The plain frozen values that the rule works on. No clock, no I/O, no lock, no log.

Durations end in ``_ms``, instants in ``_at_ms`` or ``_until_ms`` and are milliseconds of the store's clock (I6).
"""

from __future__ import annotations

from dataclasses import dataclass, field

BACKGROUND_RANK = 3
"""Calls of this rank may not touch the reserve."""

NOWHERE = ""
"""The endpoint of a lease that uses no capacity: it says where a message is that was handed over without a permit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    """What one process publishes about one endpoint.

    Attributes:
        id: the endpoint's id, any text of 1 to 200 characters.
        ceiling: the most calls in flight that its server can take; at least 1.
        floor: units of the group's budget that are set aside for it: ``min(declared capacity, ceiling)`` for an
            endpoint in a reserved role, else 0.
        reserve: units that background may not take; ``None`` for the fraction of the present limit.
        group: GPU group, "" for none with a budget.
        fallback: id of the endpoint that serves while this one's breaker is not closed, "" for none.
        breaker: whether overloads trip a breaker at all.
        fail_threshold: consecutive overloads that trip it.
        base_cooldown_ms: the first cooldown.
        max_cooldown_ms: the longest cooldown that escalation reaches.
        backoff_factor: by how much each trip lengthens the cooldown.
    """

    id: str
    ceiling: int
    floor: int = 0
    reserve: int | None = None
    group: str = ""
    fallback: str = ""
    breaker: bool = True
    fail_threshold: int = 1
    base_cooldown_ms: int = 500
    max_cooldown_ms: int = 30_000
    backoff_factor: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What one process publishes about the deployment as a whole.

    Attributes:
        lease_ms: how long a lease lives without a renewal.
        heartbeat_ms: how often each process renews, reports and takes.
        hold_ms: how long one freed unit is kept for a process that was notified.
        ageing_ms: after this long without a background start, a waiting background call goes next, once.
        max_overloads: overloads that count against one message before it takes Dramatiq's path.
        reserve_fraction: share of a limit that background may not take.
        probe_deadline_ms: how long the probe's role stays with one call, at least.
        retry_after_cap_ms: the longest ``Retry-After`` that is obeyed.
    """

    lease_ms: int = 15_000
    heartbeat_ms: int = 2_000
    hold_ms: int = 50
    ageing_ms: int = 60_000
    max_overloads: int = 3
    reserve_fraction: float = 0.34
    probe_deadline_ms: int = 30_000
    retry_after_cap_ms: int = 600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One process's whole configuration, as it goes to the store.

    The smallest value among the live processes at the highest revision applies (DESIGN section 7).
    """

    endpoints: tuple[EndpointSpec, ...] = ()
    budgets: dict[str, int] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    revision: int = 0
