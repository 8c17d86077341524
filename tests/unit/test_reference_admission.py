"""The rule's verdicts on the whole machine: lease, park, wait, refuse, and the order of the seven rules."""

from __future__ import annotations

import pytest

from guard_middleware.core.commands import Action, Message, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.verdict import Reason
from tests.unit.builders import NAMESPACE, World, fill, spec, trip

BACKGROUND = 3


# -- before the rules --------------------------------------------------------------------------------------------------


def test_store_without_an_epoch_asks_to_publish_first():
    """Nobody has published: neither an ask nor a beat is answered, and nothing changes."""
    world = World(workers=())
    message = Message(namespace=NAMESPACE, queue="q", id="m", worker="w")

    assert world.rule.admit(world.command(message=message), world.now).status is Status.UNCONFIGURED
    assert world.rule.beat(World().beating(), world.now).status is Status.UNCONFIGURED
    assert not world.rule.state.leases
    assert not world.rule.state.processes


def test_unknown_endpoint_or_process_is_told_to_publish():
    """The same ids are asked again afterwards; the message stays where it was."""
    world = World()
    call = world.arrive(endpoint="other")

    assert call.status is Status.UNCONFIGURED
    assert world.acks() == {call.id}
    assert world.rule.admit(world.command("stranger"), world.now).status is Status.UNCONFIGURED


@pytest.mark.parametrize("lost", ["ack set", "payload"])
def test_message_that_is_not_the_workers_any_more_is_gone(lost):
    """Park, step 2: doubled, swept or flushed. It is neither leased nor parked."""
    world = World()
    world.enqueue()
    message = world.fetch()
    if lost == "ack set":
        world.rule.broker.ack_set(message).clear()
    else:
        world.rule.broker.payloads[NAMESPACE, "q"].clear()

    assert world.admit(world.command(message=message)).status is Status.GONE
    assert world.in_flight() == 0
    assert world.line() == []


def test_admitted_message_stays_in_its_ack_set_with_a_lease():
    """Admission moves nothing: the message is the worker's, the lease names its whereabouts and one lease time."""
    world = World()
    call = world.arrive()

    assert call.status is Status.ADMITTED
    assert world.acks() == {call.id}
    lease = world.rule.state.leases[call.lease]
    assert (lease.message, lease.process, lease.cost) == (call.message, "p", 1)
    assert call.reply.expires_at_ms == world.now + world.rules.lease_ms


def test_message_that_may_not_start_leaves_the_ack_set_for_the_line():
    """I3: one place at a time, and the payload stays byte for byte where it was."""
    world = World(spec(ceiling=1))
    fill(world, 1)
    call = world.arrive()

    assert (call.status, call.reason) == (Status.PARKED, Reason.ENDPOINT_FULL)
    assert world.acks() == set()
    assert world.line() == [call.id]
    assert world.rule.broker.payloads[NAMESPACE, "q"][call.id] == call.id.encode()


def test_caller_that_does_not_wait_leaves_nothing_behind():
    """A refusal keeps nothing: no record, no place in a line, no lease, however often it is asked."""
    world = World(spec(ceiling=1))
    fill(world, 1)
    refused = [world.call() for _ in range(100)]

    assert {(call.status, call.reason) for call in refused} == {(Status.REFUSED, Reason.ENDPOINT_FULL)}
    assert not world.rule.state.parked
    assert not world.rule.state.lines
    assert set(world.rule.state.tombstones) == set()
    assert world.in_flight() == 1


# -- rules 1 and 2 -----------------------------------------------------------------------------------------------------


def test_cost_above_published_ceiling_is_an_error_and_keeps_nothing():
    """Rule 1: never admissible; the worker dead-letters it, so it stays in its ack set."""
    world = World(spec(ceiling=4))
    call = world.arrive(cost=5)

    assert (call.status, call.reason) == (Status.IMPOSSIBLE, Reason.TOO_COSTLY)
    assert world.acks() == {call.id}
    assert not world.rule.state.parked
    assert world.arrive(cost=4).status is Status.ADMITTED


