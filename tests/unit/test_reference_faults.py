"""Faults that other limiters, semaphores, queues and breakers shipped, on the pure machine."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from guard_middleware.core.breaker import Phase
from guard_middleware.core.commands import Action, ParkAs, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.verdict import Reason
from tests.unit.builders import NAMESPACE, World, fill, spec, trip

BACKGROUND = 3


def everything(world):
    """Where each message is: in the broker's queue, with a worker, in a line, or resting beside one."""
    state, broker = world.rule.state, world.rule.broker
    places = Counter()
    for ids in [*broker.queues.values(), *broker.acks.values()]:
        places.update(ids)
    for line, waiters in state.lines.items():
        if line[1]:
            places.update(list(waiters))
    places.update(waiter for line, waiter in state.held_back if line[1])
    return places


def test_shrunk_ceiling_grants_nothing_until_enough_came_back():
    """64 held, the ceiling falls to 16: no grant until fewer than 16 run; a rise in between is obeyed at once."""
    world = World(spec(ceiling=64))
    running = fill(world, 64)
    world.operate(Action.OVERRIDE, value=16)
    for _ in range(48):
        world.finish(running.pop())
        assert world.call().status is Status.REFUSED
    world.operate(Action.OVERRIDE, value=20)
    assert len(fill(world, 4)) == 4
    world.operate(Action.OVERRIDE, value=16)
    assert world.call().status is Status.REFUSED
    for _ in range(5):
        world.finish(running.pop())

    assert world.call().status is Status.ADMITTED
    assert world.in_flight() == 16


@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_takes_releases_and_deaths_lose_and_make_no_unit(seed):
    """Free + held = capacity at every command boundary, and all is free again in the end."""
    chance = random.Random(seed)
    capacity = 7
    world = World(spec(ceiling=capacity), workers=("a", "b", "c"))
    names = ["a", "b", "c"]
    born = 0
    for _ in range(5_000):
        name = chance.choice(names)
        live = list(world.workers[name].calls.values())
        if live and chance.random() < 0.5:
            world.finish(chance.choice(live), chance.choice([Outcome.SUCCESS, Outcome.NEUTRAL, Outcome.IGNORED]))
        else:
            world.call(name, cost=chance.choice([1, 1, 2]))
        if chance.random() < 0.003:
            world.kill(name)
            names.remove(name)
            born += 1
            names.append(f"n{born}")
            world.start(names[-1])
        if chance.random() < 0.05:
            world.pass_time(chance.choice([500, 3_000]))
        leases = world.rule.snapshot(world.now).leases
        assert world.in_flight() == sum(cost for _, cost, _ in leases.values()) <= capacity
    for name in names:
        for call in list(world.workers[name].calls.values()):
            world.finish(call)
    world.pass_time(world.rules.lease_ms)

    assert world.in_flight() == 0
    assert len(fill(world, capacity, process=names[0])) == capacity


def test_no_waiter_is_left_while_a_unit_is_free():
    """Try, release and park in every order, a thousand times: enqueueing never misses the release before it."""
    chance = random.Random(0)
    world = World(spec(ceiling=1), workers=("p", "r"))
    for number in range(1_000):
        if number % 20 == 0:
            world.beat("p")
            world.beat("r")
        name = chance.choice(["p", "r"])
        live = list(world.workers[name].calls.values())
        if live:
            world.finish(live[0], take=1, idle=1)
        else:
            world.arrive(name, take=1, idle=0)
        state = world.rule.state
        units = [lease for lease in state.leases.values() if lease.expires_at_ms > world.now]
        assert units or not state.lines
        world.jump(chance.choice([0, 1, 49]))


