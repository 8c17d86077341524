"""Nothing that an exception is, holds or does can break its classification, or get its text into a reason."""

from __future__ import annotations

import time
import types

import httpx
import openai
import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from guard_middleware.core.outcome import Classified, Outcome, classify_exception, classify_status

SECRET = "sk-secret prompt about a busy day"
REQUEST = httpx.Request("POST", "http://model.example")
NAMES = [
    *("status_code", "status", "response", "headers", "body", "error", "message", "detail", "text", "args", "reason"),
    *("last_attempt", "exceptions", "errno", "code", "__cause__", "__context__", "__suppress_context__", "_content"),
]


def judged(exc, **options):
    """Classify, and hold what is promised of every answer."""
    found = classify_exception(exc, now_epoch_s=0.0, **options)
    assert isinstance(found, Classified)
    assert isinstance(found.outcome, Outcome)
    assert found.reason
    assert len(found.reason) <= 120
    assert "secret" not in found.reason
    assert found.status is None or 100 <= found.status <= 599
    assert found.retry_after_ms is None or (0 <= found.retry_after_ms <= 600_000)
    return found


def fail(*args, **kwargs):
    """Stand in for any method or property."""
    raise RuntimeError(SECRET)


class Hostile:
    """An object on which everything fails."""

    __getattr__ = fail
    __str__ = __repr__ = __bool__ = __len__ = __iter__ = __int__ = __hash__ = __eq__ = __lt__ = fail

    @property
    def __class__(self):
        raise RuntimeError(SECRET)


def hostile_error(*bases):
    """Make an exception on which everything fails that can be made to fail."""
    methods = ("__str__", "__repr__", "__bool__", "__len__", "__eq__", "__hash__", "__getattr__")
    return type("HostileError", bases, {name: property(fail) for name in NAMES} | dict.fromkeys(methods, fail))


def bare(kind):
    """Make an exception without running its constructor."""
    return kind.__new__(kind)


@pytest.mark.parametrize(
    ("bases", "expected"),
    [
        ((Exception,), Outcome.IGNORED),
        ((BaseException,), Outcome.IGNORED),
        ((TimeoutError,), Outcome.OVERLOAD),
        ((OSError,), Outcome.IGNORED),
        ((httpx.ReadTimeout,), Outcome.OVERLOAD),
        ((httpx.PoolTimeout,), Outcome.IGNORED),
        ((openai.APIError,), Outcome.OVERLOAD),
        ((requests.ConnectionError,), Outcome.OVERLOAD),
    ],
)
def test_exception_on_which_everything_fails_is_judged_by_its_type(bases, expected):
    """Attributes that raise are not there; the type still is."""
    assert judged(bare(hostile_error(*bases))).outcome is expected


def test_group_on_which_everything_fails_is_ignored():
    """Members that cannot be listed are no evidence."""
    kind = hostile_error(ExceptionGroup)
    assert judged(kind.__new__(kind, "tasks", [ValueError()])).outcome is Outcome.IGNORED


def test_object_on_which_everything_fails_is_ignored():
    """It need not even be an exception."""
    assert judged(Hostile()) == Classified(outcome=Outcome.IGNORED, reason="Hostile")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"args", "errno"} and "__" not in name])
@pytest.mark.parametrize("kind", [RuntimeError, httpx.ReadTimeout])
def test_hostile_value_in_one_attribute_takes_nothing_else_away(kind, name):
    """One attribute is an object on which everything fails; what the others say still counts."""
    error = kind("x")
    error.status = 503
    setattr(error, name, Hostile())
    if name == "status":
        error.status_code = 503
    assert judged(error).status == 503


@pytest.mark.parametrize("kind", [RuntimeError, httpx.ReadTimeout])
def test_hostile_argument_takes_nothing_away(kind):
    """Arguments are looked through for errors and words; one that fails is no reason to forget the status."""
    error = kind("x")
    error.args = (Hostile(), Hostile())
    error.status = 503
    assert judged(error).status == 503


@pytest.mark.parametrize(
    "status",
    [True, False, -1, 0, 99, 600, 999, 10**100, "", "5O3", "٥٠٣", "503 ", b"503", 503.0, None, [], {}, Hostile],
)
def test_status_that_is_none_counts_as_absent(status):
    """An attribute called status may be anything; only 100 to 599 is an HTTP status."""
    error = RuntimeError()
    error.status_code = Hostile() if status is Hostile else status
    assert judged(error) == Classified(outcome=Outcome.IGNORED, reason="RuntimeError")


def test_wrong_additions_do_not_take_the_table_away():
    """A 503 stays one, whatever the configuration's additions are."""
    error = RuntimeError()
    error.status = 503
    for extra in (None, 5, Hostile(), "503"):
        assert judged(error, extra_overload=extra).outcome is Outcome.OVERLOAD
        assert classify_status(503, extra_overload=extra).outcome is Outcome.OVERLOAD


