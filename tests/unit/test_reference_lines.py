"""Waiting lines: who stands where, who goes next, and what a place is worth (I3, I8)."""

from __future__ import annotations

import random

import pytest

from guard_middleware.core.commands import Action, ParkAs, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import NOWHERE
from guard_middleware.core.verdict import Reason
from tests.unit.builders import NAMESPACE, World, fill, full, serve_all, spec, trip

BACKGROUND = 3


# -- order -------------------------------------------------------------------------------------------------------------


def test_line_is_ordered_by_rank_then_first_arrival():
    """Lower rank first, first come first served within it."""
    world, running = full()
    arrived = [world.arrive(rank=rank) for rank in (3, 1, 0, 1, 3, 0)]
    wanted = [arrived[number].id for number in (2, 5, 1, 3, 0, 4)]

    assert world.line() == wanted
    assert serve_all(world, running) == wanted


def test_order_holds_over_queues_namespaces_and_callers():
    """All lines of an endpoint are one order; places are counted once for all."""
    world = World(spec(ceiling=1))
    world.start("p", queues=("q", "x"))
    running = fill(world, 1)
    first = world.arrive(queue="x")
    caller = world.call(wait=True)
    third = world.arrive(queue="q")
    better = world.arrive(queue="q", rank=0)
    order = []
    for _ in range(4):
        call = running.pop(0)
        reply = world.finish(call, take=1, idle=1)
        order += [take.message_id for take in reply.takes]
        running += list(world.calls().values())
        if world.rule.state.leases.get(caller.lease) and caller.lease not in order:
            order.append(caller.lease)
            running.append(caller)

    assert order == [better.id, first.id, caller.lease, third.id]


def test_orchestration_and_hydration_share_a_rank():
    """Equal rank is first come first served, whatever the name of the priority."""
    world, running = full()
    arrived = [world.arrive(rank=1).id for _ in range(6)]

    assert serve_all(world, running) == arrived


def test_fresh_arrival_does_not_overtake_a_takeable_waiter_of_its_rank():
    """A permit became free by time; the arriving thread exchanges its message for the one that waited."""
    world = World(spec(ceiling=1))
    trip(world)
    waiting = world.arrive(rank=1)
    world.pass_time(500)
    fresh = world.arrive(rank=1)

    assert (fresh.status, fresh.reason) == (Status.PARKED, Reason.QUEUE_AHEAD)
    assert [take.message_id for take in fresh.reply.takes] == [waiting.id]


def test_fresh_arrival_of_a_better_rank_goes_first():
    """Order is by rank before it is by time."""
    world = World(spec(ceiling=1))
    trip(world)
    world.arrive(rank=1)
    world.pass_time(500)

    assert world.arrive(rank=0).status is Status.ADMITTED


def test_waiter_that_nobody_idle_can_run_holds_nobody_up():
    """Takeable means that a process that consumes its queue has an idle thread: its own busy one does not."""
    world = World(spec(ceiling=1), workers=())
    world.start("p", queues=("q",))
    world.start("r", queues=("x",))
    trip(world)
    waiting = world.arrive("r", queue="x", rank=0, take=0, idle=0)
    world.pass_time(500)

    fresh = world.arrive("p", rank=1)

    assert fresh.status is Status.ADMITTED
    assert world.line(queue="x") == [waiting.id]


def test_waiting_caller_that_is_alive_is_always_takeable():
    """It needs no idle thread: a caller is its own thread."""
    world = World(spec(ceiling=1))
    trip(world)
    caller = world.call(wait=True)
    world.jump(500)

    assert world.call().reason is Reason.QUEUE_AHEAD
    assert caller.lease in world.rule.state.leases  # and that very command gave it the permit


