"""The circuit breaker's transitions, one by one."""

from __future__ import annotations

import pytest

from guard_middleware.core.breaker import (
    NO_RAMP,
    Breaker,
    Phase,
    close,
    cooldown_ms,
    role_ms,
    settle,
    smoothed,
    trip,
)
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import EndpointSpec, Rules

NOW = 1_000_000
SPEC = EndpointSpec(id="e", ceiling=8)
RULES = Rules()
WELL = [Outcome.SUCCESS, Outcome.BENIGN]
SILENT = [Outcome.NEUTRAL, Outcome.IGNORED]


def ended(state, outcome, *, spec=SPEC, lease="l", generation=None, cost=1, retry_after_ms=0, full=8, now=NOW):
    """Settle one call of the present generation, the probe's by default."""
    return settle(
        state,
        spec,
        RULES,
        outcome,
        lease=lease,
        generation=state.generation if generation is None else generation,
        cost=cost,
        retry_after_ms=retry_after_ms,
        full_limit=full,
        now_ms=now,
    )


def half_open(**more):
    """A breaker whose probe is the lease `l`."""
    return Breaker(
        **{"generation": 3, "open_until_ms": NOW, "trips": 1, "probe": "l", "probe_until_ms": NOW + 9, **more}
    )


def test_missing_state_is_closed_with_defaults():
    """A breaker of which nothing is known is closed, at the full limit, without a past."""
    state = Breaker()

    assert state.phase(NOW) is Phase.CLOSED
    assert state.ramp_limit() is None
    assert (state.trips, state.fails, state.probe) == (0, 0, "")


@pytest.mark.parametrize(
    ("now", "phase"), [(NOW - 1, Phase.OPEN), (NOW, Phase.HALF_OPEN), (NOW + 6 * 86_400_000, Phase.HALF_OPEN)]
)
def test_open_becomes_half_open_by_time_alone(now, phase):
    """Nobody has to write anything at the end of the cooldown; at that instant it is over."""
    assert Breaker(open_until_ms=NOW).phase(now) is phase


def test_cooldown_doubles_up_to_its_cap():
    """The pauses are 0.5, 1, 2, 4, 8, 16 s, then 30 s for good."""
    series = [cooldown_ms(SPEC, trips) for trips in range(1, 10)]

    assert series == [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000]
    assert cooldown_ms(SPEC, 10_000) == 30_000


def test_cooldown_follows_factor_and_base_of_the_endpoint():
    """A factor of 1 does not escalate; fractions are rounded down to whole milliseconds."""
    flat = EndpointSpec(id="e", ceiling=1, backoff_factor=1.0, base_cooldown_ms=5_000)
    odd = EndpointSpec(id="e", ceiling=1, backoff_factor=1.5, base_cooldown_ms=101)

    assert {cooldown_ms(flat, trips) for trips in range(1, 5)} == {5_000}
    assert [cooldown_ms(odd, trips) for trips in (1, 2, 3)] == [101, 151, 227]


@pytest.mark.parametrize(
    ("retry_after_ms", "pause"),
    [(0, 500), (1, 500), (499, 500), (501, 501), (90_000, 90_000), (600_000, 600_000), (3_600_000, 600_000), (-5, 500)],
)
def test_retry_after_lengthens_up_to_its_cap_and_never_shortens(retry_after_ms, pause):
    """The server's hint counts if it is longer than the cooldown, up to its own cap of 600 s."""
    after = trip(Breaker(), SPEC, RULES, retry_after_ms=retry_after_ms, now_ms=NOW)

    assert after.open_until_ms == NOW + pause


def test_retry_after_does_not_escalate():
    """A long hint lengthens one pause; the next cooldown is still the second of the series."""
    first = trip(Breaker(), SPEC, RULES, retry_after_ms=90_000, now_ms=NOW)
    second = trip(first, SPEC, RULES, retry_after_ms=0, now_ms=NOW + 90_000)

    assert second.open_until_ms == NOW + 91_000


