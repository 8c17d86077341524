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

import errno
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import chain, islice

from guard_middleware.core import outcome_table as table
from guard_middleware.core.outcome_table import Outcome
from guard_middleware.core.retry_after import parse_retry_after

__all__ = ["Classified", "Outcome", "classify_exception", "classify_status"]

_MOST_ERRORS = 64
_DEEPEST = 32
_MOST_HOPS = 8
_LONGEST_NAME = 100


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
        now_epoch_s: our clock, for a `Retry-After` date in a response without a `Date`.
        extra_overload: statuses from 400 that the endpoint's configuration counts as overload.

    Returns:
        The outcome and its reason. Never raises.
    """
    with suppress(Exception):
        known = _as_status(status)
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
    return Classified(outcome=Outcome.IGNORED, reason=_type_name(type(exc)))


# ------------------------------------------------------------------------------------------------ from a status


_PHRASES = "|".join(
    r"[\W_]{0,3}".join(words) if len(words) > 1 else rf"(?<![a-z0-9]){words[0]}(?![a-z0-9])"
    for words in (entry.split() for entry in table.OVERLOAD_WORDS)
)
_OVERLOAD_TEXT = re.compile(_PHRASES, re.IGNORECASE)
_CERTIFICATE_TEXT = re.compile(r"[\W_]{0,3}".join(table.CERTIFICATE_WORDS.split()), re.IGNORECASE)
_RETRIES_ENDED = re.compile(r"too many (\d{3}) error responses")
_BY_STATUS = {status: row.outcome for row in table.STATUS_ROWS for status in row.statuses}
_BY_HUNDRED = {row.hundred: row.outcome for row in table.STATUS_ROWS if row.hundred}


def _as_status(value: object) -> int | None:
    """Accept 100 to 599 as a number or as three digits; `True`, -1 and "error" are no statuses."""
    if isinstance(value, str) and len(value) == 3 and value.isascii() and value.isdigit():  # noqa: PLR2004
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599:  # noqa: PLR2004
        return int(value)
    return None


def _from_status(
    status: int,
    texts: Collection[object],
    headers: Collection[object],
    now_epoch_s: float | None,
    extra_overload: Collection[int],
) -> Classified:
    outcome = _BY_STATUS.get(status) or _BY_HUNDRED[status // 100]
    reason = f"status {status}"
    if status >= 400 and status in extra_overload:  # noqa: PLR2004 - the first error status
        outcome = Outcome.OVERLOAD
    elif outcome is Outcome.NEUTRAL and status >= 500 and any(map(_says_overload, texts)):  # noqa: PLR2004
        outcome, reason = Outcome.OVERLOAD, f"{reason}, overload text"
    hint = None
    if outcome is Outcome.OVERLOAD:
        hint = max((ms for ms in (parse_retry_after(h, now_epoch_s=now_epoch_s) for h in headers) if ms), default=None)
    return Classified(outcome=outcome, reason=reason, retry_after_ms=hint, status=status)


def _says_overload(text: object) -> bool:
    if isinstance(text, (bytes, bytearray)):
        text = bytes(text[: 4 * table.SCANNED_CHARACTERS]).decode("utf-8", "replace")
    if not isinstance(text, str):
        return False
    # A raw JSON body holds its line ends as escapes, whose letter would touch the next word.
    return _OVERLOAD_TEXT.search(text[: table.SCANNED_CHARACTERS].replace("\\n", " ")) is not None


# --------------------------------------------------------------------------------------------- from an exception


class _Source(Enum):
    """Whose word a finding is."""

    STOP = auto()  # cancelled, shut down, interrupted
    GUARD = auto()  # our own error
    OTHER = auto()  # a database, broker or store
    MODEL = auto()  # a client of model servers
    HTTP = auto()  # a client of anything
    SYSTEM = auto()  # sockets, TLS and time-outs of the standard library
    OBJECT = auto()  # an unknown class that has a status
    NOBODY = auto()  # anything else


_CLIENTS = frozenset({_Source.MODEL, _Source.HTTP})
_EVIDENCE = _CLIENTS | {_Source.SYSTEM, _Source.OBJECT}

_ROWS = {name: row for row in table.TYPE_ROWS for name in row.names}
_OPAQUE = table.TYPE_ROWS[-1]
_OF_ROOT = dict.fromkeys(table.MODEL_CLIENTS, _Source.MODEL) | dict.fromkeys(table.HTTP_CLIENTS, _Source.HTTP)
_LOCAL = frozenset(getattr(errno, name, None) for name in table.LOCAL_ERRNOS) - {None}
_UNREACHABLE = frozenset(getattr(errno, name, None) for name in table.UNREACHABLE_ERRNOS) - {None}


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one error, with all that stands behind it, says."""

    source: _Source
    verdict: Classified
    looks_inside: bool = False
    catch_all: bool = False


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
        own = self._group(exc, depth) or self._alone(exc)
        if own.source in {_Source.STOP, _Source.GUARD}:
            return own
        if own.source not in {_Source.NOBODY, _Source.OBJECT, _Source.OTHER} and not own.looks_inside:
            return own
        for inner, explicit in _behind(exc, implicit=not own.looks_inside):
            finding = self.judge(inner, depth + 1)
            if finding is not None and _yields(own, finding, explicit=explicit):
                return finding
        return own

    def _group(self, exc: object, depth: int) -> _Finding | None:
        """Judge the worst member of an exception group; `None` for anything else, or if no member is evidence."""
        if not issubclass(type(exc), BaseExceptionGroup):
            return None
        members = islice(_get(exc, "exceptions") or (), _MOST_ERRORS)
        judged = [self.judge(member, depth + 1) for member in members]
        evidence = [one for one in judged if one is not None and one.source in _EVIDENCE]
        return min(
            (replace(one, looks_inside=False) for one in evidence),
            key=lambda one: (table.WORST_FIRST.index(one.verdict.outcome), -(one.verdict.retry_after_ms or 0)),
            default=None,
        )

    def _alone(self, exc: object) -> _Finding:
        """Judge `exc` by itself, without what stands behind it."""
        name, source, row = _recognise(type(exc))
        label = _type_name(type(exc))
        if row is None and source in {_Source.STOP, _Source.GUARD, _Source.OTHER}:
            return _Finding(source, Classified(outcome=Outcome.IGNORED, reason=label))
        if source is not _Source.STOP:
            status = _status_of(exc, source)
            if status is not None and (status >= 400 or not isinstance(exc, BaseException)):  # noqa: PLR2004
                who = _Source.OBJECT if source is _Source.NOBODY else source
                return _Finding(who, self._by_status(exc, status, source))
            if status is not None and status // 100 == 3 and row is not None and row.outcome is Outcome.OVERLOAD:  # noqa: PLR2004
                return _Finding(source, self._by_status(exc, status, source))
        if row is None:
            return _system(exc, label)
        if row.looks_inside and row.outcome is Outcome.OVERLOAD and _certificate_refused(exc):
            return _Finding(source, Classified(outcome=Outcome.NEUTRAL, reason=label))
        verdict = Classified(outcome=row.outcome, reason=label)
        return _Finding(source, verdict, looks_inside=row.looks_inside, catch_all=name in table.CATCH_ALL)

    def _by_status(self, exc: object, status: int, source: _Source) -> Classified:
        texts = list(islice(_loaded_texts(exc, with_args=source is _Source.NOBODY), 64))
        verdict = _from_status(status, texts, _headers(exc), self.now_epoch_s, self.extra_overload)
        if verdict.outcome is Outcome.OVERLOAD and verdict.retry_after_ms is None:
            return replace(verdict, retry_after_ms=self._hint_behind(exc, status))
        return verdict

    def _hint_behind(self, exc: object, status: int) -> int | None:
        """Find the hint of the same answer on an error behind this one.

        Also where `raise ... from None` hid that error: hiding is about tracebacks, and ollama's client drops the
        response, headers included, that way.
        """
        for _ in range(_MOST_HOPS):
            exc = _get(exc, "__cause__") or _get(exc, "__context__")
            if exc is None:
                return None
            if _status_of(exc, _Source.NOBODY) == status:
                hints = (parse_retry_after(h, now_epoch_s=self.now_epoch_s) for h in _headers(exc))
                hint = max((ms for ms in hints if ms is not None), default=None)
                if hint is not None:
                    return hint
        return None


