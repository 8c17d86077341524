"""Leases: how they end, come back and do not come back (I2, I5, I6)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guard_middleware.core.commands import Action, ParkAs, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import Rules
from guard_middleware.core.verdict import Reason
from tests.unit.builders import NAMESPACE, World, fill, spec

LEASE_MS = Rules().lease_ms


# -- expiry ------------------------------------------------------------------------------------------------------------


def test_lease_stops_counting_at_its_instant_whether_or_not_anybody_swept():
    """Not a millisecond later, and not earlier."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    call = fill(world, 1, process="r")[0]
    world.kill("r")
    world.pass_time(LEASE_MS - 1_000)
    world.jump(999)
    assert (world.in_flight(), world.call().status) == (1, Status.REFUSED)
    world.jump(1)

    assert world.in_flight() == 0
    assert world.call().status is Status.ADMITTED
    assert call.lease not in world.rule.state.leases


def test_renewed_lease_lives_as_long_as_its_process_beats():
    """However long the call: a beat per lease time is enough."""
    world = World(spec(ceiling=1))
    call = fill(world, 1)[0]
    world.pass_time(40 * LEASE_MS)

    assert set(world.rule.state.leases) == {call.lease}
    assert world.call().reason is Reason.ENDPOINT_FULL


def test_each_lease_has_its_own_expiry():
    """A short-lived neighbour neither shortens nor lengthens another's."""
    world = World(spec(ceiling=4), workers=("p", "r"))
    first = fill(world, 1, process="r")[0]
    world.kill("r")
    world.pass_time(10_000)
    second = fill(world, 1)[0]
    world.pass_time(5_000)

    assert set(world.rule.state.leases) == {second.lease}
    assert first.lease not in world.rule.state.leases


def test_refused_commands_lengthen_no_lease():
    """Steady denied traffic keeps nothing alive."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    fill(world, 1, process="r")
    world.kill("r")
    asked = 0
    while world.call().status is Status.REFUSED:
        asked += 1
        world.pass_time(500)

    assert asked * 500 == LEASE_MS


def test_message_of_an_expired_lease_goes_back_exactly_once():
    """It still stands in the dead worker's ack set: back to its line, out of that set."""
    world = World(workers=("p", "r"))
    call = world.arrive("r")
    world.kill("r")
    world.pass_time(5 * LEASE_MS)

    assert world.line() == [call.id]
    assert world.acks("r") == set()
    world.beat(take=2, idle=2)
    assert list(world.calls()) == [call.id]


def test_message_that_its_broker_took_back_first_is_not_put_back():
    """Only if it still stands in that worker's ack set: maintenance was faster, or it was acked."""
    world = World(workers=("p", "r"))
    requeued, acked = world.arrive("r"), world.arrive("r")
    world.ack(acked.message)
    world.rule.broker.acks[NAMESPACE, "w-r", "q"].clear()
    world.rule.broker.queues[NAMESPACE, "q"].append(requeued.id)
    world.kill("r")
    world.pass_time(2 * LEASE_MS)

    assert world.line() == []
    assert world.queue() == [requeued.id]