def test_open_until_never_moves_back():
    """A trip keeps an end that is later than its own."""
    state = Breaker(open_until_ms=NOW + 99_000)

    assert trip(state, SPEC, RULES, retry_after_ms=0, now_ms=NOW).open_until_ms == NOW + 99_000


def test_first_overload_trips_at_the_default_threshold():
    """One overload of the present generation opens, begins a generation, and counts against its message."""
    after, counted = ended(Breaker(generation=4), Outcome.OVERLOAD)

    assert after.phase(NOW) is Phase.OPEN
    assert (after.generation, after.trips, counted) == (5, 1, True)


def test_threshold_counts_consecutive_overloads():
    """Below the threshold nothing opens; only the first failure of the row counts against a message."""
    spec = EndpointSpec(id="e", ceiling=8, fail_threshold=3)

    one, first = ended(Breaker(), Outcome.OVERLOAD, spec=spec)
    two, second = ended(one, Outcome.OVERLOAD, spec=spec)
    three, third = ended(two, Outcome.OVERLOAD, spec=spec)

    assert [state.phase(NOW) for state in (one, two, three)] == [Phase.CLOSED, Phase.CLOSED, Phase.OPEN]
    assert (first, second, third) == (True, False, False)
    assert three.trips == 1


@pytest.mark.parametrize("well", WELL)
def test_good_answer_ends_the_row_of_failures(well):
    """Success and benign begin the count anew: two, one good one, two more do not trip a threshold of three."""
    spec = EndpointSpec(id="e", ceiling=8, fail_threshold=3)
    state = Breaker()
    for outcome in (Outcome.OVERLOAD, Outcome.OVERLOAD, well, Outcome.OVERLOAD, Outcome.OVERLOAD):
        state, _ = ended(state, outcome, spec=spec)

    assert state.phase(NOW) is Phase.CLOSED
    assert state.fails == 2


@pytest.mark.parametrize("silent", SILENT)
def test_neutral_and_ignored_say_nothing_while_closed(silent):
    """They neither add to a row of failures nor end it, nor move a ramp."""
    state = Breaker(fails=2, ramp=3, trips=1)

    assert ended(state, silent) == (state, False)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_result_of_another_generation_changes_nothing(outcome):
    """Late results move the breaker in no phase, not even by their Retry-After."""
    for state in (Breaker(generation=3), Breaker(generation=3, open_until_ms=NOW + 5), half_open()):
        assert ended(state, outcome, generation=2, retry_after_ms=90_000) == (state, False)
        assert ended(state, outcome, generation=4, retry_after_ms=90_000) == (state, False)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_half_open_listens_to_the_probe_only(outcome):
    """In half-open another lease of the same generation changes nothing."""
    assert ended(half_open(), outcome, lease="other") == (half_open(), False)


@pytest.mark.parametrize("well", WELL)
def test_probe_that_ends_well_closes_with_a_ramp(well):
    """The close begins a generation and a ramp at one; the escalation is remembered."""
    after, counted = ended(half_open(trips=3), well)

    assert after == Breaker(generation=4, trips=3, ramp=0)
    assert after.ramp_limit() == 1
    assert not counted


def test_probe_that_fails_opens_with_the_next_cooldown():
    """The second trip in a row pauses twice as long, and counts against the probe's message."""
    after, counted = ended(half_open(), Outcome.OVERLOAD)

    assert after == Breaker(generation=4, trips=2, open_until_ms=NOW + 1_000)
    assert counted


def test_probe_fails_whatever_the_threshold():
    """A threshold of many does not let many probes fail."""
    spec = EndpointSpec(id="e", ceiling=8, fail_threshold=9)

    assert ended(half_open(), Outcome.OVERLOAD, spec=spec)[0].phase(NOW) is Phase.OPEN


@pytest.mark.parametrize("silent", SILENT)
def test_probe_that_says_nothing_gives_the_role_back(silent):
    """Neutral, cancelled, shut down: half-open goes on, and the role is free."""
    after, counted = ended(half_open(), silent)

    assert after.phase(NOW) is Phase.HALF_OPEN
    assert (after.probe, after.probe_until_ms, after.generation, counted) == ("", 0, 3, False)


