"""A store that was away or lost its data, and processes that come and go (I6, I12)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guard_middleware.core.commands import Action, Status
from guard_middleware.core.values import Rules
from guard_middleware.core.verdict import Reason
from tests.unit.builders import World, fill, spec, trip

LEASE_MS = Rules().lease_ms

# -- a store that was away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap_ms", [4_001, 60_000, 86_400_000])
def test_expiries_move_on_by_the_time_that_the_store_was_away(gap_ms):
    """Nobody's message is put back because the store was down: what was left of the lease time is still left."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    call = world.arrive("r")
    world.jump(gap_ms)
    assert world.call().status is Status.REFUSED
    assert world.beat("r").lost == ()
    assert world.acks("r") == {call.id}
    world.workers["r"].alive = False
    world.pass_time(LEASE_MS - 1)

    assert world.in_flight() == 1
    world.jump(1)
    assert world.in_flight() == 0


def test_short_silence_is_no_outage():
    """Up to two heartbeats nothing is moved."""
    world = World(spec(ceiling=1))
    call = fill(world, 1)[0]
    before = world.rule.state.leases[call.lease].expires_at_ms
    world.jump(4_000)
    world.call()

    assert world.rule.state.leases[call.lease].expires_at_ms == before


def test_outage_keeps_processes_and_what_they_published():
    """After it everybody is still known: nobody has to publish first."""
    world = World()
    world.jump(600_000)

    assert world.call().status is Status.ADMITTED


# -- epoch -------------------------------------------------------------------------------------------------------------


def test_first_start_holds_for_one_heartbeat():
    """A store without an epoch may just have lost its data: nobody starts before who runs could say so."""
    world = World(workers=(), first_start_hold_ms=-1)
    world.start("p")
    parked = world.arrive()

    assert (parked.status, parked.reason) == (Status.PARKED, Reason.RECOVERING)
    assert parked.reply.retry_after_ms == world.rules.heartbeat_ms
    assert parked.reply.next_ms == world.rules.heartbeat_ms
    world.jump(world.rules.heartbeat_ms - 1)
    assert world.beat(take=1, idle=1).takes == ()
    world.jump(1)
    assert [take.message_id for take in world.beat(take=1, idle=1).takes] == [parked.id]


def test_lost_data_hold_for_one_lease_time():
    """A process that remembers another epoch makes the new one: calls of before may still run somewhere."""
    world = World(workers=(), first_start_hold_ms=-1)
    world.start("p", epoch="another")
    world.pass_time(LEASE_MS - 1)
    assert world.call().reason is Reason.RECOVERING
    world.jump(1)

    assert world.call().status is Status.ADMITTED


def test_running_calls_are_asserted_during_the_hold():
    """What ran before the loss counts before anybody new starts."""
    before = World(spec(ceiling=1))
    call = fill(before, 1)[0]
    world = World(spec(ceiling=1), workers=(), first_start_hold_ms=-1)
    world.start("p", epoch=before.rule.state.epoch)
    world.workers["p"].calls[call.lease] = call
    assert world.beat().lost == (call.lease,)
    world.beat(asserts=(call.held(),))
    world.pass_time(LEASE_MS)

    assert world.call().reason is Reason.ENDPOINT_FULL
    assert world.in_flight() == 1


def test_second_process_makes_no_second_epoch():
    """It joins: no hold, the same epoch in each reply."""
    world = World(workers=("p",))
    epoch = world.rule.state.epoch
    world.hold = 60_000
    world.start("r", epoch=epoch)

    assert world.call("r").reply.epoch == epoch
    assert world.call("r").status is Status.ADMITTED


def test_lost_data_hold_for_one_lease_time_whoever_publishes_first():
    """A fresh process was first; then one comes that remembers another epoch, whose calls may still run."""
    world = World(workers=("p",))
    world.jump(1_000)
    assert world.call().status is Status.ADMITTED
    world.start("r", epoch="another@1")
    assert world.call().reason is Reason.RECOVERING
    world.pass_time(LEASE_MS - 1_000)

    assert world.call().status is Status.ADMITTED


def test_who_comes_back_after_a_long_time_holds_nobody_up():
    """What it remembers was lost more than a lease time ago: its calls have ended, or do not count any more."""
    world = World(workers=("p",))
    world.pass_time(LEASE_MS)
    world.start("r", epoch="another@1")

    assert world.call().status is Status.ADMITTED