def test_flushed_message_of_a_dead_worker_leaves_nothing():
    """No payload: no line, no record."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    call = world.arrive("r")
    world.rule.broker.payloads[NAMESPACE, "q"].clear()
    world.kill("r")
    world.pass_time(2 * LEASE_MS)

    assert world.line() == []
    assert not world.rule.state.parked
    assert call.id not in world.acks("r")


def test_killed_workers_give_full_capacity_back_within_a_lease_time():
    """A kill -9 of three workers that held everything: all units and all messages are back."""
    names = ["a", "b", "c"]
    world = World(spec(ceiling=6), workers=("p", *names))
    held = [world.arrive(name) for name in names * 2]
    for name in names:
        world.kill(name)
    world.pass_time(LEASE_MS)

    assert world.in_flight() == 0
    assert world.line() == [call.id for call in held]


def test_more_expired_leases_than_one_sweep_stop_counting_all_the_same():
    """The sweep ends at most 256 at a time; the others do not count, and cannot be renewed."""
    world = World(spec(ceiling=1_200), workers=("p", "r"))
    calls = fill(world, 1_200, process="r")
    world.workers["r"].alive = False
    world.pass_time(LEASE_MS - 1_000)
    world.jump(1_000)
    assert world.in_flight() == 0
    world.configure("r")
    reply = world.beat("r")
    assert world.rule.state.leases  # not swept yet

    assert set(reply.lost) == {call.lease for call in calls}
    assert world.in_flight() == 0


def come_back(world, name="r"):
    """All that a silent process leases ends at this instant; it has just published again, and speaks next."""
    world.kill(name)
    world.pass_time(LEASE_MS - 1_000)
    world.configure(name)
    world.jump(1_000)


def test_caller_whose_lease_is_over_and_not_swept_is_given_a_fresh_one():
    """It repeats its ask after a lease time: what it is told then is a lease that counts."""
    # Given more leases than one sweep ends, all over
    world = World(spec(ceiling=300), workers=("p", "r"))
    last = max(call.lease for call in fill(world, 300, process="r"))
    come_back(world)
    # When the ask is repeated whose lease that sweep does not come to
    again = world.admit(world.command("r", lease=last))
    # Then its lease is as new as any
    assert len(world.rule.state.leases) == 300 - 256
    assert (again.status, again.reply.expires_at_ms) == (Status.ADMITTED, world.now + LEASE_MS)
    assert world.in_flight() == 1


def test_message_whose_lease_is_over_and_not_swept_is_gone_and_runs_once():
    """Its repeated ask finds it in the line again, from where whoever is idle takes it."""
    # Given more messages at work than one sweep ends leases, all over
    world = World(spec(ceiling=300), workers=("p", "r"))
    calls = [world.arrive("r") for _ in range(300)]
    last = max(calls, key=lambda call: call.lease)
    come_back(world)
    # When the ask is repeated whose lease that sweep does not come to
    again = world.admit(world.command("r", lease=last.lease, message=last.message, take=1, idle=0))
    # Then its worker does not have it, and each message is taken once, in its place
    assert (again.status, world.in_flight(), last.id in world.acks("r")) == (Status.GONE, 0, False)
    assert [take.message_id for take in world.beat("p", take=300, idle=300).takes] == [call.id for call in calls]


# -- release -----------------------------------------------------------------------------------------------------------


def test_release_frees_once():
    """A finish twice, or of a lease of somebody else's imagination, frees nothing that is not its own."""
    world = World(spec(ceiling=2))
    first, _ = fill(world, 2)
    world.finish(first)
    for _ in range(5):
        world.rule.finish(world.ending(first), world.now)
    world.rule.finish(replace(world.ending(first), lease="never-given"), world.now)

    assert world.in_flight() == 1
    assert [world.call().status for _ in range(2)] == [Status.ADMITTED, Status.REFUSED]


def test_two_deliveries_of_one_message_hold_two_leases_and_free_their_own():
    """The broker delivered twice: each release ends the lease of its own delivery."""
    world = World(spec(ceiling=2), workers=("p", "r"))
    first = world.arrive("p")
    second = world.admit(world.command("r", message=replace(first.message, worker="w-r")))
    assert second.status is Status.GONE  # the broker has given it to one worker only

    world.rule.broker.ack_set(replace(first.message, worker="w-r")).add(first.id)
    second = world.admit(world.command("r", message=replace(first.message, worker="w-r")))
    world.finish(second)
    assert set(world.rule.state.leases) == {first.lease}


def test_released_lease_never_comes_back():
    """Neither a repeated ask, nor a renewal, nor an assertion brings it back for one lease time."""
    world = World(spec(ceiling=1))
    ask = world.command()
    call = world.admit(ask)
    world.finish(call)
    world.jump(1_000)

    assert world.rule.admit(ask, world.now).status is Status.FINISHED
    assert world.beat(leases=(call.lease,)).lost == (call.lease,)
    world.beat(asserts=(call.held(),))
    assert world.in_flight() == 0


def test_tombstone_outlives_a_store_that_was_away():
    """The reply to a finish is lost and the store is gone for a minute: the repeat finds its answer."""
    world = World(spec(ceiling=1))
    running = world.arrive()
    waiting = world.arrive()
    ending = world.ending(running, take=1, idle=1)
    first = world.rule.finish(ending, world.now)
    world.jump(60_000)

    again = world.rule.finish(ending, world.now)

    assert [take.message_id for take in again.takes] == [take.message_id for take in first.takes] == [waiting.id]