def test_caller_whose_process_died_holds_nobody_up():
    """It leaves the line; the next one is served."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    running = fill(world, 1, process="r")
    world.call("p", wait=True, rank=0)
    second = world.call("r", wait=True, rank=1)
    world.kill("p")
    world.pass_time(world.rules.lease_ms + 2_000)
    world.finish(running[0])

    assert second.lease in world.rule.state.leases
    assert not world.rule.state.parked


def test_living_caller_behind_a_dead_one_is_not_overtaken():
    """I8: the very command that finds the first one dead respects the second."""
    world = World(spec(ceiling=1, base_cooldown_ms=15_000), workers=("p", "r"))
    trip(world, process="r")
    world.call("p", wait=True)
    second = world.call("r", wait=True)
    world.kill("p")
    world.pass_time(world.rules.lease_ms - 1)
    world.jump(1)
    fresh = world.call("r")

    assert fresh.reason is Reason.QUEUE_AHEAD
    assert second.lease in world.rule.state.leases


def test_refused_caller_tells_the_waiter_that_stands_before_a_free_permit():
    """I9: time freed it and nobody was told; whoever is turned away because of the waiter makes sure that it goes."""
    world = World(spec(ceiling=1), workers=())
    world.start("p", idle=1)
    world.start("r", queues=())
    trip(world, process="p")
    waiting = world.arrive("p", take=0)
    world.jump(500)
    refused = world.call("r")

    assert refused.reason is Reason.QUEUE_AHEAD
    assert refused.reply.woken == ("p",)
    world.beat(take=1, idle=1)
    assert waiting.id in world.calls("p")


def test_waiting_caller_learns_at_once_that_the_free_permit_is_its_own():
    """The command that asks and is served in one answers with the permit."""
    world = World(spec(ceiling=2), workers=("p", "r"), first_start_hold_ms=1_000)
    first = world.call("p", wait=True)
    assert first.reason is Reason.RECOVERING
    world.jump(1_000)
    second = world.call("r", wait=True)

    assert second.status is Status.ADMITTED
    assert second.reply.expires_at_ms == world.now + world.rules.lease_ms
    assert set(world.rule.state.leases) == {first.lease, second.lease}


# -- cost --------------------------------------------------------------------------------------------------------------


def test_wide_waiter_is_not_overtaken_by_small_ones():
    """Strictly first come first served by cost: units collect until it fits."""
    world, running = full(4)
    wide = world.arrive(cost=4)
    small = world.arrive(cost=1)
    taken = [world.finish(call, take=1, idle=1).takes for call in running]

    assert [[take.message_id for take in takes] for takes in taken] == [[], [], [], [wide.id]]
    assert world.line() == [small.id]


def test_fresh_small_call_does_not_take_what_is_kept_for_a_wide_waiter():
    """The same for arrivals and callers."""
    world, running = full(4)
    world.beat(idle=1)
    wide = world.arrive(cost=3, take=0, idle=1)
    world.finish(running[0])

    assert world.call().reason is Reason.QUEUE_AHEAD
    assert world.arrive().status is Status.PARKED
    assert world.call(rank=0).status is Status.ADMITTED
    assert wide.id in world.line()


def test_wide_waiter_under_a_smaller_override_holds_nobody_up():
    """No release can help it: until the operator lifts the override, the others go past it."""
    world, running = full(4)
    wide = world.arrive(cost=4)
    second = world.arrive(cost=1)
    world.operate(Action.OVERRIDE, value=2)
    for call in running:
        world.finish(call)
    world.beat(take=1, idle=1)
    assert list(world.calls()) == [second.id]
    assert world.arrive(cost=1).status is Status.ADMITTED

    for call in list(world.calls().values()):
        world.finish(call)
    world.operate(Action.CLEAR_OVERRIDE)
    world.beat(take=2, idle=2)
    assert list(world.calls()) == [wide.id]


def test_waiter_that_has_become_impossible_is_handed_to_its_brokers_dead_letters():
    """A deploy lowered the ceiling below its cost: it goes out without a permit, its worker asks and is told so."""
    world, running = full(4)
    wide = world.arrive(cost=4)
    world.configure("p", world.publish(spec(ceiling=2), revision=1))
    for call in running:
        world.finish(call)
    reply = world.beat(take=1, idle=1)

    assert [(take.endpoint, take.message_id) for take in reply.takes] == [(NOWHERE, wide.id)]
    assert world.acks() == {wide.id}
    again = world.admit(world.command(message=wide.message, cost=4, take=1))
    assert again.status is Status.IMPOSSIBLE
    assert not world.rule.state.parked
    assert world.in_flight() == 0


def test_waiting_caller_that_has_become_impossible_is_told_and_leaves_the_line():
    """It asks once more, and gets its error instead of a place."""
    world, _ = full(4)
    caller = world.call(cost=4, wait=True)
    world.configure("p", world.publish(spec(ceiling=2), revision=1))

    assert world.admit(world.command(lease=caller.lease, cost=4, wait=True)).status is Status.IMPOSSIBLE
    assert not world.rule.state.lines
    assert not world.rule.state.parked


def test_background_wider_than_what_the_reserve_leaves_holds_nobody_up():
    """Only its ageing turn can let it go; meanwhile smaller background work flows."""
    world = World(spec(ceiling=4, reserve=1))
    wide = world.arrive(rank=BACKGROUND, cost=4)
    assert wide.reason is Reason.RESERVED

    assert world.arrive(rank=BACKGROUND, cost=1).status is Status.ADMITTED


def test_reserved_wide_background_is_not_overtaken_by_fresh_background():
    """A release can help it, so what is free is kept for it, from its own rank."""
    world = World(spec(ceiling=4, reserve=1))
    running = fill(world, 1)
    world.beat(idle=1)
    wide = world.arrive(rank=BACKGROUND, cost=3, take=0, idle=1)
    small = world.arrive(rank=BACKGROUND, cost=1)

    assert (wide.reason, small.reason) == (Reason.RESERVED, Reason.QUEUE_AHEAD)
    assert [take.message_id for take in world.finish(running[0], take=1, idle=1).takes] == [wide.id]


# -- places ------------------------------------------------------------------------------------------------------------


def test_message_parked_again_keeps_its_first_place():
    """Given back before it began: first in line again, before those that came in between."""
    world, running = full()
    first, second = world.arrive(), world.arrive()
    world.finish(running[0], take=1, idle=1)
    lease = world.calls()[first.id].lease
    third = world.arrive()
    del world.workers["p"].calls[lease]
    world.beat(give_back=(lease,), idle=0)

    assert world.line() == [first.id, second.id, third.id]


def test_message_denied_many_times_keeps_its_place_in_its_rank():
    """A deferral is not a new arrival, however it is deferred."""
    world, running = full(2)
    first, second = world.arrive(), world.arrive()
    for _ in range(10):
        call = running.pop(0)
        reply = world.finish(call, take=1, idle=1)
        lease = reply.takes[0].lease
        assert reply.takes[0].message_id == first.id
        del world.workers["p"].calls[lease]
        world.beat(give_back=(lease,), idle=0)
        running += fill(world, 1)
        assert world.line() == [first.id, second.id]


def test_place_survives_the_death_of_the_worker_that_took_it():
    """After a killed worker it stands where it stood, before those that came later."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    running = fill(world, 1)
    first, second = world.arrive(), world.arrive()
    world.beat("r", idle=1)
    world.finish(running[0], idle=0)
    world.beat("r", take=1, idle=1)
    assert first.id in world.calls("r")
    world.kill("r")
    third = world.arrive()
    world.pass_time(world.rules.lease_ms + 1)

    assert world.line() == [first.id, second.id, third.id]


