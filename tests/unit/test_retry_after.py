"""How long a server asks to be left alone, in every way that it can be said, and mis-said."""

from __future__ import annotations

import email.message
import math
from datetime import UTC, datetime
from email.utils import format_datetime

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requests.structures import CaseInsensitiveDict
from urllib3 import HTTPHeaderDict

from guard_middleware.core.retry_after import RETRY_AFTER_CAP_MS, parse_retry_after

NOW_S = datetime(2030, 5, 17, 12, 0, 0, tzinfo=UTC).timestamp()


def http_date(epoch_s: float) -> str:
    """Write an instant as a server does."""
    return format_datetime(datetime.fromtimestamp(epoch_s, UTC), usegmt=True)


def hint(headers: object, now_epoch_s: float | None = NOW_S) -> int | None:
    """Read a hint at the test's own instant."""
    return parse_retry_after(headers, now_epoch_s=now_epoch_s)


@pytest.mark.parametrize(
    ("headers", "expected_ms"),
    [
        ({"Retry-After": "90"}, 90_000),
        ({"Retry-After": "0"}, 0),
        ({"Retry-After": " 2 "}, 2_000),
        ({"Retry-After": "+2"}, 2_000),
        ({"Retry-After": "0.5"}, 500),
        ({"Retry-After": ".5"}, 500),
        ({"Retry-After": "1.1"}, 1_100),
        ({"Retry-After": "0.0004"}, 1),
        ({"Retry-After": "1e1"}, 10_000),
        ({"Retry-After": 30}, 30_000),
        ({"Retry-After": 1.5}, 1_500),
        ({"Retry-After": b"30"}, 30_000),
        ({b"retry-after": b"30"}, 30_000),
        ({"Retry-After": ["3", "7"]}, 7_000),
        ({"retry-after-ms": "1500"}, 1_500),
        ({"retry-after-ms": "1500.2"}, 1_501),
        ({"Retry-After-Ms": 1500}, 1_500),
    ],
)
def test_hint_reads_seconds_fractions_and_milliseconds(headers, expected_ms):
    """Both headers are read in every plain form of a number, and rounded up, never down."""
    assert hint(headers) == expected_ms


@pytest.mark.parametrize(
    ("headers", "expected_ms"),
    [
        ({"retry-after-ms": "1500", "Retry-After": "90"}, 90_000),
        ({"retry-after-ms": "95000", "Retry-After": "90"}, 95_000),
        ({"retry-after-ms": "0", "Retry-After": "1"}, 1_000),
        ({"retry-after-ms": "garbage", "Retry-After": "2"}, 2_000),
        ({"retry-after-ms": "1500", "Retry-After": "garbage"}, 1_500),
        ({"Retry-After": "3, 40"}, 40_000),
        ([("Retry-After", "3"), ("retry-after", "40")], 40_000),
        (httpx.Headers([("Retry-After", "3"), ("Retry-After", "40")]), 40_000),
    ],
)
def test_hint_takes_the_longest_of_several(headers, expected_ms):
    """Headers in conflict: the longest wait counts, and one that cannot be read does not spoil the other."""
    assert hint(headers) == expected_ms


@pytest.mark.parametrize(
    "value",
    [
        *("", " ", "-1", "-0.5", "nan", "NaN", "inf", "-inf", "Infinity", "soon", "30s", "1 minute", "0x10", "1_000"),
        *("٣٠", "--1", "1.2.3", ",", "12:00", "9" * 200, "Wed, 99 Foo 2030 99:99:99 GMT", "00:00:00", "\x00", None),
        *(True, math.nan, math.inf, -1, {}, object()),
    ],
)
@pytest.mark.parametrize("name", ["Retry-After", "retry-after-ms"])
def test_hint_is_none_for_what_cannot_be_read(name, value):
    """Negative, not a number, infinite, empty, a unit, a broken date: nothing was said."""
    assert hint({name: value}) is None


@pytest.mark.parametrize("value", ["600", "600.001", "86400", "1e300", "1e999", "9" * 100, str(int(NOW_S))])
def test_hint_is_cut_to_the_cap(value):
    """No header stops an endpoint for longer than the cap."""
    assert hint({"Retry-After": value}) == RETRY_AFTER_CAP_MS == 600_000
    assert hint({"retry-after-ms": f"{value}e3" if value.isdigit() else "1e999"}) == RETRY_AFTER_CAP_MS


@pytest.mark.parametrize(
    "shape",
    [dict, lambda pairs: pairs, tuple, iter, httpx.Headers, CaseInsensitiveDict, HTTPHeaderDict],
    ids=["dict", "list", "tuple", "iterator", "httpx", "requests", "urllib3"],
)
def test_hint_is_found_in_every_shape_of_headers(shape):
    """Whatever the client calls its headers, and however their names are written."""
    pairs = [("Content-Type", "text/plain"), ("RETRY-after", "12")]
    assert hint(shape(pairs)) == 12_000


