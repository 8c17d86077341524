"""The admission rule over one endpoint and its GPU group: rules 1, 2, 4 to 6, without the waiting lines."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from guard_middleware.core.admission import (
    GroupView,
    View,
    endpoint_reason,
    fits_alone,
    group_reason,
    never_fits,
    reserve_of,
    takes_from_others,
)
from guard_middleware.core.breaker import Breaker, Phase
from guard_middleware.core.values import EndpointSpec
from guard_middleware.core.verdict import Reason

NOW = 1_000_000
INTERACTIVE, ORCHESTRATION, BACKGROUND = 0, 1, 3
HALF_OPEN = Breaker(generation=2, open_until_ms=NOW, trips=1)
OPEN = Breaker(generation=2, open_until_ms=NOW + 1, trips=1)


def view(
    *,
    ceiling=4,
    force=None,
    in_flight=0,
    present=None,
    breaker=None,
    probe_live=False,
    paused=False,
    group=None,
    **spec,
):
    """One endpoint at one instant."""
    return View(
        spec=EndpointSpec(id="e", ceiling=ceiling, **{"reserve": 0, **spec}),
        ceiling=ceiling if force is None else force,
        paused=paused,
        breaker=breaker or Breaker(),
        probe_live=probe_live,
        in_flight=in_flight,
        present=in_flight if present is None else present,
        fraction=0.34,
        group=group,
    )


def group(budget=6, total=0, set_aside=0, floors=None):
    """A GPU group, seen from one of its members."""
    return GroupView(budget=budget, total=total, set_aside=set_aside, floors=set_aside if floors is None else floors)


def at_endpoint(one, *, rank=ORCHESTRATION, cost=1, aged=False):
    """What the endpoint alone says."""
    return endpoint_reason(one, rank=rank, cost=cost, aged=aged, now_ms=NOW)


def in_group(one, *, rank=ORCHESTRATION, cost=1, aged=False):
    """What its group says."""
    return group_reason(one, rank=rank, cost=cost, aged=aged, now_ms=NOW)


# -- reserve -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "reserve"),
    [(-1, 0), (0, 0), (1, 0), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2), (7, 2), (8, 3), (16, 5), (32, 11), (64, 22)],
)
def test_reserve_follows_the_table(limit, reserve):
    """max(1, min(floor(0.34 x + 0.5), x - 1)), and none of a limit of one or less."""
    assert reserve_of(limit, None, 0.34) == reserve


def test_reserve_is_the_formula_for_every_limit():
    """The table's rule holds up to a thousand; background is always left at least one."""
    for limit in range(2, 1_001):
        reserve = reserve_of(limit, None, 0.34)
        assert reserve == max(1, min(math.floor(0.34 * limit + 0.5), limit - 1))
        assert 1 <= reserve < limit


@pytest.mark.parametrize(("fixed", "reserve"), [(0, 0), (1, 1), (3, 3), (4, 3), (99, 3)])
def test_fixed_reserve_wins_but_leaves_one(fixed, reserve):
    """The operator's own number applies, 0 included; it cannot take the last unit."""
    assert reserve_of(4, fixed, 0.34) == reserve


@pytest.mark.parametrize(("fraction", "reserve"), [(0.0, 1), (0.5, 4), (1.0, 7), (2.0, 7)])
def test_fraction_is_clamped(fraction, reserve):
    """Whatever the fraction, one unit is reserved and one is left."""
    assert reserve_of(8, None, fraction) == reserve


# -- rule 1 ------------------------------------------------------------------------------------------------------------


def test_cost_above_published_ceiling_never_fits():
    """Rule 1: a cost equal to the ceiling is possible, one more never."""
    assert not never_fits(view(ceiling=4), 4)
    assert never_fits(view(ceiling=4), 5)


def test_cost_above_an_override_only_delays():
    """Rule 1 looks at what was published: an override below the cost is an operator's wish of the moment."""
    low = view(ceiling=4, force=2)

    assert not never_fits(low, 4)
    assert at_endpoint(low, cost=4) is Reason.ENDPOINT_FULL


