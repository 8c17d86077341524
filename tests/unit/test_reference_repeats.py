"""Every command can be repeated (I11): the same answer, the same state; and reading changes nothing."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from guard_middleware.core.commands import Action, Operate, ParkAs, Status
from guard_middleware.core.outcome import Outcome
from tests.unit.builders import NAMESPACE, World, fill, spec, trip

TIMES = 3


def state_of(world):
    """All that is kept; places and slots are counters without a meaning of their own."""
    return replace(copy.deepcopy(world.rule.state), places=0), copy.deepcopy(world.rule.broker)


def repeat(world, verb, command, *, after_ms=0):
    """Carry a command out, and again; every answer and every state must be the first one. Returns the answer."""
    first = getattr(world.rule, verb)(command, world.now)
    state = state_of(world)
    for _ in range(TIMES):
        world.jump(after_ms)
        again = getattr(world.rule, verb)(command, world.now)
        if after_ms == 0:
            assert replace(again, woken=()) == replace(first, woken=())
            assert state_of(world) == state
        else:
            assert (again.status, again.endpoint, again.generation) == (first.status, first.endpoint, first.generation)
            assert [take.lease for take in again.takes] == [take.lease for take in first.takes]
    return first


def test_repeated_ask_that_was_admitted():
    """One lease, one permit."""
    world = World(spec(ceiling=1))
    world.enqueue()
    reply = repeat(world, "admit", world.command(message=world.fetch(), take=1, idle=0))

    assert reply.status is Status.ADMITTED
    assert world.in_flight() == 1


def test_repeated_ask_of_the_probe():
    """It is the probe still, and there is no second one."""
    world = World()
    trip(world)
    world.pass_time(500)
    reply = repeat(world, "admit", world.command(), after_ms=100)

    assert reply.probe
    assert world.in_flight() == 1


def test_repeated_ask_that_parked_and_took():
    """Parked once; the same message is handed over again, under the same lease."""
    world = World(spec("a", 1), spec("c", 1))
    fill(world, 1, endpoint="a")
    running = fill(world, 1, endpoint="c")[0]
    waiting = world.arrive(endpoint="c", take=0, idle=0)
    world.finish(running, idle=0)
    world.enqueue()
    reply = repeat(world, "admit", world.command(endpoint="a", message=world.fetch(), take=1, idle=0))

    assert reply.status is Status.PARKED
    assert [take.message_id for take in reply.takes] == [waiting.id]
    assert world.in_flight("c") == 1


def test_repeated_ask_that_was_refused_or_is_gone():
    """It leaves nothing, each time."""
    world = World(spec(ceiling=1))
    fill(world, 1)
    assert repeat(world, "admit", world.command()).status is Status.REFUSED
    assert repeat(world, "admit", world.command(cost=2)).status is Status.IMPOSSIBLE
    world.enqueue()
    message = world.fetch()
    world.ack(message)
    assert repeat(world, "admit", world.command(message=message)).status is Status.GONE


def test_repeated_ask_of_a_waiting_caller():
    """One place in the line."""
    world = World(spec(ceiling=1))
    fill(world, 1)

    assert repeat(world, "admit", world.command(wait=True)).status is Status.WAITING
    assert len(world.rule.state.lines["e", "", ""]) == 1


@pytest.mark.parametrize("outcome", list(Outcome))
def test_repeated_finish(outcome):
    """Released once, counted once, taken once: also as the one that trips, and with a hint."""
    world = World(spec(ceiling=2))
    call = world.arrive()
    fill(world, 1)
    world.arrive()
    command = world.ending(call, outcome, take=1, idle=1, retry_after_ms=9_000)

    assert repeat(world, "finish", command).status is Status.FINISHED
    assert world.seen().trips == (outcome is Outcome.OVERLOAD)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_repeated_finish_of_the_probe(outcome):
    """One close, one generation, one step of the series."""
    world = World()
    trip(world)
    world.pass_time(500)
    call = world.call()
    repeat(world, "finish", world.ending(call, outcome), after_ms=200)

    trips = {Outcome.OVERLOAD: 2}.get(outcome, 1)
    assert world.seen().trips == trips


@pytest.mark.parametrize("park", [ParkAs.OVERLOADED, ParkAs.DENIED])
def test_repeated_finish_that_parks(park):
    """One overload, one denial, one place."""
    world = World()
    call = world.arrive()
    outcome = Outcome.OVERLOAD if park is ParkAs.OVERLOADED else Outcome.IGNORED

    assert repeat(world, "finish", world.ending(call, outcome, park=park)).status is Status.PARKED
    record = next(iter(world.rule.state.parked.values()))
    assert (record.overloads, record.denials) == ((1, 0) if park is ParkAs.OVERLOADED else (0, 1))


def test_repeated_finish_that_came_too_late():
    """Withdrawn once; a stolen one stays stolen."""
    world = World(workers=("p", "r"))
    first, second = world.arrive("r"), world.arrive("r")
    world.workers["r"].alive = False
    world.pass_time(world.rules.lease_ms)
    world.beat("p", take=1, idle=1)

    assert repeat(world, "finish", world.ending(first)).status is Status.STOLEN
    assert repeat(world, "finish", world.ending(second)).status is Status.FINISHED
    assert world.line() == []


def test_repeated_finish_returns_only_takes_that_are_still_leased():
    """What was given back or finished meanwhile is not handed over a second time."""
    world = World(spec(ceiling=1))
    running = fill(world, 1)[0]
    world.arrive()
    ending = world.ending(running, take=1, idle=1)
    reply = world.rule.finish(ending, world.now)
    world.beat(give_back=(reply.takes[0].lease,), idle=0)

    assert world.rule.finish(ending, world.now).takes == ()


def test_repeated_beat_hands_over_the_same_messages():
    """Two taken of three wanted: the repeat hands over those two, in their order, and no third."""
    world = World(spec(ceiling=2))
    running = fill(world, 2)
    waiting = [world.arrive(idle=0).id for _ in range(4)]
    for call in running:
        world.finish(call, idle=0)
    reply = repeat(world, "beat", world.beating(take=3, idle=3))

    assert [take.message_id for take in reply.takes] == waiting[:2]
    assert world.in_flight() == 2


def test_repeated_beat_takes_nothing_new():
    """A permit came back in between: it is for the next beat, or for whoever is woken, not for the repeat."""
    world = World(spec(ceiling=3), workers=("p", "r"))
    running = fill(world, 3, process="r")
    waiting = [world.arrive("p", idle=0).id for _ in range(4)]
    world.finish(running[0], idle=0)
    beat = world.beating("p", take=3, idle=3)
    first = world.rule.beat(beat, world.now)
    world.finish(running[1], idle=0)
    again = world.rule.beat(beat, world.now)

    assert [take.message_id for take in first.takes] == [waiting[0]]
    assert [take.message_id for take in again.takes] == [waiting[0]]


def test_repeated_beat_that_gives_back_and_asserts():
    """Back once, asserted once."""
    world = World(spec(ceiling=3), workers=("p", "r"))
    running = fill(world, 1)[0]
    world.arrive("p", take=0, idle=0)
    lost = world.arrive("r")
    world.workers["r"].alive = False
    world.pass_time(world.rules.lease_ms)
    world.configure("r")
    world.beat("r")
    repeat(world, "beat", world.beating("r", asserts=(lost.held(),)))
    assert world.in_flight() == 3

    taken = next(one for one in world.workers["p"].calls if one != running.lease)
    repeat(world, "beat", world.beating("p", leases=(running.lease,), give_back=(taken,)))
    assert len(world.line()) == 1
    assert set(world.rule.state.leases) == {running.lease, lost.lease}


def test_repeated_configuration():
    """Publishing again changes nothing, and makes no second epoch."""
    world = World()
    world.start("r", published=world.publish(spec(ceiling=2)))
    epoch = world.rule.state.epoch
    for _ in range(3):
        world.configure("r", world.publish(spec(ceiling=2)))

    assert world.seen().ceiling == 2
    assert world.rule.state.epoch == epoch


@pytest.mark.parametrize(
    ("action", "value"),
    [
        (Action.OVERRIDE, 2),
        (Action.CLEAR_OVERRIDE, 0),
        (Action.PAUSE, 0),
        (Action.RESUME, 0),
        (Action.CLOSE, 0),
        (Action.RESET, 0),
        (Action.OPEN, 5_000),
    ],
)
def test_repeated_operation(action, value):
    """An operator who presses twice: as if once (a forced breaker only begins another generation)."""
    world = World(spec(ceiling=4))
    fill(world, 2)
    command = Operate(action=action, target="e", value=value)
    world.rule.operate(command, world.now)
    once = world.seen()
    world.rule.operate(command, world.now)

    assert replace(world.seen(), generation=0) == replace(once, generation=0)


def test_repeated_drain_withdraw_and_goodbye():
    """The second finds nothing to do."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    fill(world, 1)
    parked = world.arrive()
    caller = world.call("r", wait=True)
    for _ in range(2):
        world.operate(Action.WITHDRAW, caller.lease)
        world.operate(Action.DRAIN, "", queue=(NAMESPACE, "q"), force=True)
        world.operate(Action.FORGET, "r")

    assert world.queue() == [parked.id]
    assert not world.rule.state.parked
    assert set(world.rule.state.processes) == {"p"}