def test_message_of_a_dead_worker_that_was_never_parked_has_the_place_of_its_first_ask():
    """Its place was counted when it first asked, not when it came back."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    running = world.arrive("r")
    waiting = [world.arrive("p") for _ in range(2)]
    world.kill("r")
    world.pass_time(world.rules.lease_ms + 1)

    assert world.line() == [running.id, *(call.id for call in waiting)]


def test_message_that_its_broker_redelivers_keeps_its_place():
    """Maintenance puts what a dead worker held back into the queue; asked again, it is first in its rank."""
    world, running = full()
    first, second = world.arrive(), world.arrive()
    world.finish(running[0], take=1, idle=1)
    world.start("r")
    world.kill("p")
    world.rule.broker.acks[NAMESPACE, "w-p", "q"].clear()
    world.rule.broker.queues[NAMESPACE, "q"].append(first.id)
    again = world.admit(world.command("r", message=world.fetch("r"), take=1))

    assert again.status is Status.PARKED
    assert world.line() == [first.id, second.id]


# -- denied a further permit -------------------------------------------------------------------------------------------


def denied(world, call, **more):
    """End a message's call because it was refused a further permit."""
    return world.finish(call, Outcome.IGNORED, park=ParkAs.DENIED, **more)


def test_denied_message_rests_one_two_four_seconds_then_takes_its_brokers_path():
    """`AdmissionDenied` from a guarded actor: parked beside the line, doubling, at most three times."""
    world = World(spec(ceiling=4))
    call = world.arrive()
    rests = []
    for _ in range(3):
        reply = denied(world, call)
        assert (reply.status, reply.reason) == (Status.PARKED, "denied")
        rests.append(reply.next_ms)
        world.jump(reply.next_ms - 1)
        assert world.beat(take=1, idle=1).takes == ()
        world.jump(1)
        assert [take.message_id for take in world.beat(take=1, idle=1).takes] == [call.id]
        call = world.calls()[call.id]

    assert rests == [1_000, 2_000, 4_000]
    assert denied(world, call).status is Status.FINISHED
    assert not world.rule.state.parked