def test_ring_of_causes_ends():
    """Errors that stand behind each other in a ring are each looked at once."""
    first, second = RuntimeError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert judged(first).outcome is Outcome.IGNORED
    first.status = 429
    assert judged(second).status == 429
    alone = httpx.ReadTimeout("")
    alone.__cause__ = alone
    assert judged(alone).outcome is Outcome.OVERLOAD


@pytest.mark.parametrize("length", [20, 10_000])
def test_long_chain_is_followed_within_a_bound(length):
    """A status twenty causes down is found; an endless chain ends."""
    error = RuntimeError()
    error.status = 503
    for _ in range(length):
        outer = RuntimeError()
        outer.__cause__, error = error, outer
    assert judged(error).status == (503 if length == 20 else None)


def test_wide_and_deep_groups_are_followed_within_a_bound():
    """A group of groups of thousands costs no more than any other."""
    group = ExceptionGroup("x", [ValueError() for _ in range(10_000)])
    for _ in range(500):
        group = ExceptionGroup("x", [group, group])
    began = time.monotonic()
    assert judged(group).outcome is Outcome.IGNORED
    assert time.monotonic() - began < 10


def test_huge_texts_are_looked_at_within_a_bound():
    """Bodies of many megabytes, of the worst form for a search, and nested without end."""
    endless: list[object] = []
    endless.append(endless)
    error = RuntimeError("out of " * 1_000_000)
    error.status, error.body, error.detail = 500, {"x": ["engine" + " " * 10_000_000] * 1_000}, endless
    began = time.monotonic()
    assert judged(error).outcome is Outcome.NEUTRAL
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", [SECRET, "", "a" * 10_000, "naïve\n", "x.y", "1x"])
def test_type_with_a_strange_name_is_not_quoted(name):
    """A type made at run time may be called anything; a reason holds only what could be written in a program."""
    found = judged(type(name, (Exception,), {})())
    assert found.reason == ("a" * 100 if name.startswith("aa") else "unnamed type")


def test_reason_never_quotes_a_text():
    """Prompts and keys stand in bodies, messages and arguments; none of them gets into the answer."""
    error = RuntimeError(SECRET)
    for name in ("body", "error", "message", "detail", "text"):
        setattr(error, name, {"error": {"message": SECRET}})
    error.response = types.SimpleNamespace(status_code=500, text=SECRET, headers={"x-secret": SECRET})
    assert SECRET not in repr(judged(error))
    assert judged(error).reason == "status 500, overload text"
    del error.response
    assert SECRET not in repr(judged(error))


anything = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=20)),
        st.sampled_from([100, 200, 302, 400, 429, 500, 503, "503", -1]),
        st.sampled_from([ValueError, TimeoutError, ConnectionError, KeyboardInterrupt, StopIteration]).map(
            lambda x: x()
        ),
        st.sampled_from([httpx.ReadTimeout, httpx.PoolTimeout, httpx.ConnectError]).map(lambda x: x("")),
        st.builds(Hostile),
        st.just(fail),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["error", "message", "code", "Retry-After", "date"]), inner, max_size=3),
        st.dictionaries(st.sampled_from(NAMES[:9]), inner, max_size=3).map(lambda held: types.SimpleNamespace(**held)),
    ),
    max_leaves=8,
)
kinds = st.sampled_from(
    [
        *(RuntimeError, OSError, TimeoutError, ConnectionError, KeyboardInterrupt),
        *(httpx.ReadTimeout, httpx.InvalidURL, requests.RequestException, requests.HTTPError),
    ]
)


@settings(deadline=None)
@given(
    kind=kinds, held=st.dictionaries(st.sampled_from(NAMES), anything, max_size=6), args=st.lists(anything, max_size=3)
)
def test_exception_with_anything_in_it_is_classified(kind, held, args):
    """Any type, with any values in the attributes that are read: always an answer, never an exception."""
    error = kind("x")
    error.args = tuple(args)
    for name, value in held.items():
        if not name.startswith("__") or value is None or issubclass(type(value), BaseException):
            try:
                setattr(error, name, value)
            except (TypeError, AttributeError):  # not everything can be set on everything
                continue
    judged(error)


@settings(deadline=None)
@given(status=st.integers(400, 599), body=st.text(max_size=40), value=anything)
def test_status_outlives_whatever_else_an_exception_holds(status, body, value):
    """The status decides; the rest of the object can add a hint or a word, and take nothing away."""
    error = RuntimeError(body)
    error.status_code = status
    error.headers, error.detail, error.text = value, value, value
    found = judged(error)
    assert found.status == status
    assert found.outcome in {classify_status(status).outcome, Outcome.OVERLOAD}
