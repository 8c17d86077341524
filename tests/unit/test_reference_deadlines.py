"""Waiters that are too old or gone: each is told to its broker once, or dropped (I3, I11)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guard_middleware.core.commands import ParkAs, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import NOWHERE
from tests.unit.builders import NAMESPACE, World, fill, full, serve_all, spec

# -- too old, or gone --------------------------------------------------------------------------------------------------


def test_waiter_past_its_deadline_is_handed_over_once_without_a_permit():
    """Dramatiq's age limit ends it: it takes no unit, also at a full endpoint."""
    world, _ = full()
    old = world.arrive(deadline_ms=world.now + 3_000)
    world.pass_time(2_999)
    assert world.beat(take=1, idle=1).takes == ()
    world.jump(1)
    reply = world.beat(take=1, idle=1)

    assert [(take.endpoint, take.message_id) for take in reply.takes] == [(NOWHERE, old.id)]
    assert reply.takes[0].payload == old.id.encode()
    assert world.in_flight() == 1
    assert world.acks() == {old.id}
    assert world.beat(take=1, idle=1).takes == ()


def test_message_that_was_handed_over_for_its_age_comes_back_if_its_process_is_gone():
    """Nobody lost it: who was handed it names its lease, as with any other; then it goes to who is there."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    fill(world, 1, "r")
    old = world.arrive("p", deadline_ms=world.now + 1_000)
    world.jump(1_000)
    assert [take.message_id for take in world.beat("p", take=1, idle=1).takes] == [old.id]
    world.kill("p")
    world.pass_time(world.rules.lease_ms + 1)

    assert [(take.endpoint, take.message_id) for take in world.beat("r", take=1, idle=1).takes] == [(NOWHERE, old.id)]


def handed_over_for_its_age(world):
    """A message whose broker's age limit let it run on: its worker has ended what it came with, and will ask again."""
    old = world.arrive(deadline_ms=world.now + 1_000)
    world.jump(1_000)
    world.beat(take=1, idle=1)
    world.finish(replace(world.calls()[old.id], message=None))
    return old


@pytest.mark.parametrize("ago_ms", [None, 0, 1_000], ids=["none", "now", "past"])
def test_message_that_is_let_run_on_at_its_age_waits_for_its_turn_without_a_deadline(ago_ms):
    """Its worker names none any more, or by a clock of its own one that is over: handed over again, it would only spin."""
    # Given a message that was handed over for its age, with another one behind it
    world, running = full()
    old, later = handed_over_for_its_age(world), world.arrive()
    # When its worker asks for it again
    deadline_ms = 0 if ago_ms is None else world.now - ago_ms
    again = world.admit(world.command(message=old.message, take=1, idle=0, deadline_ms=deadline_ms))
    # Then neither that command nor a beat hands it over, and it gets its permit where it stood
    assert (again.status, again.reply.takes) == (Status.PARKED, ())
    assert [world.beat(take=1, idle=1).takes for _ in range(3)] == [()] * 3
    assert serve_all(world, running) == [old.id, later.id]


def test_message_that_is_let_run_on_at_its_age_rests_after_a_denial_like_any_other():
    """What is remembered of it has the deadline of its last ask: it does not come back at once for its age."""
    world, running = full()
    old = handed_over_for_its_age(world)
    world.finish(running[0])
    call = world.admit(world.command(message=old.message, take=1))
    assert world.finish(call, Outcome.IGNORED, park=ParkAs.DENIED).status is Status.PARKED

    assert world.beat(take=1, idle=1).takes == ()
    world.pass_time(1_000)
    assert [(take.endpoint, take.message_id) for take in world.beat(take=1, idle=1).takes] == [("e", old.id)]


def test_deadline_that_is_over_at_the_first_ask_is_none():
    """By the store's clock; the worker that asks has seen to the age already."""
    world, running = full()
    call = world.arrive(deadline_ms=world.now)

    assert (call.status, call.reply.takes) == (Status.PARKED, ())
    assert serve_all(world, running) == [call.id]


def test_later_deadline_takes_the_place_of_the_one_before():
    """A deploy raised the age limit: until the new instant it waits like any other, then it is handed over."""
    # Given a message that was too old, and is not any more
    world, _ = full()
    old = handed_over_for_its_age(world)
    # When its worker asks for it with a later deadline, Then that one counts
    again = world.admit(world.command(message=old.message, take=1, idle=0, deadline_ms=world.now + 3_000))
    assert (again.status, again.reply.takes) == (Status.PARKED, ())
    world.pass_time(2_999)
    assert world.beat(take=1, idle=1).takes == ()
    world.jump(1)
    assert [(take.endpoint, take.message_id) for take in world.beat(take=1, idle=1).takes] == [(NOWHERE, old.id)]


def test_deadline_of_a_message_that_runs_in_time_does_nothing():
    """Only waiters are looked at."""
    world = World()
    call = world.arrive(deadline_ms=world.now + 1_000)
    world.pass_time(5_000)

    assert world.beat(take=1, idle=1).takes == ()
    assert world.finish(call).status is Status.FINISHED


def test_flushed_waiters_are_dropped_and_never_count_as_a_take():
    """Ghosts before a living message: the one thread that asks gets the living one."""
    world, running = full()
    ghosts = [world.arrive() for _ in range(20)]
    living = world.arrive()
    for ghost in ghosts:
        del world.rule.broker.payloads[NAMESPACE, "q"][ghost.id]
    reply = world.finish(running[0], take=1, idle=1)

    assert [take.message_id for take in reply.takes] == [living.id]
    assert world.line() == []
    assert {waiter for _, waiter in world.rule.state.parked} == {living.id}


def test_ghosts_are_dropped_in_batches():
    """Of 1,200 one command drops at most 500; what is left is dropped later, and the living one is served."""
    world, running = full()
    ghosts = [world.arrive() for _ in range(1_200)]
    living = world.arrive()
    for ghost in ghosts:
        del world.rule.broker.payloads[NAMESPACE, "q"][ghost.id]
    world.finish(running[0], take=1, idle=1)
    left = [len(world.line())]
    while living.id not in world.calls():
        world.beat(take=1, idle=1)
        left.append(len(world.line()))

    assert left == [701, 201, 0]