def test_cost_above_the_primary_is_impossible_even_if_the_fallback_could():
    """Rule 1 looks at the primary's ceiling, not at the fallback's."""
    world = World(spec("a", 2, fallback="b"), spec("b", 8))
    trip(world, "a")

    assert world.call(endpoint="a", cost=3).status is Status.IMPOSSIBLE


def test_cost_above_the_budget_is_an_error():
    """Rule 1: of the budget, what the others' floors leave."""
    world = World(spec("a", 8, group="g"), spec("c", 4, group="g", floor=2), budgets={"g": 6})

    assert world.call(endpoint="a", cost=5).status is Status.IMPOSSIBLE
    assert world.call(endpoint="a", cost=4).status is Status.ADMITTED


def test_override_below_the_cost_only_delays():
    """Rule 1: cleared, the same message goes."""
    world = World(spec(ceiling=4))
    world.operate(Action.OVERRIDE, value=2)
    parked = world.arrive(cost=4)
    assert (parked.status, parked.reason) == (Status.PARKED, Reason.ENDPOINT_FULL)

    world.operate(Action.CLEAR_OVERRIDE)
    world.beat(take=1, idle=1)

    assert parked.id in world.calls()


def test_pause_delays_everybody_and_resume_lets_them_go():
    """Rule 2: a pause is a flag, with no end that is known."""
    world = World()
    world.operate(Action.PAUSE)
    parked = world.arrive(rank=0)
    assert (parked.status, parked.reason) == (Status.PARKED, Reason.PAUSED)
    assert parked.reply.retry_after_ms == world.rules.heartbeat_ms

    world.operate(Action.RESUME)
    world.beat(take=1, idle=1)

    assert parked.id in world.calls()


def test_open_breaker_answers_with_the_rest_of_the_cooldown():
    """Rule 2: Delay(remaining); a refused command lengthens nothing."""
    world = World()
    trip(world)
    world.jump(200)
    waits = [world.call(rank=0).reply.retry_after_ms for _ in range(50)]

    assert set(waits) == {300}
    assert world.seen().open_for_ms == 300


# -- rules 4 and 5 -----------------------------------------------------------------------------------------------------


def test_endpoint_admits_up_to_its_ceiling_over_all_processes_and_queues():
    """Rule 4, I1: one number for everybody, whoever asks."""
    world = World(spec(ceiling=4), workers=())
    for name, queues in (("p", ("q",)), ("r", ("q", "x")), ("s", ("x",))):
        world.start(name, queues=queues)
    calls = [
        world.arrive("p"),
        world.arrive("r", queue="x"),
        world.call("s"),
        world.arrive("s", queue="x"),
        world.arrive("p"),
        world.call("r"),
    ]

    assert [call.status for call in calls] == [Status.ADMITTED] * 4 + [Status.PARKED, Status.REFUSED]
    assert world.in_flight() == 4


def test_background_leaves_the_reserve_to_the_others():
    """Rule 5: with the default fraction and a ceiling of 8, background may hold 5, interactive the rest."""
    world = World(spec(ceiling=8, reserve=None))
    background = [world.call(rank=BACKGROUND) for _ in range(6)]
    others = [world.call(rank=rank) for rank in (1, 0, 1, 0)]

    assert [call.status for call in background] == [Status.ADMITTED] * 5 + [Status.REFUSED]
    assert background[-1].reason is Reason.RESERVED
    assert [call.status for call in others] == [Status.ADMITTED] * 3 + [Status.REFUSED]


def test_waiting_background_does_not_hold_back_better_work():
    """Rule 5: a reserved waiter is not takeable; an interactive call takes the reserve past it."""
    world = World(spec(ceiling=2, reserve=1))
    fill(world, 1)
    assert world.arrive(rank=BACKGROUND).reason is Reason.RESERVED

    assert world.arrive(rank=1).status is Status.ADMITTED