def test_command_that_was_resent_out_of_order_brings_nothing_back():
    """The ask arrives once more after its finish: answered from the tombstone, no lease."""
    world = World(spec(ceiling=1))
    world.enqueue()
    ask = world.command(message=world.fetch(), take=1)
    call = world.admit(ask)
    world.finish(call)

    assert world.rule.admit(ask, world.now).status is Status.FINISHED
    assert world.in_flight() == 0
    assert not world.rule.state.parked


def test_message_handed_over_for_its_age_is_handed_over_again():
    """I11 for takes without a permit: the reply may be the one that was lost."""
    world = World(spec(ceiling=1))
    running = fill(world, 1)[0]
    old = world.arrive(deadline_ms=world.now + 1_000)
    world.pass_time(1_000)
    ending = world.ending(running, take=1, idle=1)
    answers = [[take.message_id for take in world.rule.finish(ending, world.now).takes] for _ in range(3)]

    assert answers == [[old.id]] * 3


def test_snapshot_changes_nothing_at_any_instant():
    """Reading sweeps nothing, serves nothing, and is the same for the same instant."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    world.arrive("r")
    world.arrive("p")
    world.call(wait=True)
    world.kill("r")
    for ms in (0, 1, 60, 20_000, 3_600_000):
        before = state_of(world)
        world.jump(ms)
        first = world.rule.snapshot(world.now)
        assert world.rule.snapshot(world.now) == first
        assert state_of(world) == before


def test_snapshot_shows_what_is():
    """Units, waiters by rank, holders, lines in their order, and what a breaker is about to do."""
    world = World(spec(ceiling=2, reserve=1), workers=("p", "r"))
    held = fill(world, 2)
    first, second, third = world.arrive(rank=3), world.arrive(rank=0), world.arrive(rank=3)
    world.call("r", wait=True)
    world.finish(held[0], Outcome.OVERLOAD, idle=0)
    shot = world.rule.snapshot(world.now)
    seen = shot.endpoints["e"]

    assert (seen.ceiling, seen.in_flight, seen.waiting) == (2, 1, {0: 1, 1: 1, 3: 2})
    assert (seen.breaker, seen.open_for_ms, seen.trips) == ("open", 500, 1)
    assert shot.lines["e", NAMESPACE, "q"] == (second.id, first.id, third.id)
    assert shot.leases == {held[1].lease: ("e", 1, "p")}
    assert set(shot.processes) == {"p", "r"}
