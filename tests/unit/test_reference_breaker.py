"""Trip, probe, close, ramp on the whole machine: one incident, one trip, one probe (I7)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from guard_middleware.core.breaker import Phase
from guard_middleware.core.commands import Action, ParkAs, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import Rules
from guard_middleware.core.verdict import Reason
from tests.unit.builders import World, fill, spec, trip

DAY_MS = 86_400_000


def to_half_open(world, endpoint="e"):
    """Trip, and wait for the end of the cooldown."""
    seen = trip(world, endpoint)
    world.pass_time(seen.open_for_ms)
    assert world.seen(endpoint).breaker == Phase.HALF_OPEN


def probe(world, endpoint="e", process="p", **more):
    """The call that becomes the probe."""
    call = world.call(process, endpoint, **more)
    assert call.status is Status.ADMITTED
    assert call.probe
    return call


def close(world, endpoint="e"):
    """From closed to closed again, with a ramp."""
    to_half_open(world, endpoint)
    world.finish(probe(world, endpoint))
    assert world.seen(endpoint).breaker == Phase.CLOSED


def end_ramp(world, endpoint="e"):
    """Let calls come back well until the full limit is reached."""
    while world.seen(endpoint).ramp >= 0:
        world.finish(fill(world, 1, endpoint=endpoint, rank=0)[0])


# -- one incident, one trip --------------------------------------------------------------------------------------------


def test_fifty_parallel_failures_are_one_trip():
    """A cohort that fails together opens once, for the first cooldown, and half-opens after it."""
    world = World(spec(ceiling=64))
    calls = fill(world, 50)
    for call in calls:
        world.finish(call, Outcome.OVERLOAD)

    seen = world.seen()
    assert (seen.breaker, seen.trips, seen.open_for_ms) == (Phase.OPEN, 1, 500)
    world.jump(500)
    assert world.seen().breaker == Phase.HALF_OPEN


def test_failures_of_one_incident_spread_over_its_cooldown_neither_lengthen_nor_escalate():
    """Time-outs that trickle in after the trip belong to it."""
    world = World(spec(ceiling=32))
    calls = fill(world, 32)
    ends = set()
    for call in calls:
        world.finish(call, Outcome.OVERLOAD, retry_after_ms=60_000 if ends else 0)
        ends.add(world.now + world.seen().open_for_ms)
        world.jump(10)

    assert len(ends) == 1
    assert world.seen().trips == 1


def test_threshold_counts_failures_of_all_processes():
    """Two failures in one process, one in another that started since: the third opens."""
    world = World(spec(ceiling=8, fail_threshold=3), workers=("p",))
    first = fill(world, 2)
    for call in first:
        world.finish(call, Outcome.OVERLOAD)
    world.start("r")
    assert world.seen().breaker == Phase.CLOSED

    world.finish(fill(world, 1, process="r")[0], Outcome.OVERLOAD)

    assert world.seen().breaker == Phase.OPEN


def test_processes_that_come_and_go_change_nothing_of_an_open_breaker():
    """The end of the pause is one shared instant."""
    world = World(spec(ceiling=8, base_cooldown_ms=20_000))
    trip(world)
    end = world.now + 20_000
    for number in range(5):
        world.pass_time(1_000)
        world.start(f"r{number}")
        if number % 2:
            world.forget(f"r{number}")

    assert world.now + world.seen().open_for_ms == end
    assert world.seen().trips == 1


def test_lost_breaker_state_means_closed():
    """A deleted key is a closed breaker with defaults, and no error."""
    world = World()
    trip(world)
    world.rule.state.breakers.clear()

    assert world.seen().breaker == Phase.CLOSED
    assert world.call().status is Status.ADMITTED


def test_success_from_before_the_trip_does_not_close():
    """Ten start; six fail, four succeed late: open until its end, and the late ones change nothing."""
    world = World(spec(ceiling=10, fail_threshold=4, base_cooldown_ms=20_000))
    calls = fill(world, 10)
    world.pass_time(1_000)
    for call in calls[:6]:
        world.finish(call, Outcome.OVERLOAD)
    world.pass_time(2_000)
    for call in calls[6:]:
        world.finish(call)

    assert world.seen().breaker == Phase.OPEN
    assert world.seen().open_for_ms == 18_000


@pytest.mark.parametrize("outcome", list(Outcome))
def test_late_result_in_half_open_changes_nothing(outcome):
    """A call from before the trip that ends while the probe runs moves neither breaker nor probe."""
    world = World(spec(ceiling=8))
    old = fill(world, 1)[0]
    to_half_open(world)
    running = probe(world)
    before = world.rule.state.breakers["e"]

    world.finish(old, outcome, retry_after_ms=60_000)

    assert world.rule.state.breakers["e"] == before
    assert world.seen().probe == running.lease


def test_hundred_late_failures_after_a_close_do_not_reopen():
    """What overhangs from before the trip counts as that incident, even after the recovery."""
    world = World(spec(ceiling=128))
    old = fill(world, 100)
    close(world)
    for call in old:
        world.finish(call, Outcome.OVERLOAD, retry_after_ms=90_000)

    seen = world.seen()
    assert (seen.breaker, seen.trips, seen.ramp) == (Phase.CLOSED, 1, 0)


# -- cooldowns ---------------------------------------------------------------------------------------------------------


def test_failed_probes_escalate_to_the_cap():
    """0.5, 1, 2, 4, 8, 16, 30, 30 s: one call reaches the server per pause."""
    world = World()
    trip(world)
    pauses = [world.seen().open_for_ms]
    for _ in range(7):
        world.pass_time(world.seen().open_for_ms)
        world.finish(probe(world), Outcome.OVERLOAD)
        pauses.append(world.seen().open_for_ms)

    assert pauses == [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]


def test_retry_after_binds_everybody_and_is_capped():
    """One worker's hint of 90 s keeps all away for 90 s; one of a day, for 600 s."""
    world = World(workers=("p", "r"))
    trip(world, retry_after_ms=90_000)
    world.pass_time(89_999)
    assert world.call("r", rank=0).reason is Reason.BREAKER_OPEN
    world.jump(1)
    world.finish(probe(world, process="r"), Outcome.OVERLOAD, retry_after_ms=DAY_MS)

    assert world.seen().open_for_ms == 600_000


