"""Failover: who goes to the fallback, in which order, and how the primary comes back."""

from __future__ import annotations

import pytest

from guard_middleware.core.commands import Action, ParkAs, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.verdict import Reason
from tests.unit.builders import World, fill, spec, trip

BACKGROUND = 3


def pair(primary=4, fallback=2, *, budgets=None, **more):
    """A primary `a` with fallback `b`."""
    return World(spec("a", primary, fallback="b", **more), spec("b", fallback), budgets=budgets)


def test_closed_primary_is_never_left():
    """A full primary is no reason: its waiters wait for it."""
    world = pair(primary=1)
    fill(world, 1, endpoint="a")

    assert world.call(endpoint="a").reason is Reason.ENDPOINT_FULL
    assert world.in_flight("b") == 0


def test_open_primary_sends_its_calls_to_the_fallback():
    """The permit names the endpoint chosen; the lease counts there, and only there."""
    world = pair()
    trip(world, "a")
    call = world.arrive(endpoint="a")

    assert (call.status, call.endpoint, call.home) == (Status.ADMITTED, "b", "a")
    assert (world.in_flight("a"), world.in_flight("b")) == (0, 1)


def test_message_waits_in_its_primarys_line():
    """A full fallback: parked at home, decided afresh when it is taken."""
    world = pair()
    trip(world, "a")
    running = fill(world, 2, endpoint="a")
    waiting = world.arrive(endpoint="a")
    assert (waiting.status, waiting.reason) == (Status.PARKED, Reason.ENDPOINT_FULL)
    assert world.line("a") == [waiting.id]

    reply = world.finish(running[0], take=1, idle=1)
    assert [(take.message_id, take.endpoint, take.home) for take in reply.takes] == [(waiting.id, "b", "a")]


def test_outcome_at_the_fallback_moves_the_fallbacks_breaker_only():
    """Two breakers: the primary neither closes nor escalates by what happens elsewhere."""
    world = pair(base_cooldown_ms=10_000)
    trip(world, "a")
    world.finish(fill(world, 1, endpoint="a")[0])
    world.finish(fill(world, 1, endpoint="a")[0], Outcome.OVERLOAD)

    assert (world.seen("a").trips, world.seen("a").open_for_ms) == (1, 10_000)
    assert world.seen("b").breaker == "open"


def test_both_open_waits_for_whichever_comes_first():
    """Never a loop: one try on each per delivery, then parked."""
    world = pair(base_cooldown_ms=10_000)
    trip(world, "b")
    trip(world, "a")
    waiting = world.arrive(endpoint="a")
    assert (waiting.status, waiting.reason) == (Status.PARKED, Reason.BREAKER_OPEN)
    world.pass_time(500)
    reply = world.beat(take=1, idle=1)

    assert [(take.endpoint, take.probe) for take in reply.takes] == [("b", True)]


def test_recovery_is_the_primarys_own_probe():
    """At the end of its cooldown one call goes to the primary; the others stay at the fallback until it closes."""
    world = pair(primary=4, fallback=2)
    trip(world, "a")
    world.pass_time(500)
    first, second = world.call(endpoint="a"), world.call(endpoint="a")
    assert (first.endpoint, first.probe) == ("a", True)
    assert (second.endpoint, second.probe) == ("b", False)
    world.finish(first)

    third = world.call(endpoint="a")
    assert (third.endpoint, third.probe) == ("a", False)


def test_benign_or_late_success_at_the_fallback_does_not_recover_the_primary():
    """Only its own probe does."""
    world = pair(base_cooldown_ms=60_000)
    old = fill(world, 1, endpoint="a")[0]
    trip(world, "a")
    world.finish(fill(world, 1, endpoint="a")[0], Outcome.BENIGN)
    world.finish(old)

    assert world.seen("a").breaker == "open"


def test_waiters_of_a_broken_primary_stand_at_its_fallback_in_one_order():
    """A fresh call of the fallback itself does not overtake them; a better one does."""
    world = pair(base_cooldown_ms=60_000)
    world.beat(idle=1)
    trip(world, "a")
    running = fill(world, 2, endpoint="b")
    waiting = world.arrive(endpoint="a", take=0, idle=1)
    own = world.arrive(endpoint="b", take=0, idle=1)
    better = world.arrive(endpoint="b", rank=0, take=0, idle=1)
    order = []
    for _ in range(3):
        reply = world.finish(running.pop(0), take=1, idle=1)
        order += [take.message_id for take in reply.takes]
        running += [world.calls()[take.message_id] for take in reply.takes]

    assert order == [better.id, waiting.id, own.id]
    assert world.call(endpoint="b").status is Status.REFUSED


def test_fresh_call_of_the_fallback_meets_the_primarys_waiter_ahead():
    """Rule 3 counts it as standing there."""
    world = pair(base_cooldown_ms=60_000)
    world.beat(idle=1)
    trip(world, "a")
    running = fill(world, 2, endpoint="b")
    world.arrive(endpoint="a", cost=2, take=0, idle=1)
    world.finish(running[0])

    assert world.call(endpoint="b").reason is Reason.QUEUE_AHEAD