# -- give back ---------------------------------------------------------------------------------------------------------


def test_given_back_message_returns_to_its_place_without_an_outcome():
    """What had not begun says nothing about the server, and frees its unit in the same command."""
    world = World(spec(ceiling=1))
    running = fill(world, 1)[0]
    first, second = world.arrive(), world.arrive(rank=0)
    world.finish(running, take=1, idle=1)
    lease = world.calls()[second.id].lease
    before = (world.rule.state.breakers["e"], world.seen().mean_ms)
    del world.workers["p"].calls[lease]
    world.jump(500)
    reply = world.beat(give_back=(lease,), take=1, idle=1)

    assert [take.message_id for take in reply.takes] == [second.id]
    assert (world.rule.state.breakers["e"], world.seen().mean_ms) == before
    assert world.line() == [first.id]


def test_lease_that_no_beat_names_goes_back():
    """A lost reply strands nothing: after two beats that know nothing of it, the message is in its line again."""
    world = World()
    world.enqueue()
    message = world.fetch()
    world.rule.admit(world.command(message=message), world.now)  # the reply is lost, the thread is killed
    world.pass_time(2 * world.rules.heartbeat_ms)

    assert world.in_flight() == 0
    assert world.line() == [message.id]


def test_lease_of_an_outstanding_command_is_not_taken_for_lost():
    """Its reply is still on the way: the beat explains it."""
    world = World()
    world.enqueue()
    ask = world.command(message=world.fetch())
    world.rule.admit(ask, world.now)
    for _ in range(4):
        world.jump(2_000)
        world.beat(outstanding=(ask.lease,))

    assert set(world.rule.state.leases) == {ask.lease}


def test_takes_of_an_outstanding_finish_are_not_taken_for_lost():
    """Also if the lease that it ends came with a take itself, and so on: the command's id explains them."""
    world = World(spec(ceiling=1))
    running = fill(world, 1)[0]
    for _ in range(3):
        world.arrive()
    world.finish(running, take=1, idle=1)
    for _ in range(2):
        call = next(iter(world.workers["p"].calls.values()))
        ending = world.ending(call, take=1, idle=1)
        world.rule.finish(ending, world.now)  # its reply is late
        for _ in range(3):
            world.jump(2_000)
            world.beat(leases=(), outstanding=(call.lease,))
        reply = world.finish(call, take=1, idle=1)
        assert len(reply.takes) == 1
        assert set(world.rule.state.leases) == set(world.workers["p"].calls)


def test_lease_given_while_a_beat_was_on_its_way_is_not_taken_for_lost():
    """The list in a beat is older than the beat: what another thread was given meanwhile is not in it."""
    world = World()
    world.pass_time(4_000)
    beat = world.beating()
    call = world.arrive()
    world.jump(30)
    world.rule.beat(beat, world.now)
    world.rule.beat(beat, world.now)  # nor by its repetition

    assert set(world.rule.state.leases) == {call.lease}
    world.pass_time(10_000)
    assert world.acks() == {call.id}


def test_ids_of_taken_leases_do_not_grow():
    """A thread that takes with each finish for days: the ids stay short and unique."""
    world = World(spec(ceiling=1))
    running = fill(world, 1)[0]
    ids = set()
    for _ in range(300):
        world.arrive(idle=1)
        reply = world.finish(running, take=1, idle=1)
        running = world.workers["p"].calls[reply.takes[0].lease]
        ids.add(running.lease)

    assert len(ids) == 300
    assert max(map(len, ids)) < 40


def test_process_that_says_goodbye_returns_all_at_once():
    """Shutdown: leases and messages go back now, not after a lease time; its hold and its report end."""
    world = World(spec(ceiling=2), workers=("p", "r"))
    held = [world.arrive("r") for _ in range(2)]
    waiting = world.arrive("p")
    world.beat("p", idle=2)
    reply = world.forget("r")

    assert reply.woken == ("p",)
    assert "r" not in world.rule.snapshot(world.now).processes
    assert world.line() == [held[0].id, held[1].id, waiting.id]