def test_cost_within_an_override_is_still_impossible_above_the_published_ceiling():
    """An override upwards makes no new kinds of calls possible: the published number is the server's."""
    assert never_fits(view(ceiling=4, force=8), 5)


def test_cost_above_the_budget_never_fits():
    """Rule 1: of the budget, what the others' floors leave counts, because idle floors are set aside as well."""
    assert not never_fits(view(ceiling=9, group=group(budget=6)), 6)
    assert never_fits(view(ceiling=9, group=group(budget=6)), 7)
    assert not never_fits(view(ceiling=9, group=group(budget=6, floors=2)), 4)
    assert never_fits(view(ceiling=9, group=group(budget=6, floors=2)), 5)


def test_pause_and_ramp_and_full_endpoint_make_nothing_unfit_for_ever():
    """Only configuration decides what can never be."""
    ramp = Breaker(generation=2, ramp=0, trips=1)

    assert not never_fits(view(paused=True, in_flight=4, breaker=ramp, group=group(total=6)), 4)


# -- rule 2 ------------------------------------------------------------------------------------------------------------


def test_pause_delays_whatever_the_breaker_says():
    """Rule 2: a paused endpoint admits nobody, not even the probe."""
    for breaker in (Breaker(), OPEN, HALF_OPEN):
        assert at_endpoint(view(paused=True, breaker=breaker), rank=INTERACTIVE) is Reason.PAUSED


def test_open_breaker_delays_every_rank():
    """Rule 2: within the cooldown nobody goes."""
    assert [at_endpoint(view(breaker=OPEN), rank=rank) for rank in (0, 1, 3)] == [Reason.BREAKER_OPEN] * 3


def test_half_open_admits_one_probe():
    """Rule 2: the role is free, or it is not."""
    assert at_endpoint(view(breaker=HALF_OPEN)) is None
    assert at_endpoint(view(breaker=HALF_OPEN, probe_live=True)) is Reason.PROBING


def test_probe_needs_room_under_the_ceiling():
    """I1: what was in flight before the trip still loads the server; the probe waits for a unit."""
    assert at_endpoint(view(breaker=HALF_OPEN, in_flight=3, present=0)) is None
    assert at_endpoint(view(breaker=HALF_OPEN, in_flight=4, present=0)) is Reason.ENDPOINT_FULL


def test_probe_knows_no_reserve():
    """Rule 2: background may be the probe although the reserve would be touched, in endpoint and group."""
    one = view(breaker=HALF_OPEN, in_flight=3, present=0, reserve=2, group=group(budget=6, total=5))

    assert at_endpoint(one, rank=BACKGROUND) is None
    assert in_group(one, rank=BACKGROUND) is None


def test_disabled_breaker_counts_as_closed():
    """With the breaker off, neither an old cooldown nor an old ramp holds anybody."""
    assert view(breaker=OPEN).phase(NOW) is Phase.OPEN
    assert at_endpoint(view(breaker=OPEN.__class__(open_until_ms=NOW + 9, ramp=0))) is Reason.BREAKER_OPEN
    off = EndpointSpec(id="e", ceiling=4, breaker=False, reserve=0)
    one = View(
        spec=off,
        ceiling=4,
        paused=False,
        breaker=Breaker(generation=2, ramp=0, trips=1),
        probe_live=False,
        in_flight=2,
        present=2,
        fraction=0.34,
        group=None,
    )

    assert one.limit() == 4
    assert at_endpoint(one) is None


# -- rule 4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_flight", "cost", "full"), [(0, 4, False), (3, 1, False), (4, 1, True), (3, 2, True)])
def test_ceiling_is_never_passed(in_flight, cost, full):
    """Rule 4, I1: leases + cost <= ceiling."""
    assert (at_endpoint(view(in_flight=in_flight), cost=cost) is Reason.ENDPOINT_FULL) is full


def test_ceiling_in_force_is_the_override():
    """An override counts in both directions."""
    assert at_endpoint(view(ceiling=4, force=2, in_flight=2)) is Reason.ENDPOINT_FULL
    assert at_endpoint(view(ceiling=4, force=6, in_flight=5)) is None


