"""The engine's clock: how long work takes on a host that is shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard_middleware.testing.model_server.pace import Pacer


def test_below_the_knee_a_call_takes_its_own_time():
    """Load up to the knee slows nothing down."""
    pacer: Pacer[str] = Pacer(knee=2, now=100.0)
    pacer.set_load(2, 100.0)
    pacer.add("a", 0.5, 100.0)

    assert pacer.next_at() == pytest.approx(100.5)
    assert pacer.pop_done(100.499) == []
    assert pacer.pop_done(100.5) == ["a"]
    assert pacer.next_at() is None


def test_above_the_knee_all_slow_down_in_proportion():
    """With twice the knee running, work takes twice as long."""
    pacer: Pacer[str] = Pacer(knee=2, now=0.0)
    pacer.set_load(4, 0.0)
    pacer.add("a", 0.5, 0.0)

    assert pacer.next_at() == pytest.approx(1.0)


def test_a_change_of_load_applies_from_then_on():
    """Work done before the load changed stays done at the old speed."""
    pacer: Pacer[str] = Pacer(knee=1, now=0.0)
    pacer.set_load(1, 0.0)
    pacer.add("a", 1.0, 0.0)
    pacer.set_load(4, 0.5)  # half is done; the other half takes four times as long

    assert pacer.next_at() == pytest.approx(2.5)
    pacer.set_load(1, 1.5)  # three quarters are done
    assert pacer.next_at() == pytest.approx(1.75)


def test_without_a_knee_load_never_slows():
    """No knee is no slowdown, whatever the load."""
    pacer: Pacer[str] = Pacer(knee=None, now=0.0)
    pacer.set_load(1000, 0.0)
    pacer.add("a", 1.0, 0.0)

    assert pacer.next_at() == pytest.approx(1.0)


def test_discarded_work_is_never_done_nor_waited_for():
    """A call that has ended otherwise leaves the engine without a trace, and its key can come again."""
    pacer: Pacer[str] = Pacer(knee=None, now=0.0)
    pacer.add("a", 1.0, 0.0)
    pacer.add("b", 2.0, 0.0)
    pacer.discard("a")

    assert pacer.next_at() == pytest.approx(2.0)
    pacer.add("a", 5.0, 0.0)
    assert pacer.pop_done(2.0) == ["b"]
    assert pacer.pop_done(5.0) == ["a"]


def test_work_that_is_a_hair_from_done_is_done():
    """A timer that fires early by less than a microsecond does not fire in vain."""
    pacer: Pacer[str] = Pacer(knee=None, now=0.0)
    pacer.add("a", 1.0, 0.0)

    assert pacer.pop_done(1.0 - 5e-7) == ["a"]


@given(
    knee=st.integers(1, 4),
    arrivals=st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 2)), min_size=1, max_size=8),
)
def test_the_pacer_ends_calls_when_processor_sharing_does(knee: int, arrivals: list[tuple[float, float]]):
    """The one clock of work gives the same ends as sharing the host out call by call."""
    expected = shared_out(knee, arrivals)

    ends: dict[int, float] = {}
    pacer: Pacer[int] = Pacer(knee=knee, now=0.0)
    coming = sorted(range(len(arrivals)), key=lambda call: arrivals[call][0])
    running = now = 0.0
    while coming or pacer.next_at() is not None:
        due_at = pacer.next_at()
        if coming and (due_at is None or arrivals[coming[0]][0] <= due_at):
            call = coming.pop(0)
            now = arrivals[call][0]
            pacer.add(call, arrivals[call][1], now)
            running += 1
        else:
            now = due_at
            for call in pacer.pop_done(now):
                ends[call] = now
                running -= 1
        pacer.set_load(running, now)

    assert ends == {call: pytest.approx(end, abs=1e-4) for call, end in expected.items()}


def shared_out(knee: int, arrivals: list[tuple[float, float]]) -> dict[int, float]:
    """The oracle: keep what is left of each call, and share the host out anew at each arrival and end."""
    left: dict[int, float] = {}
    ends: dict[int, float] = {}
    coming = sorted(range(len(arrivals)), key=lambda call: arrivals[call][0])
    now = 0.0
    while coming or left:
        speed = min(1.0, knee / len(left)) if left else 1.0
        next_end = now + min(left.values()) / speed if left else float("inf")
        next_arrival = arrivals[coming[0]][0] if coming else float("inf")
        then = min(next_end, next_arrival)
        left = {call: rest - (then - now) * speed for call, rest in left.items()}
        now = then
        for call in [call for call, rest in left.items() if rest <= 1e-6]:
            del left[call]
            ends[call] = now
        if next_arrival <= next_end:
            call = coming.pop(0)
            left[call] = arrivals[call][1]
    return ends