# -- rule 6: GPU groups ------------------------------------------------------------------------------------------------


def gpu(budget=6, **more):
    """A chat endpoint with a floor and an embedding endpoint on one accelerator."""
    return World(spec("chat", 4, group="g", floor=2), spec("embed", 8, group="g"), budgets={"g": budget}, **more)


def test_budget_binds_the_sum_of_all_members():
    """Rule 6: unused floors of the others are set aside, their own calls use them up."""
    world = gpu()
    embeds = [world.call(endpoint="embed") for _ in range(5)]
    chats = [world.call(endpoint="chat") for _ in range(3)]

    assert [call.status for call in embeds] == [Status.ADMITTED] * 4 + [Status.REFUSED]
    assert embeds[-1].reason is Reason.GROUP_FULL
    assert [call.status for call in chats] == [Status.ADMITTED] * 2 + [Status.REFUSED]
    assert world.rule.snapshot(world.now).groups == {"g": (6, 6)}


def test_idle_member_keeps_its_floor():
    """Rule 6: membership comes from configuration, not from traffic."""
    world = gpu()
    fill(world, 4, endpoint="embed")

    assert world.call(endpoint="embed").reason is Reason.GROUP_FULL
    assert world.seen("chat").in_flight == 0


def test_budget_and_endpoint_are_taken_together_or_not_at_all():
    """A call that waits for the budget holds no unit of its endpoint."""
    world = gpu()
    fill(world, 4, endpoint="embed")
    waiting = world.arrive(endpoint="embed")

    assert waiting.status is Status.PARKED
    assert world.seen("embed").in_flight == 4
    assert world.rule.snapshot(world.now).groups == {"g": (4, 6)}


def test_second_in_a_group_that_is_full_is_told_that_somebody_is_ahead():
    """Rule 3 comes before rule 6: the reason names the waiter, not the budget."""
    world = World(spec("a", 8, group="g"), spec("c", 8, group="g"), budgets={"g": 2})
    fill(world, 2, endpoint="a")

    assert world.arrive(endpoint="a").reason is Reason.GROUP_FULL
    assert world.arrive(endpoint="a").reason is Reason.QUEUE_AHEAD


def test_group_without_a_budget_binds_nobody():
    """Rule 6: without an entry among the budgets there is none."""
    world = World(spec("a", 3, group="g"), spec("c", 3, group="g"))

    fill(world, 3, endpoint="a")
    fill(world, 3, endpoint="c")

    assert world.rule.snapshot(world.now).groups == {}
    assert (world.in_flight("a"), world.in_flight("c")) == (3, 3)


def test_waiter_blocked_by_the_budget_alone_is_not_overtaken_by_another_endpoint():
    """Rule 3: it needs 3, two are free; a fresh call of the other endpoint, same rank, must not take them."""
    world = World(spec("a", 8, group="g"), spec("c", 8, group="g"), budgets={"g": 6}, workers=())
    world.start("p", idle=1)
    fill(world, 4, endpoint="a")
    big = world.arrive(endpoint="a", cost=3, take=0)
    assert (big.status, big.reason) == (Status.PARKED, Reason.GROUP_FULL)
    world.beat(idle=1)

    fresh = world.call(endpoint="c", rank=1)
    better = world.call(endpoint="c", rank=0)

    assert (fresh.status, fresh.reason) == (Status.REFUSED, Reason.QUEUE_AHEAD)
    assert better.status is Status.ADMITTED


def test_freed_budget_is_kept_for_the_better_waiter_of_another_endpoint():
    """Rule 3, handing out: units go to nobody behind it until it fits."""
    world = World(spec("a", 8, group="g"), spec("c", 8, group="g"), budgets={"g": 4})
    running = fill(world, 4, endpoint="a")
    big = world.arrive(endpoint="a", cost=3)
    small = world.arrive(endpoint="c", cost=1)

    replies = [world.finish(call, take=1, idle=1) for call in running[:3]]

    assert [[take.message_id for take in reply.takes] for reply in replies] == [[], [], [big.id]]
    assert world.line("c") == [small.id]


