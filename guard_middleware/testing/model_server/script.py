"""What goes wrong, and when: a list of steps, and the pure machine that picks the one for a call.

A script in JSON::

    {
        "starts": "now",
        "steps": [
            {"calls": [1, 3], "fault": "status", "status": 503, "headers": {"retry-after": "1"}},
            {"from_s": 0.5, "to_s": 2, "fault": "refuse"},
            {"message_calls": [1, 1], "fault": "drop", "after_ms": 20},
            {"endpoint": "chat", "every": 2, "fault": "stream_reset", "chunks": 3},
            {"in_flight_above": 2, "to_s": 30, "fault": "status", "status": 503},
        ],
    }

The first step that matches a call decides it. A step matches when all of its conditions hold; one without conditions
matches always.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator


class Fault(StrEnum):
    """What a step does to a call. Unless it says otherwise, it happens after ``after_ms``, outside the engine."""

    SERVE = "serve"
    """Serve it, at another pace: in ``ms``, or ``factor`` times the usual time."""
    STATUS = "status"
    """Answer ``status`` with ``headers`` and ``body``."""
    DROP = "drop"
    """Close the connection without a byte."""
    RESET = "reset"
    """Reset the connection without a byte."""
    HANG = "hang"
    """Never answer. The call is open until its client gives up."""
    REFUSE = "refuse"
    """Close the listening socket for the window, and idle connections with it; ``open_calls`` says what else."""
    TRUNCATE = "truncate"
    """Send status 200, headers that promise a body and half of that body, then close."""
    GARBAGE = "garbage"
    """Send bytes that are no HTTP, then close."""
    NOT_JSON = "not_json"
    """Answer 200 with an HTML page where JSON is due."""
    STREAM_RESET = "stream_reset"
    """Serve ``chunks`` chunks of the stream, then reset the connection."""
    STREAM_ERROR = "stream_error"
    """Serve ``chunks`` chunks, then an error event with ``body`` (default: overloaded), then end the stream."""
    STREAM_SILENCE = "stream_silence"
    """Serve ``chunks`` chunks, then nothing, with the connection open until the client gives up."""
    STREAM_NO_END = "stream_no_end"
    """Serve ``chunks`` chunks, then end the response in order, but without ``[DONE]`` or a finish reason."""


STREAM_FAULTS = frozenset({Fault.STREAM_RESET, Fault.STREAM_ERROR, Fault.STREAM_SILENCE, Fault.STREAM_NO_END})
"""These match streamed calls only, and strike from inside the engine."""

Span = tuple[int, int | None]

_STREAM_DETAILS = frozenset({"chunks", "after_ms", "ms", "factor"})
_DETAILS_OF: dict[Fault, frozenset[str]] = {
    Fault.SERVE: frozenset({"after_ms", "ms", "factor"}),
    Fault.STATUS: frozenset({"after_ms", "status", "headers", "body"}),
    Fault.DROP: frozenset({"after_ms"}),
    Fault.RESET: frozenset({"after_ms"}),
    Fault.HANG: frozenset(),
    Fault.REFUSE: frozenset({"open_calls"}),
    Fault.TRUNCATE: frozenset({"after_ms"}),
    Fault.GARBAGE: frozenset({"after_ms"}),
    Fault.NOT_JSON: frozenset({"after_ms"}),
    Fault.STREAM_RESET: _STREAM_DETAILS,
    Fault.STREAM_ERROR: _STREAM_DETAILS | {"body"},
    Fault.STREAM_SILENCE: _STREAM_DETAILS,
    Fault.STREAM_NO_END: _STREAM_DETAILS,
}
_DETAILS = frozenset[str]().union(*_DETAILS_OF.values())
_PROBE_FAULTS = frozenset({Fault.STATUS, Fault.DROP, Fault.RESET, Fault.HANG})
_CALL_CONDITIONS = frozenset(
    {"path", "calls", "message_calls", "every", "share", "contains", "in_flight_above", "cost_above", "times"}
)


class Step(BaseModel):
    """One rule of a script: conditions, and a fault.

    Attributes:
        fault: what happens to a call that matches.
        endpoint: only calls to the endpoint of this name.
        path: only calls to this path, such as ``/v1/embeddings``.
        calls: only the endpoint's calls number first to last since the script began (from 1, both included; last may
            be ``None`` for no end).
        message_calls: the same, counted per ``x-message-id`` header; a call without one never matches.
        every: only each so-manieth call of the endpoint.
        share: only this share of the calls, chosen by chance, the same ones in each run.
        contains: only calls whose body contains this text.
        in_flight_above: only if more than so many calls are open at the endpoint, this one included.
        cost_above: only if more than so much cost is open over all endpoints, this call's included.
        from_s: only from so long after the script began...
        to_s: ...until so long after (not included); ``None`` for no end.
        times: only so many times.
        probes: let it strike ``/health``, ``/v1/models`` and ``/metrics`` too (``status``, ``drop``, ``reset`` and
            ``hang`` only). They are no calls, so only ``endpoint``, ``path``, ``from_s`` and ``to_s`` apply.
        after_ms: wait so long first. The call is open meanwhile.
        status: of a ``status`` fault, which must have one.
        headers: of a ``status`` fault, added to the usual ones.
        body: of a ``status`` or ``stream_error`` fault: text, or JSON; the usual error object if not given. In a
            text, ``{prompt}`` is replaced by what the caller asked.
        chunks: chunks served before a stream breaks.
        ms: service time of ``serve``.
        factor: slowdown of ``serve``.
        open_calls: what ``refuse`` does to calls that are open when it begins: ``keep``, ``drop`` or ``reset``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fault: Fault
    endpoint: str | None = None
    path: str | None = None
    calls: Span | None = None
    message_calls: Span | None = None
    every: int | None = Field(default=None, ge=1)
    share: float | None = Field(default=None, ge=0, le=1)
    contains: str | None = None
    in_flight_above: int | None = Field(default=None, ge=0)
    cost_above: int | None = Field(default=None, ge=0)
    from_s: float = Field(default=0.0, ge=0)
    to_s: float | None = None
    times: int | None = Field(default=None, ge=1)
    probes: bool = False
    after_ms: float = Field(default=0.0, ge=0)
    status: int = Field(default=500, ge=200, le=599)
    headers: dict[str, str] = {}
    body: JsonValue = None
    chunks: int = Field(default=0, ge=0)
    ms: float | None = Field(default=None, ge=0)
    factor: float = Field(default=1.0, gt=0)
    open_calls: Literal["keep", "drop", "reset"] = "keep"

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> Self:
        """Refuse what would have no effect: a test that says it believes in it."""
        given = self.model_fields_set
        if vain := given & _DETAILS - _DETAILS_OF[self.fault]:
            msg = f"{self.fault}: {', '.join(sorted(vain))} would have no effect"
            raise ValueError(msg)
        if self.fault is Fault.STATUS and "status" not in given:
            msg = "status: say which one"
            raise ValueError(msg)
        if self.fault is Fault.REFUSE and (vain := given & _CALL_CONDITIONS):
            msg = f"refuse: a closed port sees no calls, so {', '.join(sorted(vain))} would have no effect"
            raise ValueError(msg)
        if self.probes and (vain := given & _CALL_CONDITIONS - {"path"}):
            msg = f"probes are not calls: {', '.join(sorted(vain))} would have no effect on them"
            raise ValueError(msg)
        if self.probes and self.fault not in _PROBE_FAULTS:
            msg = f"{self.fault}: probes know only {', '.join(sorted(_PROBE_FAULTS))}"
            raise ValueError(msg)
        if self.to_s is not None and self.to_s <= self.from_s:
            msg = f"to_s {self.to_s} is not after from_s {self.from_s}"
            raise ValueError(msg)
        return self

    def open_at(self, elapsed_s: float) -> bool:
        """Tell whether the step's window is open so long after the script began."""
        return self.from_s <= elapsed_s and (self.to_s is None or elapsed_s < self.to_s)


