"""What can be read off a foreign error without trusting it, and without reading from the network.

The objects come from any library, half-built or mocked: whatever their attributes do, what cannot be read is not there.
"""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING

from guard_middleware.core import outcome_table as table

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_ARGS = 8
_MOST_ELEMENTS = 64
_DEEPEST_VALUE = 8
_LONGEST_NAME = 100
_FIRST_ERROR = 400

_ROWS = {name: row for row in table.TYPE_ROWS for name in row.names}
_OPAQUE = table.TYPE_ROWS[-1]
_LOCAL = frozenset(getattr(errno, name, -1) for name in table.LOCAL_ERRNOS)
_UNREACHABLE = frozenset(getattr(errno, name, -1) for name in table.UNREACHABLE_ERRNOS)
_CERTIFICATE_TEXT = re.compile(r"[\W_]{0,3}".join(table.CERTIFICATE_WORDS.split()), re.IGNORECASE)
_RETRIES_ENDED = re.compile(r"too many (\d{3}) error responses", re.ASCII)


class Source(Enum):
    """Whose word an error is."""

    STOP = auto()  # cancelled, shut down, interrupted
    GUARD = auto()  # our own error
    OTHER = auto()  # a database, broker or store
    MODEL = auto()  # a client of model servers
    HTTP = auto()  # a client of anything
    SYSTEM = auto()  # sockets, TLS and time-outs of the standard library
    OBJECT = auto()  # an unknown class that has a status
    NOBODY = auto()  # anything else


_OF_ROOT = dict.fromkeys(table.MODEL_CLIENTS, Source.MODEL) | dict.fromkeys(table.HTTP_CLIENTS, Source.HTTP)


# ------------------------------------------------------------------------------------------------------- its type


def recognise(cls: type) -> tuple[str, Source, table.TypeRow | None]:
    """Find the nearest class that the table knows.

    Returns:
        Its name as `root.Class`, whose it is, and its row; `("", Source.NOBODY, None)` for a stranger.
    """
    if not issubclass(cls, BaseException) or issubclass(cls, Warning):
        return "", Source.NOBODY, None
    ordinary = issubclass(cls, Exception)
    client: Source | None = None
    for base in cls.__mro__:
        root, name = _root_and_name(base)
        if root == table.GUARD:
            return name, Source.GUARD, None
        if name in table.SIGNALS:
            return name, Source.NOBODY, None
        if root in table.OTHER_SYSTEMS and ordinary:
            return name, Source.OTHER, None
        if name in table.CANCELLED:
            return name, Source.STOP, None
        if name in _ROWS:
            return name, (client or _OF_ROOT.get(root, Source.SYSTEM)) if ordinary else Source.STOP, _ROWS[name]
        client = client or _OF_ROOT.get(root)
    if client is not None:
        return "", client, _OPAQUE
    stops = not ordinary and not issubclass(cls, BaseExceptionGroup)
    return "", Source.STOP if stops else Source.NOBODY, None


def _root_and_name(cls: type) -> tuple[str, str]:
    module, label = get(cls, "__module__"), get(cls, "__name__")
    if not isinstance(module, str) or not isinstance(label, str):
        return "", ""
    root = module.partition(".")[0]
    root = table.SAME_FAMILY.get(root, root)
    return root, f"{root}.{label}"


def type_name(cls: type) -> str:
    """Name a type for a reason; a name that is no identifier could be anything, so it is not repeated (I13)."""
    name = get(cls, "__name__")
    return name[:_LONGEST_NAME] if isinstance(name, str) and name.isidentifier() else "unnamed type"


def unreachable(exc: object) -> bool:
    """Say whether a plain `OSError` means that the network did not get there."""
    return _errno(exc) in _UNREACHABLE


def exhausted(exc: object) -> bool:
    """Say whether an `OSError` means that our own host ran out of something."""
    return _errno(exc) in _LOCAL


def _errno(exc: object) -> int | None:
    number = get(exc, "errno") if issubclass(type(exc), OSError) else None
    return number if isinstance(number, int) and number > 0 else None


def certificate_refused(exc: object) -> bool:
    """Say whether a connection error tells of a refused certificate in its own message."""
    return any(isinstance(arg, str) and _CERTIFICATE_TEXT.search(arg[: table.SCANNED_CHARACTERS]) for arg in _args(exc))


# ----------------------------------------------------------------------------------------------------- its status


def as_status(value: object) -> int | None:
    """Accept 100 to 599 as a number or as three digits; `True`, -1 and "error" are no statuses."""
    with suppress(Exception):
        if isinstance(value, str):
            return as_status(int(value)) if re.fullmatch(r"[1-5]\d\d", value, re.ASCII) else None
        if isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599:  # noqa: PLR2004
            return int(value)
    return None


def status_of(exc: object, source: Source) -> int | None:
    """Find the HTTP status that an error, or its response, carries."""
    holders = (exc, get(exc, "response"))
    read = (as_status(get(holder, name)) for holder in holders for name in ("status_code", "status"))
    found = next((status for status in read if status is not None), None)
    if found is None or found < _FIRST_ERROR:
        if source is Source.MODEL:
            return _status_in_body(get(exc, "body")) or found
        if source is Source.HTTP:
            return _status_in_words(exc) or found
    return found