def test_denied_message_keeps_its_place():
    """While it rests others go; then it stands where it stood."""
    world, running = full()
    first, second, third = (world.arrive() for _ in range(3))
    world.finish(running[0], take=1, idle=1)
    reply = denied(world, world.calls()[first.id], take=1, idle=1)
    assert [take.message_id for take in reply.takes] == [second.id]
    world.pass_time(1_000)

    assert world.line() == [first.id, third.id]


def test_denied_message_feeds_no_breaker():
    """Somebody else's capacity is no evidence about this endpoint; as the probe it gives the role back."""
    world = World()
    call = world.arrive()
    denied(world, call)
    assert world.seen().breaker == "closed"

    trip(world)
    world.pass_time(1_000)
    world.beat(take=1, idle=1)
    assert world.calls()[call.id].probe
    denied(world, world.calls()[call.id])
    assert world.call().probe


def test_resting_message_counts_as_waiting_and_can_be_drained():
    """It is nowhere lost: seen by the snapshot, moved by a drain."""
    world = World()
    call = world.arrive()
    denied(world, call)
    assert world.seen().waiting == {1: 1}

    world.operate(Action.DRAIN, queue=(NAMESPACE, "q"), force=True)
    assert world.queue() == [call.id]


# -- callers -----------------------------------------------------------------------------------------------------------


def test_waiting_caller_gets_its_lease_from_the_release_and_learns_it_by_asking_again():
    """It is given under the id that it asked with; its process is notified."""
    world, running = full(workers=("p", "r"))
    caller = world.call("r", wait=True)
    assert caller.status is Status.WAITING
    reply = world.finish(running[0])

    assert reply.woken == ("r",)
    again = world.admit(world.command("r", lease=caller.lease, wait=True))
    assert again.status is Status.ADMITTED
    assert world.in_flight() == 1


def test_caller_that_asks_again_keeps_its_place():
    """Polling is not a new arrival."""
    world, running = full(workers=("p", "r"))
    first = world.call("p", wait=True)
    second = world.call("r", wait=True)
    for _ in range(5):
        world.admit(world.command("p", lease=first.lease, wait=True))
    world.finish(running[0])

    assert set(world.rule.state.leases) == {first.lease}
    assert second.lease in world.rule.state.lines["e", "", ""]


def test_caller_that_gives_up_leaves_the_line_and_returns_what_it_was_given():
    """Time-out and grant cross each other: no unit stays behind, the next one gets it."""
    world, running = full(workers=("p", "r"))
    first, second = world.call("p", wait=True), world.call("r", wait=True)
    world.finish(running[0])
    world.operate(Action.WITHDRAW, first.lease)

    assert set(world.rule.state.leases) == {second.lease}
    world.operate(Action.WITHDRAW, second.lease)
    assert world.in_flight() == 0
    assert not world.rule.state.parked