def _yields(own: _Finding, inner: _Finding, *, explicit: bool) -> bool:
    """Say whether what stands behind an error counts instead of the error.

    Args:
        own: the error by itself.
        inner: what stands behind it.
        explicit: it was named as the cause, not merely handled when the error arose.
    """
    match own.source:
        case _Source.NOBODY:
            return inner.source in _EVIDENCE
        case _Source.OTHER:  # below a store's error, sockets and HTTP are the store's
            return inner.source is _Source.MODEL
        case _Source.OBJECT:
            return inner.source in _CLIENTS or (
                explicit and inner.source in {_Source.SYSTEM, _Source.OTHER, _Source.GUARD}
            )
        case _ if inner.source is _Source.STOP:  # a time-out cancels what it waits for
            return False
        case _ if inner.source is _Source.NOBODY:
            return own.catch_all
        case _:
            return inner.verdict.status is not None or inner.verdict.outcome is not own.verdict.outcome


def _recognise(cls: type) -> tuple[str, _Source, table.TypeRow | None]:
    """Find the nearest class that is in the table, whose it is, and its row."""
    known: _Source | None = None
    for base in cls.__mro__:
        module, label = _get(base, "__module__"), _get(base, "__name__")
        if not isinstance(module, str) or not isinstance(label, str):
            continue
        root = module.partition(".")[0]
        root = table.SAME_FAMILY.get(root, root)
        name = f"{root}.{label}"
        row = _ROWS.get(name)
        if root == table.GUARD:
            return name, _Source.GUARD, None
        if root in table.OTHER_SYSTEMS and issubclass(cls, Exception):
            return name, _Source.OTHER, None
        if row is not None:
            final = not issubclass(cls, Exception)
            return name, _Source.STOP if final else known or _OF_ROOT.get(root, _Source.SYSTEM), row
        known = known or _OF_ROOT.get(root)
        if root == "concurrent" and label == "CancelledError":
            return name, _Source.STOP, None
    if issubclass(cls, BaseException) and not issubclass(cls, (Exception, BaseExceptionGroup)):
        return "", _Source.STOP, None  # cancelled, interrupted, shut down, generator closed
    return "", known or _Source.NOBODY, _OPAQUE if known else None


