"""How a call ended, told from a status or from an exception of any client.

Pure and duck-typed: no client library is imported; an error is known by the names of its classes (see
`outcome_table`), its `status_code` or `status`, its `response`, and by what stands behind it. The rule, in short:

- A status of 400 or more decides, the same way in every shape. What an application's own exception says of itself
  yields to the error of a client behind it, since applications translate ("500: failed to embed", from a 400).
- Without a status, the type decides; an error that only passes on what happened below yields to a cause that says
  something else (a time-out that was our own connection pool).
- An exception of nobody we know is evidence only through what stands behind it; else it is ignored.

Nothing here raises an `Exception`, whatever object comes, nor reads from the network: a body counts only if it is
already loaded. What another thread raises into this one (a time limit, a shutdown) passes through untouched.
No text of a body, a prompt or a message leaves this module (I13): reasons hold statuses and names of types.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from guard_middleware.core import outcome_evidence as evidence
from guard_middleware.core import outcome_table as table
from guard_middleware.core.outcome_evidence import Source
from guard_middleware.core.outcome_table import Outcome
from guard_middleware.core.retry_after import parse_retry_after

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["Classified", "Outcome", "classify_exception", "classify_status"]

_MOST_ERRORS = 64
_DEEPEST = 32
_MOST_HOPS = 8
_FIRST_ERROR = 400
_FIRST_SERVER_ERROR = 500

_BY_STATUS = {status: row.outcome for row in table.STATUS_ROWS for status in row.statuses}
_BY_HUNDRED = {row.hundred: row.outcome for row in table.STATUS_ROWS if row.hundred}
_OVERLOAD_TEXT = re.compile(
    "|".join(
        r"[\W_]{0,3}".join(words) if len(words) > 1 else rf"(?<![a-z0-9]){words[0]}(?![a-z0-9])"
        for words in (entry.split() for entry in table.OVERLOAD_WORDS)
    ),
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Classified:
    """One call's end.

    Attributes:
        outcome: what it means for the server's capacity.
        reason: why, never empty: "status 503", "status 500, overload text", "ReadTimeout". Statuses and type names
            only, fit for a log, an event or a label.
        retry_after_ms: how long the server asked to be left alone; only an overload carries it.
        status: the HTTP status that decided, if one did.
    """

    outcome: Outcome
    reason: str
    retry_after_ms: int | None = None
    status: int | None = None


def classify_status(
    status: int,
    *,
    body_text: str | bytes | None = None,
    headers: object = None,
    now_epoch_s: float | None = None,
    extra_overload: Collection[int] = (),
) -> Classified:
    """Say what an HTTP status means.

    Args:
        status: of the response. Outside 100 to 599 it is no status, and the outcome is ignored.
        body_text: the body, as far as it is loaded; its first 4096 characters can make a neutral 5xx an overload.
            They never change a 4xx.
        headers: of the response, in any shape that `parse_retry_after` reads.
        now_epoch_s: our clock in seconds since 1970, for a `Retry-After` date in a response without a `Date`.
        extra_overload: statuses from 400 that the endpoint's configuration counts as overload.

    Returns:
        The outcome and its reason. Never raises.
    """
    known = evidence.as_status(status)
    with suppress(Exception):
        if known is not None:
            return _from_status(known, (body_text,), (headers,), now_epoch_s, extra_overload)
    return Classified(outcome=Outcome.IGNORED, reason="no status")


def classify_exception(exc: object, *, now_epoch_s: float | None, extra_overload: Collection[int] = ()) -> Classified:
    """Say what the exception that a call ended with means.

    Args:
        exc: what was raised. An object that is no exception but has a status (a response) is judged by it.
        now_epoch_s: our clock in seconds since 1970, for a `Retry-After` date in a response without a `Date`.
        extra_overload: statuses from 400 that the endpoint's configuration counts as overload.

    Returns:
        The outcome and its reason. Never raises, never reads from the network.
    """
    with suppress(Exception):
        finding = _Walk(now_epoch_s=now_epoch_s, extra_overload=extra_overload).judge(exc)
        if finding is not None:
            return finding.verdict
    return Classified(outcome=Outcome.IGNORED, reason=evidence.type_name(type(exc)))


# ------------------------------------------------------------------------------------------------- from a status


def _from_status(
    status: int,
    texts: Iterable[object],
    headers: Iterable[object],
    now_epoch_s: float | None,
    extra_overload: Collection[int],
) -> Classified:
    outcome = _BY_STATUS.get(status) or _BY_HUNDRED[status // 100]
    reason = f"status {status}"
    if status >= _FIRST_ERROR and _added(status, extra_overload):
        outcome = Outcome.OVERLOAD
    elif outcome is Outcome.NEUTRAL and status >= _FIRST_SERVER_ERROR and _say_overload(texts):
        outcome, reason = Outcome.OVERLOAD, f"{reason}, overload text"
    hint = _longest_hint(headers, now_epoch_s) if outcome is Outcome.OVERLOAD else None
    return Classified(outcome=outcome, reason=reason, retry_after_ms=hint, status=status)


def _added(status: int, extra_overload: Collection[int]) -> bool:
    with suppress(Exception):  # a wrong addition does not take away the table
        return status in extra_overload
    return False


def _say_overload(texts: Iterable[object]) -> bool:
    with suppress(Exception):
        for text in texts:
            known = text
            if isinstance(known, (bytes, bytearray)):
                known = bytes(known[: 4 * table.SCANNED_CHARACTERS]).decode("utf-8", "replace")
            # A raw JSON body holds its line ends as escapes, whose letter would touch the next word.
            if isinstance(known, str) and _OVERLOAD_TEXT.search(known[: table.SCANNED_CHARACTERS].replace("\\n", " ")):
                return True
    return False


def _longest_hint(headers: Iterable[object], now_epoch_s: float | None) -> int | None:
    hints = (parse_retry_after(each, now_epoch_s=now_epoch_s) for each in headers)
    return max((hint for hint in hints if hint is not None), default=None)


# --------------------------------------------------------------------------------------------- from an exception


_CLIENTS = frozenset({Source.MODEL, Source.HTTP})
_EVIDENCE = _CLIENTS | {Source.SYSTEM, Source.OBJECT}
_STRANGERS = frozenset({Source.NOBODY, Source.OBJECT, Source.OTHER})


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one error, with all that stands behind it, says."""

    source: Source
    verdict: Classified
    looks_inside: bool = False
    catch_all: bool = False

    @property
    def is_evidence(self) -> bool:
        """Whether it says something about a server; of what stops a call, only a time limit does."""
        return self.source in _EVIDENCE or self.verdict.outcome is Outcome.OVERLOAD