def _status_in_body(body: object) -> int | None:
    """Find the `code` of an error event in a stream that had begun with 200.

    Only a 4xx is believed: what broke off with a 500 had begun well, and its end is opaque.
    """
    if isinstance(body, dict) and "code" not in body:
        body = body.get("error")
    status = as_status(body.get("code")) if isinstance(body, dict) else None
    return status if status is not None and 400 <= status <= 499 else None  # noqa: PLR2004


def _status_in_words(exc: object) -> int | None:
    """Find the status that made urllib3 give up its own retries: it says so only in words."""
    for arg in _args(exc):
        match = _RETRIES_ENDED.fullmatch(arg) if isinstance(arg, str) else None
        if match:
            return as_status(match[1])
    return None


def headers_of(exc: object) -> list[object]:
    """List where the headers of the answer may be."""
    return [held for holder in (get(exc, "response"), exc) if (held := get(holder, "headers")) is not None]


def loaded_texts(exc: object, *, message: bool) -> Iterator[object]:
    """Yield the texts of an answer that are already in memory.

    Args:
        exc: the error.
        message: also the exception's own arguments. Those of a known HTTP client hold the URL, and a host may be
            called anything, so they are read only where the class is unknown.
    """
    for name in ("body", "error", "message", "detail"):
        yield from _strings(get(exc, name))
    for holder, names in (
        (get(exc, "response"), ("_content", "_body", "text", "body", "content")),
        (exc, ("_content", "text")),
    ):
        for held in _stored(holder, names):
            yield from _strings(held)
    if message:
        for arg in _args(exc):
            yield from _strings(arg)


def _strings(value: object, depth: int = 0) -> Iterator[object]:
    """Yield the texts in a decoded JSON value."""
    if isinstance(value, (str, bytes, bytearray)):
        yield value
    elif isinstance(value, (dict, list)) and depth < _DEEPEST_VALUE:
        for element in islice(value.values() if isinstance(value, dict) else value, _MOST_ELEMENTS):
            yield from _strings(element, depth + 1)


# ------------------------------------------------------------------------------------------ what stands behind it


def behind(exc: object, *, implicit: bool) -> Iterator[tuple[object, bool]]:
    """Yield what stands behind an error, and whether it was named there on purpose.

    Args:
        exc: the error.
        implicit: also what was merely being handled when it arose. An error of a client does not inherit that: it
            may be the second attempt, after a first one that was caught.
    """
    for holder in (get(exc, "last_attempt"), *_args(exc)):
        inner = holder if _is_error(holder) else _exception_of(holder)
        if inner is not None:
            yield inner, True
    for name in ("__cause__", "reason"):
        inner = get(exc, name)
        if _is_error(inner):
            yield inner, True
    context = get(exc, "__context__")
    # The operating system raises subclasses of it; the class itself is raised by hand, as ollama's client does
    # `from None` for any failure to connect, a refused certificate included.
    by_hand = type(exc) is ConnectionError
    if _is_error(context) and (by_hand or (implicit and get(exc, "__suppress_context__") is not True)):
        yield context, by_hand


def one_behind(exc: object) -> object:
    """Take the next error of a traceback, also one that `raise ... from None` hid; `None` at the end."""
    cause = get(exc, "__cause__")
    return get(exc, "__context__") if cause is None else cause


def members_of(exc: object) -> tuple[object, ...]:
    """List the members of an exception group; empty for anything else."""
    members = get(exc, "exceptions") if issubclass(type(exc), BaseExceptionGroup) else ()
    return members[:_MOST_ELEMENTS] if isinstance(members, tuple) else ()


def _is_error(value: object) -> bool:
    return issubclass(type(value), BaseException)  # not isinstance, which asks the object what it is


def _exception_of(future: object) -> object:
    """Take the exception out of a finished future, without waiting for one that is not finished."""
    done, cancelled, read = get(future, "done"), get(future, "cancelled"), get(future, "exception")
    with suppress(Exception):
        if callable(done) and callable(cancelled) and callable(read) and done() is True and cancelled() is False:
            found: object = read()
            return found if _is_error(found) else None
    return None


# -------------------------------------------------------------------------------------------------- any attribute


def get(obj: object, name: str) -> object:
    """Read an attribute; whatever goes wrong, it is not there."""
    with suppress(Exception):
        return getattr(obj, name, None)
    return None


def _stored(obj: object, names: tuple[str, ...]) -> list[object]:
    """Read attributes that are plainly stored: a property could read from the network."""
    with suppress(Exception):
        held = object.__getattribute__(obj, "__dict__")
        return [held[name] for name in names if name in held]
    return []


def _args(exc: object) -> tuple[object, ...]:
    args = get(exc, "args")
    return args[:_MOST_ARGS] if isinstance(args, tuple) else ()