def test_ramp_grows_by_the_costs_that_came_back_well():
    """The limit is 1 + the costs of successes and benign ends since the close."""
    state = close(Breaker(trips=1), full_limit=8)
    limits = [state.ramp_limit()]
    for outcome, cost in [(Outcome.SUCCESS, 1), (Outcome.BENIGN, 2), (Outcome.NEUTRAL, 3), (Outcome.SUCCESS, 2)]:
        state, _ = ended(state, outcome, cost=cost)
        limits.append(state.ramp_limit())

    assert limits == [1, 2, 4, 4, 6]


def test_escalation_is_forgotten_only_at_the_end_of_the_ramp():
    """A trip during the ramp goes on with the series; one after it begins anew."""
    ramping = close(Breaker(generation=1, trips=2), full_limit=3)
    one, _ = ended(ramping, Outcome.SUCCESS, full=3)
    full, _ = ended(one, Outcome.SUCCESS, full=3)

    assert (one.ramp, one.trips) == (1, 2)
    assert (full.ramp, full.trips) == (NO_RAMP, 0)
    assert ended(one, Outcome.OVERLOAD, full=3)[0].open_until_ms == NOW + 2_000
    assert ended(full, Outcome.OVERLOAD, full=3)[0].open_until_ms == NOW + 500


def test_trip_ends_the_ramp():
    """An overload of the ramp's own generation opens; no ramp is left behind."""
    state, _ = ended(close(Breaker(trips=1), full_limit=8), Outcome.OVERLOAD)

    assert (state.ramp, state.trips, state.phase(NOW)) == (NO_RAMP, 2, Phase.OPEN)


@pytest.mark.parametrize("full", [0, 1])
def test_ramp_of_a_limit_of_one_ends_where_it_begins(full):
    """With a full limit of one (or none) there is nothing to climb."""
    state = close(Breaker(generation=1, trips=4), full_limit=full)

    assert (state.ramp, state.trips) == (NO_RAMP, 0)


def test_endless_good_answers_leave_a_closed_breaker_alone():
    """Outside of a ramp success adds up to nothing."""
    state = Breaker(generation=7)

    assert ended(state, Outcome.SUCCESS, cost=5)[0] == state


@pytest.mark.parametrize("outcome", list(Outcome))
def test_disabled_breaker_never_moves(outcome):
    """With the breaker switched off no outcome opens anything."""
    off = EndpointSpec(id="e", ceiling=8, breaker=False)

    assert ended(Breaker(), outcome, spec=off, retry_after_ms=9_000) == (Breaker(), False)


@pytest.mark.parametrize(
    ("mean_ms", "role"), [(0, 30_000), (7_499, 30_000), (7_500, 30_000), (7_501, 30_004), (240_000, 960_000)]
)
def test_role_of_the_probe_lasts_30_s_or_four_mean_calls(mean_ms, role):
    """A model whose calls take minutes is given four of them before the role passes on."""
    assert role_ms(RULES, mean_ms) == role


def test_role_of_the_probe_assumes_one_second_before_the_first_call():
    """Before any call has ended, the mean is taken to be 1 s."""
    assert role_ms(Rules(probe_deadline_ms=100), 0) == 4_000


def test_mean_is_smoothed_with_one_eighth():
    """The first call sets the mean, each further one moves it by an eighth of the difference."""
    assert smoothed(0, 800) == 800
    assert smoothed(800, 1_600) == 900
    assert smoothed(800, 0) == 700
    assert smoothed(0, 0) == 1
    assert smoothed(1, 0) == 1


def test_mean_settles_at_a_constant_length():
    """Rounding neither drifts nor sticks far away."""
    mean = 10_000
    for _ in range(200):
        mean = smoothed(mean, 1_000)

    assert abs(mean - 1_000) <= 4