def test_waiter_too_wide_for_the_fallback_holds_nobody_up_there():
    """It can only go to its primary; the fallback's own calls and narrower waiters use what is free."""
    world = pair(base_cooldown_ms=60_000)
    world.beat(idle=1)
    trip(world, "a")
    wide = world.arrive(endpoint="a", cost=4, take=0, idle=1)
    assert wide.status is Status.PARKED

    assert world.call(endpoint="b").status is Status.ADMITTED
    assert world.arrive(endpoint="a").endpoint == "b"
    assert world.line("a") == [wide.id]


def test_waiter_too_wide_for_its_primary_does_not_keep_it_from_its_probe():
    """An override lowered the primary; behind the wide one a narrow one becomes the probe."""
    world = World(spec("a", 4, fallback="b"), spec("b", 4, base_cooldown_ms=60_000))
    trip(world, "b")
    trip(world, "a")
    wide = world.arrive(endpoint="a", cost=3, rank=0)
    narrow = world.arrive(endpoint="a")
    world.operate(Action.OVERRIDE, "a", value=2)
    world.pass_time(500)
    reply = world.beat(take=1, idle=1)

    assert [(take.message_id, take.probe) for take in reply.takes] == [(narrow.id, True)]
    assert world.line("a") == [wide.id]


def test_pause_does_not_fail_over():
    """An operator's pause means: wait."""
    for broken in (False, True):
        world = pair()
        if broken:
            trip(world, "a")
        world.operate(Action.PAUSE, "a")
        assert world.call(endpoint="a").reason is Reason.PAUSED


def test_paused_fallback_takes_nobody():
    """Then the calls of a broken primary wait, too."""
    world = pair()
    trip(world, "a")
    world.operate(Action.PAUSE, "b")

    assert world.call(endpoint="a").reason is Reason.PAUSED
    world.pass_time(500)
    assert world.call(endpoint="a").probe


def test_fallback_that_nobody_names_is_no_fallback():
    """Missing from every live configuration: the primary's own word applies."""
    world = World(spec("a", 4, fallback="gone"))
    trip(world, "a")

    assert world.call(endpoint="a").reason is Reason.BREAKER_OPEN


def test_failover_is_one_level():
    """The fallback's own fallback is not asked."""
    world = World(spec("a", 2, fallback="b"), spec("b", 2, fallback="c"), spec("c", 2))
    trip(world, "b")
    trip(world, "a")

    assert world.call(endpoint="a").reason is Reason.BREAKER_OPEN
    assert world.call(endpoint="b").endpoint == "c"


def test_fallbacks_own_rules_apply():
    """Its reserve, its ramp and its group's budget bound what it takes over."""
    world = World(
        spec("a", 8, fallback="b", base_cooldown_ms=60_000),
        spec("b", 8, reserve=4, group="g"),
        spec("c", 4, group="g", floor=3),
        budgets={"g": 9},
    )
    trip(world, "a")
    background = [world.call(endpoint="a", rank=BACKGROUND) for _ in range(6)]
    assert [call.status for call in background].count(Status.ADMITTED) == 4
    others = [world.call(endpoint="a") for _ in range(4)]
    assert [call.status for call in others].count(Status.ADMITTED) == 2
    assert others[-1].reason is Reason.GROUP_FULL


def test_overload_at_the_fallback_parks_in_the_primarys_line():
    """Home is where it waits."""
    world = pair(base_cooldown_ms=60_000)
    trip(world, "a")
    call = world.arrive(endpoint="a")
    reply = world.finish(call, Outcome.OVERLOAD, park=ParkAs.OVERLOADED)

    assert reply.status is Status.PARKED
    assert world.line("a") == [call.id]


def test_killed_worker_at_the_fallback_returns_the_message_to_its_home():
    """Its lease is the fallback's, its place the primary's."""
    world = pair(base_cooldown_ms=600_000)
    world.start("r")
    trip(world, "a")
    call = world.arrive("r", endpoint="a")
    world.kill("r")
    world.pass_time(world.rules.lease_ms)

    assert call.endpoint == "b"
    assert world.line("a") == [call.id]
    assert world.in_flight("b") == 0


def test_another_probe_is_only_who_goes_to_the_same_endpoint():
    """The overloaded one could probe the primary; the other's cost would send it to the fallback: no exchange, I1."""
    world = World(spec("a", 4, fallback="b", group="g"), spec("b", 4), spec("c", 4, group="g"), budgets={"g": 4})
    failing = world.arrive(endpoint="a")
    world.finish(failing, Outcome.OVERLOAD, park=ParkAs.OVERLOADED)
    fill(world, 3, endpoint="c")
    fill(world, 4, endpoint="b")
    other = world.arrive(endpoint="a", cost=2, take=0, idle=0)
    world.pass_time(500)
    for call in list(world.workers["p"].calls.values()):
        if call.endpoint == "b":
            world.finish(call, idle=0)
    reply = world.beat(take=1, idle=1)

    assert world.rule.snapshot(world.now).groups["g"][0] <= 4
    assert {take.message_id for take in reply.takes} <= {failing.id, other.id}


@pytest.mark.parametrize("recover", [True, False])
def test_generation_of_a_lease_is_that_of_the_endpoint_it_runs_on(recover):
    """What the primary goes through meanwhile does not make a fallback's call late."""
    world = pair()
    trip(world, "a")
    call = world.call(endpoint="a")
    if recover:
        world.pass_time(500)
        world.finish(world.call(endpoint="a"))
    world.finish(call, Outcome.OVERLOAD)

    assert world.seen("b").breaker == "open"
