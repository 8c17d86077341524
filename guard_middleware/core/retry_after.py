"""How long a server asks its clients to stay away, read from the headers of its answer.

Two headers say it: `retry-after-ms` (milliseconds, a convention of model providers) and `Retry-After` (RFC 9110,
section 10.2.3: seconds or a date). Where both stand, or one stands twice, the longest wait counts: a hint lengthens a
cooldown and never ends it early. What cannot be read says nothing, so it is skipped rather than guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from itertools import islice

RETRY_AFTER_CAP_MS = 600_000
"""The longest hint that is believed. More is cut to this: no header may stop an endpoint for a day."""

_MOST_HEADERS = 512
_LONGEST_VALUE = 128
_NUMBER = re.compile(r"\+?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_TIME_OF_DAY = re.compile(r"\d:\d\d:\d\d", re.ASCII)


def parse_retry_after(headers: object, *, now_epoch_s: float | None) -> int | None:
    """Say for how many milliseconds the server wants to be left alone.

    A date is measured against the response's own `Date` header where there is one, so that it is a bounded duration
    however wrong our clock is; only without it against `now_epoch_s`. A date that has passed means "now", 0.

    Args:
        headers: any mapping (a dict, `httpx.Headers`, requests' `CaseInsensitiveDict`), or a list of pairs. Names are
            compared without regard to case; names and values may be text or bytes, values also numbers or lists.
        now_epoch_s: our clock in seconds since 1970, or `None` if the caller has none.

    Returns:
        Milliseconds from 0 to `RETRY_AFTER_CAP_MS`, rounded up; `None` if nothing readable is said (absent, empty,
        negative, NaN, infinite, garbage). Never raises, whatever `headers` is.
    """
    with suppress(Exception):  # a foreign object: whatever its methods do, it only costs us the hint
        found = _interesting(headers)
        waits = [_milliseconds(text, 1.0) for text in _split(found["retry-after-ms"])]
        reference_s = next((date for date in map(_date_s, found["date"]) if date is not None), now_epoch_s)
        for value in found["retry-after"]:
            date_s = _date_s(value)
            if date_s is None:
                waits.extend(_milliseconds(text, 1_000.0) for text in _split([value]))
            elif reference_s is not None and math.isfinite(reference_s):
                waits.append(_capped(max(0.0, date_s - reference_s) * 1_000.0))
        return max((wait for wait in waits if wait is not None), default=None)
    return None


def _interesting(headers: object) -> dict[str, list[str]]:
    """Collect the values of the three headers that matter, each time they occur."""
    found: dict[str, list[str]] = {"retry-after-ms": [], "retry-after": [], "date": []}
    items = getattr(headers, "items", None)
    pairs = items() if callable(items) else headers
    if not isinstance(pairs, Iterable) or isinstance(pairs, (str, bytes)):
        return found
    for pair in islice(pairs, _MOST_HEADERS):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004 - a name and a value
            continue
        for name in _texts(pair[0]):
            values = found.get(name.lower())
            if values is not None:
                values.extend(_texts(pair[1]))
    return found


def _texts(value: object) -> Iterator[str]:
    """Yield what `value` says as text: itself, its decoding, or each element of a list."""
    if isinstance(value, bytes):
        value = value[:_LONGEST_VALUE].decode("latin-1")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        value = repr(value)
    if isinstance(value, str):
        if len(value) <= _LONGEST_VALUE:
            yield value.strip()
    elif isinstance(value, (list, tuple)):
        for element in value[:_MOST_HEADERS]:
            if not isinstance(element, (list, tuple)):
                yield from _texts(element)


def _split(values: list[str]) -> Iterator[str]:
    """Yield the single values: some header classes join a header that came twice with a comma."""
    for value in values:
        yield from (part.strip() for part in value.split(","))


def _milliseconds(text: str, unit_ms: float) -> int | None:
    """Read a plain number; signs, words, units and NaN make it unreadable."""
    if not _NUMBER.fullmatch(text):
        return None
    return _capped(float(text) * unit_ms)


def _date_s(text: str) -> float | None:
    """Read an HTTP date as seconds since 1970; one without a zone is in UTC."""
    if not _TIME_OF_DAY.search(text):  # the parser below also makes dates of things that are none
        return None
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _capped(wait_ms: float) -> int:
    """Round up, never down: too late is polite, too early is not. A thousandth is the noise of a float, not a wait."""
    return RETRY_AFTER_CAP_MS if wait_ms >= RETRY_AFTER_CAP_MS else math.ceil(round(wait_ms, 3))