def test_fraction_of_a_second_in_retry_after_is_obeyed():
    """retry-after-ms 1500 lengthens a cooldown of 500 to 1500; 100 does not shorten it."""
    world = World()

    assert trip(world, retry_after_ms=1_500).open_for_ms == 1_500
    assert trip(World(), retry_after_ms=100).open_for_ms == 500


def test_escalation_is_forgotten_only_after_the_ramp():
    """A trip during the ramp pauses for the next step of the series, one after it for the first."""
    world = World(spec(ceiling=4))
    close(world)
    world.finish(fill(world, 1)[0])
    assert trip(world).open_for_ms == 1_000

    world.pass_time(1_000)
    world.finish(probe(world))
    end_ramp(world)
    assert world.seen().trips == 0
    assert trip(world).open_for_ms == 500


# -- the probe ---------------------------------------------------------------------------------------------------------


def test_exactly_one_of_many_is_the_probe():
    """16 processes and 200 asks at the end of the pause: one call, whatever the order."""
    world = World(spec(ceiling=32), workers=[f"p{number}" for number in range(16)])
    trip(world, process="p0")
    world.pass_time(500)
    asked = [world.call(f"p{number % 16}", rank=number % 4) for number in range(200)]

    assert Counter(call.status for call in asked) == {Status.ADMITTED: 1, Status.REFUSED: 199}
    assert {call.reason for call in asked[1:]} == {Reason.PROBING}
    assert world.in_flight() == 1


def test_best_takeable_waiter_becomes_the_probe():
    """At the end of the pause the better rank goes, not the one who waits longest or asks now."""
    world = World()
    trip(world)
    late, first = world.arrive(rank=3), world.arrive(rank=0)
    world.pass_time(500)
    fresh = world.arrive(rank=1, take=1)

    assert fresh.status is Status.PARKED
    assert world.calls()[first.id].probe
    assert world.line() == [fresh.id, late.id]


def test_probe_is_released_with_its_outcome_by_the_one_message_that_closes():
    """Success of the probe lets the next waiter go in the same command, within the ramp."""
    world = World()
    trip(world)
    waiting = [world.arrive() for _ in range(3)]
    world.pass_time(500)
    world.beat(take=3, idle=3)
    assert list(world.calls()) == [waiting[0].id]

    reply = world.finish(world.calls()[waiting[0].id], take=1, idle=3)

    assert [take.message_id for take in reply.takes] == [waiting[1].id]
    assert not reply.takes[0].probe
    assert world.seen().limit == 1


