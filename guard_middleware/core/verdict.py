"""What admission answers: `Admit`, `Delay` or `Reroute`, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a call may not start now. These words stand in replies, events, metrics and errors."""

    BREAKER_OPEN = "breaker_open"
    PROBING = "probing"
    PAUSED = "paused"
    RECOVERING = "recovering"
    QUEUE_AHEAD = "queue_ahead"
    ENDPOINT_FULL = "endpoint_full"
    RESERVED = "reserved"
    GROUP_FULL = "group_full"
    TOO_COSTLY = "too_costly"


DELAYS = frozenset({Reason.BREAKER_OPEN, Reason.PROBING, Reason.PAUSED, Reason.RECOVERING})
"""Reasons that time or an operator ends; all others end with a release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """The call may start on `endpoint`."""

    endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """The call waits at least `retry_after_ms`: time has to pass first."""

    reason: Reason
    retry_after_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reroute:
    """The call waits its turn in the waiting line."""

    reason: Reason
    retry_after_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """No state of the endpoint could ever admit a call of this cost."""

    reason: Reason = Reason.TOO_COSTLY


Verdict = Admit | Delay | Reroute | Impossible