def _system(exc: object, label: str) -> _Finding:
    """Judge an error without a row: an `OSError` by its number, all else as nobody's."""
    number = _get(exc, "errno") if issubclass(type(exc), OSError) else None
    if number in _UNREACHABLE:
        return _Finding(_Source.SYSTEM, Classified(outcome=Outcome.OVERLOAD, reason=label), looks_inside=True)
    source = _Source.SYSTEM if number in _LOCAL else _Source.NOBODY
    return _Finding(source, Classified(outcome=Outcome.IGNORED, reason=label))


# ------------------------------------------------------------------------------------- reading of foreign objects


def _get(obj: object, name: str) -> object:
    """Read an attribute of a foreign object; whatever goes wrong, it is not there."""
    with suppress(Exception):
        return getattr(obj, name, None)
    return None


def _stored(obj: object, *names: str) -> Iterator[object]:
    """Read attributes that are plainly stored on `obj`: a property could read from the network."""
    with suppress(Exception):
        held = object.__getattribute__(obj, "__dict__")
        if isinstance(held, dict):
            yield from [held[name] for name in names if name in held]


def _type_name(cls: type) -> str:
    """Name a type for a reason; a name that is no identifier could be anything, so it is not repeated."""
    name = _get(cls, "__name__")
    return name[:_LONGEST_NAME] if isinstance(name, str) and name.isidentifier() else "unnamed type"