@pytest.mark.parametrize("outcome", [Outcome.NEUTRAL, Outcome.IGNORED])
def test_probe_that_says_nothing_passes_the_role_on_at_once(outcome):
    """Cancelled, shut down, a 500: half-open goes on, and the next waiter is the probe."""
    world = World()
    to_half_open(world)
    running = probe(world)
    waiting = world.arrive()
    reply = world.finish(running, outcome, take=1, idle=1)

    assert [(take.message_id, take.probe) for take in reply.takes] == [(waiting.id, True)]
    assert world.seen().breaker == Phase.HALF_OPEN
    assert world.seen().trips == 1


def test_probe_given_back_before_it_began_passes_the_role_on():
    """The message was dropped by another middleware, or its thread never came: no outcome, no harm."""
    world = World()
    trip(world)
    waiting = world.arrive()
    world.pass_time(500)
    world.beat(take=1, idle=1)
    lease = world.calls()[waiting.id].lease
    del world.workers["p"].calls[lease]
    world.beat(give_back=(lease,), idle=0)

    assert world.line() == [waiting.id]
    assert probe(world, rank=0)


@pytest.mark.parametrize("silence_ms", [0, 6 * DAY_MS])
def test_killed_probe_is_replaced_within_a_lease_time(silence_ms):
    """A kill -9 of the probe's process, under steady denied traffic or after six days of silence: soon a new probe."""
    world = World(workers=("p", "r"))
    trip(world)
    world.pass_time(500)
    probe(world)
    world.kill("p")
    world.jump(silence_ms)
    asked = 0
    refused = world.call("r")
    while refused.status is not Status.ADMITTED:
        asked += 1
        world.pass_time(500)
        refused = world.call("r")

    assert refused.probe
    assert asked * 500 <= world.rules.lease_ms + 1_000


def test_hung_probe_loses_its_role_at_the_deadline_and_goes_on_counting():
    """It is renewed for ever: after 30 s another call is the probe; the old lease still takes up a unit."""
    world = World(spec(ceiling=2))
    to_half_open(world)
    hung = probe(world)
    world.pass_time(29_999)
    assert world.call().reason is Reason.PROBING
    world.jump(1)
    second = probe(world)
    assert world.in_flight() == 2
    assert hung.generation < second.generation

    world.finish(second)
    world.finish(hung, Outcome.OVERLOAD, retry_after_ms=60_000)

    assert world.seen().breaker == Phase.CLOSED


def test_hung_probe_at_a_ceiling_of_one_blocks_even_its_successor():
    """I1 before I7: the hung call still loads the server; nobody goes until its lease ends."""
    world = World(spec(ceiling=1))
    to_half_open(world)
    probe(world)
    world.pass_time(60_000)

    assert world.call().reason is Reason.ENDPOINT_FULL


def test_deadline_of_the_probe_follows_the_mean_call():
    """A model whose calls take 60 s keeps its probe for 240 s."""
    world = World(spec(ceiling=4))
    slow = fill(world, 1)[0]
    world.pass_time(60_000)
    world.finish(slow)
    to_half_open(world)
    probe(world)
    world.pass_time(239_999)
    assert world.call().reason is Reason.PROBING
    world.jump(1)

    assert probe(world)


def test_deadline_of_the_probe_is_among_the_instants_that_are_waited_for():
    """I9: somebody is awake when the role passes on."""
    world = World(spec(ceiling=4), rules=Rules(probe_deadline_ms=5_000, lease_ms=60_000))
    to_half_open(world)
    probe(world)

    assert world.arrive().reply.next_ms == 5_000


def test_cancelling_a_call_that_is_not_the_probe_leaves_the_probe_alone():
    """A cancelled waiter, a given-up caller, an ignored old call: the probe runs on."""
    world = World()
    old = fill(world, 1)[0]
    to_half_open(world)
    running = probe(world)
    waiting = world.call(wait=True)
    world.operate(Action.WITHDRAW, waiting.lease)
    world.finish(old, Outcome.IGNORED)

    assert world.seen().probe == running.lease
    assert world.call().reason is Reason.PROBING


@pytest.mark.parametrize("seed", range(5))
def test_never_two_probes_whatever_happens(seed):
    """Random ends, kills, cancellations and time: at each instant at most one call has the role."""
    chance = random.Random(seed)
    world = World(spec(ceiling=8), workers=("p", "r", "s"))
    trip(world)
    for _ in range(300):
        living = [call for worker in world.workers.values() for call in worker.calls.values()]
        match chance.choice(["ask", "ask", "end", "time", "time", "die"]):
            case "ask":
                name = chance.choice(list(world.workers))
                if world.workers[name].alive:
                    world.call(name, rank=chance.choice([0, 1, 3]))
            case "end" if living:
                world.finish(chance.choice(living), chance.choice(list(Outcome)))
            case "time":
                world.pass_time(chance.choice([100, 500, 3_000, 31_000]))
            case "die":
                name = chance.choice(list(world.workers))
                world.kill(name)
                world.workers[name].calls.clear()
                world.start(f"{name}'")
        state = world.rule.state
        if world.seen().breaker == Phase.HALF_OPEN:
            fresh = [
                lease
                for lease in state.leases.values()
                if lease.generation == state.breakers["e"].generation and lease.expires_at_ms > world.now
            ]
            assert len(fresh) <= 1