def test_call_inside_its_own_unused_floor_is_never_held_back():
    """Rule 3: the floor is what the others' waiters cannot claim."""
    world = gpu(workers=())
    world.start("p", idle=1)
    fill(world, 4, endpoint="embed")
    waiting = world.arrive(endpoint="embed", rank=0, take=0)
    world.beat(idle=1)
    assert waiting.reason is Reason.GROUP_FULL

    assert world.call(endpoint="chat", rank=BACKGROUND).status is Status.REFUSED  # the budget's reserve is not its
    assert world.call(endpoint="chat", rank=1).status is Status.ADMITTED
    assert world.call(endpoint="chat", rank=1).status is Status.ADMITTED


def test_waiter_inside_its_floor_is_served_past_a_claim():
    """The same when permits are handed out."""
    world = gpu()
    embeds = fill(world, 4, endpoint="embed")
    chats = fill(world, 2, endpoint="chat")
    first = world.arrive(endpoint="embed", rank=0, cost=2)
    second = world.arrive(endpoint="chat", rank=1)

    reply = world.finish(chats[0], take=1, idle=1)

    assert [take.message_id for take in reply.takes] == [second.id]
    assert world.line("embed") == [first.id]
    world.finish(embeds[0])
    assert first.id in {take.message_id for take in world.finish(embeds[1], take=1, idle=1).takes}


def test_members_come_and_go_with_the_configuration():
    """A budget that shrinks admits nobody until enough came back; nothing is taken away from who holds."""
    world = World(spec("a", 8, group="g"), budgets={"g": 6})
    running = fill(world, 6, endpoint="a")
    world.configure("p", world.publish(spec("a", 8, group="g"), budgets={"g": 2}))

    for call in running[:4]:
        assert world.call(endpoint="a").reason is Reason.GROUP_FULL
        world.finish(call)
    assert world.call(endpoint="a").reason is Reason.GROUP_FULL
    world.finish(running[4])
    assert world.call(endpoint="a").status is Status.ADMITTED


# -- slots for brokers that cannot park --------------------------------------------------------------------------------


def test_slots_spread_the_refused_over_time():
    """One counter per rank: each refused message is told a later slot, so that they do not come back as a herd."""
    world = World(spec(ceiling=1))
    fill(world, 1)
    slots = [world.call(slot=True).reply.retry_after_ms for _ in range(5)]
    others = [world.call(slot=True, rank=0).reply.retry_after_ms for _ in range(2)]

    assert slots == [1_000, 2_000, 3_000, 4_000, 5_000]
    assert others == [1_000, 2_000]


def test_slots_reach_at_most_30_s_ahead():
    """However long the queue, nobody is sent away for longer."""
    world = World(spec(ceiling=1))
    fill(world, 1)

    assert max(world.call(slot=True).reply.retry_after_ms for _ in range(100)) == 30_000


def test_slot_of_a_repeated_ask_is_the_same():
    """I11: one slot per message, however often the ask is resent."""
    world = World(spec(ceiling=1))
    fill(world, 1)
    ask = world.command(slot=True)
    answers = {world.rule.admit(ask, world.now).retry_after_ms for _ in range(3)}

    assert answers == {1_000}
    assert world.call(slot=True).reply.retry_after_ms == 2_000


def test_slot_never_undercuts_the_cooldown():
    """With the breaker open the slot is at least its rest: nobody comes back before the server asked."""
    world = World(spec(ceiling=4))
    call = world.call()
    world.finish(call, Outcome.OVERLOAD, retry_after_ms=90_000)

    assert all(world.call(slot=True).reply.retry_after_ms >= 90_000 for _ in range(20))