@dataclass(slots=True)
class _Walk:
    """One judgement over an error and what stands behind it: each error once, within a bound."""

    now_epoch_s: float | None
    extra_overload: Collection[int]
    seen: dict[int, object] = field(default_factory=dict)  # keeps them alive, so that no id comes back

    def judge(self, exc: object, depth: int = 0) -> _Finding | None:
        """Judge `exc` with all that stands behind it; `None` if it was seen already or lies too deep."""
        if id(exc) in self.seen or len(self.seen) >= _MOST_ERRORS or depth >= _DEEPEST:
            return None
        self.seen[id(exc)] = exc
        own = self._worst_member(exc, depth) or self._alone(exc)
        stranger = own.source in _STRANGERS
        with suppress(Exception):  # what cannot be looked into does not take away what is already known
            for inner, explicit in evidence.behind(exc, implicit=stranger) if stranger or own.looks_inside else ():
                finding = self.judge(inner, depth + 1)
                if finding is not None and _yields(own, finding, explicit=explicit):
                    return finding
        return own

    def _worst_member(self, exc: object, depth: int) -> _Finding | None:
        """Judge an exception group by its worst member; `None` if it has none that is evidence."""
        judged = [self.judge(member, depth + 1) for member in evidence.members_of(exc)]
        return min(
            (replace(one, looks_inside=False) for one in judged if one is not None and one.is_evidence),
            key=lambda one: (table.WORST_FIRST.index(one.verdict.outcome), -(one.verdict.retry_after_ms or 0)),
            default=None,
        )

    def _alone(self, exc: object) -> _Finding:
        """Judge `exc` by itself, without what stands behind it: its status first, then its type."""
        name, source, row = evidence.recognise(type(exc))
        if source not in {Source.STOP, Source.GUARD, Source.OTHER}:
            status = evidence.status_of(exc, source)
            if status is not None and _decides(status, exc, row):
                owner = Source.OBJECT if source is Source.NOBODY else source
                return _Finding(owner, self._by_status(exc, status, source))
        outcome = Outcome.IGNORED if row is None else row.outcome
        looks_inside = row is not None and row.looks_inside
        if source is Source.NOBODY and evidence.exhausted(exc):
            source = Source.SYSTEM
        elif source is Source.NOBODY and evidence.unreachable(exc):
            source, outcome, looks_inside = Source.SYSTEM, Outcome.OVERLOAD, True
        elif looks_inside and outcome is Outcome.OVERLOAD and evidence.certificate_refused(exc):
            outcome, looks_inside = Outcome.NEUTRAL, False
        verdict = Classified(outcome=outcome, reason=evidence.type_name(type(exc)))
        return _Finding(source, verdict, looks_inside=looks_inside, catch_all=name in table.CATCH_ALL)

    def _by_status(self, exc: object, status: int, source: Source) -> Classified:
        texts = evidence.loaded_texts(exc, message=source is Source.NOBODY)
        headers = evidence.headers_of(exc)
        verdict = _from_status(status, texts, headers, self.now_epoch_s, self.extra_overload)
        if verdict.outcome is Outcome.OVERLOAD and verdict.retry_after_ms is None:
            return replace(verdict, retry_after_ms=self._hint_behind(exc, status))
        return verdict

    def _hint_behind(self, exc: object, status: int) -> int | None:
        """Find the hint of the same answer on an error behind this one.

        Also where `raise ... from None` hid that error: hiding is about tracebacks, and ollama's client drops the
        response that way, headers included.
        """
        for _ in range(_MOST_HOPS):
            exc = evidence.one_behind(exc)
            if exc is None:
                break
            if evidence.status_of(exc, Source.NOBODY) == status:
                hint = _longest_hint(evidence.headers_of(exc), self.now_epoch_s)
                if hint is not None:
                    return hint
        return None


