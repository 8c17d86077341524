"""The errors that the guard raises, by whose fault they are.

Core decisions are values; only the faces (guard, decorator, middleware) raise.
Each message says what to do next, and none holds a prompt, a key or a password (I13).
"""

from __future__ import annotations


class GuardError(Exception):
    """Root of everything that this package raises on purpose."""


class ConfigurationError(GuardError, ValueError):
    """The configuration cannot work: refused at start-up, in one message that names every field."""


class AdmissionDenied(GuardError):
    """No permit was given. Nothing was taken from anybody, so it is safe to try again.

    Attributes:
        model: id of the endpoint that was asked for.
        priority: name of the priority that the call had.
        reason: why not, one of the published reasons ("endpoint_full", "breaker_open", ...).
        retry_after_ms: when asking again may help, in milliseconds; 0 if nothing is known.
    """

    def __init__(self, model: str, priority: str, reason: str, retry_after_ms: int = 0) -> None:
        super().__init__(model, priority, reason, retry_after_ms)
        self.model = model
        self.priority = priority
        self.reason = reason
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        """One line for people: what was refused, why, and when to ask again."""
        again = f"; try again in {self.retry_after_ms} ms" if self.retry_after_ms else ""
        return f"no permit for {self.model!r} at priority {self.priority} ({self.reason}){again}"


def denial_in(exc: BaseException | None) -> AdmissionDenied | None:
    """The denial that an exception is, or that a client library has put into one of its own."""
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        if isinstance(exc, AdmissionDenied):
            return exc
        seen.add(id(exc))
        exc = exc.__cause__
    return None


class StoreError(GuardError):
    """The store gave an answer that cannot be used."""


class StoreUnavailable(StoreError):
    """The store does not answer, or answers that it cannot serve now (READONLY, LOADING, out of memory).

    Nothing starts unguarded meanwhile (I12). Work resumes by itself once the store is back.
    """