def test_beat_that_comes_after_a_later_one_changes_nothing():
    """The network held it back: its lists are older than the lease that it does not name."""
    world = World()
    late = world.beating("p", idle=5, queues=())
    call = world.call()
    world.pass_time(6_000)
    before = replace(world.rule.state.processes["p"])
    reply = world.rule.beat(late, world.now)

    assert (reply.status, reply.lost, reply.takes) == (Status.DONE, (), ())
    assert call.lease in world.rule.state.leases
    assert world.rule.state.processes["p"] == before


# -- processes ---------------------------------------------------------------------------------------------------------


def test_dead_process_takes_its_smaller_ceiling_with_it():
    """The smallest value among the live ones applies; who dies is no longer among them."""
    world = World(spec(ceiling=8), workers=("p",))
    world.start("r", published=world.publish(spec(ceiling=2)))
    assert world.seen().ceiling == 2
    world.kill("r")
    world.pass_time(LEASE_MS)

    assert world.seen().ceiling == 8


def test_rise_of_a_ceiling_by_a_death_is_given_to_waiters():
    """I9: the command that finds the process dead serves what that frees."""
    world = World(spec(ceiling=2), workers=("p",))
    world.start("r", published=world.publish(spec(ceiling=1)))
    fill(world, 1)
    caller = world.call(wait=True)
    world.kill("r")
    world.pass_time(LEASE_MS - 2_000)
    assert caller.lease not in world.rule.state.leases
    world.jump(2_000)
    world.call(endpoint="unknown")  # whatever the command is about

    assert caller.lease in world.rule.state.leases


def test_rise_of_a_ceiling_is_given_to_waiters_by_the_command_that_brings_it():
    """Every process sees a change at its next call, and who waits need not wait for one."""
    world = World(spec(ceiling=1))
    fill(world, 1)
    caller = world.call(wait=True)
    reply = world.configure("p", world.publish(spec(ceiling=2), revision=1))

    assert reply.woken == ("p",)
    assert caller.lease in world.rule.state.leases


def test_unknown_process_that_finishes_is_answered():
    """Taken for dead while it ran: the release counts, and it takes nothing before it has published."""
    world = World(workers=("p", "r"))
    call = fill(world, 1, process="r")[0]
    world.rule.forget("r")
    world.arrive("p", take=0)
    reply = world.finish(call, take=1, idle=1)

    assert reply.status is Status.FINISHED
    assert reply.takes == ()


def test_override_outlives_restarts_until_it_is_cleared():
    """Everybody stops and comes back: the operator's number still applies."""
    world = World(spec(ceiling=8))
    world.operate(Action.OVERRIDE, value=3)
    world.forget("p")
    world.start("r")
    assert world.seen().ceiling == 3
    world.operate(Action.CLEAR_OVERRIDE)

    assert world.seen().ceiling == 8


def test_every_instant_is_the_stores():
    """I6: nothing that a process sends is a time of its own; the same commands at another hour give the same."""
    runs = []
    for offset in (0, 86_400_000_000):
        world = World(spec(ceiling=2))
        world.now += offset
        trip(world)
        world.pass_time(500)
        call = world.call()
        runs.append((call.probe, call.reply.expires_at_ms - world.now))

    assert runs[0] == runs[1]


# -- calls of an endpoint that nobody names any more -------------------------------------------------------------------


def test_budget_counts_the_leases_of_a_process_that_was_forgotten_before_them():
    """I1: killed between two beats, its record ends at most a heartbeat before its last leases do."""
    world = World(workers=())
    for name, endpoint in (("p", "a"), ("r", "c")):
        world.start(name, published=world.publish(spec(endpoint, 4, group="g"), budgets={"g": 4}))
    world.jump(1_900)
    fill(world, 4, process="r", endpoint="c")
    world.kill("r")
    world.pass_time(LEASE_MS - 1_900)

    assert len(world.rule.state.leases) == 4
    assert world.call("p", "a").reason is Reason.GROUP_FULL


def test_budget_counts_the_running_calls_of_an_endpoint_that_was_taken_out():
    """I1: a deploy no longer names the endpoint while its calls still load the accelerator."""
    world = World(spec("a", 4, group="g"), spec("c", 4, group="g"), budgets={"g": 4})
    fill(world, 4, endpoint="c")
    world.configure("p", world.publish(spec("a", 4, group="g"), budgets={"g": 4}, revision=1))

    assert world.call("p", "a").reason is Reason.GROUP_FULL