class Script(BaseModel):
    """Steps, and when their clock starts.

    Attributes:
        steps: in order of precedence.
        starts: ``now``, or at the ``first_call`` to any endpoint, for tests whose workers take a while to start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: tuple[Step, ...] = ()
    starts: Literal["now", "first_call"] = "now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a script may know about a call: where it came, what it says, and what is open with it."""

    endpoint: str
    path: str
    message_id: str = ""
    body: bytes = b""
    is_stream: bool = False
    in_flight: int = 1
    cost: int = 1


class ScriptRun:
    """A script on its way: how many calls it has seen, and how often each step has struck.

    Args:
        script: what to follow.
        now: seconds on the clock of all later calls.
    """

    def __init__(self, script: Script, now: float) -> None:
        self.script = script
        self._began_at = now if script.starts == "now" else None
        self._calls: Counter[str] = Counter()
        self._message_calls: Counter[tuple[str, str]] = Counter()
        self._struck: Counter[int] = Counter()
        self._chance = random.Random(1)  # noqa: S311 - the same calls in each run, on purpose

    @property
    def has_begun(self) -> bool:
        """Whether its clock runs."""
        return self._began_at is not None

    def decide(self, arrival: Arrival, now: float) -> Step | None:
        """Count a call, and return the step that decides it, or ``None`` to serve it as usual."""
        if self._began_at is None:
            self._began_at = now
        elapsed = now - self._began_at
        self._calls[arrival.endpoint] += 1
        if arrival.message_id:
            self._message_calls[arrival.endpoint, arrival.message_id] += 1
        for index, step in enumerate(self.script.steps):
            if self._matches(index, step, arrival, elapsed):
                self._struck[index] += 1
                return step
        return None

    def decide_probe(self, endpoint: str, path: str, now: float) -> Step | None:
        """Return the step that decides a request for the server's health, models or metrics. It is not counted."""
        if self._began_at is None:
            return None
        for step in self.script.steps:
            if (
                step.probes
                and step.endpoint in {None, endpoint}
                and step.path in {None, path}
                and step.open_at(now - self._began_at)
            ):
                return step
        return None

    def refusing(self, endpoint: str, now: float) -> Step | None:
        """Return the step that keeps the endpoint's port closed now, if any."""
        if self._began_at is None:
            return None
        elapsed = now - self._began_at
        for step in self.script.steps:
            if step.fault is Fault.REFUSE and step.endpoint in {None, endpoint} and step.open_at(elapsed):
                return step
        return None

    def next_change_at(self, now: float) -> float | None:
        """Return when a port next opens or closes, or ``None`` if that cannot be known or will not happen."""
        if self._began_at is None:
            return None
        edges = [
            self._began_at + edge
            for step in self.script.steps
            if step.fault is Fault.REFUSE
            for edge in (step.from_s, step.to_s)
            if edge is not None
        ]
        return min((edge for edge in edges if edge > now), default=None)

    def _matches(self, index: int, step: Step, arrival: Arrival, elapsed: float) -> bool:
        """Tell whether all conditions hold. Chance comes last, so that it is asked only about calls in question."""
        number = self._calls[arrival.endpoint]
        message_number = self._message_calls[arrival.endpoint, arrival.message_id] if arrival.message_id else 0
        return (
            step.fault is not Fault.REFUSE
            and (arrival.is_stream or step.fault not in STREAM_FAULTS)
            and step.endpoint in {None, arrival.endpoint}
            and step.path in {None, arrival.path}
            and step.open_at(elapsed)
            and (step.calls is None or _within(number, step.calls))
            and (step.message_calls is None or _within(message_number, step.message_calls))
            and (step.every is None or number % step.every == 0)
            and (step.contains is None or step.contains.encode() in arrival.body)
            and (step.in_flight_above is None or arrival.in_flight > step.in_flight_above)
            and (step.cost_above is None or arrival.cost > step.cost_above)
            and (step.times is None or self._struck[index] < step.times)
            and (step.share is None or self._chance.random() < step.share)
        )


def _within(number: int, span: Span) -> bool:
    first, last = span
    return first <= number and (last is None or number <= last)