def test_foreign_or_expired_release_changes_nothing():
    """The slow worker's release, and one of an id that never was, free nobody else's unit."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    expired = fill(world, 1, process="r")[0]
    world.workers["r"].alive = False
    world.pass_time(world.rules.lease_ms)
    mine = fill(world, 1)[0]
    for _ in range(3):
        world.finish(expired)

    assert set(world.rule.state.leases) == {mine.lease}


def test_redelivered_message_gets_its_permit_over_its_own_old_lease():
    """Its first worker died with it, the endpoint is full by that very lease: it is free within one lease time."""
    world = World(spec(ceiling=1), workers=("p", "r"))
    first = world.arrive("r")
    world.kill("r")
    world.rule.broker.acks[NAMESPACE, "w-r", "q"].clear()
    world.rule.broker.queues[NAMESPACE, "q"].append(first.id)
    again = world.admit(world.command("p", message=world.fetch("p"), take=1, idle=0))
    assert again.status is Status.PARKED
    world.pass_time(world.rules.lease_ms)

    assert [take.message_id for take in world.beat("p", take=1, idle=1).takes] == [first.id]


def test_waiting_message_holds_no_unit():
    """Parked, resting, overloaded, given back: whatever the way, its units are free."""
    world = World(spec(ceiling=4))
    parked = [world.arrive() for _ in range(3)]
    world.finish(parked[0], Outcome.IGNORED, park=ParkAs.DENIED)
    world.finish(parked[1], Outcome.OVERLOAD, park=ParkAs.OVERLOADED)
    lease = parked[2].lease
    del world.workers["p"].calls[lease]
    world.beat(give_back=(lease,), idle=0)
    world.arrive()

    assert world.in_flight() == 0
    assert world.seen().waiting == {1: 4}


def test_hundred_deferrals_leave_the_message_as_it_was():
    """Byte for byte: nothing of waiting is written into it."""
    world = World(spec(ceiling=1))
    running = fill(world, 1)[0]
    call = world.arrive()
    payload = world.rule.broker.payloads[NAMESPACE, "q"][call.id]
    for _ in range(100):
        reply = world.finish(running, take=1, idle=1)
        lease = reply.takes[0].lease
        assert reply.takes[0].payload == payload
        del world.workers["p"].calls[lease]
        world.beat(give_back=(lease,), idle=0)
        running = fill(world, 1, rank=0)[0]

    assert world.rule.broker.payloads[NAMESPACE, "q"] == {call.id: payload}


def test_far_wake_up_never_hides_a_near_one():
    """A message that rests for 4 s, a cooldown of 20 s and a lease of 15 s: the nearest instant is answered."""
    world = World(spec("a", 1, base_cooldown_ms=20_000), spec("c", 1))
    trip(world, "a")
    assert world.arrive(endpoint="a").reply.next_ms == 20_000
    fill(world, 1, endpoint="c")
    assert world.arrive(endpoint="c").reply.next_ms == world.rules.lease_ms
    world.operate(Action.CLOSE, "a")
    call = world.arrive(endpoint="a", rank=0)
    assert world.finish(call, Outcome.IGNORED, park=ParkAs.DENIED, idle=0).next_ms == 1_000


def test_mixed_lease_times_do_not_shorten_each_other():
    """A later grant neither shortens nor ends an earlier one: each lease has its own instant."""
    world = World(spec(ceiling=8), workers=("p", "r"))
    ends = {}
    for _ in range(8):
        call = world.call("r")
        ends[call.lease] = call.reply.expires_at_ms
        world.jump(700)
    kept = {one: lease.expires_at_ms for one, lease in world.rule.state.leases.items()}

    assert kept == ends


def test_releases_under_steady_traffic_age_a_leak_out():
    """A release that was forgotten disappears within one lease time, however busy the endpoint."""
    world = World(spec(ceiling=2), workers=("p", "r"))
    leaked = fill(world, 1, process="r")[0]
    world.kill("r")
    started = world.now
    while leaked.lease in world.rule.state.leases:
        call = world.call()
        if call.status is Status.ADMITTED:
            world.pass_time(100)
            world.finish(call)
        else:
            world.pass_time(100)

    assert world.now - started <= world.rules.lease_ms


def test_low_classes_are_served_within_their_ageing_time():
    """With a saturated better class each low waiter goes within 60 s after the one before it."""
    world = World(spec(ceiling=1))
    running = fill(world, 1, rank=0)[0]
    low = [world.arrive(rank=BACKGROUND, take=0, idle=0).id for _ in range(3)]
    served, now = {}, world.now
    while len(served) < 3:
        world.pass_time(1_000)
        world.arrive(rank=0, take=0, idle=0)
        reply = world.finish(running, take=1, idle=1)
        running = world.calls()[reply.takes[0].message_id]
        if running.id in low:
            served[running.id] = (world.now - now) // 1_000

    assert list(served) == low
    assert [served[one] for one in low] == [60, 120, 180]


def test_missing_limit_heals_from_configuration():
    """Specs vanished from the store: the next publication brings them back."""
    world = World(spec(ceiling=3))
    world.rule.state.specs.clear()
    assert world.call().status is Status.UNCONFIGURED
    world.configure("p")

    assert len(fill(world, 3)) == 3


def test_cancelling_in_every_phase_leaves_nothing():
    """Before the grant, after it, while waiting, after the release: a thousand times, and 0 in flight."""
    chance = random.Random(1)
    world = World(spec(ceiling=2), workers=("p", "r"))
    for _ in range(1_000):
        call = world.call(chance.choice(["p", "r"]), wait=chance.random() < 0.7)
        match chance.choice(["withdraw", "finish", "both", "late"]):
            case "withdraw":
                world.operate(Action.WITHDRAW, call.lease)
            case "finish":
                world.finish(call, Outcome.IGNORED)
                world.operate(Action.WITHDRAW, call.lease)
            case "both":
                world.operate(Action.WITHDRAW, call.lease)
                world.finish(call, Outcome.IGNORED)
            case "late":
                world.jump(10)
                world.operate(Action.WITHDRAW, call.lease)
        world.workers[call.process].calls.pop(call.lease, None)

    assert world.in_flight() == 0
    assert not world.rule.state.parked
    assert world.seen().breaker == Phase.CLOSED


def test_poison_message_that_kills_its_workers_does_not_stop_the_others():
    """It holds one unit per delivery, for one lease time at most; the others go on."""
    world = World(spec(ceiling=2), workers=("p",))
    poison = None
    for number in range(4):
        name = f"victim{number}"
        world.start(name, queues=("x",))
        if poison is None:
            call = world.arrive(name, queue="x")
            poison = call.id
        else:
            world.beat(name, take=1, idle=1)
            assert poison in world.calls(name)
        world.kill(name)
        held = [one for one in world.rule.state.leases.values() if one.message and one.message.id == poison]
        assert len(held) == 1
        for _ in range(5):
            other = world.arrive("p")
            assert other.status is Status.ADMITTED
            world.finish(other)
        world.pass_time(world.rules.lease_ms)

    assert world.in_flight() == 0


def test_many_deliveries_of_one_burst_run_once_each_within_the_ceiling():
    """1,319 at once over four processes of eight threads, ceiling 8: never over, each once, none lost."""
    chance = random.Random(3)
    names = ["a", "b", "c", "d"]
    world = World(spec(ceiling=8), workers=names)
    done = Counter()
    to_come = 1_319
    while to_come or sum(len(world.workers[name].calls) for name in names):
        name = chance.choice(names)
        live = list(world.workers[name].calls.values())
        free = 8 - len(live)
        if live and (chance.random() < 0.5 or not to_come):
            call = chance.choice(live)
            world.finish(call, take=1, idle=free + 1)
            done[call.id] += 1
        elif to_come and free:
            to_come -= 1
            world.arrive(name, take=1, idle=free - 1)
        elif free:
            world.beat(name, take=free, idle=free)
        assert world.in_flight() <= 8
        world.jump(1)

    assert len(done) == 1_319
    assert set(done.values()) == {1}
    assert not world.rule.state.lines


def test_every_retry_returns_its_unit():
    """503 to each message's first attempts: parked or finished, the unit is back each time, and all end."""
    world = World(spec(ceiling=4, base_cooldown_ms=100, max_cooldown_ms=100))
    for number in range(40):
        call = world.arrive(deadline_ms=0)
        if call.status is Status.ADMITTED:
            outcome = Outcome.OVERLOAD if number % 3 == 0 else Outcome.SUCCESS
            world.finish(call, outcome, park=ParkAs.OVERLOADED if number % 3 == 0 else ParkAs.NO)
        world.pass_time(150)
        for taken in list(world.workers["p"].calls.values()):
            world.finish(taken)
        world.beat(take=2, idle=2)
    for _ in range(100):
        for taken in list(world.workers["p"].calls.values()):
            world.finish(taken)
        world.pass_time(150)
        world.beat(take=4, idle=4)

    assert world.in_flight() == 0
    assert not world.rule.state.lines
    assert everything(world) == Counter()


def test_reason_of_a_paused_endpoint_is_no_breaker_state():
    """A pause is a flag of its own: it neither opens a breaker nor outlives its resume."""
    world = World()
    world.operate(Action.PAUSE)
    assert world.seen().breaker == Phase.CLOSED
    assert world.call().reason is Reason.PAUSED
    world.operate(Action.RESUME)

    assert world.call().status is Status.ADMITTED