def test_ask_that_arrives_after_its_caller_has_given_up_gets_nothing():
    """Resent by the client library, overtaken on the wire: a permit that was returned never comes back."""
    world, running = full()
    ask = world.command(wait=True)
    world.admit(ask)
    world.finish(running[0])
    assert ask.lease in world.rule.state.leases
    world.operate(Action.WITHDRAW, ask.lease)

    assert world.rule.admit(ask, world.now).status is Status.GONE
    assert world.in_flight() == 0


# -- drain -------------------------------------------------------------------------------------------------------------


def test_drain_puts_parked_messages_back_in_order_at_the_tail():
    """The messages are the broker's again, in the order of the line."""
    world, _ = full()
    arrived = [world.arrive(rank=rank) for rank in (3, 0, 1)]
    world.enqueue(message_id="fresh")
    world.kill("p")
    world.jump(1)
    world.operate(Action.FORGET, "p")
    reply = world.operate(Action.DRAIN, queue=(NAMESPACE, "q"))

    assert (reply.status, reply.count) == (Status.DONE, 3)
    assert world.queue() == ["fresh", *(arrived[number].id for number in (1, 2, 0))]
    assert not world.rule.state.parked
    assert not world.rule.state.lines


def test_drain_is_refused_while_a_guarded_worker_of_the_queue_lives():
    """It would park them again; by force it is done all the same."""
    world, _ = full()
    call = world.arrive()

    assert world.operate(Action.DRAIN, queue=(NAMESPACE, "q")).status is Status.REFUSED_ALIVE
    assert world.line() == [call.id]
    assert world.operate(Action.DRAIN, queue=(NAMESPACE, "q"), force=True).count == 1
    assert world.queue() == [call.id]


def test_drain_of_one_queue_leaves_the_others_and_callers():
    """Only what came from that queue goes back to it."""
    world = World(spec(ceiling=1))
    world.start("p", queues=("q", "x"))
    fill(world, 1)
    mine, other = world.arrive(queue="q"), world.arrive(queue="x")
    caller = world.call(wait=True)
    world.operate(Action.DRAIN, queue=(NAMESPACE, "q"), force=True)

    assert world.queue("q") == [mine.id]
    assert world.line(queue="x") == [other.id]
    assert caller.lease in world.rule.state.lines["e", "", ""]


def test_drain_moves_no_more_than_it_was_told():
    """In batches, from the head."""
    world, _ = full()
    arrived = [world.arrive().id for _ in range(5)]
    counts = [world.operate(Action.DRAIN, queue=(NAMESPACE, "q"), force=True, value=2).count for _ in range(4)]

    assert counts == [2, 2, 1, 0]
    assert world.queue() == arrived


def test_lines_of_an_endpoint_that_nobody_names_are_drained_by_a_beat():
    """A deploy removed the endpoint: a worker that consumes the queue puts its messages back."""
    world = World(spec("e", 1), spec("other", 1))
    fill(world, 1)
    arrived = [world.arrive().id for _ in range(3)]
    world.configure("p", world.publish(spec("other", 1)))
    assert world.rule.snapshot(world.now).lines

    world.beat(take=1, idle=1)

    assert world.queue() == arrived
    assert not world.rule.state.parked


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_after_everything_is_done(seed):
    """When all is served no lease, line or record remains, and after one lease time no tombstone does."""
    chance = random.Random(seed)
    world = World(spec(ceiling=3, reserve=1))
    for _ in range(200):
        world.arrive(rank=chance.choice([0, 1, 3]), cost=chance.choice([1, 1, 2]), idle=2)
        if world.calls() and chance.random() < 0.6:
            call = chance.choice(list(world.workers["p"].calls.values()))
            world.finish(call, chance.choice([Outcome.SUCCESS, Outcome.SUCCESS, Outcome.NEUTRAL]), take=1, idle=1)
    for _ in range(500):
        for call in list(world.workers["p"].calls.values()):
            world.finish(call, take=1, idle=1)
        world.pass_time(500)
        world.beat(take=3, idle=3)
    world.pass_time(world.rules.lease_ms + 1_000)

    state = world.rule.state
    left = [state.leases, state.lines, state.parked, state.held_back, state.tombstones]
    assert left == [{}] * 5
    assert world.acks() == set()
    assert world.rule.broker.payloads[NAMESPACE, "q"] == {}