def test_leaving_process_is_handed_nothing_and_notified_of_nothing():
    """It beats on for its running calls; whatever it says of idle threads does not count."""
    world = World(spec(ceiling=2), workers=("p", "r"))
    running = fill(world, 2, process="r")
    world.beat("p", idle=3)
    world.arrive("p", idle=2)
    world.arrive("p", idle=2)
    world.finish(running[0])
    reply = world.beat("p", take=3, idle=3, leaving=True)
    freed = world.finish(running[1])

    assert (reply.takes, reply.woken) == ((), ())
    assert freed.woken == ()
    assert world.in_flight() == 0


# -- slow, not dead ----------------------------------------------------------------------------------------------------


def slow(world, name="r", ms=LEASE_MS + 1_000):
    """The process is stopped, not killed; the others live on."""
    world.workers[name].alive = False
    world.pass_time(ms)
    world.workers[name].alive = True


def revive(world, name="r"):
    """Its first beat after the pause: taken for dead, it publishes, beats, and learns what is lost."""
    if world.beat(name).status is Status.UNCONFIGURED:
        world.configure(name)
    return world.beat(name)


def test_slow_worker_asserts_its_running_call_again():
    """The call still loads the server: it counts, and its message comes back from the line into the ack set."""
    world = World(spec(ceiling=2), workers=("p", "r"))
    call = world.arrive("r")
    slow(world)
    assert world.line() == [call.id]
    reply = revive(world)
    assert reply.lost == (call.lease,)

    reply = world.beat("r", asserts=(call.held(),))

    assert reply.stolen == ()
    assert world.in_flight() == 1
    assert world.line() == []
    assert world.acks("r") == {call.id}
    assert world.finish(call).status is Status.FINISHED
    assert not world.rule.state.parked


def test_asserted_call_counts_even_above_the_ceiling():
    """Its place was given away meanwhile: two run at a ceiling of one, and nobody starts before both are through."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    call = world.arrive("r")
    slow(world)
    other = world.call("p", rank=0)
    assert other.status is Status.ADMITTED
    revive(world)
    world.beat("r", asserts=(call.held(),))

    assert world.in_flight() == 2
    world.finish(other)
    assert world.call("p", rank=0).reason is Reason.ENDPOINT_FULL
    world.finish(call)
    assert world.call("p", rank=0).status is Status.ADMITTED


@pytest.mark.parametrize("asserted", [True, False])
def test_slow_run_whose_message_somebody_else_has_is_told_so(asserted):
    """I4: no result, no retry copy, no callback from the late run; the other's lease and record stay."""
    world = World(spec(ceiling=2), workers=("p", "r"))
    call = world.arrive("r")
    slow(world)
    world.beat("p", take=1, idle=1)
    thief = world.calls("p")[call.id]
    revive(world)
    if asserted:
        reply = world.beat("r", asserts=(call.held(),))
        assert reply.stolen == (call.lease,)
        assert world.in_flight() == 2
    record = dict(world.rule.state.parked)

    assert world.finish(call, Outcome.OVERLOAD, park=ParkAs.OVERLOADED).status is Status.STOLEN
    assert world.rule.state.parked == record
    assert world.acks("p") == {call.id}
    assert thief.lease in world.rule.state.leases
    assert world.finish(thief).status is Status.FINISHED


def test_repeated_assertion_of_a_stolen_call_says_so_again():
    """I11: the reply that told of the theft may be the one that was lost."""
    world = World(spec(ceiling=2), workers=("p", "r"))
    call = world.arrive("r")
    slow(world)
    world.beat("p", take=1, idle=1)
    revive(world)
    beat = world.beating("r", asserts=(call.held(),))
    answers = [world.rule.beat(beat, world.now).stolen for _ in range(3)]

    assert answers == [(call.lease,)] * 3