def test_hint_is_found_in_the_standard_library_s_headers():
    """`http.client` and urllib hand out an e-mail message."""
    message = email.message.Message()
    message["Retry-After"] = "12"
    assert hint(message) == 12_000


def test_hint_is_found_in_raw_headers():
    """Pairs of bytes, as h11 and ASGI have them."""
    assert hint(httpx.Headers({"Retry-After": "12"}).raw) == 12_000


@pytest.mark.parametrize("headers", [None, {}, [], "Retry-After: 5", b"x", 5, object(), [1, "ab", ("only",)], {5: "5"}])
def test_hint_is_none_without_headers(headers):
    """No headers, or something that is none."""
    assert hint(headers) is None


@pytest.mark.parametrize(
    "form",
    ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y", "%a, %d %b %Y %H:%M:%S -0000"],
)
def test_hint_reads_every_form_of_an_http_date(form):
    """The three forms of RFC 9110, and a zone that says nothing: all in UTC."""
    date = datetime.fromtimestamp(NOW_S + 90, UTC).strftime(form)
    assert hint({"Retry-After": date}) == 90_000


@pytest.mark.parametrize("our_error_s", [-3_600, -120, 0, 120, 3_600, math.nan, None])
def test_hint_measures_a_date_by_the_server_s_own_clock(our_error_s):
    """With a `Date` beside it, a date is the same duration however wrong our clock is, or without any."""
    headers = {"Date": http_date(NOW_S), "Retry-After": http_date(NOW_S + 90)}
    assert hint(headers, None if our_error_s is None else NOW_S + our_error_s) == 90_000


@pytest.mark.parametrize(
    ("our_error_s", "expected_ms"), [(0, 90_000), (30, 60_000), (3_600, 0), (-3_600, RETRY_AFTER_CAP_MS)]
)
def test_hint_bounds_a_date_without_a_reference(our_error_s, expected_ms):
    """Without a `Date` our clock has to do; a clock that is wrong costs nothing, or the cap, never more."""
    assert hint({"Retry-After": http_date(NOW_S + 90)}, NOW_S + our_error_s) == expected_ms


def test_hint_skips_an_unreadable_date_header():
    """A broken `Date` is no reference; our clock is used instead."""
    assert hint({"Date": "yesterday", "Retry-After": http_date(NOW_S + 90)}) == 90_000


@pytest.mark.parametrize("clock", [None, math.nan, math.inf, -math.inf])
def test_hint_is_none_for_a_date_without_any_clock(clock):
    """A date cannot be measured against nothing; a number still can."""
    assert hint({"Retry-After": http_date(NOW_S)}, clock) is None
    assert hint({"Retry-After": "5"}, clock) == 5_000


class Hostile:
    """Headers whose every method fails."""

    def items(self):
        message = "no items today"
        raise RuntimeError(message)

    def __iter__(self):
        message = "nor by iteration"
        raise RuntimeError(message)


class Endless:
    """Headers that never end."""

    def __iter__(self):
        while True:
            yield ("x", "y")


@pytest.mark.parametrize("headers", [Hostile(), Endless(), {"Retry-After": Hostile()}, [(Hostile(), "5")]])
def test_hint_survives_hostile_headers(headers):
    """Nothing is raised, and nothing goes on for ever."""
    assert hint(headers) is None


@settings(deadline=None)
@given(
    name=st.sampled_from(["retry-after", "Retry-After", "retry-after-ms"]),
    value=st.one_of(
        st.text(max_size=60),
        st.binary(max_size=60),
        st.integers(),
        st.floats(),
        st.from_regex(r"[A-Z][a-z]{2}, \d{1,3} [A-Z][a-z]{2} \d{1,5} \d\d:\d\d:\d\d [A-Z+-]\d*", fullmatch=True),
        st.lists(st.text(max_size=8), max_size=3),
    ),
    date=st.one_of(st.none(), st.text(max_size=40), st.integers(0, 4_000_000_000).map(http_date)),
    now_epoch_s=st.one_of(st.none(), st.floats()),
)
def test_hint_is_always_bounded_and_never_raises(name, value, date, now_epoch_s):
    """Whatever a server sends: `None`, or milliseconds from 0 to the cap."""
    found = hint([(name, value), ("Date", date)], now_epoch_s)
    assert found is None or (isinstance(found, int) and 0 <= found <= RETRY_AFTER_CAP_MS)


@settings(deadline=None)
@given(seconds=st.floats(min_value=0, max_value=599))
def test_hint_is_never_shorter_than_said(seconds):
    """Too late is polite, too early is not; but not much too late either."""
    found = hint({"Retry-After": repr(seconds)})
    assert found is not None
    assert seconds * 1_000 - 0.001 <= found <= seconds * 1_000 + 1