def test_shrunk_ceiling_admits_nobody_until_enough_came_back():
    """64 held, ceiling now 16: no grant until fewer than 16 are in flight."""
    verdicts = {held: at_endpoint(view(ceiling=64, force=16, in_flight=held)) for held in (64, 17, 16, 15)}

    assert verdicts == {64: Reason.ENDPOINT_FULL, 17: Reason.ENDPOINT_FULL, 16: Reason.ENDPOINT_FULL, 15: None}


def test_ceiling_of_zero_is_a_stop_not_a_default():
    """An override of zero admits nobody."""
    assert at_endpoint(view(force=0)) is Reason.ENDPOINT_FULL
    assert view(force=0).limit() == 0


def test_ramp_limits_the_present_generation():
    """Rule 4: after a close, 1 + what came back well may be in flight of the new generation."""
    ramp = Breaker(generation=2, ramp=1, trips=1)

    assert at_endpoint(view(breaker=ramp, in_flight=1)) is None
    assert at_endpoint(view(breaker=ramp, in_flight=2)) is Reason.ENDPOINT_FULL


def test_ramp_ignores_leases_of_older_generations():
    """What was in flight before the trip does not block the ramp, but it still counts under the ceiling."""
    ramp = Breaker(generation=2, ramp=0, trips=1)

    assert at_endpoint(view(breaker=ramp, in_flight=3, present=0)) is None
    assert at_endpoint(view(breaker=ramp, in_flight=4, present=0)) is Reason.ENDPOINT_FULL


def test_call_alone_is_admitted_above_the_ramp():
    """Rule 4: cost 2 at a limit of one goes if nothing of its generation is in flight."""
    ramp = Breaker(generation=2, ramp=0, trips=1)

    assert at_endpoint(view(breaker=ramp), cost=4) is None
    assert at_endpoint(view(breaker=ramp, in_flight=1), cost=2) is Reason.ENDPOINT_FULL
    assert at_endpoint(view(breaker=ramp), cost=5) is Reason.ENDPOINT_FULL


# -- rule 5 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "reason"), [(0, None), (1, None), (2, None), (3, Reason.RESERVED), (4, Reason.RESERVED)]
)
def test_only_background_is_kept_out_of_the_reserve(rank, reason):
    """Rule 5: three of four in flight, one reserved: only rank 3 and worse must wait."""
    assert at_endpoint(view(in_flight=3, reserve=1), rank=rank) is reason


def test_background_fills_up_to_the_reserve():
    """Rule 5: with a ceiling of 8 and the default fraction it may hold 5."""
    reasons = [at_endpoint(view(ceiling=8, reserve=None, in_flight=held), rank=BACKGROUND) for held in range(9)]

    assert reasons == [None] * 5 + [Reason.RESERVED] * 3 + [Reason.ENDPOINT_FULL]


def test_reserve_counts_all_calls_in_flight():
    """Rule 5: interactive calls use up the units that background could have had."""
    assert at_endpoint(view(in_flight=3, present=0, reserve=1), rank=BACKGROUND) is Reason.RESERVED


def test_reserve_shrinks_with_the_ramp():
    """Rule 5: the reserve is that of the present limit: at 1 there is none, at 2 and 3 it is one."""
    allowed = {}
    for ramp in range(4):
        state = Breaker(generation=2, ramp=ramp, trips=1)
        held = 0
        while at_endpoint(view(ceiling=8, reserve=None, breaker=state, in_flight=held), rank=BACKGROUND) is None:
            held += 1
        allowed[1 + ramp] = held

    assert allowed == {1: 1, 2: 1, 3: 2, 4: 3}


def test_aged_background_may_use_the_reserve_but_not_more():
    """Rule 5: the one whose turn has come goes inside ceiling and budget."""
    assert at_endpoint(view(in_flight=3, reserve=1), rank=BACKGROUND, aged=True) is None
    assert at_endpoint(view(in_flight=4, reserve=1), rank=BACKGROUND, aged=True) is Reason.ENDPOINT_FULL
    tight = view(group=group(budget=6, total=5))
    full = view(group=group(budget=6, total=6))
    assert in_group(tight, rank=BACKGROUND) is Reason.RESERVED
    assert in_group(tight, rank=BACKGROUND, aged=True) is None
    assert in_group(full, rank=BACKGROUND, aged=True) is Reason.GROUP_FULL