def _decides(status: int, exc: object, row: table.TypeRow | None) -> bool:
    """Say whether a status is stronger than the type that came with it.

    A good status on an error means that the trouble came later (a stream), or elsewhere: then the type decides. A
    redirect decides if the type would only say that something went wrong. On what is no error, any status decides.
    """
    if status >= _FIRST_ERROR or not issubclass(type(exc), BaseException):
        return True
    return status // 100 == 3 and row is not None and row.outcome is Outcome.OVERLOAD  # noqa: PLR2004


def _yields(own: _Finding, inner: _Finding, *, explicit: bool) -> bool:
    """Say whether what stands behind an error counts instead of the error.

    Args:
        own: the error by itself.
        inner: what stands behind it.
        explicit: it was named as the cause, not merely handled when the error arose.
    """
    match own.source:
        case Source.NOBODY:
            return inner.is_evidence
        case Source.OTHER:  # below a store's error, sockets and HTTP are the store's
            return inner.source is Source.MODEL
        case Source.OBJECT:
            behind_it = {Source.SYSTEM, Source.OTHER, Source.GUARD} if explicit else frozenset()
            return inner.source in _CLIENTS | behind_it
        case _ if inner.source is Source.STOP:  # a time-out cancels what it waits for
            return False
        case _ if inner.source is Source.NOBODY:
            return own.catch_all
        case _:
            return inner.verdict.status is not None or inner.verdict.outcome is not own.verdict.outcome