# -- the ramp ----------------------------------------------------------------------------------------------------------


def test_ramp_is_clocked_by_calls_that_come_back():
    """No wave at full width after a recovery: 1, 2, 4, 8 at once, then the full limit."""
    world = World(spec(ceiling=16))
    close(world)
    widths = []
    while world.seen().ramp >= 0:
        calls = []
        while (call := world.call()).status is Status.ADMITTED:
            calls.append(call)
        widths.append(len(calls))
        for call in calls:
            world.finish(call)

    assert widths == [1, 2, 4, 8]
    assert world.seen().limit == 16


def test_ramp_does_not_grow_by_time_or_neutral_ends():
    """Only evidence widens it."""
    world = World(spec(ceiling=16))
    close(world)
    for outcome in (Outcome.NEUTRAL, Outcome.IGNORED):
        world.finish(fill(world, 1)[0], outcome)
    world.pass_time(600_000)

    assert world.seen().limit == 1


def test_ramp_releases_waiters_in_the_command_that_widens_it():
    """I9: one success, two permits: the thread that ended takes one, the rest goes to whoever is idle."""
    world = World(spec(ceiling=8), workers=())
    world.start("p")
    world.start("r")
    close(world)
    running = fill(world, 1)[0]
    waiting = [world.arrive() for _ in range(4)]
    world.beat("r", idle=1)

    reply = world.finish(running, take=1, idle=1)

    assert [take.message_id for take in reply.takes] == [waiting[0].id]
    assert reply.woken == ("r",)


def test_wide_call_goes_alone_during_the_ramp():
    """Cost 3 at a limit of one would wait for ever; alone it may go."""
    world = World(spec(ceiling=4))
    close(world)
    wide = world.call(cost=3)

    assert wide.status is Status.ADMITTED
    assert world.call().reason is Reason.ENDPOINT_FULL
    world.finish(wide)
    assert world.seen().ramp == -1


def test_wide_background_work_recovers_without_waiting_for_its_turn():
    """An endpoint with background of cost 2 only: after the close it goes on at once, one by one, then wider."""
    world = World(spec(ceiling=8, reserve=None))
    trip(world)
    waiting = [world.arrive(rank=3, cost=2).id for _ in range(4)]
    world.pass_time(500)
    world.beat(take=1, idle=1)
    reply = world.finish(world.calls()[waiting[0]], take=2, idle=2)

    assert [take.message_id for take in reply.takes] == [waiting[1]]
    reply = world.finish(world.calls()[waiting[1]], take=2, idle=2)
    assert [take.message_id for take in reply.takes] == [waiting[2]]


def test_breaker_switched_off_during_its_ramp_leaves_no_limit_behind():
    """A deploy with the breaker off takes the ramp and the cooldown away."""
    world = World(spec(ceiling=8))
    close(world)
    world.configure("p", world.publish(spec(ceiling=8, breaker=False), revision=1))

    assert len(fill(world, 8)) == 8


# -- the message that fails --------------------------------------------------------------------------------------------


def overloaded(world, call, **more):
    """End a message's call with an overload that leaves its actor."""
    return world.finish(call, Outcome.OVERLOAD, park=ParkAs.OVERLOADED, **more)


def test_overloaded_message_is_parked_behind_those_of_its_rank():
    """The server's state is not the message's fault; it goes back, with a new place."""
    world = World(spec(ceiling=2))
    failing = world.arrive(rank=1)
    other = world.arrive(rank=1)
    third, background = world.arrive(rank=1), world.arrive(rank=3)

    reply = overloaded(world, failing)

    assert reply.status is Status.PARKED
    assert world.line() == [third.id, failing.id, background.id]
    assert world.acks() == {other.id}


def test_overloaded_message_is_parked_in_half_open_too():
    """A late overload of the old generation while the probe runs: the breaker is not closed, so it is parked."""
    world = World(spec(ceiling=4))
    old = world.arrive()
    to_half_open(world)
    probe(world)

    assert overloaded(world, old).status is Status.PARKED