def test_budget_has_a_reserve_of_its_own():
    """Rule 5: of a budget of 6, two units are not for background, whatever the endpoint's own reserve."""
    reasons = [in_group(view(ceiling=9, group=group(budget=6, total=total)), rank=BACKGROUND) for total in range(7)]

    assert reasons == [None] * 4 + [Reason.RESERVED] * 3
    assert in_group(view(ceiling=9, group=group(budget=6, total=5)), rank=ORCHESTRATION) is None


# -- rule 6 ------------------------------------------------------------------------------------------------------------


def test_no_group_no_budget():
    """Rule 6: an endpoint without a budget is bound by its ceiling only."""
    assert in_group(view(), rank=BACKGROUND, cost=4) is None


@pytest.mark.parametrize(
    ("total", "set_aside", "full"), [(0, 0, False), (5, 0, False), (6, 0, True), (3, 2, False), (3, 3, True)]
)
def test_budget_minus_the_others_unused_floors(total, set_aside, full):
    """Rule 6: total + cost + unused floors of the others <= budget."""
    one = view(ceiling=9, group=group(budget=6, total=total, set_aside=set_aside))

    assert (in_group(one) is Reason.GROUP_FULL) is full


def test_call_takes_from_others_beyond_its_own_floor():
    """Where there is a budget: what it has and the cost are more than its floor, and not all of the cost is lent."""
    member = {"floor": 2, "group": group()}

    assert [takes_from_others(view(in_flight=held, **member), 1) for held in range(4)] == [False, False, True, True]
    assert takes_from_others(view(in_flight=1, **member), 2)
    assert not takes_from_others(view(floor=2), 3)
    assert not takes_from_others(view(in_flight=3, floor=2, group=replace(group(), lent=1)), 1)
    assert takes_from_others(view(in_flight=3, floor=2, group=replace(group(), lent=1)), 2)


# -- who waits in vain -------------------------------------------------------------------------------------------------


def waits_in_vain(one, *, rank=ORCHESTRATION, cost=1):
    """Whether no release could let the call go."""
    return not fits_alone(one, rank=rank, cost=cost, now_ms=NOW)


def test_waiter_waits_in_vain_only_if_no_release_can_help():
    """A full endpoint or group is no reason, an override below the cost is."""
    assert not waits_in_vain(view(in_flight=4), cost=4)
    assert not waits_in_vain(view(ceiling=9, group=group(total=6)), cost=6)
    assert waits_in_vain(view(force=3), cost=4)
    assert waits_in_vain(view(ceiling=9, group=group(budget=6, floors=1)), cost=6)


def test_background_waits_in_vain_above_what_the_reserve_leaves():
    """Only its ageing turn can let it go; as the probe it can go, too."""
    assert not waits_in_vain(view(reserve=1), rank=BACKGROUND, cost=3)
    assert waits_in_vain(view(reserve=1), rank=BACKGROUND, cost=4)
    assert not waits_in_vain(view(reserve=1), rank=ORCHESTRATION, cost=4)
    assert not waits_in_vain(view(reserve=1, breaker=HALF_OPEN), rank=BACKGROUND, cost=4)
    assert waits_in_vain(view(ceiling=9, group=group(budget=6)), rank=BACKGROUND, cost=5)


def test_background_alone_in_the_ramp_is_not_kept_out_by_the_ramps_reserve():
    """Rules 4 and 5: cost 2 at a limit of one or two goes alone; the ceiling's own reserve still holds."""
    for ramp in (0, 1):
        state = Breaker(generation=2, ramp=ramp, trips=1)
        assert at_endpoint(view(ceiling=8, reserve=None, breaker=state), rank=BACKGROUND, cost=2) is None
        assert at_endpoint(
            view(ceiling=8, reserve=None, breaker=state, in_flight=4, present=0), rank=BACKGROUND, cost=2
        )