def test_message_taken_again_by_the_same_worker_is_stolen_from_its_first_run():
    """Both runs are in one process, and the ack set holds the id: the lease tells them apart."""
    world = World(spec(ceiling=2), workers=("p", "r"))
    call = world.arrive("r")
    slow(world)
    reply = world.beat("r", take=1, idle=1)
    if reply.status is Status.UNCONFIGURED:
        world.configure("r")
        reply = world.beat("r", take=1, idle=1)
    assert [take.message_id for take in reply.takes] == [call.id]
    again = world.workers["r"].calls[reply.takes[0].lease]

    assert world.beat("r", asserts=(call.held(),)).stolen == (call.lease,)
    assert world.finish(call).status is Status.STOLEN
    assert world.finish(again).status is Status.FINISHED


def test_late_finish_withdraws_its_message_from_the_line():
    """The run was slow and is over: its result counts, nobody runs the message again."""
    world = World(workers=("p", "r"))
    call = world.arrive("r")
    slow(world)
    assert world.line() == [call.id]

    assert world.finish(call).status is Status.FINISHED
    assert world.line() == []
    assert world.acks("r") == set()
    assert not world.rule.state.parked


def test_late_finish_of_a_lease_moves_no_breaker():
    """Nobody knows any more in which generation it began."""
    world = World(workers=("p", "r"))
    call = world.arrive("r")
    slow(world)
    world.finish(call, Outcome.OVERLOAD, retry_after_ms=90_000)

    assert world.seen().breaker == "closed"


def test_late_finish_of_a_caller_frees_nothing_that_is_not_its_own():
    """Its unit was freed at its instant; a second one must not be."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    call = fill(world, 1, process="r")[0]
    slow(world)
    other = fill(world, 1)[0]

    assert world.finish(call).status is Status.FINISHED
    assert set(world.rule.state.leases) == {other.lease}


def test_assertion_of_a_live_lease_changes_nothing():
    """It is there: it keeps its message, its generation and its place."""
    world = World()
    call = world.arrive()
    before = world.rule.state.leases[call.lease]
    reply = world.beat(leases=(), asserts=(call.held(),))

    assert reply.stolen == ()
    assert world.rule.state.leases[call.lease] == before


# -- confirm -----------------------------------------------------------------------------------------------------------


def taken(world):
    """A message that came with a take and has not begun."""
    running = fill(world, 1)[0]
    waiting = world.arrive()
    world.finish(running, take=1, idle=1)
    return world.calls()[waiting.id]


def confirm(world, call):
    """Ask whether a taken message may still start."""
    return world.admit(
        world.command(lease=call.lease, message=call.message, rank=call.rank, cost=call.cost, take=1, confirm=True)
    )


def test_taken_message_is_confirmed_under_its_own_lease():
    """It asks with the lease that it has: the same lease, no second one."""
    world = World(spec(ceiling=1))
    call = taken(world)
    world.pass_time(8_000)

    assert confirm(world, call).status is Status.ADMITTED
    assert set(world.rule.state.leases) == {call.lease}


def test_taken_message_does_not_start_into_an_open_breaker():
    """The breaker has tripped since: its lease goes back, and it waits in its place."""
    world = World(spec(ceiling=2))
    other = fill(world, 1)[0]
    call = taken(world)
    world.finish(other, Outcome.OVERLOAD)
    again = confirm(world, call)

    assert (again.status, again.reason) == (Status.PARKED, Reason.BREAKER_OPEN)
    assert world.in_flight() == 0
    assert world.line() == [call.id]


def test_taken_message_whose_lease_ran_out_is_gone():
    """Its message stands in the line again, for somebody else."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    call = taken(world)
    slow(world, "p")
    revive(world, "p")

    assert confirm(world, call).status is Status.GONE
    assert world.line() == [call.id]


def test_unit_of_an_outdated_lease_whose_message_is_gone_goes_to_a_waiter_at_once():
    """I9: the command that ends it gives it away, although its own answer is that there is nothing to do."""
    # Given a taken message from before the breaker moved, and a caller that waits to be the probe
    world = World(spec(ceiling=1))
    call = taken(world)
    world.operate(Action.OPEN, value=500)
    caller = world.call(wait=True)
    world.jump(500)
    # When it is to be confirmed, and its broker has it no more
    world.ack(call.message)
    again = confirm(world, call)
    # Then that reply has told the caller
    assert (again.status, again.reply.woken) == (Status.GONE, ("p",))
    assert set(world.rule.state.leases) == {caller.lease}