@pytest.mark.parametrize("way", ["threshold not reached", "breaker off", "late, after the close"])
def test_overloaded_message_takes_its_brokers_path_when_the_breaker_is_closed(way):
    """Where the breaker does not speak, the exception does: Dramatiq's ordinary retries."""
    more = {"threshold not reached": {"fail_threshold": 2}, "breaker off": {"breaker": False}}.get(way, {})
    world = World(spec(ceiling=4, **more))
    failing = world.arrive()
    if way == "late, after the close":
        close(world)

    assert overloaded(world, failing).status is Status.FINISHED
    assert world.line() == []
    assert not world.rule.state.parked


def test_third_counted_overload_of_a_message_takes_its_brokers_path():
    """A message that itself kills the server ends where Dramatiq's retries end: parked twice, then not."""
    world = World(spec(ceiling=4))
    call = world.arrive()
    statuses = []
    for _ in range(3):
        statuses.append(overloaded(world, call).status)
        if statuses[-1] is Status.PARKED:
            world.pass_time(world.seen().open_for_ms)
            world.beat(take=1, idle=1)
            call = world.calls()[call.id]

    assert statuses == [Status.PARKED, Status.PARKED, Status.FINISHED]
    assert not world.rule.state.parked


def test_bystanders_of_an_incident_are_not_charged_with_it():
    """Ten fail together, ten times in a row: only who was first or the probe is counted, and nobody is lost."""
    world = World(spec(ceiling=4))
    first, bystander = world.arrive(), world.arrive()
    overloaded(world, first)
    overloaded(world, bystander)
    records = {waiter: parked.overloads for (_, waiter), parked in world.rule.state.parked.items()}

    assert records == {first.id: 1, bystander.id: 0}


def test_overloaded_message_is_not_the_next_probe_while_another_can_be():
    """Better rank or earlier place notwithstanding: one that has not seen the server shed load goes first."""
    world = World(spec(ceiling=4))
    failing = world.arrive(rank=0)
    overloaded(world, failing)
    other = world.arrive(rank=3)
    world.pass_time(500)
    world.beat(take=1, idle=1)

    assert list(world.calls()) == [other.id]
    assert world.calls()[other.id].probe


def test_overloaded_message_is_the_probe_if_nobody_else_can_be():
    """Alone, it is not held back."""
    world = World(spec(ceiling=4))
    failing = world.arrive()
    overloaded(world, failing)
    world.pass_time(500)
    world.beat(take=1, idle=1)

    assert list(world.calls()) == [failing.id]


def test_overload_without_parking_only_feeds_the_breaker():
    """`record(status=503)` with a normal return: the message is done."""
    world = World()
    call = world.arrive()

    assert world.finish(call, Outcome.OVERLOAD).status is Status.FINISHED
    assert world.seen().breaker == Phase.OPEN
    assert world.line() == []


# -- other endpoints, other hands --------------------------------------------------------------------------------------


def test_breakers_of_two_endpoints_of_one_group_are_two():
    """429 of one leaves the other alone."""
    world = World(spec("a", 4, group="g"), spec("c", 4, group="g"), budgets={"g": 8})
    trip(world, "a")

    assert world.seen("c").breaker == Phase.CLOSED
    assert world.call(endpoint="c").status is Status.ADMITTED


def test_operator_opens_closes_and_resets():
    """Forced open for so long; closed at the full limit, without a past."""
    world = World(spec(ceiling=8))
    world.operate(Action.OPEN, value=7_000)
    assert (world.seen().breaker, world.seen().open_for_ms) == (Phase.OPEN, 7_000)

    for action in (Action.CLOSE, Action.RESET):
        world.operate(Action.OPEN, value=7_000)
        world.operate(action)
        seen = world.seen()
        assert (seen.breaker, seen.trips, seen.limit) == (Phase.CLOSED, 0, 8)


def test_result_from_before_an_operators_word_does_not_move_the_breaker():
    """Forced closed: what was in flight before does not open it again."""
    world = World()
    old = fill(world, 1)[0]
    world.operate(Action.CLOSE)
    world.finish(old, Outcome.OVERLOAD)

    assert world.seen().breaker == Phase.CLOSED


def test_reading_while_open_changes_nothing():
    """A snapshot neither half-opens nor probes."""
    world = World()
    trip(world)
    before = world.rule.state.breakers["e"]
    for _ in range(3):
        world.jump(400)
        world.seen()

    assert world.rule.state.breakers["e"] == before