def _status_of(exc: object, source: _Source) -> int | None:
    """Find the HTTP status that an error carries."""
    found = None
    for holder in (exc, _get(exc, "response")):
        for name in ("status_code", "status"):
            status = _as_status(_get(holder, name)) if holder is not None else None
            found = found or status
    if source is _Source.MODEL and (found is None or found < 300):  # noqa: PLR2004
        return _status_in_body(_get(exc, "body")) or found
    if source is _Source.HTTP and found is None:  # urllib3 gave up on one status, and says so only in words
        words = next((arg for arg in _args(exc) if isinstance(arg, str)), "")
        match = _RETRIES_ENDED.fullmatch(words[:_LONGEST_NAME])
        return _as_status(match[1]) if match else None
    return found


def _status_in_body(body: object) -> int | None:
    """Find the `code` of an error event inside a stream whose status was 200.

    Only a 4xx is believed: a stream that broke off with a 500 had begun, and its end is opaque.
    """
    for _ in range(2):
        if not isinstance(body, dict):
            return None
        status = _as_status(body.get("code"))
        if status is not None:
            return status if 400 <= status <= 499 else None  # noqa: PLR2004
        body = body.get("error")
    return None


def _headers(exc: object) -> list[object]:
    """List where the headers of the answer may be."""
    return [held for holder in (_get(exc, "response"), exc) if (held := _get(holder, "headers")) is not None]


def _args(exc: object) -> tuple[object, ...]:
    args = _get(exc, "args")
    return args[:_MOST_HOPS] if isinstance(args, tuple) else ()


def _loaded_texts(exc: object, *, with_args: bool) -> Iterator[object]:
    """Yield the texts of an answer that are already in memory.

    An exception's own message is read only if its class is unknown (`with_args`): that of a known HTTP client holds
    the URL, and a host may be called anything.
    """
    for name in ("body", "error", "message", "detail"):
        yield from _strings(_get(exc, name))
    response = _get(exc, "response")
    for held in chain(_stored(response, "_content", "_body", "text", "body", "content"), _stored(exc, "text")):
        yield from _strings(held)
    if with_args:
        for arg in _args(exc):
            yield from _strings(arg)


def _strings(value: object, depth: int = 0) -> Iterator[object]:
    """Yield the texts in a decoded JSON value."""
    if isinstance(value, (str, bytes, bytearray)):
        yield value
    elif isinstance(value, (dict, list)) and depth < _MOST_HOPS:
        for element in islice(value.values() if isinstance(value, dict) else value, _MOST_ERRORS):
            yield from _strings(element, depth + 1)


def _certificate_refused(exc: object) -> bool:
    return any(isinstance(arg, str) and _CERTIFICATE_TEXT.search(arg[: table.SCANNED_CHARACTERS]) for arg in _args(exc))


def _behind(exc: object, *, implicit: bool) -> Iterator[tuple[object, bool]]:
    """Yield what stands behind an error, nearest first, and whether it was named as the cause.

    Args:
        exc: the error.
        implicit: also what was merely being handled when it arose. An error of a client does not inherit that: it
            may be the second attempt, after a first one that was caught.
    """
    for holder in (_get(exc, "last_attempt"), *_args(exc)):
        inner = holder if isinstance(holder, BaseException) else _exception_of(holder)
        if inner is not None:
            yield inner, True
    for name in ("__cause__", "reason"):
        inner = _get(exc, name)
        if isinstance(inner, BaseException):
            yield inner, True
    context = _get(exc, "__context__")
    if implicit and isinstance(context, BaseException) and not _get(exc, "__suppress_context__"):
        yield context, False


def _exception_of(future: object) -> BaseException | None:
    """Take the exception out of a finished future, without waiting for one that is not finished."""
    done, cancelled, read = (_get(future, name) for name in ("done", "cancelled", "exception"))
    if future is None or not (callable(done) and callable(cancelled) and callable(read)):
        return None
    with suppress(Exception):
        if done() is True and cancelled() is False:
            found = read()
            return found if isinstance(found, BaseException) else None
    return None
